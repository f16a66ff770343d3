"""The kit's own way to Redis under real engines: wrong values, a Redis that dies, no gap at all."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import redis
import yaml

from deploy.metrics.connector import SILENT_WORKERS
from deploy.verify.equivalence import Completion
from deploy.verify.hits import eligible_tokens
from deploy.verify.store_path import StorePath
from tests.e2e.conftest import Deploy, eventually, running_stack
from tests.e2e.engines import CHUNK, VLLM_DEV_API, Engines, assert_same, path
from tests.e2e.traffic import MODEL, Users, chat, text
from tests.ports import free_row

T = TypeVar("T")
HEADER = 128
LAYERS = 4
# Of the last stack here: each rank stores its own part of every layer of a chunk.
RANKS = 2
VALUES = LAYERS * RANKS


def up(folder: Path, name: str, port: int, *options: str) -> Iterator[Engines]:
    (folder / "stack.yaml").write_text(yaml.safe_dump({"engine": {"env": VLLM_DEV_API}}))
    kit = Deploy(folder)
    with running_stack(kit, name, port, "-f", str(folder / "stack.yaml"), *options, "--no-check"):
        yield Engines(kit, name, port)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Have a process do nothing until the end; its sockets stay."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def soon(attempt: Callable[[], T]) -> T | None:
    """Return what the first of a few attempts gives that is not in vain; None if all are.

    An engine leaves a Redis that failed alone for a second at most, so that of attempts a fifth of
    a second apart few can be in vain, on a slow machine fewer still.
    """
    for _ in range(25):
        if found := attempt():
            return found
        time.sleep(0.2)
    return None


def ask_in_time(engines: Engines, whom: str, prompt: str) -> tuple[Completion, int, StorePath]:
    """Return an answer for which Redis answered in time, the tokens loaded, and what was counted.

    A machine that keeps a lookup from its answer for two seconds makes it miss what is there.
    """

    def in_time() -> tuple[Completion, int, StorePath] | None:
        engines.forget()
        before = path(engines, whom)
        answer, hits = engines.ask_counting(whom, prompt)
        moved = path(engines, whom).since(before)
        return (answer, hits, moved) if moved.lookups and not moved.failures else None

    found = soon(in_time)
    assert found, f"Redis answers {whom} too late"
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    yield from up(tmp_path_factory.mktemp("path"), "path", free_row())


# What somebody does to the value of one chunk, given the keys of two.


def flip(store: redis.Redis, key: bytes, _other: bytes) -> None:
    at = HEADER + random.Random(1).randrange(store.strlen(key) - HEADER)
    (byte,) = store.getrange(key, at, at)
    store.setrange(key, at, bytes([byte ^ 0x40]))


def flip_header(store: redis.Redis, key: bytes, _other: bytes) -> None:
    (byte,) = store.getrange(key, 40, 40)  # the shape
    store.setrange(key, 40, bytes([byte ^ 1]))


def truncate(store: redis.Redis, key: bytes, _other: bytes) -> None:
    value = store.get(key)
    store.set(key, value[:-100])


def lengthen(store: redis.Redis, key: bytes, _other: bytes) -> None:
    store.append(key, b"\0" * 64)


def swap(store: redis.Redis, key: bytes, other: bytes) -> None:
    ours, theirs = store.get(key), store.get(other)
    store.set(key, theirs)
    store.set(other, ours)


def of_another_layout(store: redis.Redis, key: bytes, _other: bytes) -> None:
    value = bytearray(store.get(key))
    value[64:80] = bytes(16)
    store.set(key, bytes(value))


def of_another_kind(store: redis.Redis, key: bytes, _other: bytes) -> None:
    store.delete(key)
    store.rpush(key, b"no string")


def lose(store: redis.Redis, key: bytes, _other: bytes) -> None:
    store.delete(key)


REFUSED: tuple[Callable[..., None], ...] = (flip, flip_header, swap, of_another_layout)
NOT_FOUND: tuple[Callable[..., None], ...] = (truncate, lengthen, of_another_kind, lose)


@pytest.mark.parametrize("damage", [*REFUSED, *NOT_FOUND])
def test_damaged_values_are_computed_again(plain: Engines, damage: Callable[..., None]) -> None:
    """The answer is right, only what came before the damage is loaded, and it is counted."""
    prompt = text(5 * CHUNK + 50, damage.__name__)
    keys = [keys[0] for keys in plain.keys_by_chunk(prompt)]
    assert len(keys) == 5, "one value a chunk"
    plain.forget()
    reference = plain.ask("producer-0", prompt)
    answer, _, moved = ask_in_time(plain, "consumer-0", prompt)
    assert_same(reference, answer)
    assert moved.loaded_chunks == 5
    damage(plain.store(), keys[2], keys[4])
    for _ in range(2):
        answer, _, moved = ask_in_time(plain, "consumer-0", prompt)
        assert_same(reference, answer)
        assert moved.loaded_chunks == 2
        assert (moved.refused > 0) == (damage in REFUSED)
    assert plain.is_alive("consumer-0")


def test_a_decode_right_after_its_prefill_loads_every_eligible_token(plain: Engines) -> None:
    """A decode that follows its prefill at once finds all of it, one by one and eight at a time."""

    def ask(number: int) -> int:
        prompt = text(4 * CHUNK + 10, ("no gap", number))
        plain.ask("front", prompt, 1)
        return eligible_tokens(len(prompt), CHUNK)

    def all_hit(users: int, prompts: range) -> bool:
        before = path(plain, "consumer-0")
        hits = plain.metric("consumer-0", "vllm:external_prefix_cache_hits_total")
        with ThreadPoolExecutor(users) as pool:
            eligible = sum(pool.map(ask, prompts))
        found = plain.metric("consumer-0", "vllm:external_prefix_cache_hits_total") - hits
        # A machine that keeps a lookup from its answer for two seconds makes it miss what is
        # there, which says nothing of the barrier.
        failures = path(plain, "consumer-0").since(before).failures
        assert failures or found == eligible
        return not failures

    assert any(all_hit(1, range(first, first + 20)) for first in (0, 100, 200, 300))
    assert any(all_hit(8, range(first, first + 40)) for first in (400, 500, 600, 700))
    barrier = path(plain, "producer-0")
    assert barrier.waits >= 60
    assert barrier.late == 0


def test_engines_answer_while_redis_stalls_and_use_it_again(plain: Engines) -> None:
    """Engines answer rightly while Redis does not, however long, and use it again afterwards."""
    prompt = text(4 * CHUNK + 10, "stall")
    reference = plain.recomputed(prompt)
    plain.ask("producer-0", prompt)
    ask_in_time(plain, "consumer-0", prompt)  # so that it leaves Redis alone no more
    plain.forget()
    before = path(plain, "consumer-0")
    with stopped(plain.kit.pid(plain.name, "redis")):
        assert_same(reference, plain.ask("consumer-0", prompt))
        moved = path(plain, "consumer-0").since(before)
    # One call was waited for; whatever else there was to ask was left alone.
    assert (moved.lookups, moved.failures) == (1, 1)
    assert moved.loaded_chunks == moved.not_loaded == 0

    def loads_again() -> bool:
        plain.forget()
        return plain.ask_counting("consumer-0", prompt)[1] == 4 * CHUNK

    assert soon(loads_again)


def test_a_full_redis_serves_reads_and_losses_are_counted(plain: Engines) -> None:
    """A Redis that takes nothing more is read on; what it does not take is counted."""
    prompt = text(3 * CHUNK + 10, "full")
    reference = plain.recomputed(prompt)
    plain.ask("producer-0", prompt)
    store = plain.store()
    limit, policy = (store.config_get(n)[n] for n in ("maxmemory", "maxmemory-policy"))
    before = path(plain, "producer-0")
    store.config_set("maxmemory-policy", "noeviction")
    store.config_set("maxmemory", "1mb")
    try:
        plain.ask("producer-0", text(3 * CHUNK + 10, "no room"), 1)
        answer, hits, _ = ask_in_time(plain, "consumer-0", prompt)
    finally:
        store.config_set("maxmemory", limit)
        store.config_set("maxmemory-policy", policy)
    assert_same(reference, answer)
    assert hits == 3 * CHUNK
    moved = path(plain, "producer-0").since(before)
    assert moved.left_out == 3
    assert moved.failures > 0


def test_no_request_fails_if_redis_dies_under_load(plain: Engines) -> None:
    """100 requests, of which Redis misses many: all are answered rightly, and hits come back."""
    prompts = [text(3 * CHUNK + 20 * number, ("load", number)) for number in range(20)]
    references = [plain.ask("producer-0", prompt, 8) for prompt in prompts]
    plain.forget()
    pids = plain.pids()
    done, answers = threading.Semaphore(0), {}

    def ask(number: int) -> None:
        answers[number] = plain.ask("front", prompts[number % 20], 8)
        done.release()

    with ThreadPoolExecutor(6) as pool:
        asked = pool.map(ask, range(100))
        for _ in range(25):
            done.acquire()
        os.kill(plain.kit.pid(plain.name, "redis"), signal.SIGKILL)
        for _ in range(25):
            done.acquire()
        plain.restart({"redis": {}})
        list(asked)
    assert len(answers) == 100
    for number, answer in answers.items():
        assert_same(references[number % 20], answer)
    assert plain.pids() == pids

    def hit() -> bool:
        prompt = text(2 * CHUNK + 10, ("back", time.monotonic()))
        plain.ask("producer-0", prompt, 1)
        return plain.ask_counting("consumer-0", prompt)[1] == 2 * CHUNK

    assert soon(hit)
    assert plain.kit.ok("check", "--quick", "--name", plain.name)["passed"]


def test_status_and_check_show_what_moved(plain: Engines) -> None:
    report = plain.kit.ok("check", "--quick", "--name", plain.name)["store_path"]
    assert report["stored_chunks"] >= report["loaded_chunks"] > 5
    assert report["load_gb_s"] > 0
    assert report["refused"] == report["left_out"] == report["late"] == 0
    services = {s["name"]: s for s in plain.kit.ok("status", "--name", plain.name)["services"]}
    assert services["consumer-0"]["path"]["loaded_chunks"] > 0
    assert services["redis"]["path"] is None
    shown = plain.kit.run("status", "--name", plain.name).stdout
    assert "GB/s out" in shown


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory, plain: Engines) -> Iterator[Engines]:
    plain.kit.ok("down", "--name", plain.name)
    folder = tmp_path_factory.mktemp("layers")
    options = ("--layerwise", "--save-decode-cache", "--tp", str(RANKS))
    yield from up(folder, "layers", free_row(), *options)


def test_a_chunk_without_one_of_its_layers_is_computed_again(layered: Engines) -> None:
    """Ten users chat; then a chunk loses one of its layers."""
    before = layered.pids()
    seen = chat(layered.url("front"), Users())
    assert seen.refused == []
    assert layered.pids() == before
    prompt = text(4 * CHUNK + 50, "layers")
    keys = layered.keys_by_chunk(prompt)
    assert [len(of_chunk) for of_chunk in keys] == [VALUES] * 4, "one a layer and rank"
    layered.forget()
    reference = layered.ask("producer-0", prompt)
    for value, damage in ((0, lose), (VALUES - 1, lose), (1, flip)):
        layered.keys_by_chunk(prompt)
        damage(layered.store(), keys[2][value], keys[3][value])
        layered.forget()
        assert_same(reference, layered.ask("consumer-0", prompt))
    assert layered.is_alive("consumer-0")


def test_decoded_tokens_are_stored(layered: Engines) -> None:
    """A prompt of one chunk and a part; the second chunk was mostly decoded."""
    layered.store().flushall()
    layered.forget()
    layered.ask("consumer-0", text(300, "decoded"), 300)
    assert eventually(lambda: layered.store().dbsize() == 2 * VALUES)


def pid_of_rank(engine: int, rank: int) -> int:
    """Return the process of an engine's worker, which vLLM names by its rank."""
    for process in psutil.Process(engine).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if f"Worker_TP{rank}" in " ".join(process.cmdline()):
                return process.pid
    raise AssertionError(f"no rank {rank}")


