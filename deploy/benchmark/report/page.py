"""The report as one HTML file that needs nothing beside it."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

from deploy.benchmark.compare import METRICS
from deploy.benchmark.report.break_even import break_even_section
from deploy.benchmark.report.cells import interval, number, percent, short, table
from deploy.benchmark.report.charts import Chart
from deploy.benchmark.report.costs import own_cost_section, redis_path_section, usage_section
from deploy.benchmark.report.points import Point, StackRuns, comparable, points, worth
from deploy.benchmark.report.topologies import topologies_section
from deploy.benchmark.report.verdict import ReportVerdict, slo_text
from deploy.benchmark.results import hit_rate

_MOST_ROWS = 30
_HERE = Path(__file__).parent


def page(
    runs: Sequence[StackRuns], found: ReportVerdict, charts: Sequence[Chart], library: str
) -> str:
    """Return the page.

    Args:
        library: Vega, Vega-Lite and vega-embed as one script, fit for a script element.
    """
    first = runs[0].result
    title = f"{first.workload.name} on {first.model.name}"
    body = "\n".join(
        [
            f"<h1>pdkit benchmark · {escape(title)}</h1>",
            f'<p class="verdict {found.kind.replace(" ", "-")}">{_unbroken(found.sentence)}</p>',
            f'<p class="soft">{escape(found.note)}</p>' if found.note else "",
            f'<p class="soft">{_unbroken(_conditions(runs))}</p>',
            *(topologies_section(found.sweep) if found.sweep else ()),
            '<div class="charts">',
            *map(_figure, charts),
            "</div>",
            *_sections(runs),
        ]
    )
    return Template(_text("page.html")).substitute(
        title=escape(f"pdkit benchmark: {title}"),
        css=_text("page.css"),
        body=body,
        charts=_embedded(json.dumps({chart.name: chart.spec for chart in charts})),
        library=library,
        script=_text("page.js"),
    )


def _unbroken(sentence: str) -> str:
    """Return a sentence as HTML in which no line ends within a date, or before a unit."""
    whole = re.sub(r"(?<=\d) (?=m?s\b)", "&nbsp;", escape(sentence))
    return re.sub(r"(\d{4})-(\d\d)-(\d\d)", r"\1&#8209;\2&#8209;\3", whole)


def _text(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _embedded(json_text: str) -> str:
    """Return JSON that cannot end the script element it is put into."""
    return json_text.replace("<", "\\u003c")


def _conditions(runs: Sequence[StackRuns]) -> str:
    result = runs[0].result
    machine = result.machine
    counts = sorted({len(point.samples) for point in points(runs)})
    parts = [
        f"{len(runs)} {'stack' if len(runs) == 1 else 'stacks'}",
        f"{'starts' if _of_sweep(runs) else 'repeats'} at each load: {_range(counts)}",
        f"SLO: {slo_text(result) or 'none'}",
        ", ".join(machine.gpus) or f"{machine.processor}, {machine.cores} cores",
        result.started[:10],
    ]
    return " · ".join(parts)


def _of_sweep(runs: Sequence[StackRuns]) -> bool:
    return runs[0].starts is not None


def _range(numbers: Sequence[int]) -> str:
    """Return ascending numbers as one, or as the range they are in."""
    return "" if not numbers else " to ".join(dict.fromkeys((str(numbers[0]), str(numbers[-1]))))


def _figure(chart: Chart) -> str:
    return (
        f"<figure><figcaption><h3>{escape(chart.title)}</h3><p>{escape(chart.caption)}</p>"
        f'</figcaption><div class="chart" id="chart-{chart.name}"></div></figure>'
    )


def _sections(runs: Sequence[StackRuns]) -> Iterator[str]:
    yield "<h2>Results</h2>"
    values = "starts, each with the median of its repeats" if _of_sweep(runs) else "repeats"
    yield (
        f'<p class="soft">Medians of the {values}; 95 % intervals where there are five or more. '
        "Noise is the relative spread of the TTFT medians. Of many loads, each stack's best and "
        "the one to compare are shown; report.csv has all. Rates of several searches of a stack "
        "are rounded to steps of 10 %.</p>"
    )
    shown = _shown(points(runs))
    each = f"each {runs[0].result.stack.unit}"
    header = tuple(each if name == _EACH else name for name in _RESULT_HEADER)
    yield table(header, map(_result_row, shown), "loads")
    yield "<h2>Latencies</h2>"
    yield '<p class="soft">In milliseconds.</p>'
    yield table(("stack", "load", *_LATENCIES), map(_latency_row, shown), "loads")
    yield from redis_path_section(shown)
    yield from break_even_section(runs)
    yield from own_cost_section(runs)
    yield from usage_section(runs)
    yield "<h2>Machine and versions</h2>"
    yield from _facts(runs)
    yield "<h2>Commands</h2>"
    yield f"<pre>{escape(_commands(runs))}</pre>"
    yield from _notes(runs)


_EACH = "each unit"
_RESULT_HEADER = (
    "stack", "load", "answered /s", _EACH, "goodput /s", _EACH, "in SLO", "output tokens /s", _EACH,
    "TTFT p50", "ITL p50", "external hits", "eligible hits", "failed", "noise",
)  # fmt: skip
_LATENCIES = tuple(metric.name for metric in METRICS if metric.unit == "ms")


def _shown(found: Sequence[Point]) -> Sequence[Point]:
    """Return all points; of many, each stack's best and the one at a load of all."""
    if len(found) <= _MOST_ROWS:
        return found
    best: dict[str, Point] = {}
    for point in found:
        known = best.setdefault(point.run.name, point)
        best[point.run.name] = max(known, point, key=worth)
    kept = [*best.values(), *comparable(found)]
    return [point for point in found if point in kept]


