"""Wrong KV on a Redis path without checksums: nothing but the check's answers can show it.

A few trials of what `python -m bench.check_power` does by the hundred; its numbers are in
docs/results/check-power.md.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from bench.check_power.damage import KINDS, NOTHING, Damage, as_words, in_one_chunk
from bench.check_power.layout import Kv
from bench.check_power.running import SPEC, bench_on
from bench.check_power.stack import Bench
from bench.check_power.vandal import payloads, vandal
from deploy.runtime.home import Home
from tests.conftest import REPO
from tests.e2e.conftest import Deploy, Ran, running_stack
from tests.ports import free_row

NAME = "power"
PORT = free_row()
# The first prompt that any check sends to a pair; its whole chunks are four.
FIRST_PROMPT, FIRST_CHUNKS = "@pdkit%check-*-1-", 4
KNOWN_BAD = {
    "id": "a test", "verdict": "known_bad", "vendors": ["cpu"], "link": "https://example.org",
    "why": "what it loads is noise",
}  # fmt: skip
# One row of 1,024 is felt by few tokens: a trial of a hundred goes unnoticed. A bit that makes a
# number small is felt less than one that makes it huge.
TRIALS = {"two-rows-k": 2, "two-rows-v": 2, "k-bit": 2, "float16": 2}


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Deploy:
    return Deploy(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def bench(kit: Deploy) -> Iterator[Bench]:
    file = kit.home / "stack.yaml"
    file.write_text(yaml.safe_dump({**SPEC, "name": NAME}))
    with running_stack(kit, NAME, PORT, "-f", str(file), "--no-check"):
        yield bench_on(Home(kit.home, kit.home / "cache"), NAME)


# What is sound comes first: damage stays in the engines' memory, and spoils later answers.
def test_the_command_passes_without_damage(bench: Bench, kit: Deploy) -> None:
    assert kit.ok("check", "--name", NAME)["passed"]


def test_a_trial_without_damage_passes(bench: Bench) -> None:
    """The same trial, its vandal included."""
    for number in range(2):
        assert bench.trial(NOTHING, f"e2e/nothing/{number}").failures == []


def test_a_running_pair_that_is_now_known_to_be_bad_is_named(
    bench: Bench, kit: Deploy, tmp_path: Path
) -> None:
    """The next release of the kit knows something against the pair that runs."""
    for folder in ("deploy", "compose", "images", "lmcache_configs", "scripts"):
        shutil.copytree(REPO / folder, tmp_path / folder)
    compat = tmp_path / "images" / "compat.yaml"
    known = yaml.safe_load(compat.read_text())
    known["pairs"].insert(0, {**KNOWN_BAD, "vllm": ">0", "lmcache": ">0"})
    compat.write_text(yaml.safe_dump(known))
    newer = replace(
        kit, env={"PYTHONPATH": str(tmp_path)}, command=(sys.executable, "-m", "deploy")
    )
    assert newer.ok("check", "--quick", "--name", NAME)["diagnosis"] == [], "nothing is wrong yet"
    ran = checked_while_damaged(bench, newer, KINDS["noise"].damage)
    assert ran.code == 1, ran
    (cause,) = ran.data["diagnosis"]
    assert cause["code"] == "known_bad_pair" and KNOWN_BAD["why"] in cause["message"]
    assert "deploy swap --image" in cause["hint"]


@pytest.mark.parametrize("kind", [kind for kind, what in KINDS.items() if what.expected])
def test_damaged_kv_fails_the_check(bench: Bench, kind: str) -> None:
    seen = [bench.trial(kind, f"e2e/{kind}/{number}") for number in range(TRIALS.get(kind, 1))]
    assert any(trial.failures for trial in seen), seen


@pytest.mark.parametrize("what", ["chunks", "no numbers"])
def test_the_command_fails_and_says_why(bench: Bench, kit: Deploy, what: str) -> None:
    damage = KINDS[what].damage if what in KINDS else in_one_chunk(no_numbers)
    ran = checked_while_damaged(bench, kit, damage)
    assert ran.code == 1, ran
    assert [cause["code"] for cause in ran.data["diagnosis"]] == ["kv_differs"]
    if what == "chunks":
        assert ran.data["equivalence"]["mismatched"] > 0
        assert ran.data["hit_rate"]["eligible_rate"] == 1.0, "all of it arrived, and was wrong"


def test_a_check_looks_back_across_a_restart_and_names_damaged_kv(
    bench: Bench, kit: Deploy
) -> None:
    """The second canary was never loaded by the consumer before its KV is replaced."""
    kit.ok("restart", "--force", "--name", NAME)  # engines hold what was damaged above
    file = Home(kit.home, kit.home / "cache").canaries_file(NAME)
    before = {one["tag"] for one in json.loads(file.read_text())["canaries"]}
    assert before
    found = kit.ok("check", "--quick", "--name", NAME)["canaries"]
    assert found["same"] == found["known"] == len(before)
    assert all(look["loaded"] == 2 * 256 for look in found["looks"]), "of before the restart"

    (fresh,) = (one for one in json.loads(file.read_text())["canaries"] if one["tag"] not in before)
    chunks = payloads(bench.store, fresh["tag"])
    assert len(chunks) == 2
    for key in chunks:
        bench.store.set(key, bench.foreign)
    ran = kit.run("check", "--quick", "--name", NAME, "--json")
    assert ran.code == 1, ran
    assert ran.data["equivalence"]["mismatched"] == 0, "new KV is right"
    (failure,) = ran.data["failures"]
    assert "consumer-0 answers from stale KV" in failure and "was damaged" in failure
    (cause,) = ran.data["diagnosis"]
    assert cause["code"] == "stale_kv"
    assert cause["hint"].startswith(f"deploy down --name {NAME}, then deploy up")
    outcomes = [look["outcome"] for look in ran.data["canaries"]["looks"]]
    assert outcomes.count("damaged") == 1 and set(outcomes) == {"same", "damaged"}


def checked_while_damaged(bench: Bench, kit: Deploy, damage: Damage) -> Ran:
    """Run the command while its first prompt is damaged."""
    work = damage, b"", bench.layout, random.Random(1)
    with vandal(bench.store, FIRST_PROMPT, FIRST_CHUNKS, work) as loot:
        ran = kit.run("check", "--quick", "--name", NAME, "--json")
    assert loot and loot[0].in_time
    return ran


def no_numbers(kv: Kv, _rng: random.Random) -> Kv:
    """Make a chunk of what is no number: vLLM cannot say how likely any token is."""
    return as_words(np.full(kv.shape, np.nan), kv.dtype)
