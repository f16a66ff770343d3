"""Pages, their differences and their sums."""

from __future__ import annotations

import math
import time

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from deploy.metrics.engine import CacheCounters, EngineCounts, EngineLoad, Latency
from deploy.metrics.page import MetricsPage, parsed_page
from deploy.metrics.router import RouterCounts, RouterView
from deploy.verify.store_path import Sample
from tests.unit.metrics.readings import page


class TestPage:
    PAGE = MetricsPage(
        (
            Sample("a_total", {"x": "1"}, 5.0),
            Sample("a_total", {"x": "2", "y": "1"}, 3.0),
            Sample("gauge", {}, 7.0),
        )
    )

    def test_totals_are_sums_over_labels(self) -> None:
        assert self.PAGE.total("a_total") == 8
        assert self.PAGE.total("a_total", x="2") == 3
        assert self.PAGE.total("a_total", x="3") is None
        assert self.PAGE.total("b_total") is None, "what is not there is not zero"

    def test_difference_holds_counters_only(self) -> None:
        later = MetricsPage(
            (
                Sample("a_total", {"x": "1"}, 9.0),
                Sample("new_total", {}, 2.0),
                *self.PAGE.samples[1:],
            )
        )
        since = later.since(self.PAGE)
        assert since.total("a_total", x="1") == 4
        assert since.total("a_total", x="2") == 0
        assert since.total("new_total") == 2
        assert since.total("gauge") is None

    def test_a_counter_that_shrank_counts_from_its_start(self) -> None:
        later = MetricsPage((Sample("a_total", {"x": "1"}, 2.0),))
        assert later.since(self.PAGE).total("a_total") == 2

    def test_labels_in_another_order_are_the_same(self) -> None:
        one = MetricsPage((Sample("a_total", {"x": "1", "y": "2"}, 1.0),))
        two = MetricsPage((Sample("a_total", {"y": "2", "x": "1"}, 3.0),))
        assert two.since(one).total("a_total") == 2
        assert (one + two).total("a_total", x="1") == 4

    def test_sums_begin_with_nothing(self) -> None:
        assert sum([self.PAGE, self.PAGE], MetricsPage()).total("a_total") == 16


class TestEngine:
    def test_an_engines_counts_are_read(self) -> None:
        counts = EngineCounts.read(
            page(queries=100, hits=40, asked=60, found=45, prompt=100, out=8, answers=2)
        )
        assert counts.cache == CacheCounters(60, 45, 100, 40)
        assert (counts.cache.external_rate, counts.cache.local_rate) == (0.75, 0.4)
        assert (counts.prompt_tokens, counts.generation_tokens, counts.answers) == (100, 8, 2)
        assert counts.path is None

    def test_nothing_asked_gives_no_rate(self) -> None:
        assert CacheCounters().external_rate is None
        assert EngineCounts.read(MetricsPage()).as_dict()["local_hit_rate"] is None

    def test_a_missing_counter_is_reported(self) -> None:
        with pytest.raises(LookupError, match="external_prefix_cache_hits"):
            CacheCounters.read(page(queries=1, hits=1, asked=1))

    def test_the_load_of_several_engine_cores_is_summed(self) -> None:
        cores = (
            Sample(name, {"engine": str(core)}, value + core)
            for core in (0, 1)
            for name, value in (
                ("vllm:num_requests_running", 2.0),
                ("vllm:num_requests_waiting", 1.0),
                ("vllm:kv_cache_usage_perc", 0.25),
            )
        )
        assert EngineLoad.read(MetricsPage(tuple(cores))) == EngineLoad(5, 3, 1.25)


class TestLatency:
    @staticmethod
    def of(*buckets: tuple[str, float], total_s: float = 1.0) -> Latency:
        samples = [Sample("t_bucket", {"le": bound}, count) for bound, count in buckets]
        count = buckets[-1][1]
        both = (Sample("t_sum", {}, total_s), Sample("t_count", {}, count))
        return Latency.read(MetricsPage((*samples, *both)), "t")

    def test_mean_and_upper_bound_are_read(self) -> None:
        found = self.of(("0.1", 50), ("0.5", 95), ("1.0", 99), ("+Inf", 100), total_s=20)
        assert found.mean_s == pytest.approx(0.2)
        assert found.most_s == 0.5

    def test_a_latency_beyond_all_buckets_has_no_bound(self) -> None:
        found = self.of(("0.1", 1), ("+Inf", 100))
        assert found.most_s is None
        assert math.isinf(found.buckets[-1][0])

    def test_an_empty_histogram_has_no_latency(self) -> None:
        empty = Latency.read(MetricsPage(), "t")
        assert (empty.mean_s, empty.most_s) == (None, None)


class TestRouter:
    def test_missing_router_counters_are_zero(self) -> None:
        assert RouterCounts.read(MetricsPage()) == RouterCounts(0, 0)

    def test_requests_and_errors_are_read(self) -> None:
        assert RouterCounts.read(page(requests=5, errors=2)) == RouterCounts(5, 2)

    def test_healthy_engines_are_read(self) -> None:
        assert RouterView.read(page(health=1)) == RouterView(2, 1)


