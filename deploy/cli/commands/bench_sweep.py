"""`deploy bench sweep`: which topology is best on this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.commands.bench import bench_app, written_report
from deploy.cli.options import (
    File,
    InputTokens,
    Json,
    OutputTokens,
    Prefixes,
    PrefixTokens,
    Seed,
    SkipBroken,
    SloShare,
    Turns,
    Within,
    Workload,
    chosen_by_noise,
    require_positive,
    takes_stack_options,
    workload_options,
)
from deploy.cli.printing import progress
from deploy.cli.result import CommandResult
from deploy.cli.shared import load_source
from deploy.errors import CheckFailed, Interrupted, UsageError

if TYPE_CHECKING:
    from deploy.benchmark.sweep import Sweep
    from deploy.config.spec import StackSpec
    from deploy.runtime.home import Home
    from deploy.workflows.bench import BenchOptions
    from deploy.workflows.sweep import LiveStacks, Planned


_Engines = Annotated[int | None, typer.Option(min=1, help="The same as --gpus, on CPUs.")]
_Topologies = Annotated[
    str | None,
    typer.Option(help="Topologies to compare, such as 1p2d,3a,2a:tp2 (default: all that fit)."),
]
_Rounds = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of times to start each topology (default: 5, as an interval needs)."
    ),
]
_Dataset = Annotated[Path | None, typer.Option(help="JSONL file of --workload dataset or trace.")]
_SloText = Annotated[
    str | None,
    typer.Option(
        help="Limits for each request, such as ttft=1s,itl=50ms (default: none; then "
        "throughput is compared)."
    ),
]
_Rate = Annotated[
    float | None,
    typer.Option(
        help="With --slo: first rate of the first search, per second (default: the warm-up's)."
    ),
]
_Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Without --slo: requests in flight in a closed loop, for each topology (default: four "
        "per GPU or engine of the largest).",
    ),
]
_Pass = Annotated[
    float, typer.Option("--pass", min=1.0, help="Approximate seconds of load at each rate.")
]
_Steps = Annotated[int, typer.Option(min=1, help="Maximum number of rates that a search tries.")]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="List the runs and how long they take; start nothing.")
]
_Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for the results; an unfinished sweep in it is continued (default: that of the "
        "same unfinished sweep, else a new one in the state folder)."
    ),
]


@bench_app.command()
@takes_stack_options
def sweep(  # noqa: PLR0913 - one parameter an option
    *,
    file: File,
    flags: dict[str, Any],
    engines: _Engines = None,
    topologies: _Topologies = None,
    rounds: _Rounds = None,
    within: Within = None,
    workload: Workload = "multi-turn",
    input_tokens: InputTokens = "512",
    output_tokens: OutputTokens = "32",
    prefix_tokens: PrefixTokens = 512,
    prefixes: Prefixes = 4,
    turns: Turns = 4,
    dataset: _Dataset = None,
    skip_broken: SkipBroken = False,
    slo: _SloText = None,
    slo_share: SloShare = 0.9,
    rate: _Rate = None,
    concurrency: _Concurrency = None,
    pass_s: _Pass = 6.0,
    steps: _Steps = 10,
    seed: Seed = 0,
    dry_run: _DryRun = False,
    out: _Out = None,
    json: Json = False,
) -> CommandResult:
    """Find the best topology: start, check, load and stop each in turn.

    Repeat the command to continue an unfinished sweep. Other stacks are left alone.
    """
    from deploy.benchmark.dataset import read_lines
    from deploy.benchmark.slo import parse_slo
    from deploy.benchmark.statistics import LEAST_REPEATS
    from deploy.benchmark.workloads import FILE_WORKLOADS
    from deploy.workflows.bench import BenchOptions

    require_positive("deploy bench sweep", "--rate", rate)
    _refuse_contradictions(rate, concurrency, slo)
    chosen_by_noise("deploy bench sweep", "--rounds", within, rounds)
    sent = workload_options(
        workload, input_tokens, output_tokens,
        prefix_tokens=prefix_tokens, prefixes=prefixes, turns=turns, file=dataset,
        skip_broken=skip_broken,
    )  # fmt: skip
    if sent.name in FILE_WORKLOADS:
        read_lines(sent, sys.maxsize)  # refuses a broken file before anything starts
    options = BenchOptions(
        sent, rate, concurrency, seed=seed, slo=None if slo is None else parse_slo(slo),
        slo_share=slo_share, steps=steps, pass_s=pass_s, within=within / 100 if within else None,
    )  # fmt: skip
    spec = load_source(_with_engines(flags, engines), file, ask=not json).spec
    asked = _Asked(spec, topologies, rounds or LEAST_REPEATS, slo, options, out)
    return _dry_run(asked) if dry_run else _swept(asked)


def _refuse_contradictions(rate: float | None, concurrency: int | None, slo: str | None) -> None:
    """Refuse a closed loop with an SLO, which is held at a rate, and a rate without one."""
    if slo is None and rate is not None:
        raise UsageError(
            "--rate is where the search for the highest rate begins, which needs an SLO",
            hint="add --slo ttft=1s,itl=50ms, or leave out --rate",
        )
    if slo is not None and concurrency is not None:
        raise UsageError(
            "--slo and --concurrency cannot be used together: the highest rate that holds an SLO "
            "is searched in an open loop",
            hint="leave out one of them",
        )


@dataclass(frozen=True)
class _Asked:
    """A requested sweep."""

    spec: StackSpec
    topologies: str | None
    rounds: int
    slo: str | None
    options: BenchOptions
    out: Path | None

    @property
    def command(self) -> list[str]:
        return ["deploy", *sys.argv[1:]]

    def opened(self, home: Home, stacks: LiveStacks) -> tuple[Planned, Path, Sweep]:
        """Return the stacks, the folder, and the sweep, new or resumed."""
        from deploy.workflows.sweep import Settings, open_sweep, plan_sweep, sweep_port

        planned = plan_sweep(
            self.spec, self.topologies, sweep_port(self.spec),
            lambda made: stacks.require(made, self.options.workload),
        )  # fmt: skip
        settings = Settings(self.rounds, self.slo, self.options, self.command)
        return planned, *open_sweep(home, planned, settings, self.out)


def _with_engines(flags: dict[str, Any], engines: int | None) -> dict[str, Any]:
    """Return the flags with --engines as the number of GPUs, which counts engines on CPUs."""
    if engines is None:
        return flags
    if flags.get("gpus") is not None:
        raise UsageError("--engines and --gpus are the same", hint="leave out one of them")
    if flags.get("vendor") not in (None, "cpu"):
        raise UsageError(
            f"--engines: {engines} with --vendor {flags['vendor']}, where GPUs are counted",
            hint=f"deploy bench sweep --gpus {engines}",
        )
    return {**flags, "gpus": engines, "vendor": "cpu"}


def _dry_run(asked: _Asked) -> CommandResult:
    from deploy.document import as_document
    from deploy.output.bench_view import LeftRun, SweepPlan, dry_run_view
    from deploy.runtime.home import Home
    from deploy.workflows.sweep import LiveStacks, left_seconds, stack_name

    home = Home.from_environ()
    stacks = LiveStacks(home, stack_name(asked.spec), asked.command, progress())
    _, _, sweep = asked.opened(home, stacks)
    left_s = left_seconds(sweep, asked.options.pass_s)
    left = [LeftRun(number, name) for name, number in sweep.left]
    planned = SweepPlan(left, sweep.refused, round(left_s))
    return CommandResult("bench sweep", as_document(planned), dry_run_view(sweep, left_s))


def _swept(asked: _Asked) -> CommandResult:
    from deploy.document import as_document
    from deploy.output.bench_view import SweepDone, sweep_view
    from deploy.runtime.home import Home
    from deploy.runtime.lock import bench_lock
    from deploy.workflows.sweep import LiveStacks, run_sweep, stack_name, write_best

    home, report = Home.from_environ(), progress()
    stacks = LiveStacks(
        home, stack_name(asked.spec), asked.command, report,
        own_port="port" in asked.spec.model_fields_set,
    )  # fmt: skip
    with bench_lock(home.bench_lock_file), stacks.claimed():
        planned, folder, sweep = asked.opened(home, stacks)
        for name, why in sweep.refused.items():
            report(f"left out: {name}: {why}")
        try:
            done = run_sweep(folder, sweep, stacks, planned.stacks, asked.options, report)
        except KeyboardInterrupt:
            raise Interrupted(
                f"interrupted; finished runs are in {folder}",
                hint="run the same command to continue",
            ) from None
    page, best = written_report(folder), write_best(folder, done, planned.asked)
    data = as_document(SweepDone(str(folder), page, str(best) if best else None, done))
    return CommandResult("bench sweep", data, sweep_view(done, folder, best, page), _failures(done))


def _failures(sweep: Sweep) -> list[CheckFailed]:
    """Return an error if no topology has a rate."""
    if any(run.rate for run in sweep.runs):
        return []
    why = next(
        (run.error for run in sweep.runs if run.error), "none of the tried rates holds the SLO"
    )
    return [CheckFailed(f"no topology has a rate: {why}", hint="deploy up, then deploy check")]
