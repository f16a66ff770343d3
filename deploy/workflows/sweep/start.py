"""What a sweep will run: its candidates as stacks, and its folder, new or resumed."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from deploy.benchmark.candidates import Candidate, feasible, named, winning_spec, without_split
from deploy.benchmark.sweep import BEST_FILE, SWEEP_FILE, Sweep, read_sweep
from deploy.config.spec import StackSpec
from deploy.config.vendors import vendor_named
from deploy.errors import ConfigError, MachineError, PdkitError, UsageError
from deploy.runtime.detect import detect_inventory
from deploy.runtime.home import Home
from deploy.runtime.ports import free_base
from deploy.workflows.bench import BenchOptions
from deploy.workflows.facts import chosen_vendor

# Not 8000, which the user's own stack may have.
_FIRST_PORT, _PORTS = 18000, 100
_USERS_A_UNIT = 4  # without SLO: as many of the largest topology for all


@dataclass(frozen=True)
class Planned:
    """The stacks of a sweep.

    Attributes:
        asked: the settings that were given, without a topology.
        stacks: by the candidate's name, in the order of the first round.
        refused: those that cannot be started here now, and why.
    """

    asked: Mapping[str, Any]
    unit: str
    stacks: Mapping[str, StackSpec]
    refused: Mapping[str, PdkitError]


def plan_sweep(
    spec: StackSpec, listed: str | None, port: int, require: Callable[[StackSpec], None]
) -> Planned:
    """Return every stack of a sweep, each asked whether this machine has room for it.

    Args:
        spec: as requested; its number of GPUs, or of engines, is the sweep's.
        listed: names of topologies, instead of all.
        port: of the stacks.
        require: refuses a stack that cannot be started here.

    Raises:
        UsageError: there is nothing to compare, or no stack can be planned.
        MachineError: no stack can be started here.
    """
    named = spec.vendor != "auto"
    vendor = vendor_named(spec.vendor if named else chosen_vendor(spec, detect_inventory()))
    candidates = _candidates(spec, listed, has_gpus=vendor.has_gpus)
    asked = spec.model_dump(mode="json", exclude_unset=True)
    stacks: dict[str, StackSpec] = {}
    refused: dict[str, PdkitError] = {}
    for candidate in candidates:
        made = stacks[candidate.name] = StackSpec.model_validate(
            {
                **winning_spec(asked, candidate),
                "name": stack_name(spec),
                "port": port,
                "supervise": False,  # what dies is a result
            }
        )
        try:
            require(made)
        except (ConfigError, MachineError) as exc:
            refused[candidate.name] = exc
    if len(refused) == len(stacks):
        raise _none_fits(list(refused.values()))
    if len(fitting := stacks.keys() - refused.keys()) == 1:
        left_out, why = next(iter(refused.items()))
        raise MachineError(
            f"bench sweep: nothing to compare {fitting.pop()} with; {left_out}: {why.message}",
            hint=f"deploy bench sweep {_counted_by(vendor.has_gpus)} 2, or name other --topologies",
        )
    return Planned(without_split(asked, plain=False), vendor.slot, stacks, refused)


def _none_fits(refused: Sequence[PdkitError]) -> PdkitError:
    lacking = next((one for one in refused if isinstance(one, MachineError)), None)
    return lacking or ConfigError(
        f"no topology can be planned here: {refused[0].message}",
        hint=refused[0].hint or "deploy plan with the same options",
    )


def _candidates(spec: StackSpec, listed: str | None, *, has_gpus: bool) -> Sequence[Candidate]:
    unit = "GPU" if has_gpus else "engine"
    if listed is not None:
        found: Sequence[Candidate] = named(listed, spec.tp)
        if spec.gpus is not None and any(one.units > spec.gpus for one in found):
            most = max(found, key=lambda one: one.units)
            raise UsageError(
                f"--topologies: {most.name} takes {most.units} {unit}s, and --gpus is {spec.gpus}",
                hint="leave out --gpus, or that topology",
            )
    elif spec.gpus is None:
        raise UsageError(
            f"bench sweep: no number of {unit}s to split",
            hint=f"deploy bench sweep {_counted_by(has_gpus)} 4, or --topologies 1p1d,2a",
        )
    else:
        found = feasible(spec.gpus, has_gpus=has_gpus)
    if len(found) < 2:
        raise UsageError(
            f"bench sweep: nothing to compare {found[0].name} with",
            hint=f"deploy bench sweep {_counted_by(has_gpus)} 2, or name more --topologies",
        )
    return found


def _counted_by(has_gpus: bool) -> str:
    return "--gpus" if has_gpus else "--engines"


def sweep_port(spec: StackSpec) -> int:
    """Return the port of a sweep's stacks: as asked, else one that is free with those after it."""
    return spec.port if "port" in spec.model_fields_set else free_port(spec.bind)


