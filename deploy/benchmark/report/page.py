"""The report as one HTML file that needs nothing beside it."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from deploy.benchmark.break_even import speeds_at_ends
from deploy.benchmark.compare import METRICS
from deploy.benchmark.report.chart_data import Point, StackRuns, comparable, points, worth
from deploy.benchmark.report.charts import Chart
from deploy.benchmark.report.costs import own_cost_section, redis_path_section, usage_section
from deploy.benchmark.report.tables import interval, number, percent, short, table
from deploy.benchmark.report.verdict import slo_text
from deploy.benchmark.results import hit_rate
from deploy.benchmark.sweep import Sweep, TopologyRow, rows
from deploy.benchmark.verdict import BenchVerdict
from deploy.planning.break_even import Speeds, break_even_tokens, changes, needed_gb_s

_MOST_ROWS = 30
_HERE = Path(__file__).parent


def page(
    runs: Sequence[StackRuns],
    found: BenchVerdict,
    charts: Sequence[Chart],
    library: str,
    *,
    note: str = "",
    sweep: Sweep | None = None,
) -> str:
    """Return the page.

    Args:
        library: Vega, Vega-Lite and vega-embed as one script, fit for a script element.
        note: what limits the verdict.
        sweep: what the runs are of, where they are of a sweep.
    """
    first = runs[0].result
    title = f"{first.workload.name} on {first.model.name}"
    body = "\n".join(
        [
            f"<h1>pdkit benchmark · {escape(title)}</h1>",
            f'<p class="verdict {found.kind.replace(" ", "-")}">{_unbroken(found.sentence)}</p>',
            f'<p class="soft">{escape(note)}</p>' if note else "",
            f'<p class="soft">{_unbroken(_conditions(runs))}</p>',
            *(topologies_section(sweep) if sweep else ()),
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


def topologies_section(sweep: Sweep) -> Iterator[str]:
    """Yield the rate of each topology, the best first, or the reason why it has no rate."""
    what = f"The highest rate that holds {sweep.slo}" if sweep.slo else "The throughput"
    yield "<h2>Topologies</h2>"
    yield (
        f'<p class="soft">{what}, in requests per second: the median of the rounds, in each of '
        "which the topology was started anew, with its 95 % interval.</p>"
    )
    header = ("topology", "rate", f"each {sweep.unit}", "95 %", f"{sweep.unit}s", "rounds", "")
    yield table(header, map(_row, rows(sweep)), "topologies")


def _row(row: TopologyRow) -> Sequence[str]:
    known = row.low is not None and row.high is not None
    return (
        row.topology,
        number(row.rate),
        number(row.per_unit),
        f"{number(row.low)} to {number(row.high)}" if known else "-",
        str(row.units),
        str(row.rounds),
        row.why_not,
    )


def break_even_section(runs: Sequence[StackRuns]) -> Iterator[str]:
    """Yield each stack's break-even, and what would move that of the first one."""
    found = [(run, speeds) for run in runs if (speeds := speeds_at_ends(run.result))]
    if not found:
        return
    yield "<h2>Break-even of loading KV</h2>"
    yield (
        '<p class="soft">The shortest prompt whose KV is loaded from Redis faster than an engine '
        "computes it, from the speeds measured with one request at a time and at each stack's "
        "highest load.</p>"
    )
    header = ("stack", "load", "break-even", "prefill", "KV computed", "KV loaded", "lookup")
    rows = [
        _speed_row(run.name, load, one) for run, speeds in found for load, one in speeds.items()
    ]
    yield table(header, rows, "loads")
    run, speeds = found[0]
    yield f"<h3>What would move it: {escape(run.name)}, estimated</h3>"
    loads = tuple(map(short, speeds))
    yield table(("change", *loads), _moves(speeds, run.result.stack.shards))
    yield (
        '<p class="soft">What another Redis would have to deliver to an engine, so that loading a '
        "prompt of this length pays.</p>"
    )
    yield table(("prompt", *loads), _needs(speeds))


def _moves(speeds: Mapping[str, Speeds], shards: int) -> Iterator[Sequence[str]]:
    by_load = [changes(one, shards) for one in speeds.values()]
    for same in zip(*by_load, strict=True):
        yield same[0].what, *(_tokens(break_even_tokens(one.speeds)) for one in same)


def _needs(speeds: Mapping[str, Speeds]) -> Iterator[Sequence[str]]:
    chunk = next(iter(speeds.values())).chunk
    for tokens in (chunk, 4 * chunk):
        needed = [needed_gb_s(one, tokens) for one in speeds.values()]
        yield f"{tokens:,} tokens", *("none can" if one is None else _over(one) for one in needed)
    yield "very long", *(_over(one.computed_gb_s) for one in speeds.values())
    yield "this Redis delivered", *(f"{number(one.load_gb_s)} GB/s" for one in speeds.values())


def _over(speed_gb_s: float) -> str:
    return f"over {number(speed_gb_s)} GB/s"


def _speed_row(name: str, load: str, speeds: Speeds) -> Sequence[str]:
    return (
        name,
        short(load),
        _tokens(break_even_tokens(speeds)),
        f"{speeds.prefill_tokens_s:,.0f} tokens/s",
        f"{speeds.computed_gb_s:.3g} GB/s",
        f"{speeds.load_gb_s:.3g} GB/s",
        f"{1e3 * speeds.lookup_s:.3g} ms",
    )


def _tokens(count: int | None) -> str:
    return "never: computing is faster" if count is None else f"{count:,} tokens"
