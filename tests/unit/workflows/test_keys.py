"""The keys of a check are told from each other's and from everybody's, whatever they end in."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.runtime.home import Home
from deploy.runtime.lock import stack_lock
from deploy.workflows.check.keys import CheckKeys, lock_guarded

HOLDS_A_LOCK = """
import pathlib, sys, time
from deploy.runtime.home import Home
from deploy.runtime.lock import stack_lock
from deploy.workflows.check.keys import lock_guarded

home = Home(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1]))
with lock_guarded(home, "one"), stack_lock(home.lock_file("one"), "one"):
    print("locked", flush=True)
    time.sleep(60)
"""


class Keys:
    """A store that counts among the keys that it was given."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys

    def count_marked(self, mark: str) -> int:
        return sum(mark in key for key in self.keys)


@pytest.mark.parametrize("form", ["m@1@0@ab@bf16@{}", "m@1@0@ab@bf16@3@{}"])
@pytest.mark.parametrize("behind", ["", "@kv_layout%1-cpu", "kv_bytes"])
def test_a_tag_is_counted_wherever_it_stands(form: str, behind: str) -> None:
    """Last, as on GPUs; before a layout's, as on CPUs; with what LMCache's own client appends."""
    own = CheckKeys(tagged=True)
    tags = [own.new_tag() for _ in range(12)]
    others = CheckKeys(tagged=True).new_tag()
    store = Keys(*(form.format(f"pdkit%{tag}{behind}") for tag in [*tags, others]))
    assert [own.count(store, tag) for tag in tags] == [1] * 12  # type: ignore[arg-type]


def test_without_tags_nobody_counts() -> None:
    own = CheckKeys(tagged=False)
    assert own.new_tag() == ""
    assert own.new_salt() != own.new_salt()
    assert own.count(Keys("a"), "") is None  # type: ignore[arg-type]


def test_who_is_killed_leaves_no_lock(tmp_path: Path) -> None:
    command = (sys.executable, "-c", HOLDS_A_LOCK, str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"locked\n"
        lock = Home(tmp_path, tmp_path).lock_file("one")
        assert lock.exists()
        process.kill()
    until = time.monotonic() + 20
    while lock.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not lock.exists()


def test_who_fails_has_no_lock_left_to_guard(tmp_path: Path) -> None:
    home = Home(tmp_path, tmp_path)
    lock = home.lock_file("one")
    with (
        pytest.raises(ValueError, match="bad"),
        lock_guarded(home, "one"),
        stack_lock(lock, "one"),
    ):
        raise ValueError("bad")
    assert not lock.exists()
