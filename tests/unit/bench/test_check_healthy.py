"""What repeated checks add up to."""

from __future__ import annotations

import itertools
from dataclasses import replace

from bench.check_healthy import CheckRuns, _conversation, _page, _table

PASSED = CheckRuns("alone", 50, 50, 7.04, 0, [])


def test_one_run_that_fails_is_an_alarm_and_is_reported() -> None:
    failed = replace(PASSED, passed=49, causes=["stores_late"])
    assert PASSED.holds and not failed.holds
    assert "| alone | 50 | 49 | 7.0 | 0 | stores_late |" in _table([PASSED, failed])


def test_the_page_has_the_command_and_all_rows() -> None:
    page = _page([PASSED, replace(PASSED, how="beside traffic", others=300)], "1p1d")
    assert "--runs 50" in page and "| beside traffic | 50 | 50 | 7.0 | 300 | - |" in page


def test_conversations_grow_and_differ() -> None:
    one, other = (list(_conversation(number)) for number in (1, 2))
    prompts = [body["prompt"] for body in one]
    assert all(b.startswith(a) and len(b) > len(a) for a, b in itertools.pairwise(prompts))
    assert one != other
