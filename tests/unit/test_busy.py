"""The busy machine of tests/busy.py: the same bursts for the same seed, and none left behind."""

from __future__ import annotations

import itertools
import os
import sys

import psutil
import pytest

from tests import busy

# Exits with the number of processes beside it, once there are as many as it is told. Those named to
# it do not count: an earlier test's may have ended, and go when Python starts the next one.
SEEN = """
import os, sys, psutil
beside, earlier = 0, {os.getpid(), *map(int, sys.argv[2:])}
while beside < int(sys.argv[1]):
    beside = len({one.pid for one in psutil.Process(os.getppid()).children()} - earlier)
sys.exit(beside)
"""
ENDLESS = (1e9,) * 3


def first(seed: str, core: int) -> list[tuple[float, ...]]:
    return list(itertools.islice(busy.bursts(seed, core), 20))


def children() -> set[int]:
    return {one.pid for one in psutil.Process().children()}


def test_bursts_follow_from_the_seed() -> None:
    assert first("1", 0) == first("1", 0)
    assert first("1", 0) != first("2", 0)
    assert first("1", 0) != first("1", 1), "cores do not take turns"
    assert {len(burst) for burst in first("1", 0)} == {1, 2, 3}
    assert max(map(max, first("1", 0))) <= busy.MOST_S


def test_each_core_is_taken_until_the_command_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "bursts", lambda *_: iter([ENDLESS]))
    # An exit code, which tells how many there were, has a byte.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    before = children()
    wanted = len(ENDLESS) * 2
    # Whoever waits for more than there are, hangs.
    seen = (sys.executable, "-c", SEEN, str(wanted), *map(str, before))
    assert busy.main(["1", "--", *seen]) == wanted
    assert children() <= before


def test_the_exit_code_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "bursts", lambda *_: iter([]))
    assert busy.main(["1", "--", sys.executable, "-c", "raise SystemExit(7)"]) == 7


@pytest.mark.parametrize("arguments", [[], ["1"], ["1", "--"], ["1", "true"], ["--", "1", "true"]])
def test_invalid_arguments_print_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert busy.main(arguments) == 2
    assert busy.USAGE in capsys.readouterr().err