def test_a_silent_ranks_counts_are_those_that_it_last_told(layered: Engines) -> None:
    """A sum without them would look like a restart."""
    layered.ask("consumer-0", text(CHUNK + 10, "ranks"), 1)
    with layered.api("consumer-0") as consumer:

        def stored(*, silent: int) -> float:
            """Return the chunks on a page on which so many ranks are silent; 0 on another."""
            page = consumer.metrics()
            path = StorePath.read(page.samples)
            return path.stored_chunks if path and page.total(SILENT_WORKERS) == silent else 0

        assert eventually(lambda: stored(silent=0) > 0)
        before = stored(silent=0)
        with stopped(pid_of_rank(layered.pids()["consumer-0"], 1)):
            assert eventually(lambda: stored(silent=1) >= before)
        assert eventually(lambda: stored(silent=0) >= before)


def marked(layered: Engines) -> list[bytes]:
    """Return the keys that a check has in the store now and knows by their tag."""
    return [key for key in layered.store().scan_iter(count=1000) if b"@pdkit%check-" in key]


def test_a_check_leaves_no_layer(layered: Engines) -> None:
    """All of it hits, and what it stored is told from others' keys, and removed."""
    before = set(layered.store().keys())
    data = layered.kit.ok("check", "--name", layered.name)
    assert data["hit_rate"]["eligible_rate"] == 1.0
    for phase in ("store_race", "turns", "decode_reuse", "burst"):
        assert data[phase]["hits"] == data[phase]["eligible"] > 0, phase
    assert data["redis"]["keys_removed"] > 30 * VALUES
    left = set(layered.store().keys()) - before
    assert len(left) == 2 * VALUES, "the chunks of its canary"
    assert all(b"@pdkit%canary-" in key for key in left)


