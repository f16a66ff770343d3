"""The report's files: complete in themselves, right in their numbers, and safe to open."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from deploy.benchmark.compare import METRICS
from deploy.benchmark.report import chart_data, files
from deploy.benchmark.report.chart_data import StackRuns, named
from deploy.benchmark.report.charts import charts
from deploy.benchmark.report.files import result_folders, table, write_report
from deploy.benchmark.report.page import page
from deploy.benchmark.report.verdict import verdict
from deploy.benchmark.results import (
    REQUESTS_FILE,
    RequestRecord,
    Result,
    append_requests,
    write_result,
)
from deploy.benchmark.statistics import median_of
from deploy.benchmark.sweep import write_sweep
from deploy.errors import MissingTool, UsageError
from tests.unit.benchmark.samples import repeat, result
from tests.unit.benchmark.test_break_even import PATH
from tests.unit.benchmark.test_sweep import sweep as a_sweep

STAGES = {
    "producer": {"queue": 0.01, "prefill": 0.109, "lookup": 0.002, "load": 0.007, "store": 0.03},
    "consumer": {"queue": 0.004, "prefill": 0.021, "decode": 0.3, "lookup": 0.001, "load": 0.015},
}


def measured(topology: str = "1p1d", **changed: Any) -> Result:
    """Return a run at two rates, five repeats each."""
    repeats = [
        repeat(
            at, rate=rate, goodput_per_s=rate * (1 + at / 100), stages=STAGES, redis_path=PATH,
            failed=1, errors={"<b>refused</b>": 1},
        )
        for at, rate in enumerate([1.0] * 5 + [2.0] * 5)
    ]  # fmt: skip
    stack = result().stack.model_dump()
    stack |= {"topology": topology, "redis": not topology.endswith("a")}
    return result(**{"repeats": repeats, "stack": stack, **changed})


def records(index: int) -> list[RequestRecord]:
    """Return a repeat's hundred requests, with TTFTs of 1 to 100 ms, and one that failed."""
    good: dict[str, Any] = {
        "repeat": index, "arrival_s": 0.0, "itl_s": [0.01], "e2e_s": 1.0, "input_tokens": 9,
        "output_tokens": 2,
    }  # fmt: skip
    made = [RequestRecord(index=at, ttft_s=(at + 1) / 1e3, **good) for at in range(100)]
    return [*made, RequestRecord(index=100, ttft_s=50.0, error="late", **good)]


def runs(*results: Result) -> list[StackRuns]:
    return named([(one, [*records(0), *records(5)]) for one in results])


def drawn(found: Sequence[StackRuns]) -> str:
    return page(found, verdict([run.result for run in found]), charts(found), "/* library */")


