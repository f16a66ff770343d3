"""The speeds of a run."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.benchmark.break_even import measured_speeds, speeds_at_ends
from tests.unit.benchmark.samples import repeat, result

PATH = {
    "stored_bytes": 10**9, "loaded_bytes": 10**9, "store_gb_s": 0.5, "load_gb_s": 0.8,
    "lookups": 20, "lookup_ms": 2.0, "failures": 0, "lost_chunks": 0, "barrier_waits": 0,
    "barrier_wait_s": 0.0, "late": 0,
}  # fmt: skip


def measured(index: int = 0, *, prefill_s: float = 0.055, **changed: Any) -> dict[str, Any]:
    stages = {"producer": {"prefill": prefill_s}, "consumer": {"prefill": 0.01}}
    return repeat(index, **{"redis_path": PATH, "stages": stages, **changed})


def test_speeds_are_the_medians_of_each_load_the_lowest_first() -> None:
    repeats = [measured(0), measured(1, prefill_s=0.11), measured(2, prefill_s=0.055)]
    repeats.insert(0, measured(3, prefill_s=0.22, rate=4.0))
    found = measured_speeds(result(repeats=repeats))
    assert list(found) == ["2 requests/s offered", "4 requests/s offered"]
    # 1,100 computed tokens of 20 requests: 55 each.
    assert found["2 requests/s offered"].prefill_tokens_s == pytest.approx(1000)
    assert found["4 requests/s offered"].prefill_tokens_s == pytest.approx(250)
    one = found["2 requests/s offered"]
    assert (one.load_gb_s, one.lookup_s, one.chunk, one.token_bytes) == (0.8, 0.002, 256, 4096)


def test_one_user_is_the_lowest_load() -> None:
    repeats = [measured(0), measured(1, prefill_s=0.11, rate=4.0), measured(2, rate=1.0)]
    alone = measured(rate=None, concurrency=1, prefill_s=0.011)
    found = speeds_at_ends(result(repeats=repeats, one_user=alone))
    assert list(found) == ["one request at a time", "4 requests/s offered"]
    assert [round(one.prefill_tokens_s) for one in found.values()] == [5000, 500]
    assert list(speeds_at_ends(result(repeats=repeats))) == [
        "1 requests/s offered", "4 requests/s offered",
    ]  # fmt: skip
    assert list(speeds_at_ends(result(repeats=repeats[:1]))) == ["2 requests/s offered"]
    unloaded = alone | {"redis_path": None}
    assert len(measured_speeds(result(repeats=repeats, one_user=unloaded))) == 3


def test_ranks_of_an_engine_load_side_by_side() -> None:
    """`load_gb_s` of a path is that of one rank; a token's bytes are those of all."""
    (found,) = measured_speeds(result(repeats=[measured(redis_path=PATH | {"ranks": 4})])).values()
    assert found.load_gb_s == 3.2


def test_lmcaches_server_tells_no_speeds_of_its_engines() -> None:
    served = measured(redis_path=PATH | {"by_server": True})
    assert measured_speeds(result(repeats=[served])) == {}


def test_time_in_which_a_producer_looks_up_and_loads_is_not_prefill() -> None:
    stages = {"producer": {"prefill": 0.1, "load": 0.035, "lookup": 0.01, "store": 0.5}}
    (found,) = measured_speeds(result(repeats=[measured(stages=stages)])).values()
    assert found.prefill_tokens_s == pytest.approx(1000)


@pytest.mark.parametrize(
    "changed",
    [
        {"redis_path": None},
        {"redis_path": PATH | {"load_gb_s": 0.0}},
        {"stages": {}},
        {"stages": {"producer": {"prefill": 0.05, "load": 0.05}}},
        {"hits": None},
        {"completed": 0},
    ],
)
def test_no_speeds_are_known_if_a_part_was_not_measured(changed: dict[str, Any]) -> None:
    assert measured_speeds(result(repeats=[measured(**changed)])) == {}