@pytest.mark.parametrize("done", ["", "consumer-0: ", "through the router: "])
def test_a_killed_check_leaves_no_layer(layered: Engines, done: str) -> None:
    """Once it has stored something, and once it has said that a part of it is done."""
    before = set(layered.store().keys())
    process = layered.kit.start("check", "--name", layered.name)
    assert eventually(lambda: marked(layered)), "it stored nothing"
    assert process.stderr is not None
    assert not done or any(done in line for line in process.stderr)
    process.kill()
    process.communicate(timeout=60)
    assert eventually(lambda: layered.kit.guards() == 0)
    assert set(layered.store().keys()) == before


def test_layers_have_no_tags_without_the_fix(layered: Engines) -> None:
    """It is the fix by which they are told. Its stack's last test."""
    layered.restart({whom: {"PDKIT_DISABLE_FIXES": "B16c"} for whom in layered.pids()})
    before = set(layered.store().keys())
    prompt = list(text(2 * CHUNK + 10, "tags").encode())
    with layered.api("producer-0") as producer:
        producer.complete(MODEL, prompt, max_tokens=1, tag="check-none")
    assert len(set(layered.store().keys()) - before) == 2 * VALUES
    assert not marked(layered)
    with layered.api("consumer-0") as consumer:
        assert not consumer.complete(MODEL, prompt, max_tokens=1, tag="check-none").cached_tokens
    ran = layered.kit.run("check", "--quick", "--name", layered.name, "--json")
    assert ran.code == 0, ran
    assert "warning: not every engine has fix B16c applied" in ran.stderr
    assert ran.data["redis"]["keys_removed"] is None
