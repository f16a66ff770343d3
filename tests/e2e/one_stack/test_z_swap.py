"""A damaged value is computed again and noticed; after a swap and a rollback, only own KV is found.

Near the end of this stack: engines are replaced.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import Deploy
from tests.e2e.engines import CHUNK, Engines, assert_same, path
from tests.e2e.one_stack.conftest import NAME, PORT
from tests.e2e.store_vandals import behind_each_store, spoil
from tests.e2e.test_redis_path import flip
from tests.e2e.traffic import text

pytestmark = pytest.mark.quick
CHUNKS = 5


@pytest.fixture(scope="module")
def engines(kit: Deploy) -> Engines:
    return Engines(kit, NAME, PORT)


def test_a_damaged_value_is_computed_again(engines: Engines) -> None:
    """The answer is right, and only what came before the damage is loaded."""
    for attempt in range(5):
        prompt = text(CHUNKS * CHUNK + 50, ("damaged", attempt))
        keys = [keys[0] for keys in engines.keys_by_chunk(prompt)]
        reference = engines.ask("producer-0", prompt)
        flip(engines.store(), keys[2], keys[4])
        before = path(engines, "consumer-0")
        assert_same(reference, engines.ask("consumer-0", prompt))
        moved = path(engines, "consumer-0").since(before)
        # A machine that keeps a lookup from its answer for two seconds makes it miss what is there.
        if moved.lookups and not moved.failures:
            break
    assert (len(keys), moved.loaded_chunks) == (CHUNKS, 2)
    assert moved.refused > 0


def test_a_check_notices_damaged_values(kit: Deploy, engines: Engines) -> None:
    store = engines.store()
    store.flushall()
    with behind_each_store(store, spoil()) as spoiled:
        ran = kit.run("check", "--quick", "--name", NAME, "--json")
    assert ran.code == 1, ran
    assert [cause["code"] for cause in ran.data["diagnosis"]] == ["values_refused"]
    assert sum(spoiled) > 0 and ran.data["equivalence"]["mismatched"] == 0
    assert kit.ok("check", "--quick", "--name", NAME)["diagnosis"] == []


@pytest.fixture(scope="module")
def prompt(engines: Engines) -> str:
    """A prompt whose KV the first connector has stored, and which the consumer can load."""
    prompt = text(CHUNKS * CHUNK + 50, "swapped")
    engines.ask("producer-0", prompt, 1)
    assert engines.ask_counting("consumer-0", prompt)[1] == CHUNKS * CHUNK
    return prompt


@pytest.fixture(scope="module")
def swapped(kit: Deploy, prompt: str) -> Any:
    redis = kit.pid(NAME, "redis")
    data = kit.ok("swap", "--connector", "lmcache-mp", "--name", NAME)
    assert kit.pid(NAME, "redis") == redis
    return data


def test_a_swap_never_reads_kv_of_the_other_connector(
    engines: Engines, prompt: str, swapped: Any
) -> None:
    assert swapped["connectors"] == ["lmcache", "lmcache-mp"]
    assert swapped["check"]["hit_rate"]["eligible_rate"] == 1.0
    assert engines.ask_counting("consumer-0", prompt)[1] == 0


def test_a_rollback_finds_its_kv_again(
    kit: Deploy, engines: Engines, prompt: str, swapped: Any
) -> None:
    back = kit.ok("rollback", "--name", NAME)
    assert back["connectors"] == ["lmcache-mp", "lmcache"]
    assert back["check"]["hit_rate"]["eligible_rate"] == 1.0
    assert engines.ask_counting("consumer-0", prompt)[1] == CHUNKS * CHUNK
    newest = kit.ok("status", "--name", NAME)["history"][:2]
    assert [(past["action"], past["outcome"]) for past in newest] == [
        ("rollback", "good"), ("swap", "good"),
    ]  # fmt: skip
