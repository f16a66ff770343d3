"""The runs of a sweep, one after the other; each finished one is kept at once."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from deploy.benchmark.candidates import Candidate, named, winning_spec
from deploy.benchmark.results import Result
from deploy.benchmark.statistics import LEAST_REPEATS
from deploy.benchmark.sweep import (
    BEST_FILE,
    Sweep,
    SweepRun,
    judged,
    rounds_for,
    starting_rate,
    write_sweep,
)
from deploy.config.spec import StackSpec
from deploy.errors import CheckFailed, MachineUnfit, NotEnoughMemory, StackUnhealthy
from deploy.workflows.bench import BenchOptions
from deploy.workflows.prepare import Report
from deploy.workflows.sweep.live import LiveStacks

_DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EEXIST, errno.ENOTDIR,
)  # fmt: skip
# A start, a check and a stop, on two cores that its engines share; and at least what the search's
# rates take.
_START_S, _ENGINE_START_S, _GPU_START_S = 15.0, 10.0, 180.0
_STEPS = 4  # that a search takes, once it knows where to begin


def run_sweep(
    folder: Path,
    sweep: Sweep,
    stacks: LiveStacks,
    specs: Mapping[str, StackSpec],
    options: BenchOptions,
    report: Report,
) -> Sweep:
    """Do the runs that are left, and judge them. The options' rate is where the search begins.

    A topology that fails once is not tried again; one without memory before its first run is left
    out, as those are for which there is none at the start. Interrupted, finished runs are kept, and
    nothing stays up.

    Raises:
        MachineError, UsageError: what would stop every run, such as a full disk.
    """
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_sweep(folder, sweep)
        while sweep.left:
            name, number = sweep.left[0]
            report(_progress(sweep, name, number, options))
            try:
                run, result = _one_run(folder, sweep, (name, number), stacks, specs[name], options)
            except NotEnoughMemory as exc:
                if sweep.of(name):
                    raise
                report(f"left out: {name}: {exc.message}")
                sweep = _without(sweep, name, exc.message)
                continue
            report(f"{name}: {_said(run)}")
            sweep = _with_run(sweep, run, result)
            if options.within and not sweep.left and sweep.rounds == LEAST_REPEATS:
                sweep = sweep.model_copy(update={"rounds": rounds_for(sweep, options.within)})
            write_sweep(folder, sweep)
        sweep = judged(sweep)
        write_sweep(folder, sweep)
    return sweep


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn a full disk, or a folder that cannot be made, into an error of the machine."""
    try:
        yield
    except OSError as exc:
        # Below /proc a folder cannot be made because it "does not exist".
        of_folder = Path(exc.filename or "") in (folder, *folder.parents)
        if exc.errno not in _DISK_ERRORS and not of_folder:
            raise
        raise MachineUnfit(
            f"the results in {folder} cannot be written: {exc.strerror}",
            hint="free some space and repeat the command to continue; or name another --out",
        ) from exc


def _one_run(
    folder: Path,
    sweep: Sweep,
    which: tuple[str, int],
    stacks: LiveStacks,
    spec: StackSpec,
    options: BenchOptions,
) -> tuple[SweepRun, Result | None]:
    name, number = which
    began = time.monotonic()
    place = folder / f"round-{number + 1}-{name.replace(':', '-')}"
    shutil.rmtree(place, ignore_errors=True)  # of a run that was killed
    error, result = None, None
    try:
        stacks.up(spec)
        result = stacks.load(_load_of(sweep, which, options), place)
    except (StackUnhealthy, CheckFailed) as exc:
        error = exc.message
    finally:
        stacks.down()
    run = SweepRun(
        topology=name,
        round=number,
        folder=place.name if place.exists() else None,
        seconds=round(time.monotonic() - began, 1),
        rate=_rate_of(result) if result else None,
        error=error,
    )
    return run, result


def _without(sweep: Sweep, name: str, why: str) -> Sweep:
    topologies = [one for one in sweep.topologies if one != name]
    refused = {**sweep.refused, name: why}
    return sweep.model_copy(update={"topologies": topologies, "refused": refused})


def _with_run(sweep: Sweep, run: SweepRun, result: Result | None) -> Sweep:
    """Return the sweep with one more run, and with what the first results say of their conditions.

    Plain engines have no LMCache and no Redis: a later result has their versions.
    """
    changes: dict[str, object] = {"runs": [*sweep.runs, run]}
    if result is not None:
        known = sweep.versions.model_dump(exclude_none=True) if sweep.versions else {}
        changes |= {
            "model": sweep.model or result.model,
            "workload": sweep.workload or result.workload,
            "machine": sweep.machine or result.machine,
            "versions": result.versions.model_copy(update=known),
        }
    return sweep.model_copy(update=changes)


def _load_of(sweep: Sweep, which: tuple[str, int], options: BenchOptions) -> BenchOptions:
    """Return the load of a run; its search begins near the result of earlier runs.

    All have the same seed, and so the same lengths and arrivals. What a round would not make more
    certain is measured in the first one only.
    """
    if which[1]:
        options = replace(options, one_user_requests=0, router_requests=0, hop_requests=0)
    if options.slo is None:  # a round is a repeat
        return replace(
            options, concurrency=sweep.concurrency, repeats=1, within=None, whole_file=False
        )
    start = starting_rate(sweep, *which, options.seed) or options.rate
    return replace(options, find_rate=True, rate=start)


def _candidate(name: str) -> Candidate:
    return named(name)[0]


def _rate_of(result: Result) -> float | None:
    if result.rate_search is not None:
        return result.rate_search.highest_rate
    return median(one.requests_per_s for one in result.repeats) or None


def _said(run: SweepRun) -> str:
    if run.error:
        return f"failed: {run.error}"
    return f"{run.rate:.2f} requests/s" if run.rate else "no rate that was tried holds the SLO"


def _progress(sweep: Sweep, name: str, number: int, options: BenchOptions) -> str:
    left_s = left_seconds(sweep, options.pass_s)
    return (
        f"round {number + 1} of {sweep.rounds}: {name}; {len(sweep.left)} runs left, about "
        f"{left_s / 60:.0f} min"
    )


def left_seconds(sweep: Sweep, pass_s: float) -> float:
    """Return the seconds that the remaining runs will take, as earlier ones of theirs did.

    What no run is known of is guessed.
    """

    def guess_s(name: str) -> float:
        engines_s = _START_S + _candidate(name).units * _ENGINE_START_S
        return (_GPU_START_S if sweep.unit == "GPU" else engines_s) + _STEPS * pass_s

    took_s = {
        name: [run.seconds for run in sweep.of(name) if not run.error] or [guess_s(name)]
        for name in sweep.topologies
    }
    return sum(median(took_s[name]) for name, _ in sweep.left)


def write_best(folder: Path, sweep: Sweep, asked: Mapping[str, Any]) -> Path | None:
    """Write the stack file of the topology to run; None if no topology is left."""
    if sweep.verdict is None or sweep.verdict.winner is None:
        return None
    file = folder / BEST_FILE
    spec = winning_spec(asked, _candidate(sweep.verdict.winner))
    head = f"# {sweep.verdict.sentence}\n# Measured by deploy bench sweep, {sweep.started}.\n"
    with _writing(folder):
        file.write_text(head + yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
    return file
