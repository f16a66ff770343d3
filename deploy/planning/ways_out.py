"""Ways out of an impossible plan. Each is planned itself before it is suggested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from deploy.config.model import Model
from deploy.config.spec import SettledSpec
from deploy.config.vendors import vendor_named
from deploy.errors import Changes, ConfigError, MissingGpus, NotEnoughMemory, PdkitError
from deploy.planning.gpus import ASSUMED_GPU_MIB, with_assumed_gpus
from deploy.planning.inventory import Inventory
from deploy.planning.topology import (
    NO_SPLIT,
    Topology,
    aggregated,
    resolve_topology,
    split,
)

_SPLIT = {**{option: option.removeprefix("--") for option in NO_SPLIT}, "--tp": "tp"}
# Of GPUs on the market.
_GPU_GIB = (16, 24, 32, 48, 80, 96, 141, 192, 288)
_SIZES = (1, 2, 4, 8, 16)  # of an engine, in GPUs
_OF_ONE_MACHINE = 8
# Settings by which a plan may be too large, or its GPUs divide badly.
_ABOUT_SIZE = frozenset({"", "gpus", "topology", "tp", "engine.kv_cache_gib", "model"})


class SizedPlan(Protocol):
    """What this module needs of a plan."""

    @property
    def spec(self) -> SettledSpec:
        """The settings that it is made from."""

    @property
    def model(self) -> Model:
        """The model that is served."""

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and answer together."""


MakePlan = Callable[[SettledSpec, Inventory], SizedPlan]


@dataclass(frozen=True)
class Way:
    """Changed options, and the plan that they give."""

    changes: Changes
    plan: SizedPlan

    @property
    def gives(self) -> str:
        """What a user gets by it."""
        length = self.plan.max_model_len
        return f"fits, context of {length:,} tokens" if length else "fits"


class _Blocked(Exception):
    """Another setting is wrong, too, so that nobody can say what fits."""


def with_ways_out(
    error: PdkitError, spec: SettledSpec, inventory: Inventory, planned: MakePlan
) -> PdkitError:
    """Return an error of planning with suggestions that were planned and fit.

    If none of its own fits, others are looked for; if none is found, the error says that the model
    does not fit this machine, and names the smallest that it fits.
    """
    own = error.retry
    if not own or any(changes.keys() - _SPLIT.keys() for changes in own):
        return error
    try:
        ways = list(_fitting(own, spec, inventory, planned))
        ways = ways or other_ways(spec, inventory, planned)
        machines = [] if ways else smallest_machines(spec, inventory, planned)
    except _Blocked:
        return error
    if ways:
        return error.with_retry(
            tuple(way.changes for way in ways), tuple(way.gives for way in ways)
        )
    return _does_not_fit(error, spec, inventory, machines)


def other_ways(spec: SettledSpec, inventory: Inventory, planned: MakePlan) -> list[Way]:
    """Return the nearest split with producers and consumers that fits, else aggregated engines."""
    for group in _alternatives(spec, inventory):
        for way in _fitting(group, spec, inventory, planned):
            return [way]
    return []


def longer_context(plan: SizedPlan, inventory: Inventory, planned: MakePlan) -> Way | None:
    """Return the nearest split with at least half of the model's context; else with the longest.

    None if no split has a longer context than the plan.
    """
    length, shape = plan.max_model_len or 0, plan.model.shape
    wanted = (shape.max_positions or 0) / 2 if shape else 0
    best: Way | None = None
    try:
        for group in _alternatives(plan.spec, inventory):
            for way in _fitting(group, plan.spec, inventory, planned):
                reached = way.plan.max_model_len or 0
                if reached >= wanted:
                    return way
                if reached > (best.plan.max_model_len or 0 if best else length):
                    best = way
    except _Blocked:
        return None
    return best


def least_that_holds(plan: SizedPlan, inventory: Inventory, planned: MakePlan) -> list[str]:
    """Return the smallest machines for a model; empty on CPUs, and if its size is unknown."""
    if not vendor_named(plan.spec.vendor).has_gpus or not plan.model.weight_bytes:
        return []
    try:
        return smallest_machines(plan.spec, inventory, planned)
    except _Blocked:
        return []


