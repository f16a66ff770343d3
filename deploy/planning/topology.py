"""How many producers (prefill) and consumers (decode) a stack has."""

from __future__ import annotations

import re
from dataclasses import dataclass

from deploy.config.spec import StackSpec
from deploy.config.vendors import Vendor
from deploy.errors import ConfigError

_FORM = re.compile(r"(?P<producers>\d+)p(?P<consumers>\d+)d")


@dataclass(frozen=True)
class Topology:
    producers: int
    consumers: int

    @property
    def engines(self) -> int:
        return self.producers + self.consumers

    def __str__(self) -> str:
        return f"{self.producers}p{self.consumers}d"


def split(engines: int) -> Topology:
    """Split engines as evenly as possible, the odd one to a consumer; one means 1p1d."""
    producers = max(1, engines // 2)
    return Topology(producers, max(1, engines - producers))


def resolve_topology(spec: StackSpec, vendor: Vendor) -> Topology:
    """Return the split that the spec asks for.

    Raises:
        ConfigError: its fields contradict each other.
    """
    asked = _asked(spec)
    if spec.gpus is None:
        return asked or split(2)
    if asked is None:
        return split(spec.gpus)
    if asked.engines not in (spec.gpus, split(spec.gpus).engines):
        raise ConfigError(
            f"--gpus {spec.gpus} contradicts --topology {asked}, which needs "
            f"{asked.engines} {vendor.slot}s",
            hint=f"deploy plan --topology {asked}, or deploy plan --gpus {spec.gpus}",
        )
    return asked


def _asked(spec: StackSpec) -> Topology | None:
    """Return the split by name or by numbers; a number alone leaves the other one at 1."""
    if spec.topology is None:
        if spec.producers is None and spec.consumers is None:
            return None
        return Topology(spec.producers or 1, spec.consumers or 1)
    match = _FORM.fullmatch(spec.topology)
    assert match is not None, "the spec's pattern admits only this form"  # noqa: S101
    named = Topology(int(match["producers"]), int(match["consumers"]))
    for field, counted in (("producers", spec.producers), ("consumers", spec.consumers)):
        if counted not in (None, getattr(named, field)):
            raise ConfigError(
                f"--topology {named} contradicts --{field} {counted}",
                hint=f"deploy plan --topology {named}",
            )
    return named
