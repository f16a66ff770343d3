"""How many engines a stack has and what they do: prefill, decode, or both (aggregated)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deploy.config.spec import StackSpec
from deploy.config.vendors import Vendor
from deploy.errors import Changes, ConfigError, NamedSetting

# Options that name a split. A suggested command clears the ones that it replaces.
NO_SPLIT: Changes = {"--gpus": None, "--topology": None, "--producers": None, "--consumers": None}
# The first engine's port is the stack's port plus this.
FIRST_ENGINE_OFFSET = 10
_FORM = re.compile(
    r"(?P<producers>\d+)p(?P<consumers>\d+)d|(?P<aggregated>\d+)a(?P<redis>\+redis)?"
)


@dataclass(frozen=True)
class Topology:
    """Producers and consumers, or aggregated engines.

    Attributes:
        aggregated: how many engines do both; 0 if there are producers and consumers.
        redis: the engines share KV through Redis.
    """

    producers: int
    consumers: int
    aggregated: int = 0
    redis: bool = True

    @property
    def engines(self) -> int:
        """Number of engines of all roles."""
        return self.producers + self.consumers + self.aggregated

    @property
    def partial(self) -> bool:
        """Whether engines of one role are missing, which other hosts then have."""
        return not self.aggregated and 0 in (self.producers, self.consumers)

    @property
    def storing(self) -> int:
        """How many engines compute prompts and store their KV."""
        return self.producers + self.aggregated if self.redis else 0

    def __str__(self) -> str:
        if self.aggregated:
            return f"{self.aggregated}a{'+redis' if self.redis else ''}"
        return f"{self.producers}p{self.consumers}d"


def aggregated(engines: int, *, redis: bool = False) -> Topology:
    """Return a topology of aggregated engines; without Redis they share no KV."""
    return Topology(0, 0, engines, redis)


def split(engines: int) -> Topology:
    """Split engines as evenly as possible, the odd one to a consumer; one means 1p1d."""
    producers = max(1, engines // 2)
    return Topology(producers, max(1, engines - producers))


def parse_topology(text: str) -> Topology:
    """Return the topology that a text in the spec's form names, such as `1p3d`."""
    match = _FORM.fullmatch(text)
    assert match is not None, "the spec's pattern admits only this form"  # noqa: S101 - for mypy
    if match["aggregated"]:
        return aggregated(int(match["aggregated"]), redis=bool(match["redis"]))
    return Topology(int(match["producers"]), int(match["consumers"]))


def resolve_topology(spec: StackSpec, vendor: Vendor, seen: int = 0) -> Topology:
    """Return the split that the spec asks for.

    On GPUs, an engine takes as many as its tensor-parallel size; a single GPU is shared by all
    engines. If neither a split nor a number is given, the engines share the GPU of a machine that
    has one (`seen`).

    Raises:
        ConfigError: its fields contradict each other.
    """
    asked = _asked(spec)
    if spec.gpus is None:
        return asked or split(1 if vendor.has_gpus and seen == 1 else 2)
    engines = _engines_on(spec, vendor)
    if asked is None:
        return split(engines)
    shared = vendor.has_gpus and spec.gpus == 1
    if not shared and asked.engines not in (engines, split(engines).engines):
        each = f" of {spec.tp}" if vendor.has_gpus and spec.tp > 1 else ""
        raise ConfigError(
            (
                NamedSetting("gpus"),
                f" {spec.gpus} contradicts ",
                NamedSetting("topology"),
                f" {asked}, which needs {asked.engines} {vendor.slot}s{each}",
            ),
            retry=(
                {**NO_SPLIT, "--topology": str(asked)},
                {**NO_SPLIT, "--gpus": str(spec.gpus)},
            ),
        )
    return asked


def gpus_needed(spec: StackSpec, vendor: Vendor, topology: Topology, seen: int = 0) -> int:
    """Return the number of GPUs of a split: 0 on CPUs, 1 if all engines share one.

    Raises:
        ConfigError: ranks of one engine would have to share a GPU.
    """
    if not vendor.has_gpus:
        return 0
    unnamed = spec.gpus is None and _asked(spec) is None and seen == 1
    if spec.gpus != 1 and not unnamed:
        return topology.engines * spec.tp
    if spec.tp > 1:
        raise ConfigError(
            f"{spec.tp} ranks of an engine need {spec.tp} GPUs, but all engines share one",
            setting="tp",
            retry=(
                {**NO_SPLIT, "--gpus": "1", "--tp": "1"},
                {**NO_SPLIT, "--gpus": str(2 * spec.tp), "--tp": str(spec.tp)},
            ),
        )
    return 1


def _engines_on(spec: StackSpec, vendor: Vendor) -> int:
    """Return the number of engines that fit on `--gpus` GPUs.

    Raises:
        ConfigError: GPUs would be left over, or there are too few for one of each role.
    """
    gpus = spec.gpus or 2
    if not vendor.has_gpus or spec.tp == 1:
        return gpus
    asked = _asked(spec)
    least = 1 if asked and (asked.aggregated or asked.engines == 1) else 2
    if gpus % spec.tp or gpus < least * spec.tp:
        engines = asked.engines if asked else max(2, round(gpus / spec.tp))
        raise ConfigError(
            (
                f"{gpus} GPU{'s do' if gpus > 1 else ' does'} not divide into engines of ",
                NamedSetting("tp"),
                f" {spec.tp}, of which a stack needs at least two",
            ),
            setting="gpus",
            retry=({"--gpus": str(engines * spec.tp), "--tp": str(spec.tp)},),
        )
    return gpus // spec.tp


def _asked(spec: StackSpec) -> Topology | None:
    """Return the split that the spec names; one of two numbers alone leaves the other at 1."""
    if spec.topology is None:
        if spec.producers is None and spec.consumers is None:
            return None
        producers, consumers = (1 if n is None else n for n in (spec.producers, spec.consumers))
        return Topology(producers, consumers)
    named = parse_topology(spec.topology)
    for field, counted in (("producers", spec.producers), ("consumers", spec.consumers)):
        if counted not in (None, getattr(named, field)):
            raise ConfigError(
                (
                    NamedSetting("topology"),
                    f" {named} contradicts ",
                    NamedSetting(field),
                    f" {counted}",
                ),
                retry=({**NO_SPLIT, "--topology": str(named)},),
            )
    return named
