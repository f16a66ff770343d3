"""Counts of the Redis path: read off a page, and told apart from earlier ones."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.verify.findings import Findings, failures
from deploy.verify.store_path import (
    PREFIX,
    Sample,
    StorePath,
    failed_calls,
    late_answers,
)

PAGE = [
    Sample("pdkit_store_bytes_total", {"operation": "load"}, 2e9),
    Sample("pdkit_store_seconds_total", {"operation": "load"}, 4.0),
    Sample("pdkit_store_cpu_seconds_total", {"operation": "load"}, 1.5),
    Sample("pdkit_store_cpu_seconds_total", {"operation": "store"}, 0.5),
    Sample("pdkit_store_chunks_total", {"operation": "load", "result": "loaded"}, 10),
    Sample("pdkit_store_chunks_total", {"operation": "load", "result": "corrupt"}, 1),
    Sample("pdkit_store_chunks_total", {"operation": "load", "result": "foreign"}, 2),
    Sample("pdkit_store_chunks_total", {"operation": "load", "result": "missing"}, 3),
    Sample("pdkit_store_chunks_total", {"operation": "store", "result": "no_room"}, 4),
    Sample("pdkit_store_replaced_total", {}, 8),
    Sample("pdkit_store_calls_total", {"operation": "lookup"}, 5),
    Sample("pdkit_store_seconds_total", {"operation": "lookup"}, 0.01),
    Sample("pdkit_store_failures_total", {"kind": "timeout"}, 6),
    Sample("pdkit_store_barrier_waits_total", {"result": "stored"}, 7),
    Sample("pdkit_store_barrier_waits_total", {"result": "late"}, 1),
    Sample("vllm:prefix_cache_hits_total", {}, 99),
]


def read(samples: list[Sample] = PAGE) -> StorePath:
    path = StorePath.read(samples)
    assert path is not None
    return path


def test_a_page_is_read() -> None:
    path = read()
    assert path.load_gb_s == 0.5
    assert path.lookup_ms == 2
    counts = (path.loaded_chunks, path.refused, path.not_loaded, path.left_out, path.failures)
    assert counts == (10, 3, 3, 4, 6)
    assert path.replaced == 8, "those were loaded, and are no damage"
    assert (path.waits, path.late) == (8, 1)
    assert (path.stored_cpu_s, path.loaded_cpu_s) == (0.5, 1.5)
    assert path.store_gb_s == 0


@pytest.mark.parametrize("result", ["paused", "no_room", "failed", "late", "unfit", "new"])
def test_every_chunk_that_was_not_stored_counts(result: str) -> None:
    labels = {"operation": "store", "result": result}
    more = Sample("pdkit_store_chunks_total", labels, 100)
    assert read([*PAGE, more]).left_out == read().left_out + 100


def test_an_engine_without_such_a_path_has_none() -> None:
    assert StorePath.read(PAGE[-1:]) is None
    barrier = [sample for sample in PAGE if "barrier" in sample.name]
    assert StorePath.read(barrier) is None, "LMCache's own client has a barrier as well"


def test_counts_of_earlier_are_taken_off() -> None:
    twice = read([*PAGE, *PAGE])
    assert twice.refused == 6
    assert twice.since(read()) == read()


@pytest.mark.parametrize(
    ("path", "failed"),
    [
        (None, False),
        (StorePath(loaded_chunks=3, not_loaded=1), False),
        (StorePath(refused=1), True),
        (StorePath(left_out=1), True),
    ],
)
def test_refused_or_lost_chunks_fail_a_check(path: Any, failed: bool) -> None:
    found = Findings(stored_keys=1, path=path)
    assert bool(list(failures(found, (), store_answers=True))) is failed


def page(*failures: tuple[str, float]) -> list[Sample]:
    """Return the samples of an engine whose Redis failed calls of these kinds."""
    return [
        Sample(f"{PREFIX}chunks_total", {"operation": "store", "result": "stored"}, 0.0),
        *(Sample(f"{PREFIX}failures_total", {"kind": kind}, count) for kind, count in failures),
    ]


def test_failed_calls_by_kind() -> None:
    assert failed_calls(page(("oom", 2.0), ("timeout", 1.0))) == {"oom": 2.0, "timeout": 1.0}
    assert failed_calls(page(("oom", 0.0))) == {}, "a difference of two equal readings"


def test_a_client_without_counters_has_no_failures_but_may_be_late() -> None:
    """LMCache's own client."""
    waits = [
        Sample(f"{PREFIX}barrier_waits_total", {"result": result}, count)
        for result, count in (("stored", 5.0), ("late", 2.0), ("absent", 1.0))
    ]
    assert failed_calls(waits) is None
    assert late_answers(waits) == 3.0
    assert late_answers([]) == 0