def smallest_machines(spec: SettledSpec, inventory: Inventory, planned: MakePlan) -> list[str]:
    """Return the smallest machines on which one engine holds the model: "8 GPUs of 96 GiB".

    Raises:
        _Blocked: another setting stops every plan.
    """
    vendor = vendor_named(spec.vendor)
    found: list[str] = []
    fewest = _OF_ONE_MACHINE + 1
    for gib in _GPU_GIB:
        for count in (size for size in _SIZES if size < fewest):
            bare = replace(inventory, gpus=())
            machine = with_assumed_gpus(bare, vendor, count)
            gpus = tuple(replace(gpu, memory_mib=gib * 1024) for gpu in machine.gpus)
            changes = _with(aggregated(1), count)
            if any(_fitting([changes], spec, replace(machine, gpus=gpus), planned)):
                fewest = count
                found.append(f"{count} GPU{'s' if count > 1 else ''} of {gib} GiB")
                break
    return found


def _fitting(
    all_changes: Sequence[Changes], spec: SettledSpec, inventory: Inventory, planned: MakePlan
) -> Iterator[Way]:
    """Yield the changes that give a plan.

    Raises:
        _Blocked: a plan fails by a setting that has nothing to do with its size.
    """
    for changes in all_changes:
        try:
            way = Way(_needed(spec, changes), planned(_changed(spec, changes), inventory))
        except (MissingGpus, NotEnoughMemory):
            continue
        except ConfigError as exc:
            if exc.setting not in _ABOUT_SIZE:
                raise _Blocked from exc
        else:
            yield way


def _changed(spec: SettledSpec, changes: Changes) -> SettledSpec:
    whole_numbers = ("gpus", "producers", "consumers", "tp")
    fields = {_SPLIT[option]: value for option, value in changes.items()}
    return SettledSpec(
        spec.model_copy(
            update={
                field: int(value) if value is not None and field in whole_numbers else value
                for field, value in fields.items()
            }
        )
    )


def _needed(spec: SettledSpec, changes: Changes) -> Changes:
    """Return the changes without a TP size that is set already."""
    same_tp = changes.get("--tp") == str(spec.tp)
    return {name: value for name, value in changes.items() if not (same_tp and name == "--tp")}


def _alternatives(spec: SettledSpec, inventory: Inventory) -> Iterator[list[Changes]]:
    """Yield groups of changes, the nearest to what was asked for first."""
    vendor = vendor_named(spec.vendor)
    there = len(inventory.gpus_of(vendor.name))
    sizes = [size for size in _SIZES if size <= there]
    # The nearest TP size first; of two, the larger.
    sizes.sort(key=lambda size: (max(size / spec.tp, spec.tp / size), -size))
    asked = _asked(spec, inventory)
    if asked and asked.partial:
        yield [_with(asked, size) for size in sizes]
        return
    if asked:
        yield [_with(asked, size) for size in sizes if asked.engines * size <= there]
    if asked is None or not asked.aggregated:
        most = asked.engines if asked else there
        for size in sizes:
            engines = min(there // size, most)
            if engines >= 2:
                yield [_with(split(engines), size), _with(split(2), size)]
        if there == 1:
            yield [{**NO_SPLIT, "--gpus": "1", "--tp": "1"}]
    yield [_with(aggregated(1), size) for size in sorted(sizes)]


def _asked(spec: SettledSpec, inventory: Inventory) -> Topology | None:
    vendor = vendor_named(spec.vendor)
    try:
        return resolve_topology(spec, vendor, len(inventory.gpus_of(vendor.name)))
    except ConfigError:
        return None


def _with(topology: Topology, tp: int) -> Changes:
    return {**NO_SPLIT, "--topology": str(topology), "--tp": str(tp)}


def _does_not_fit(
    error: PdkitError, spec: SettledSpec, inventory: Inventory, machines: Sequence[str]
) -> PdkitError:
    gpus = inventory.gpus_of(spec.vendor)
    smallest = min((gpu.memory_mib for gpu in gpus), default=ASSUMED_GPU_MIB)
    least = f"; the least that holds it: {' or '.join(machines)}" if machines else ""
    these = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'} of {smallest / 1024:.0f} GiB"
    return type(error)(
        (*error.words, f"; the model does not fit this machine ({these}) in any split{least}"),
        hint="a smaller --model, or deploy plan --inventory FILE for another machine",
        details=error.details,
    )
