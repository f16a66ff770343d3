"""Each cause from its evidence, and none where nothing is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deploy.verify.diagnosis import Evidence, diagnose
from deploy.verify.store_path import StorePath

HEALTHY = Evidence(
    stack="demo",
    hash_seeds={"producer-0": "0", "consumer-0": "0"},
    fixes={"producer-0": {"B17": "applied", "B2b": "not needed"}, "consumer-0": {"B17": "applied"}},
    store_reachable=True,
    stored_chunks=6,
    expected_chunks=6,
    flushes=0,
    evicted=0,
    store_restarted=False,
    failed_requests={},
    missed=False,
    mismatched=False,
)


@pytest.mark.parametrize(("by_spec", "words"), [(True, "engine.env"), (False, "unset PDKIT")])
def test_a_fix_that_is_switched_off_is_switched_on_where_it_was(by_spec: bool, words: str) -> None:
    fixes = {"producer-0": {"B17": "disabled"}, "consumer-0": {"B17": "disabled"}}
    (cause,) = diagnose(replace(HEALTHY, missed=True, fixes=fixes, disabled_by_spec=by_spec))
    assert words in cause.hint


def codes(**changes: Any) -> list[str]:
    return [cause.code for cause in diagnose(replace(HEALTHY, **changes))]


# evidence → the cause it must lead to, where tokens were missed.
CAUSES: dict[str, tuple[dict[str, Any], str, str]] = {
    "redis gone": ({"store_reachable": False}, "store_unreachable", "Redis"),
    "seeds differ": (
        {"hash_seeds": {"producer-0": "0", "consumer-0": "1"}},
        "hash_seed_differs",
        "consumer-0 has 1",
    ),
    "no seed at all": (
        {"hash_seeds": {"producer-0": "", "consumer-0": ""}}, "hash_seed_differs", "has none",
    ),
    "one without a seed": (
        {"hash_seeds": {"producer-0": "0", "consumer-0": ""}},
        "hash_seed_differs",
        "consumer-0 has none",
    ),
    "fix disabled": (
        {"fixes": {"producer-0": {"B17": "disabled"}, "consumer-0": {"B17": "applied"}}},
        "fix_not_applied",
        "fix B17 is disabled in producer-0",
    ),
    "fix failed": (
        {"fixes": {"producer-0": {"B17": "applied"}, "consumer-0": {"B17": "failed"}}},
        "fix_not_applied",
        "fix B17 is failed in consumer-0",
    ),
    "no connector": (
        {"fixes": {"producer-0": {}, "consumer-0": {"B17": "applied"}}},
        "fix_not_applied",
        "producer-0",
    ),
    "corrupt values": ({"path": StorePath(refused=2)}, "values_refused", "2 values"),
    "redis fails": (
        {"path": StorePath(failures=3, left_out=4)}, "store_fails", "4 chunks were not stored",
    ),
    "flushed": ({"flushes": 2}, "keys_lost", "flushed"),
    "evicted": ({"evicted": 5}, "keys_lost", "evicted 5"),
    "restarted": ({"store_restarted": True}, "keys_lost", "restarted"),
    "request failed": (
        {"failed_requests": {"consumer-0": "HTTP 500"}},
        "request_failed",
        "consumer-0 did not answer: HTTP 500",
    ),
    "not stored": ({"stored_chunks": 2}, "not_stored", "of 6 chunks 2"),
    "nothing stored": ({"stored_chunks": 0}, "not_stored", "of 6 chunks 0"),
    "found by nobody": ({}, "not_found", "did not find it"),
}  # fmt: skip


@pytest.mark.parametrize("case", CAUSES)
def test_a_cause_from_its_evidence(case: str) -> None:
    changes, code, words = CAUSES[case]
    first, *others = diagnose(replace(HEALTHY, missed=True, **changes))
    assert first.code == code
    assert words in first.message
    assert first.hint
    assert others == [], "one thing was wrong, and one cause is named"


@pytest.mark.parametrize("case", CAUSES)
def test_no_cause_where_nothing_failed(case: str) -> None:
    changes, _, _ = CAUSES[case]
    if not {"failed_requests", "path"} & changes.keys():  # failures by themselves
        assert codes(**changes) == [], "others may flush or evict; no hit was lost by it"


def test_a_healthy_stack_has_none() -> None:
    assert diagnose(HEALTHY) == []


def test_wrong_kv_is_not_called_a_miss() -> None:
    assert codes(mismatched=True) == ["kv_differs"]


def test_wrong_kv_with_a_fix_switched_off_is_that_fix() -> None:
    assert codes(mismatched=True, fixes={"producer-0": {"B17": "disabled"}}) == ["fix_not_applied"]


def test_the_likeliest_comes_first() -> None:
    found = codes(
        missed=True,
        store_reachable=False,
        fixes={"producer-0": {"B17": "failed"}},
        hash_seeds={"producer-0": "0", "consumer-0": "1"},
        stored_chunks=0,
    )
    assert found[:3] == ["store_unreachable", "fix_not_applied", "hash_seed_differs"]


def test_a_flush_explains_that_nothing_is_stored() -> None:
    assert codes(missed=True, flushes=1, stored_chunks=0) == ["keys_lost"]


def test_one_cause_names_all_engines_it_is_seen_in() -> None:
    (cause,) = diagnose(
        replace(HEALTHY, missed=True, fixes={"a": {"B17": "failed"}, "b": {"B17": "failed"}})
    )
    assert "a, b" in cause.message


@pytest.mark.parametrize("state", ["applied", "not needed", "not applicable"])
def test_states_that_are_no_cause(state: str) -> None:
    assert codes(missed=True, fixes={"producer-0": {"B17": state}}) == ["not_found"]


def test_hints_name_the_stack() -> None:
    for changes, _, _ in CAUSES.values():
        for cause in diagnose(replace(HEALTHY, missed=True, stack="mine", **changes)):
            if "deploy" in cause.hint:
                assert "mine" in cause.hint


def test_hints_that_start_it_again_start_the_same_stack() -> None:
    """`deploy up` alone would start the default stack beside it."""
    for changes, _, _ in CAUSES.values():
        for cause in diagnose(replace(HEALTHY, missed=True, stack="mine", **changes)):
            assert not cause.hint.endswith("deploy up")


@pytest.mark.parametrize(
    ("changes", "ours", "theirs"),
    [
        ({"store_reachable": False}, "deploy logs redis --name demo", "redis.url_file"),
        ({"evicted": 5}, "raise redis.memory_gib", "raise maxmemory of that Redis"),
    ],
)
def test_hints_on_a_redis_of_the_users_own(changes: dict[str, Any], ours: str, theirs: str) -> None:
    """It has no log here, and no size that the kit sets."""
    for brought, words in ((False, ours), (True, theirs)):
        found = diagnose(replace(HEALTHY, missed=True, redis_brought=brought, **changes))
        assert words in found[0].hint
    assert "logs redis" not in found[0].hint
    assert "memory_gib" not in found[0].hint