def free_port(bind: str) -> int:
    """Return a port that is free now, with those after it."""
    return free_base(range(_PORTS), _FIRST_PORT, bind) or _FIRST_PORT


def stack_name(spec: StackSpec) -> str:
    """Return the name of a sweep's stacks, which is not the user's own stack's."""
    return f"{spec.name[:34]}-sweep"


@dataclass(frozen=True)
class Settings:
    """How often and with what every stack is loaded.

    Attributes:
        slo: the text of the option; None without one.
    """

    rounds: int
    slo: str | None
    options: BenchOptions
    command: Sequence[str]


def open_sweep(
    home: Home, planned: Planned, settings: Settings, out: Path | None
) -> tuple[Path, Sweep]:
    """Return the folder of an unfinished sweep of the same settings, else a new one.

    A topology that was left out before and fits now runs, too.

    Raises:
        UsageError: `out` holds another sweep, or cannot be written.
        MachineError: a topology whose runs are not done does not fit any more.
    """
    key = _key(planned, settings)
    folder = (out or _unfinished(home, key) or _new_folder(home)).absolute()
    if (folder / SWEEP_FILE).exists():
        before = read_sweep(folder)
        if before.key != key:
            raise UsageError(
                f"--out {folder}: it holds a sweep of other settings", hint="name a new folder"
            )
        return folder, _gone_on(before, planned)
    options = settings.options
    sweep = Sweep(
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=list(settings.command),
        key=key,
        unit=planned.unit,
        slo=settings.slo,
        slo_share=options.slo_share if options.slo else None,
        concurrency=None if options.slo else options.concurrency or _users(planned),
        seed=options.seed,
        rounds=settings.rounds,
        topologies=[name for name in planned.stacks if name not in planned.refused],
        refused={name: why.message for name, why in planned.refused.items()},
        runs=[],
    )
    return folder, sweep


def _users(planned: Planned) -> int:
    """Return the users of all topologies; they do not depend on what fits at the moment."""
    return _USERS_A_UNIT * max(named(name)[0].units for name in planned.stacks)


def _gone_on(before: Sweep, planned: Planned) -> Sweep:
    """Return an unfinished sweep, with the topologies that it had and those that fit now."""
    for name, _ in before.left:
        if name in planned.refused:
            raise planned.refused[name]
    refused = {
        name: why.message for name, why in planned.refused.items() if name not in before.topologies
    }
    topologies = [name for name in planned.stacks if name not in refused]
    changed = {"topologies": topologies, "refused": refused, "verdict": None}
    return before.model_copy(update=changed)


def _new_folder(home: Home) -> Path:
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    tried = (home.bench / f"{stamp}-{number}-sweep" for number in itertools.count(1))
    return next(folder for folder in tried if not folder.exists())


def _key(planned: Planned, settings: Settings) -> str:
    # The port is left out: another one may be free next time.
    stacks = {
        name: spec.model_dump(mode="json", exclude={"port"})
        for name, spec in planned.stacks.items()
    }
    load = asdict(settings.options)
    text = json.dumps([stacks, settings.rounds, load], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _unfinished(home: Home, key: str) -> Path | None:
    return next((folder for folder in _sweeps(home) if _goes_on(folder, key)), None)


def _sweeps(home: Home) -> Iterator[Path]:
    """Yield the folders of sweeps, the newest first."""
    for file in sorted(home.bench.glob(f"*-sweep/{SWEEP_FILE}"), reverse=True):
        yield file.parent


def _goes_on(folder: Path, key: str) -> bool:
    try:
        sweep = read_sweep(folder)
    except UsageError:
        return False
    # The last thing that a sweep writes is the winner's stack file.
    won = sweep.verdict is not None and sweep.verdict.winner is not None
    ended = (folder / BEST_FILE).exists() if won else sweep.verdict is not None
    return sweep.key == key and not ended