class TestPage:
    def test_has_verdict_charts_tables_and_commands(self) -> None:
        found = runs(measured(), measured("2a"))
        text = drawn(found)
        assert "No significant difference between 1p1d and 2a in 5 repeats" in text
        for heading in ("Results", "Break-even", "Machine and versions", "Commands", "Failures"):
            assert f"<h2>{heading}" in text
        assert "deploy bench" in text
        assert "prefers-color-scheme: dark" in text
        specs = json.loads(re.findall(r'<script id="charts"[^>]*>(.*?)</script>', text)[0])
        assert list(specs) == re.findall(r'id="chart-([\w-]+)"', text)
        assert len(specs) == 7

    def test_goodput_is_divided_by_all_gpus_or_engines(self) -> None:
        # The median of five repeats of 2.1 to 2.18.
        for gpus, unit, each in ((0, "engine", "1.07"), (8, "GPU", "0.268")):
            stack = result().stack.model_dump() | {"gpus": gpus}
            text = drawn(runs(measured(stack=stack)))
            assert f"<th>goodput /s</th><th>each {unit}</th>" in text
            assert re.search(rf"<td>2\.14 \([^)]*\)</td><td>{each}</td>", text)

    def test_speeds_of_the_redis_path_are_medians_of_repeats_that_moved_kv(self) -> None:
        idle = PATH | {"stored_bytes": 0, "store_gb_s": 0.0, "lookups": 0, "lookup_ms": 0.0}
        moved = PATH | {"lost_chunks": 2, "late": 1, "load_gb_s": 1.2, "lookup_ms": 3.0}
        paths = [PATH, idle, moved, None]
        repeats = [repeat(at, redis_path=path) for at, path in enumerate(paths)]
        text = drawn(runs(measured(repeats=repeats)))
        cells = (
            "2/s offered",
            "2,000 MB",
            "0.500 GB/s",
            "3,000 MB",
            "0.800 GB/s",
            "2.50 ms",
            "2",
            "1",
        )
        assert f"<td>1p1d</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" in text
        assert "Redis path</h2>" not in drawn(runs(measured(repeats=[repeat(0)])))

    def test_own_cost_of_the_kit(self) -> None:
        usage = {"cpu_s": {"router": 0.04}, "peak_rss_bytes": {}}
        path = PATH | {"barrier_wait_s": 0.1, "store_cpu_s": 0.25, "load_cpu_s": 0.5}
        steps = {"producer": 0.031, "consumer": 0.08}
        costly = repeat(0, usage=usage, redis_path=path, connector=steps)
        hop = {"p50": 0.001, "p90": 0.002, "p99": 0.0034, "mean": 0.001}
        passed = {"in_flight": 8, "routed_per_s": 57.0, "direct_per_s": 60.0}
        once = {"hop_s": hop, "router_throughput": passed, "up_extra_s": 3.25}
        text = drawn(runs(measured(repeats=[costly], **once)))
        by_router = "57.0/s of 60.0/s (95 %)"
        moved = ("0.250 CPU s/GB", "0.500 CPU s/GB", "producer 3.1 %, consumer 8.0 %", "3.25 s")
        for cells in (("1.00 ms", "3.40 ms", "2.00 ms", "500/s", by_router), ("5.00 ms", *moved)):
            row = "".join(f"<td>{cell}</td>" for cell in ("1p1d", *cells))
            assert f"<tr>{row}</tr>" in text
        bare = measured(repeats=[repeat(0)])
        assert "own cost" not in drawn(runs(bare))

    def test_break_even_of_one_user_and_under_load_and_what_would_move_it(self) -> None:
        # Prefill makes 5,000 and 500 tokens/s: a chunk of 256 takes 51.2 and 512 ms.
        redis = PATH | {"lookup_ms": 1.2, "load_gb_s": 0.003}
        one, busy = (
            repeat(
                stages={"producer": {"prefill": seconds}, "consumer": {"prefill": 1.0}},
                redis_path=redis, rate=None, concurrency=users,
            )
            for seconds, users in ((0.011, 1), (0.11, 8))
        )  # fmt: skip
        text = drawn(runs(measured(repeats=[busy], one_user=one)))
        section = text.partition("<h2>Break-even")[2].partition("<h2>")[0]
        rows = [re.findall("<t[dh]>(.*?)</t[dh]>", row) for row in section.split("<tr>")[1:]]
        never = "never: computing is faster"
        assert [row[1:4] for row in rows[1:3]] == [
            ["one request at a time", never, "5,000 tokens/s"],
            ["8 in flight", "256 tokens", "500 tokens/s"],
        ]
        loads = ["one request at a time", "8 in flight"]
        moved = {row[0]: row[1:] for row in rows[3:]}
        assert moved["change"] == moved["prompt"] == loads
        assert moved["prefill twice as fast, as on another GPU"] == [never, never]
        # 256 tokens of 4,096 bytes in 50 and 510.8 ms; without a lookup, in 51.2 and 512.
        assert moved["256 tokens"] == ["over 0.0210 GB/s", "over 0.00205 GB/s"]
        assert moved["very long"] == ["over 0.0205 GB/s", "over 0.00205 GB/s"]
        assert moved["this Redis delivered"] == ["0.00300 GB/s", "0.00300 GB/s"]
        slow = busy | {"redis_path": PATH | {"lookup_ms": 600.0}}
        assert "<td>256 tokens</td><td>none can</td>" in drawn(runs(measured(repeats=[slow])))

    def test_costs_that_a_run_measures_once_are_the_medians_of_the_runs(self) -> None:
        kinds = ("p50", "p90", "p99", "mean")
        rounds = [
            measured(hop_s=dict.fromkeys(kinds, ms / 1e3), up_extra_s=up_s)
            for ms, up_s in ((9, 90.0), (1, 50.0), (2, 51.0))
        ]
        text = drawn(runs(*rounds, measured()))
        assert "<td>1p1d</td><td>2.00 ms</td><td>2.00 ms</td>" in text
        assert "<td>51.0 s</td></tr>" in text

    def test_use_of_services_over_all_repeats(self) -> None:
        """CPU time by the time of both, and the higher of the peaks; the generator's is unknown."""
        usages = [
            {"cpu_s": {"redis": cpu_s, "bench": 1.0}, "peak_rss_bytes": {"redis": gib << 30}}
            for cpu_s, gib in ((4.0, 3), (2.0, 1))
        ]
        repeats = [
            repeat(at, usage=usage, duration_s=10.0 + 20 * at) for at, usage in enumerate(usages)
        ]
        text = drawn(runs(measured(repeats=[*repeats, repeat(2, usage=None)])))
        assert "<tr><td>1p1d</td><td>redis</td><td>0.150</td><td>3.00 GiB</td></tr>" in text
        assert "<tr><td>1p1d</td><td>bench</td><td>0.0500</td><td>-</td></tr>" in text
        assert "CPU and memory" not in drawn(runs(measured(repeats=[repeat(0, usage=None)])))

    def test_use_of_gpus(self) -> None:
        gpu = {"0": {"utilization": 0.875, "peak_memory_bytes": 3 << 30},
               "1": {"utilization": None, "peak_memory_bytes": None}}  # fmt: skip
        usage = {"cpu_s": {}, "peak_rss_bytes": {}, "gpu": gpu}
        text = drawn(runs(measured(repeats=[repeat(0, usage=usage)])))
        assert "<tr><td>1p1d</td><td>0</td><td>87.5 %</td><td>3.00 GiB</td></tr>" in text
        assert "<tr><td>1p1d</td><td>1</td><td>-</td><td>-</td></tr>" in text
        assert "<h2>GPUs</h2>" not in drawn(runs(measured()))

    def test_the_page_loads_nothing_from_elsewhere(self) -> None:
        text = drawn(runs(measured()))
        assert not re.findall(r'(?:src|href)\s*=\s*"(?!data:)', text)
        assert not re.findall(r"url\(|@import|fetch\(", text)

    def test_names_cannot_become_code(self) -> None:
        evil = "</script><script>alert(1)</script><!--"
        found = runs(measured(evil, workload={"name": evil}), measured(command=[evil]))
        text = drawn(found)
        assert evil not in text
        assert "<b>refused" not in text
        assert "10 of 200 requests failed: &lt;b&gt;refused" in text
        assert text.count("<script") == 3
        charts_json = re.findall(r'type="application/json">(.*?)</script>', text)[0]
        assert evil in json.dumps(json.loads(charts_json))

    def test_the_table_has_the_first_and_the_best_of_many_loads(self) -> None:
        many = [repeat(at, rate=float(at), goodput_per_s=20.0 - at) for at in range(1, 40)]
        text = drawn(runs(measured(repeats=many), measured("2a", repeats=[repeat(0, rate=9.0)])))
        rows = re.findall(r"<td>([\d.]+)/s offered</td>", text.partition("<h2>Break")[0])
        assert rows == ["1", "9"] * 2, "of results and of latencies"

    def test_latencies_and_hit_rates(self) -> None:
        text = drawn(runs(measured()))
        latencies = text.partition("<h2>Latencies")[2].partition("</table>")[0]
        header, row = (re.findall(f"<{cell}>(.*?)</{cell}>", latencies) for cell in ("th", "td"))
        assert header[2:5] == ["TTFT p50", "TTFT p90", "TTFT p99"]
        assert header[8:] == ["end to end p50", "end to end p90", "end to end p99"]
        assert row[2:5] == ["100", "200", "300"]
        assert (len(header), len(row)) == (11, 22), "of two loads"
        results = text.partition("<h2>Latencies")[0]
        assert "<td>90.0 %</td><td>100.0 %</td>" in results, "external and eligible hits"

    def test_settings_that_differ_between_runs_are_shown_separately(self) -> None:
        text = drawn(runs(measured(), measured("2a")))
        differs, same = re.findall(r'<table class="words">(.*?)</table>', text, re.DOTALL)
        assert "stack: topology" in differs
        assert "stack: topology" not in same
        assert "versions: vllm" in same