class TestParsed:
    TEXT = (
        "# HELP a_total Counts.\n# TYPE a_total counter\n"
        'a_total{engine="0",model="m"} 5.0\n'
        "gauge 7\n"
        'stamped{x="1"} 3 1395066363000\n'
        'odd{text="a \\"b\\", {c}\\\\ \\n=",le="+Inf",} 1.5e+09\n'
        ' spaced { x = "1" , y="" }  -2\t\n'
        "nothing{} +Inf\n"
        "\n"
    )

    def test_samples_are_parsed(self) -> None:
        assert parsed_page(self.TEXT).samples == (
            Sample("a_total", {"engine": "0", "model": "m"}, 5.0),
            Sample("gauge", {}, 7.0),
            Sample("stamped", {"x": "1"}, 3.0),
            Sample("odd", {"text": 'a "b", {c}\\ \n=', "le": "+Inf"}, 1.5e9),
            Sample("spaced", {"x": "1", "y": ""}, -2.0),
            Sample("nothing", {}, math.inf),
        )

    def test_a_value_that_is_not_a_number(self) -> None:
        assert math.isnan(parsed_page("a NaN\n").samples[0].value)

    @pytest.mark.parametrize(
        "line",
        [
            "a",
            "a one",
            'a{x="1"',
            'a{x="1" 2',
            "a{x=1} 2",
            '{x="1"} 2',
            "<html> 2 3",
            "a 1 2 3",
            'a{x="1"} 1 2 3',
            'a b{x="1"} 2',
            'a\x1b[2J{x="1"} 2',
            'a{x="1"} 2 b{x="1"} 2',
            "a 10 00.0",
            "NaN",
        ],
    )
    def test_other_text_is_refused(self, line: str) -> None:
        with pytest.raises(ValueError, match=r"a sample|a label|to float"):
            parsed_page(f"ok 1\n{line}\n")

    def test_parsing_agrees_with_what_the_prometheus_client_counts(self) -> None:
        registry = CollectorRegistry()
        histogram = Histogram("latency", "A \\ and\nb.", ["path"], registry=registry)
        info = Info("build", "Texts.", registry=registry)
        counter = Counter("hits", "Hits.", ["model", "engine"], registry=registry)
        info.info({"text": 'quotes ", commas, {braces}, \\ and\nlines', "empty": ""})
        for number in range(20):
            histogram.labels(f"/v{number}").observe(number / 7)
            counter.labels(f'm"{number}\\', "é ü").inc(number * 1e9)
        text = generate_latest(registry).decode()
        theirs = [
            Sample(sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]
        assert list(parsed_page(text).samples) == theirs
        assert len(theirs) > 300


@pytest.mark.parametrize(
    "line",
    [
        "a" + " " * 200_000 + "b c",
        "a" * 200_000 + " b c",
        "a{" + "}" * 200_000 + " b c",
        'a{b="c"' + " " * 200_000 + "d} 1",
        'a{b="' + "\\" * 200_001 + "} 1",
        'a{b="c",' + " " * 200_000 + '="d"} 1',
        "a{" + '"' * 200_001 + "} 1",
    ],
    ids=["spaces", "letters", "braces", "in labels", "escapes", "no name", "quotes"],
)
def test_a_long_line_takes_time_in_proportion(line: str) -> None:
    """Were it quadratic, one would take minutes."""
    began = time.thread_time()
    with pytest.raises(ValueError, match="not a"):
        parsed_page(line)
    assert time.thread_time() - began < 5


@pytest.mark.parametrize(
    "labels",
    [",".join(f'b{number}="c"' for number in range(5000)), 'b="' + '\\"' * 30_000 + '"'],
    ids=["many", "escapes"],
)
def test_the_longest_lines_take_little_time(labels: str) -> None:
    began = time.thread_time()
    assert parsed_page(f"a{{{labels}}} 1").total("a") == 1
    assert time.thread_time() - began < 5
    with pytest.raises(ValueError, match="not a"):
        parsed_page(f"a{{{labels},{' ' * 65_536}}} 1")


def test_a_label_that_comes_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="not a"):
        parsed_page('a{b="c",b="d"} 1')


@pytest.mark.parametrize("value", ["NaN", "Inf", "+Inf", "-Inf"])
def test_unusable_numbers_are_left_out(value: str) -> None:
    assert parsed_page(f"a_total {value}\nb_total 1\n") == MetricsPage((Sample("b_total", {}, 1),))


@pytest.mark.parametrize(
    ("text", "count"),
    [("a NaN", 0), ("a +Inf", 0), ("a 1e308\na 1e308", 0), ("a 2.0", 2), ("b 1", 0)],
)
def test_counts_are_whole_numbers(text: str, count: int) -> None:
    """Whatever a page says, counting it does not fail."""
    assert parsed_page(text).count("a") == count
    EngineLoad.read(parsed_page(f"vllm:num_requests_running {text.split()[1]}"))
