"""The charts as Vega-Lite specifications."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.benchmark.report import chart_data
from deploy.benchmark.report.chart_data import Point, StackRuns

Spec = dict[str, Any]

# Okabe and Ito's palette, which colour-blind people can tell apart. There are more shapes and
# dashes than colours, so that the eighth stack, whose colour is the first one's, has others.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")
_SHAPES = (
    "circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right",
    "triangle-left",
)  # fmt: skip
_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 4], [1, 3], [10, 4], [8, 3, 2, 3, 2, 3])
# Tol's light palette for kinds of time and of tokens, so that no colour is also a stack's.
_KINDS = (
    "#77AADD", "#EE8866", "#44BB99", "#FFAABB", "#BBCC33", "#EEDD88", "#99DDFF", "#AAAA00",
    "#DDDDDD",
)  # fmt: skip
_HEIGHT = 280


@dataclass(frozen=True)
class Chart:
    """A chart with what it shows and how to read it."""

    name: str
    title: str
    caption: str
    spec: Spec


def charts(runs: Sequence[StackRuns]) -> list[Chart]:
    """Return the charts that these runs have values for."""
    found, order = chart_data.points(runs), [run.name for run in runs]
    made = [*_of_all_loads(found, order), *_of_one_load(chart_data.comparable(found), order)]
    return [chart for chart in made if chart.spec["data"]["values"]]


def _of_all_loads(found: Sequence[Point], order: Sequence[str]) -> Iterator[Chart]:
    yield Chart(
        "goodput",
        "Goodput",
        "Requests per second within the SLO, by the rate offered. Higher is better; on the dashed "
        "line all requests keep the SLO.",
        _goodput(list(chart_data.goodput(found)), order),
    )
    for name, title in (("TTFT", "Time to first token"), ("ITL", "Inter-token latency")):
        yield Chart(
            name.lower(),
            f"{title} by throughput",
            "90th percentile. Lower and further right is better.",
            _curve(list(chart_data.curve(found, f"{name} p90")), order, f"{name} p90 (ms)"),
        )


def _of_one_load(same: Sequence[Point], order: Sequence[str]) -> Iterator[Chart]:
    load = chart_data.load_text(same)
    for name, title, what in (
        ("TTFT", "time to first token", "requests"),
        ("ITL", "inter-token latency", "tokens"),
    ):
        values = list(chart_data.distribution(same, f"{name.lower()}_s"))
        yield Chart(
            f"{name.lower()}-distribution",
            f"Distribution of {title}",
            f"Share of {what} that took at most this long, at {load}. Further left is better.",
            _distribution(values, order, f"{name} (ms)", what),
        )
    yield Chart(
        "stages",
        "Where a request's time goes",
        f"Mean time in the engines, at {load}, as they count it. Lookups and loads of producer and "
        "consumer are added up; KV store is the wait of the store barrier. The rest, up to end to "
        "end, is the router and the network.",
        _bars(list(chart_data.stages(same)), order, "stage", chart_data.STAGE_ORDER, "ms"),
    )
    yield Chart(
        "sources",
        "Where the prompts' KV came from",
        f"Share of prompt tokens, counted by all engines, at {load}.",
        _bars(
            list(chart_data.sources(same)),
            order,
            "source",
            tuple(chart_data.SOURCES.values()),
            "share",
        ),
    )


def _by_stack(order: Sequence[str], marks: Sequence[Any]) -> Spec:
    """Return the colour, shape or dash of each stack, the same in every chart."""
    return {
        "field": "stack",
        "type": "nominal",
        "scale": {
            "domain": list(order),
            "range": [marks[at % len(marks)] for at in range(len(order))],
        },
        "legend": {"title": None, "orient": "top", "columns": 4, "symbolOpacity": 1},
    }


def _spec(values: Iterable[Spec], **rest: Any) -> Spec:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "data": {"values": list(values)},
        "width": "container",
        "height": _HEIGHT,
        "autosize": {"type": "fit", "contains": "padding"},
        **rest,
    }


def _axis(field: str, title: str, **rest: Any) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **rest}


def _tooltip(**titles: str) -> list[Spec]:
    return [
        {"field": field, "title": title, **({} if field in _TEXTS else {"format": ".4~g"})}
        for field, title in titles.items()
    ]


_TEXTS = {"stack", "load", "stage", "source"}


def _with_intervals(
    x: Spec, y: Spec, order: Sequence[str], tooltip: list[Spec], *, below: Sequence[Spec] = ()
) -> Spec:
    """Return lines with chart_data, and the interval of each as a bar."""
    # One legend for lines, bars and points: the layers share colour and shape.
    return {
        "encoding": {"x": x, "color": _by_stack(order, PALETTE)},
        "layer": [
            *below,
            {
                "mark": {"type": "line", "strokeWidth": 2},
                # By load: beyond the knee, more of it does not mean more answers.
                "encoding": {"y": y, "order": {"field": "order"}},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 1.5, "opacity": 0.6},
                "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
                "encoding": {
                    "y": y,
                    "shape": _by_stack(order, _SHAPES),
                    "tooltip": tooltip,
                },
            },
        ],
    }


def _curve(values: list[Spec], order: Sequence[str], title: str) -> Spec:
    scaled = [
        {**one, **{key: 1e3 * one[key] for key in ("value", "low", "high")}} for one in values
    ]
    tooltip = _tooltip(
        stack="stack", load="load", answered="requests/s", value=title, low="from", high="to",
        repeats="repeats",
    )  # fmt: skip
    y = _axis(
        "value",
        title,
        scale={"type": "log", "nice": True},
        axis={"format": ",~g", "gridOpacity": 0.5},
    )
    x = _axis("answered", "requests answered per second", axis={"tickCount": 6})
    return _spec(scaled, **_with_intervals(x, y, order, tooltip))


def _goodput(values: list[Spec], order: Sequence[str]) -> Spec:
    tooltip = _tooltip(
        stack="stack", offered="offered /s", value="within the SLO /s", low="from", high="to",
        repeats="repeats",
    )  # fmt: skip
    top = 1.1 * max((one["high"] for one in values), default=1.0)
    y = _axis("value", "requests per second within the SLO", scale={"domain": [0, top or 1.0]})
    ideal: Spec = {
        "mark": {
            "type": "line", "strokeDash": [4, 4], "opacity": 0.6, "strokeWidth": 1, "clip": True,
        },
        "encoding": {"y": {"field": "offered", "type": "quantitative"}, "color": {"value": "#888"}},
    }  # fmt: skip
    # A search begins with rates far beyond what a stack can take.
    rates = [one["offered"] for one in values]
    wide = bool(rates) and max(rates) > 16 * min(rates)
    scale = {"type": "log", "nice": False} if wide else {}
    x = _axis(
        "offered", "requests offered per second", axis={"tickCount": 6, "format": ",~f"},
        scale=scale,
    )  # fmt: skip
    return _spec(values, **_with_intervals(x, y, order, tooltip, below=[ideal]))


def _distribution(values: list[Spec], order: Sequence[str], title: str, what: str) -> Spec:
    return _spec(
        values,
        mark={"type": "line", "strokeWidth": 2},
        encoding={
            "x": _axis(
                "ms",
                title,
                scale={"type": "log", "nice": False},
                axis={"format": ",~g", "gridOpacity": 0.5},
            ),
            "y": _axis("share", f"share of {what}", axis={"format": "%"}),
            "color": _by_stack(order, PALETTE),
            "strokeDash": _by_stack(order, _DASHES),
            "tooltip": _tooltip(stack="stack", ms="ms", share=f"share of {what}"),
        },
    )


def _bars(
    values: list[Spec], order: Sequence[str], kind: str, kinds: Sequence[str], amount: str
) -> Spec:
    present = [one for one in kinds if any(value[kind] == one for value in values)]
    share = amount == "share"
    title = "share of prompt tokens" if share else "mean ms of a request"
    return {
        **_spec(values, mark={"type": "bar", "height": {"band": 0.7}}),
        # On a phone the legend has two columns.
        "height": 75 + 40 * len(order) + 18 * math.ceil(len(present) / 2),
        "encoding": {
            "y": {
                "field": "stack", "type": "nominal", "sort": list(order), "title": None,
                "axis": {"labelFontSize": 13},
            },
            "x": _axis(amount, title, stack="zero", axis={"format": "%" if share else ",~f"}),
            "color": {
                "field": kind,
                "type": "nominal",
                "scale": {"domain": present, "range": list(_KINDS[: len(present)])},
                "legend": {"title": None, "orient": "top", "columns": 3},
            },
            "order": {"field": "order"},
            "tooltip": _tooltip(**{"stack": "stack", kind: kind, amount: title}),
        },
    }  # fmt: skip