class TestCharts:
    def names(self, *results: Result) -> list[str]:
        return [chart.name for chart in charts(runs(*results))]

    def test_charts_show_only_what_was_measured(self) -> None:
        bare = [repeat(0, goodput_per_s=None, within_slo=None, hits=None, itl_s=None)]
        assert self.names(measured(repeats=bare, slo=None)) == [
            "ttft",
            "ttft-distribution",
            "itl-distribution",
        ]

    def test_closed_loops_have_no_offered_rate(self) -> None:
        closed = [repeat(0, rate=None, concurrency=4)]
        assert "goodput" not in self.names(measured(repeats=closed))

    def test_axes_have_plain_numbers(self) -> None:
        """Not 0.5k, nor 5e+2."""
        slow = {"producer": {"prefill": 1.05}}
        repeats = [repeat(at, rate=5.0 * at, stages=slow) for at in (1, 2)]
        labels: set[str] = set()
        for chart in charts(runs(measured(repeats=repeats))):
            svg = vl_convert.vegalite_to_svg({**chart.spec, "width": 640})
            labels |= set(re.findall(">([^<]+)</text>", svg))
        assert {"10", "500", "1,000"} <= labels
        assert not [one for one in labels if re.search(r"\d(k|e\+)", one)]

    def test_a_stack_has_the_same_colour_in_all(self) -> None:
        found = json.dumps([chart.spec for chart in charts(runs(measured(), measured("2a")))])
        stacks = re.findall(r'"domain": \["1p1d", "2a"\], "range": (\["#.*?\])', found)
        assert len(stacks) == 5
        assert len(set(stacks)) == 1

    @pytest.mark.parametrize(
        ("chart", "mark"), [("ttft", "shape"), ("ttft-distribution", "strokeDash")]
    )
    def test_many_stacks_can_be_told_apart(self, chart: str, mark: str) -> None:
        names = [f"{engines}a" for engines in range(1, 13)]
        made = {one.name: one for one in charts(runs(*map(measured, names)))}
        spec = json.dumps(made[chart].spec)
        domain = re.escape(json.dumps(names))
        ranges = {
            of: json.loads(
                re.search(rf'"{of}": .*?"domain": {domain}, "range": (\[.*?\])}}', spec)[1]
            )
            for of in ("color", mark)
        }
        assert len(ranges["color"]) == len(names)
        assert len({json.dumps(pair) for pair in zip(*ranges.values(), strict=True)}) == len(names)


