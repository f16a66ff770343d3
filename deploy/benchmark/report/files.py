"""The report's files: HTML, CSV and PNG."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.benchmark.compare import METRICS
from deploy.benchmark.report.chart_data import Point, StackRuns, named, points
from deploy.benchmark.report.charts import Chart, charts
from deploy.benchmark.report.counted import medians
from deploy.benchmark.report.page import page
from deploy.benchmark.report.verdict import note, sweep_of, verdict
from deploy.benchmark.results import RESULT_FILE, RequestRecord, read_requests, read_result
from deploy.benchmark.statistics import Estimate, Ratio
from deploy.benchmark.sweep import judge
from deploy.errors import MissingTool, UsageError, printable

PAGE, TABLE = "report.html", "report.csv"
_FORMULA = ("=", "+", "-", "@", "\t", "\n")
_PNG_WIDTH = 640
_PNG_CONFIG = {
    "background": "white",
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {"titleFontWeight": "normal", "gridColor": "#d8dee4"},
}
_CSV_HEADER = ("stack", "load", "metric", "unit", "median", "low", "high", "repeats")


@dataclass(frozen=True)
class BenchReport:
    """A report of results.

    Attributes:
        verdict: its kind.
        note: what limits the verdict; "" if nothing does.
        ratio: null if nothing was compared.
        files: files that were written, the page first.
    """

    verdict: str
    sentence: str
    note: str
    ratio: Ratio | None
    files: Sequence[str]


def write_report(folders: Sequence[Path], out: Path) -> BenchReport:
    """Write the report of the results in these folders, and return its files.

    Raises:
        UsageError: a folder has no result, or `out` cannot be written.
        MissingTool: the drawing library is not installed.
    """
    library = _library()
    results = [(read_result(one), _requests(one)) for one in folders]
    for folder, (result, _) in zip(folders, results, strict=True):
        if not result.repeats:
            raise UsageError(
                f"{folder}: the result has no finished repeat", hint="deploy bench, to run it again"
            )
    sweep, measured = sweep_of(folders), [result for result, _ in results]
    # Of a sweep that is not finished, its finished runs are judged.
    found = judge(sweep) if sweep else verdict(measured)
    limit = "" if sweep else note(measured, found)
    runs = named(results, of_sweep=sweep is not None)
    drawn = charts(runs)
    files: dict[str, bytes] = {
        PAGE: page(
            runs, found, drawn, library.javascript_bundle(), note=limit, sweep=sweep
        ).encode(),
        TABLE: table(runs).encode(),
        **{f"{chart.name}.png": _png(library, chart) for chart in drawn},
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (out / name).write_bytes(content)
    except OSError as exc:
        raise UsageError(f"{out}: {exc.strerror}", hint="choose a folder with -o") from exc
    written = [str(out / name) for name in files]
    return BenchReport(found.kind, found.sentence, limit, found.ratio, written)


def result_folders(folder: Path) -> list[Path]:
    """Return the folder itself, or those in it that have a result."""
    inner = sorted(file.parent for file in folder.glob(f"*/{RESULT_FILE}"))
    return [folder] if (folder / RESULT_FILE).exists() or not inner else inner


def _requests(folder: Path) -> list[RequestRecord]:
    """Return the requests up to the first broken line, which a killed run may leave."""
    found: list[RequestRecord] = []
    try:
        found.extend(read_requests(folder))
    except ValueError:
        return found
    return found


def table(runs: Sequence[StackRuns]) -> str:
    """Return all metrics as CSV, in seconds, bytes and shares."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_CSV_HEADER)
    writer.writerows(map(_cell, row) for row in _rows(runs))
    return text.getvalue()


def _cell(value: object) -> object:
    """Return a cell that no spreadsheet takes for a formula: a run's name may begin like one."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _rows(runs: Sequence[StackRuns]) -> Iterator[tuple[object, ...]]:
    units = {"ms": "s", "1/s": "1/s", "%": "share"}
    for point in points(runs):
        for metric in METRICS:
            value = point.median(metric.name)
            if value:
                yield _row(point, metric.name, units[metric.unit], value)
        for one in medians(point):
            yield _row(point, one.name, one.unit, one.median)


def _row(point: Point, name: str, unit: str, value: Estimate) -> tuple[object, ...]:
    return (
        point.run.name, point.load, name, unit, value.value, value.low, value.high, value.repeats,
    )  # fmt: skip


def _library() -> Any:
    """Return vl-convert, which draws Vega-Lite without a browser and has its scripts.

    Raises:
        MissingTool: it is not installed.
    """
    try:
        import vl_convert
    except ImportError as exc:
        raise MissingTool(
            "the report needs vl-convert-python, which is not installed",
            hint=_install("vl-convert-python"),
        ) from exc
    return vl_convert


def _install(package: str) -> str:
    """Return the command that installs a package here; scripts/install makes no pip."""
    uv = Path(sys.prefix).parent / ".uv" / "bin" / "uv"
    if uv.exists():
        return f"{uv} pip install --python {sys.executable} {package}"
    return f"{sys.executable} -m pip install {package}"


def _png(library: Any, chart: Chart) -> bytes:
    title = {"text": chart.title, "anchor": "start", "fontSize": 15, "offset": 12}
    spec = {**chart.spec, "width": _PNG_WIDTH, "title": title}
    drawn: bytes = library.vegalite_to_png(spec, scale=2, config=_PNG_CONFIG)
    return drawn