def _result_row(point: Point) -> Sequence[str]:
    units = point.run.result.stack.units
    answered, goodput = point.median("requests"), point.median("goodput")
    ttft, itl, tokens = (point.median(name) for name in ("TTFT p50", "ITL p50", "output tokens"))
    within = point.median("within the SLO")
    hits = [one.hits for one in point.repeats if one.hits]
    return (
        point.run.name,
        short(point.load),
        number(answered.value if answered else None),
        number(answered.value / units if answered else None),
        interval(goodput),
        number(goodput.value / units if goodput else None),
        percent(within.value if within else None),
        number(tokens.value if tokens else None),
        number(tokens.value / units if tokens else None),
        interval(ttft, 1e3, " ms"),
        interval(itl, 1e3, " ms"),
        percent(hit_rate(hits, "queried")),
        percent(hit_rate(hits, "eligible")),
        str(sum(one.failed for one in point.repeats)),
        percent(point.noise),
    )


def _latency_row(point: Point) -> Sequence[str]:
    medians = map(point.median, _LATENCIES)
    cells = (number(1e3 * one.value if one else None) for one in medians)
    return (point.run.name, short(point.load), *cells)


def _facts(runs: Sequence[StackRuns]) -> Iterator[str]:
    """Yield a table of what all runs share, and one of what differs."""
    found: dict[str, list[str]] = {}
    for part in ("machine", "versions", "model", "stack", "workload"):
        values = [getattr(run.result, part).model_dump() for run in runs]
        for field in dict.fromkeys(field for one in values for field in one):
            found[f"{part}: {field.replace('_', ' ')}"] = [_fact(one.get(field)) for one in values]
    found["seed"] = [str(run.result.seed) for run in runs]
    unlike = {name: values for name, values in found.items() if len(set(values)) > 1}
    if unlike:
        header = ("differs", *(run.name for run in runs))
        yield table(header, ((name, *values) for name, values in unlike.items()), "words")
    alike = ((name, values[0]) for name, values in found.items() if name not in unlike)
    yield table(("the same in all runs", ""), alike, "words")


def _fact(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "not known" if value is None else str(value)


def _commands(runs: Sequence[StackRuns]) -> str:
    return "\n".join(f"# {run.name}\n{shlex.join(run.result.command)}" for run in runs)


def _notes(runs: Sequence[StackRuns]) -> Iterator[str]:
    notes = []
    for run in runs:
        if run.result.interrupted:
            notes.append(f"{run.name} was interrupted: only its finished repeats are shown.")
        errors = sum((Counter(one.errors) for one in run.result.repeats), Counter[str]())
        sent = sum(one.sent for one in run.result.repeats)
        notes += [
            f"{run.name}: {count} of {sent} requests failed: {text}"
            for text, count in errors.items()
        ]
    if notes:
        yield "<h2>Failures</h2>"
        yield "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"