class TestPoints:
    def test_curves_have_medians_with_intervals(self) -> None:
        first, second = chart_data.goodput(chart_data.points(runs(measured())))
        assert (first["offered"], second["offered"]) == (1.0, 2.0)
        assert first["value"] == pytest.approx(1.02)
        assert first["low"] < 1.02 < first["high"]

    def test_distributions_are_of_answered_requests(self) -> None:
        found = list(chart_data.distribution(chart_data.points(runs(measured()))[:1], "ttft_s"))
        assert (found[0]["ms"], found[-1]["ms"], found[-1]["share"]) == (1.0, 100.0, 1.0)
        half = next(one for one in found if one["share"] == 0.5)
        assert half["ms"] == pytest.approx(50, abs=1)

    def test_gaps_of_zero_are_on_the_log_scale(self) -> None:
        """An engine that falls behind sends several tokens in one piece."""
        at_once = [one.model_copy(update={"itl_s": [0.0, 0.01]}) for one in records(0)]
        (point, *_) = chart_data.points(named([(measured(), at_once)]))
        found = list(chart_data.distribution([point], "itl_s"))
        assert {round(one["ms"], 3) for one in found} == {0.01, 10.0}

    def test_stacks_are_compared_at_a_load_that_all_can_take(self) -> None:
        weak = [
            repeat(0, rate=1.2, goodput_per_s=1.1),
            repeat(1, rate=3.0, goodput_per_s=0.0),
        ]
        same = chart_data.comparable(
            chart_data.points(runs(measured(), measured("2a", repeats=weak)))
        )
        assert [(point.run.name, point.load) for point in same] == [
            ("1p1d", "1 requests/s offered"),
            ("2a", "1.2 requests/s offered"),
        ]
        assert chart_data.load_text(same).startswith("1 to 1.2 requests/s offered (each")
        both = chart_data.comparable(chart_data.points(runs(measured(), measured("2a"))))
        assert chart_data.load_text(both) == "2 requests/s offered"

    def test_like_runs_of_a_stack_are_one(self) -> None:
        rounds = named([(measured(), records(at)) for at in (0, 9)] + [(measured("2a"), [])])
        assert [run.name for run in rounds] == ["1p1d", "2a"]
        first, second = chart_data.points(rounds[:1])
        assert [one.index for one in first.repeats] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
        assert {one.repeat for one in rounds[0].requests} == {0, 19}
        unlike = named([(measured(), []), (measured(seed=1), [])])
        assert [run.name for run in unlike] == ["1p1d #1", "1p1d #2"]
        assert second.load == "2 requests/s offered"

    def test_a_start_of_a_sweep_is_one_value(self) -> None:
        """Its repeats share what varies from start to start: they are no larger sample of that."""
        rates = [10.0, 11.0, 12.0, 13.0, 14.0]
        rounds = [
            measured(repeats=[repeat(at, goodput_per_s=g) for at, g in enumerate((9, rate, 99))])
            for rate in rates
        ]
        swept, pooled = (named([(one, []) for one in rounds], of_sweep=of) for of in (True, False))
        (point,), (other,) = chart_data.points(swept), chart_data.points(pooled)
        assert point.median("goodput") == median_of(rates)
        assert len(point.repeats) == 15
        assert "starts at each load: 5" in drawn(swept)
        assert [len(sample) for sample in other.samples] == [1] * 15
        assert "repeats at each load: 15" in drawn(pooled)

    def test_rates_of_several_searches_that_hardly_differ_are_one_load(self) -> None:
        search = {
            "required_share": 0.9,
            "highest_rate": 8.2,
            "low": None,
            "high": None,
            "steps": [],
        }
        rounds = [
            measured(repeats=[repeat(0, rate=rate), repeat(1, rate=1.2 * rate)], rate_search=search)
            for rate in (8.0, 8.2, 7.9)
        ]
        merged = chart_data.points(named([(one, []) for one in rounds]))
        assert [len(point.repeats) for point in merged] == [3, 3]
        assert merged[0].repeats[0].rate == pytest.approx(1.1**22)
        (alone, _) = chart_data.points(named([(rounds[0], [])]))
        assert alone.load == "8 requests/s offered"
        exact = named([(measured(repeats=[repeat(0, rate=8.0)]), [])] * 2)
        assert chart_data.points(exact)[0].load == "8 requests/s offered"

    def test_no_part_of_a_requests_time_is_in_two_stages(self) -> None:
        """Lookups and loads are within what engines count as prefill; stores follow."""
        found = chart_data.points(runs(measured()))[:1]
        assert [(one["stage"], round(one["ms"], 6)) for one in chart_data.stages(found)] == [
            ("queue before prefill", 10),
            ("lookup", 3),
            ("prefill", 100),
            ("KV store", 30),
            ("queue before decode", 4),
            ("KV load", 22),
            ("first token after load", 5),
            ("decode", 300),
        ]
        counted = sum(sum(of_role.values()) for of_role in STAGES.values())
        within = sum(STAGES[role][one] for role in STAGES for one in ("lookup", "load"))
        assert sum(one["ms"] for one in chart_data.stages(found)) == pytest.approx(
            1e3 * (counted - within)
        )

    def test_stages_of_an_earlier_version(self) -> None:
        """It counted neither lookups nor stores, so that loads are in a consumer's prefill."""
        old = {"producer": {"prefill": 0.1}, "consumer": {"prefill": 0.02}}
        found = chart_data.points(runs(measured(repeats=[repeat(0, stages=old)])))
        assert [(one["stage"], one["ms"]) for one in chart_data.stages(found)] == [
            ("prefill", 100),
            ("KV load and first token", 20),
        ]

    def test_tokens_by_kind(self) -> None:
        found = chart_data.points(runs(measured()))[:1]
        assert [one["share"] for one in chart_data.sources(found)] == [0.45, 0.0, 0.55]


