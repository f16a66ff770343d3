"""The commands that read results of benchmark runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.commands.bench import bench_app
from deploy.cli.options import Json
from deploy.cli.result import CommandResult


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
    """Compare two results.

    Shows ratios with 95 % intervals, and whether the results differ at all.
    """
    from deploy.benchmark.compare import compare as compare_results
    from deploy.benchmark.results import read_result
    from deploy.output.compare_view import compare_view

    results = read_result(first), read_result(second)
    found = compare_results(*results, anyway=anyway)
    data = {"first": str(first), "second": str(second), **found.as_dict()}
    return CommandResult("bench compare", data, compare_view(found, *results))


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

    found = [inner for folder in folders for inner in result_folders(folder)]
    target = out or (folders[0] if len(folders) == 1 else Path("bench-report"))
    written = write_report(found, target)
    verdict, files = written.verdict, [str(file) for file in written.files]
    data = {
        "verdict": verdict.kind,
        "sentence": verdict.sentence,
        "note": verdict.note,
        "ratio": verdict.ratio.as_dict() if verdict.ratio else None,
        "files": files,
    }
    said = "\n".join(filter(None, (verdict.sentence, verdict.note)))
    return CommandResult("bench report", data, f"{said}\n\nReport: {files[0]}")
