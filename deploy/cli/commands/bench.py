"""The commands that measure a stack under load."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.app import app
from deploy.cli.options import (
    InputTokens,
    Json,
    Name,
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
    workload_options,
)
from deploy.cli.printing import progress
from deploy.cli.result import CommandResult
from deploy.cli.shared import stack_name
from deploy.errors import CheckFailed, Interrupted, PdkitError, UsageError

if TYPE_CHECKING:
    from deploy.benchmark.results import Result
    from deploy.runtime.home import Home
    from deploy.workflows.bench import BenchOptions

bench_app = typer.Typer(name="bench", rich_markup_mode=None)
app.add_typer(bench_app)


_LoadFile = Annotated[
    Path | None, typer.Option("--file", help="JSONL file of a dataset or a trace.")
]
_AsIs = Annotated[
    bool, typer.Option("--as-is", help="Send a dataset's prompts unchanged; they may hit caches.")
]
_Speed = Annotated[float, typer.Option(help="Replay a trace this many times as fast.")]
_Rate = Annotated[
    float | None,
    typer.Option(help="Requests per second with Poisson arrivals (default: closed loop)."),
]
_Concurrency = Annotated[
    int | None,
    typer.Option(min=1, help="Requests in flight in a closed loop (default: one per engine)."),
]
_Requests = Annotated[
    int | None,
    typer.Option(min=1, help="Requests per repeat (default: 15 s of --rate, at least 20)."),
]
_Repeats = Annotated[
    int | None, typer.Option(min=1, help="Number of measured repeats (default: 3).")
]
_Warmup = Annotated[
    int | None,
    typer.Option(min=0, help="Requests before the first repeat (default: two per engine)."),
]
_SloText = Annotated[
    str | None,
    typer.Option(help="Limits for each request, such as ttft=1s,itl=50ms,e2e=5s (default: none)."),
]
_FindRate = Annotated[
    bool, typer.Option("--find-rate", help="Search for the highest rate that holds the SLO.")
]
_Steps = Annotated[int, typer.Option(min=1, help="Maximum number of rates that --find-rate tries.")]
_Timeout = Annotated[float, typer.Option(min=1.0, help="Timeout of a request in seconds.")]
_Out = Annotated[
    Path | None, typer.Option(help="Folder for the result (default: one in the state folder).")
]


@bench_app.callback(invoke_without_command=True)
def bench(  # noqa: PLR0913 - one parameter an option
    context: typer.Context,
    *,
    workload: Workload = "random",
    input_tokens: InputTokens = "512",
    output_tokens: OutputTokens = "32",
    prefix_tokens: PrefixTokens = 512,
    prefixes: Prefixes = 4,
    turns: Turns = 4,
    file: _LoadFile = None,
    skip_broken: SkipBroken = False,
    as_is: _AsIs = False,
    speed: _Speed = 1.0,
    rate: _Rate = None,
    concurrency: _Concurrency = None,
    requests: _Requests = None,
    repeats: _Repeats = None,
    within: Within = None,
    warmup: _Warmup = None,
    seed: Seed = 0,
    slo: _SloText = None,
    slo_share: SloShare = 0.9,
    find_rate: _FindRate = False,
    steps: _Steps = 10,
    timeout: _Timeout = 120.0,
    out: _Out = None,
    name: Name = None,
    json: Json = False,
) -> CommandResult | None:
    """Measure the running stack under load.

    Shows latencies, throughput, goodput, hit rates, CPU and memory.
    """
    if context.invoked_subcommand is not None:
        return None
    from deploy.benchmark.slo import parse_slo
    from deploy.runtime.home import Home
    from deploy.workflows.bench import BenchOptions

    _refuse_contradictions(rate, concurrency, speed, slo if find_rate else "not needed")
    chosen_by_noise("deploy bench", "--repeats", within, repeats)
    if find_rate and within is not None:
        raise UsageError("--find-rate has no repeats to choose", hint="leave out --within")
    sent = workload_options(
        workload, input_tokens, output_tokens,
        prefix_tokens=prefix_tokens, prefixes=prefixes, turns=turns, file=file, speed=speed,
        skip_broken=skip_broken, as_is=as_is,
    )  # fmt: skip
    options = BenchOptions(
        sent, rate, concurrency, requests, repeats=repeats or 3, warmup=warmup, seed=seed,
        slo=None if slo is None else parse_slo(slo), slo_share=slo_share, find_rate=find_rate,
        steps=steps, timeout_s=timeout, within=within / 100 if within else None,
    )  # fmt: skip
    return _answer(Home.from_environ(), stack_name(name), options, out)


def _refuse_contradictions(
    rate: float | None, concurrency: int | None, speed: float, slo: str | None
) -> None:
    require_positive("deploy bench", "--rate", rate)
    require_positive("deploy bench", "--speed", speed)
    if slo is None:
        raise UsageError("--find-rate needs an SLO", hint="add --slo ttft=1s,itl=50ms")
    if concurrency is not None and (rate is not None or slo != "not needed"):
        raise UsageError(
            f"{'--rate' if rate is not None else '--find-rate'} and --concurrency cannot be used "
            "together: load is open-loop or closed-loop",
            hint="leave out one of them",
        )


def _answer(home: Home, name: str, options: BenchOptions, out: Path | None) -> CommandResult:
    from deploy.document import as_document
    from deploy.output.bench_view import Bench, bench_view
    from deploy.runtime.lock import bench_lock, stack_lock
    from deploy.workflows.bench import open_folder

    with bench_lock(home.bench_lock_file), stack_lock(home.lock_file(name), name):
        folder = open_folder(home, name, options.workload.name, out)
        result = _kept(home, name, options, folder)
    page = written_report(folder)
    data = as_document(Bench(str(folder), page, result))
    text = bench_view(result, str(folder)) + (f"\nReport: {page}" if page else "")
    return CommandResult("bench", data, text, _failures(result, name))


def written_report(folder: Path) -> str | None:
    """Write the report of the results in a folder, and return its page.

    None if it cannot be written, which is not the benchmark's failure.
    """
    from deploy.benchmark.report.files import result_folders, write_report

    try:
        return write_report(result_folders(folder), folder).files[0]
    except PdkitError as exc:
        progress()(f"no report: {exc.message}; {exc.hint}")
        return None


def _kept(home: Home, name: str, options: BenchOptions, folder: Path) -> Result:
    """Return the result; when interrupted, say where the finished repeats are."""
    from deploy.workflows.bench import bench_stack

    try:
        return bench_stack(
            home,
            name,
            options,
            folder=folder,
            command=["deploy", *sys.argv[1:]],
            report=progress(),
        )
    except KeyboardInterrupt:
        if not any(folder.iterdir()):
            raise
        raise Interrupted(
            f"interrupted; the finished repeats are in {folder}",
            hint="deploy bench, for a new run",
        ) from None
    except PdkitError as exc:
        if any(folder.iterdir()):
            exc.details = (*exc.details, f"the finished repeats are in {folder}")
        raise
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()


def _failures(result: Result, name: str) -> list[CheckFailed]:
    """Return an error if no request was answered."""
    if any(repeat.completed for repeat in result.repeats):
        return []
    said = next(iter(result.repeats[0].errors), "")
    return [CheckFailed(f"no request was answered: {said}", hint=f"deploy check --name {name}")]