def csv_rows(found: Sequence[StackRuns]) -> dict[tuple[str, str], tuple[str, float]]:
    """Return load and metric → unit and median."""
    rows = list(csv.DictReader(io.StringIO(table(found))))
    made = {(row["load"], row["metric"]): (row["unit"], float(row["median"])) for row in rows}
    assert len(made) == len(rows), "a metric has two rows"
    return made


def test_csv_has_every_metric_of_every_load() -> None:
    rows = csv_rows(runs(measured()))
    assert {load for load, _ in rows} == {"1 requests/s offered", "2 requests/s offered"}
    assert {metric.name for metric in METRICS} <= {metric for _, metric in rows}
    assert rows["1 requests/s offered", "goodput"] == ("1/s", pytest.approx(1.02))
    assert rows["1 requests/s offered", "TTFT p90"] == ("s", pytest.approx(0.2))


def test_csv_has_what_was_counted_beside_latencies() -> None:
    gpu = {"3": {"utilization": 0.5, "peak_memory_bytes": 7}}
    usages = [
        {"cpu_s": {"redis": cpu_s}, "peak_rss_bytes": {"redis": 9}, "gpu": gpu}
        for cpu_s in (1.0, 5.0, 2.0)
    ]
    path = PATH | {"barrier_wait_s": 0.1, "store_cpu_s": 0.25, "load_cpu_s": 0.5,
                   "loaded_bytes": 2 * 10**9}  # fmt: skip
    repeats = [
        repeat(
            at, usage=usage, redis_path=path, stages=STAGES, connector={"consumer": 0.08},
            goodput_per_s=1.5,
        )
        for at, usage in enumerate(usages)
    ]  # fmt: skip
    rows = csv_rows(runs(measured(repeats=repeats)))
    found = {metric: value for (_, metric), value in rows.items()}
    assert {name: found[name] for name in found if name not in {one.name for one in METRICS}} == {
        "requests of each engine": ("1/s", 1.0),
        "input tokens of each engine": ("1/s", 1000.0),
        "output tokens of each engine": ("1/s", 16.0),
        "goodput of each engine": ("1/s", 0.75),
        **{
            f"{role} {stage}": ("s", seconds)
            for role, of_role in STAGES.items()
            for stage, seconds in of_role.items()
        },
        "connector in consumer steps": ("share", 0.08),
        "prompt tokens loaded from Redis": ("share", 0.45),
        "prompt tokens in own cache": ("share", 0.0),
        "prompt tokens computed": ("share", 0.55),
        "external hit rate": ("share", 0.9),
        "eligible hit rate": ("share", 1.0),
        "KV stored": ("bytes", 1e9),
        "speed of KV stored": ("GB/s", 0.5),
        "CPU time of KV stored": ("s/GB", 0.25),
        "KV loaded": ("bytes", 2e9),
        "speed of KV loaded": ("GB/s", 0.8),
        "CPU time of KV loaded": ("s/GB", 0.25),
        "a lookup": ("s", 0.002),
        "store barrier of an answer": ("s", 0.005),
        "CPU of redis": ("cores", 0.2),
        "peak memory of redis": ("bytes", 9.0),
        "GPU 3 computes": ("share", 0.5),
        "peak memory of GPU 3": ("bytes", 7.0),
    }


