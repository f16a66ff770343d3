"""A stack slowed by a known factor, from the socket to the verdict: the bench finds that factor."""

from __future__ import annotations

import math
import random

from deploy.benchmark.compare import MetricRow, compare
from deploy.benchmark.load import LoadTarget, run_load
from deploy.benchmark.results import Repeat, Result
from deploy.benchmark.summary import summary
from deploy.benchmark.workloads import Conversation, Turn
from tests.unit.benchmark.samples import result
from tests.unit.benchmark.streaming import Stage

FACTOR = 1.5
REPEATS, REQUESTS = 5, 3
LATENCIES = ("TTFT p50", "ITL p50", "end to end p50")


def measured(stage: Stage, factor: float, seed: int) -> Result:
    """Load a server that takes `factor` times as long for everything, with some noise."""
    chance = random.Random(seed)

    def slow() -> None:
        stage.gaps = [factor * gap * math.exp(chance.gauss(0, 0.05)) for gap in (0.4, 0.05, 0.06)]

    stage.before = slow
    return result(repeats=[one_repeat(stage, index).model_dump() for index in range(REPEATS)])


def one_repeat(stage: Stage, index: int) -> Repeat:
    talks = [Conversation(at, at, (Turn((1, 2, 3), 3),)) for at in range(REQUESTS)]
    load = run_load(LoadTarget(stage.url, "model", 20), talks, concurrency=1)
    return summary(load, None, index=index).model_copy(update={"concurrency": 1})


def rows(first: Result, second: Result) -> dict[str, MetricRow]:
    (found,) = [one.metrics for one in compare(first, second).points]
    return {row.metric: row for row in found}


def test_the_factor_is_in_the_interval(stage: Stage) -> None:
    found = rows(measured(stage, 1.0, 1), measured(stage, FACTOR, 2))
    for name in LATENCIES:
        ratio = found[name].ratio
        assert ratio is not None
        assert ratio.low is not None
        assert ratio.high is not None
        assert 1 < ratio.low <= FACTOR <= ratio.high < 1.8, name
        assert found[name].verdict == "worse", name


def test_the_same_stack_twice_does_not_differ(stage: Stage) -> None:
    found = rows(measured(stage, 1.0, 1), measured(stage, 1.0, 3))
    assert {found[name].verdict for name in LATENCIES} == {"no significant difference"}
