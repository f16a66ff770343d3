"""The commands that read results of benchmark runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.commands.bench import bench_app
from deploy.cli.options import Json
from deploy.cli.result import CommandResult
from deploy.errors import UsageError

if TYPE_CHECKING:
    from deploy.benchmark.compare import Comparison
    from deploy.benchmark.compare_sweeps import ComparedSweeps


@bench_app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Folder of the first result (A).")],
    second: Annotated[Path, typer.Argument(help="Folder of the second result (B).")],
    *,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway", help="Compare runs even if their settings differ, and list the differences."
        ),
    ] = False,
    json: Json = False,
) -> CommandResult:
    """Compare two results, or two sweeps.

    Shows ratios with 95 % intervals, and whether they differ at all.
    """
    from dataclasses import replace

    from deploy.benchmark.sweep import sweep_file
    from deploy.document import as_document

    kinds = [sweep_file(one).exists() for one in (first, second)]
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"{(first, second)[kinds[1]]} is a sweep, and the other one is not",
            hint="compare two sweeps, or a run of the sweep, which has a folder of its own",
        )
    found, text = (_sweeps if all(kinds) else _runs)(first, second, anyway=anyway)
    data = as_document(replace(found, first=str(first), second=str(second)))
    return CommandResult("bench compare", data, text)


def _runs(first: Path, second: Path, *, anyway: bool) -> tuple[Comparison, str]:
    from deploy.benchmark.compare import compare as compare_results
    from deploy.benchmark.results import read_result
    from deploy.output.bench_view import compare_view

    results = read_result(first), read_result(second)
    found = compare_results(*results, anyway=anyway)
    return found, compare_view(found, *results)


def _sweeps(first: Path, second: Path, *, anyway: bool) -> tuple[ComparedSweeps, str]:
    from deploy.benchmark.compare_sweeps import compare_sweeps
    from deploy.benchmark.sweep import read_sweep
    from deploy.output.bench_view import sweeps_view

    sweeps = read_sweep(first), read_sweep(second)
    found = compare_sweeps(*sweeps, anyway=anyway)
    return found, sweeps_view(found, *sweeps)


@bench_app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Result folders, or folders that contain them.")
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o",
            help="Folder to write to (default: the given folder, or bench-report for several).",
        ),
    ] = None,
    json: Json = False,
) -> CommandResult:  # fmt: skip
    """Write a report of results as HTML, CSV and PNG.

    The HTML page has the verdict and charts.
    """
    from deploy.benchmark.report.files import result_folders, write_report
    from deploy.document import as_document

    found = [inner for folder in folders for inner in result_folders(folder)]
    target = out or (folders[0] if len(folders) == 1 else Path("bench-report"))
    written = write_report(found, target)
    said = "\n".join(filter(None, (written.sentence, written.note)))
    text = f"{said}\n\nReport: {written.files[0]}"
    return CommandResult("bench report", as_document(written), text)