def test_csv_has_nothing_that_was_not_measured() -> None:
    bare = repeat(0, hits=None, usage=None, goodput_per_s=None)
    rows = csv_rows(runs(measured(repeats=[bare])))
    names = {metric for _, metric in rows} - {one.name for one in METRICS}
    assert names == {
        f"{name} of each engine" for name in ("requests", "input tokens", "output tokens")
    }


@pytest.mark.parametrize("begins", ["=", "+", "-", "@", "\t", "\n"])
def test_no_cell_of_the_csv_is_a_formula(begins: str) -> None:
    name = f"{begins}HYPERLINK(A1)"
    written = table([replace(run, name=name) for run in runs(measured())])
    assert {row["stack"] for row in csv.DictReader(io.StringIO(written))} == {f"'{name}"}


def test_no_cell_of_the_csv_has_a_control_character() -> None:
    written = table([replace(run, name="\r\x1b=A1") for run in runs(measured())])
    assert {row["stack"] for row in csv.DictReader(io.StringIO(written))} == {"'=A1"}


class TestFiles:
    @pytest.fixture
    def sweep(self, tmp_path: Path) -> Path:
        """A folder with two results, of which one has half a line of requests."""
        for topology in ("1p1d", "2a"):
            folder = tmp_path / "sweep" / topology
            folder.mkdir(parents=True)
            write_result(folder, measured(topology))
            append_requests(folder, records(5))
        with (folder / REQUESTS_FILE).open("a") as file:
            file.write('{"repeat": 5, "ind')
        return tmp_path / "sweep"

    def test_a_report_of_a_sweep_has_page_table_and_pictures(
        self, sweep: Path, tmp_path: Path
    ) -> None:
        folders = result_folders(sweep)
        assert [folder.name for folder in folders] == ["1p1d", "2a"]
        written = write_report(folders, tmp_path / "out")
        html, table_file, *pictures = map(Path, written.files)
        assert "window.vegaEmbed" in html.read_text()
        assert table_file.read_text().startswith("stack,load,metric")
        assert len(pictures) == 7
        assert all(one.read_bytes().startswith(b"\x89PNG") for one in pictures)

    def test_an_unfinished_sweep_is_judged_by_its_finished_runs(
        self, sweep: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its finished runs are judged, and each of them is one value of an interval."""
        monkeypatch.setattr(files, "charts", lambda _: [])
        write_sweep(sweep, a_sweep({"1p1d": [2.0], "2a": [3.0]}))
        written = write_report(result_folders(sweep), sweep)
        assert written.sentence.startswith("Too few rounds to tell 1p1d from 2a")
        assert "starts at each load: 1 " in Path(written.files[0]).read_text()

    def test_a_single_result_is_reported(self, sweep: Path) -> None:
        assert result_folders(sweep / "2a") == [sweep / "2a"]

    @pytest.mark.parametrize("checkout", [True, False])
    def test_a_missing_library_is_an_error_with_what_installs_it(
        self, sweep: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkout: bool
    ) -> None:
        """An environment that scripts/install made has no pip, but uv beside it."""
        uv = tmp_path / ".uv" / "bin" / "uv"
        if checkout:
            uv.parent.mkdir(parents=True)
            uv.touch()
        monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
        monkeypatch.setitem(sys.modules, "vl_convert", None)
        with pytest.raises(MissingTool, match="vl-convert-python") as found:
            write_report(result_folders(sweep), sweep)
        tool = f"{uv} pip install --python {sys.executable}"
        installs = tool if checkout else f"{sys.executable} -m pip install"
        assert found.value.hint == f"{installs} vl-convert-python"
        assert not list(sweep.glob("report.*"))

    def test_a_result_without_a_finished_repeat_is_refused(self, tmp_path: Path) -> None:
        write_result(tmp_path, measured(repeats=[]))
        with pytest.raises(UsageError, match="no finished repeat"):
            write_report([tmp_path], tmp_path)

    def test_an_output_that_cannot_be_written_is_an_error(self, sweep: Path) -> None:
        taken = sweep / "file"
        taken.touch()
        with pytest.raises(UsageError, match="file") as found:
            write_report(result_folders(sweep), taken)
        assert "-o" in found.value.hint
