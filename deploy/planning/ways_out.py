"""Ways out of an impossible plan. Each is planned itself before it is suggested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from deploy.config.fields import IN_ENGINES
from deploy.config.model import Model
from deploy.config.spec import EngineSpec, SettledSpec
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

_FIELDS = {**{option: option.removeprefix("--") for option in (*NO_SPLIT, "--tp", "--connector")}}
# Of GPUs on the market.
_GPU_GIB = (16, 24, 32, 48, 80, 96, 141, 192, 288)
_SIZES = (1, 2, 4, 8, 16)  # of an engine, in GPUs
_OF_ONE_MACHINE = (1, 2, 4, 8)
# Settings by which a plan may be too large, divide badly, or leave no KV to share.
_ABOUT_SIZE = frozenset({
    "", "connector", "consumers", "engine.kv_cache_gib", "engine.max_model_len", "gpus",
    "layerwise", "model", "producers", "save_decode_cache", "topology", "tp",
})  # fmt: skip
_SHARE = EngineSpec().gpu_memory


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
        if self.plan.model.weight_bytes is None:
            return "possible; whether it fits is unknown"
        return f"fits, context of {length:,} tokens" if length else "weights fit, context unknown"


def with_ways_out(
    error: PdkitError, spec: SettledSpec, inventory: Inventory, planned: MakePlan
) -> PdkitError:
    """Return an error of planning with suggestions that were planned and fit.

    If none of its own fits, others are looked for; if none is found, the error says that the model
    does not fit this machine, and names the smallest that it fits.
    """
    own = error.retry
    if not own or any(changes.keys() - _FIELDS.keys() for changes in own):
        return error
    asked = _asked(spec, inventory)
    if isinstance(error, MissingGpus) and asked and asked.aggregated:
        own = ()  # it would name a split of producers and consumers
    ways = list(_fitting(own, spec, inventory, planned)) or other_ways(spec, inventory, planned)
    if ways:
        changes = tuple(way.changes for way in ways)
        return error.with_retry(changes, tuple(way.gives for way in ways))
    if not vendor_named(spec.vendor).has_gpus:
        return error
    return _blocker(own, spec, inventory, planned) or _does_not_fit(error, spec, inventory, planned)


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
    for group in _alternatives(plan.spec, inventory):
        for way in _fitting(group, plan.spec, inventory, planned):
            reached = way.plan.max_model_len or 0
            if reached >= wanted:
                return way
            if reached > (best.plan.max_model_len or 0 if best else length):
                best = way
    return best


def least_that_holds(plan: SizedPlan, inventory: Inventory, planned: MakePlan) -> list[str]:
    """Return the smallest machines for a model; empty on CPUs, and if its size is unknown."""
    if not vendor_named(plan.spec.vendor).has_gpus or not plan.model.weight_bytes:
        return []
    return smallest_machines(plan.spec, inventory, planned)


def smallest_machines(spec: SettledSpec, inventory: Inventory, planned: MakePlan) -> list[str]:
    """Return the smallest machines on which one engine holds the model: "8 GPUs of 96 GiB".

    Empty if there is none, or if another setting stops every plan.
    """
    vendor = vendor_named(spec.vendor)
    found: list[str] = []
    fewest = max(_OF_ONE_MACHINE) + 1
    for gib in _GPU_GIB:
        for count in (size for size in _OF_ONE_MACHINE if size < fewest):
            bare = replace(inventory, gpus=())
            machine = with_assumed_gpus(bare, vendor, count)
            gpus = tuple(replace(gpu, memory_mib=gib * 1024) for gpu in machine.gpus)
            changes = _alone(spec, count)
            if any(_fitting([changes], spec, replace(machine, gpus=gpus), planned)):
                fewest = count
                found.append(f"{count} GPU{'s' if count > 1 else ''} of {gib} GiB")
                break
    return found


def _fitting(
    all_changes: Sequence[Changes], spec: SettledSpec, inventory: Inventory, planned: MakePlan
) -> Iterator[Way]:
    """Yield the changes that give a plan."""
    for changes in all_changes:
        try:
            way = Way(_needed(spec, changes), planned(_changed(spec, changes), inventory))
        except (ConfigError, MissingGpus, NotEnoughMemory):
            continue
        yield way


def _changed(spec: SettledSpec, changes: Changes) -> SettledSpec:
    whole_numbers = ("gpus", "producers", "consumers", "tp")
    fields = {_FIELDS[option]: value for option, value in changes.items()}
    return SettledSpec(
        spec.model_copy(
            update={
                field: int(value) if value is not None and field in whole_numbers else value
                for field, value in fields.items()
            }
        )
    )


def _blocker(
    all_changes: Sequence[Changes], spec: SettledSpec, inventory: Inventory, planned: MakePlan
) -> ConfigError | None:
    """Return the error of another setting, which has to be corrected first, if there is one."""
    for changes in all_changes:
        try:
            planned(_changed(spec, changes), inventory)
        except ConfigError as exc:
            if exc.setting not in _ABOUT_SIZE:
                return exc
        except (MissingGpus, NotEnoughMemory):
            continue
    return None


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
    if asked and asked.aggregated:
        fewer = [(min(asked.aggregated, there // size), size) for size in sizes]
        least = 2 if asked.redis else 1
        yield [
            _with(replace(asked, aggregated=count), size) for count, size in fewer if count >= least
        ]
    if asked is None or not asked.aggregated:
        most = asked.engines if asked else there
        for size in sizes:
            engines = min(there // size, most)
            if engines >= 2:
                yield [_with(split(engines), size), _with(split(2), size)]
        if there == 1:
            yield [{**NO_SPLIT, "--gpus": "1", "--tp": "1"}]
    yield [_alone(spec, size) for size in sorted(sizes)]


def _asked(spec: SettledSpec, inventory: Inventory) -> Topology | None:
    vendor = vendor_named(spec.vendor)
    try:
        return resolve_topology(spec, vendor, len(inventory.gpus_of(vendor.name)))
    except ConfigError:
        return None


def _alone(spec: SettledSpec, tp: int) -> Changes:
    """Return what makes one engine, which shares no KV."""
    other: Changes = {} if spec.connector in (None, IN_ENGINES) else {"--connector": IN_ENGINES}
    return {**_with(aggregated(1), tp), **other}


def _with(topology: Topology, tp: int) -> Changes:
    return {**NO_SPLIT, "--topology": str(topology), "--tp": str(tp)}


def _does_not_fit(
    error: PdkitError, spec: SettledSpec, inventory: Inventory, planned: MakePlan
) -> PdkitError:
    if spec.engine.gpu_memory < _SHARE:
        more = spec.engine.model_copy(update={"gpu_memory": _SHARE})
        if other_ways(SettledSpec(spec.model_copy(update={"engine": more})), inventory, planned):
            hint = f"set engine.gpu_memory to {_SHARE}, or leave it out"
            return type(error)(error.words, hint=hint, details=error.details)
    gpus = inventory.gpus_of(spec.vendor)
    smallest = min((gpu.memory_mib for gpu in gpus), default=ASSUMED_GPU_MIB)
    machines = smallest_machines(spec, inventory, planned)
    least = f"; the least that holds it: {' or '.join(machines)}" if machines else ""
    # Without a machine that holds it, another setting may stop every plan.
    what = "the model does not fit this machine ({}) in any split"
    if not machines:
        what = "no split of this machine's GPUs ({}) can be planned with these settings"
    these = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'} of {smallest / 1024:.0f} GiB"
    return type(error)(
        (*error.words, f"; {what.format(these)}{least}"),
        hint="a smaller --model, or deploy plan --inventory FILE for another machine",
        details=error.details,
    )
