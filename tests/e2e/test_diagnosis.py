"""Each way to break a real stack makes the check fail and name its cause; fixed, it passes.

Whatever is broken is broken from outside: engines and router are started otherwise, by hand as an
operator might, and Redis is told or made to behave otherwise. Nothing touches the check.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis

from bench.redis_server import RedisServer
from bench.store_gate import NOTHING, at_each_store, held, let_through, writes_held
from deploy.errors import StackUnhealthy
from deploy.planning.memory import ANSWER_TOKENS
from deploy.stack.service import Service
from tests.e2e.conftest import Deploy, Ran, eventually, is_free, running_stack
from tests.e2e.engines import (
    CHUNK,
    OFFSETS,
    Change,
    Engines,
    all_of,
    in_environ,
    path,
    with_arguments,
    with_settings,
    without_argument,
    without_environ,
)
from tests.e2e.store_vandals import behind_each_store, spoil
from tests.e2e.traffic import text
from tests.ports import free_row

NAME = "broken"
PORT = free_row()
ELSEWHERE = PORT + 50
PASSWORD = "no-password-to-be-seen"
CONSUMER = "consumer-0"
PRODUCER = "producer-0"
ROUTER = "router"


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Deploy:
    return Deploy(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module", autouse=True)
def healthy_stack(kit: Deploy) -> Iterator[None]:
    with running_stack(kit, NAME, PORT) as data:
        assert data["check"]["passed"]
        yield


@pytest.fixture(scope="module")
def engines(kit: Deploy) -> Engines:
    return Engines(kit, NAME, PORT)


@pytest.fixture
def store(kit: Deploy) -> redis.Redis:
    return kit.redis(NAME)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Another Redis; yields its port."""
    with RedisServer(tmp_path_factory.mktemp("redis"), port=ELSEWHERE):
        yield ELSEWHERE


def checked(kit: Deploy, *options: str, during: Callable[[], object] = lambda: None) -> Any:
    """Run the check, expect it to fail with exit code 1, and return its data."""
    process = kit.start("check", "--name", NAME, "--json", *options)
    during()
    ran: Ran = kit.ended(process)
    assert ran.code == 1, ran
    envelope = ran.envelope
    assert envelope["status"] == "error" and envelope["errors"][0]["code"] == "check_failed"
    assert envelope["data"]["passed"] is False and envelope["data"]["failures"]
    # What the command ends with is the fix for the first cause.
    assert envelope["errors"][0]["hint"] == envelope["data"]["diagnosis"][0]["hint"]
    return envelope["data"]


def named(
    kit: Deploy,
    code: str,
    *words: str,
    options: tuple[str, ...] = ("--quick",),
    during: Callable[[], object] = lambda: None,
) -> Any:
    """Expect the check to name one cause alone, with these words in what it says of it."""
    data = checked(kit, *options, during=during)
    causes = data["diagnosis"]
    assert [cause["code"] for cause in causes] == [code], data
    for word in words:
        assert word in causes[0]["message"], causes
    return data


def healthy(kit: Deploy) -> bool:
    ran = kit.run("check", "--name", NAME, "--quick", "--json")
    return ran.code == 0 and ran.data["passed"] and ran.data["diagnosis"] == []


def assert_healthy(kit: Deploy) -> None:
    data = kit.ok("check", "--name", NAME, "--quick")
    assert data["passed"] and data["diagnosis"] == []


class TestRedis:
    """Broken while the engines run, and fixed after."""

    def test_a_flush_between_prefill_and_decode_is_named(
        self, kit: Deploy, store: redis.Redis
    ) -> None:
        with behind_each_store(store, ("FLUSHALL",)):
            data = named(kit, "keys_lost", "flushed")
        assert data["hit_rate"]["hits"] < data["hit_rate"]["eligible"]

    def test_refused_values_are_named(self, kit: Deploy, store: redis.Redis) -> None:
        """Values are replaced by noise as they arrive: none is used, and the check says so."""
        store.flushall()
        with behind_each_store(store, spoil()) as spoiled:
            data = named(kit, "values_refused")
        assert sum(spoiled) > 0
        assert data["equivalence"]["mismatched"] == 0
        assert data["store_path"]["refused"] > 0

    def test_a_full_redis_without_eviction_is_named(self, kit: Deploy, store: redis.Redis) -> None:
        with configured(store, {"maxmemory-policy": "noeviction", "maxmemory": "1mb"}):
            named(kit, "store_full", "noeviction", f"{PRODUCER} ", "oom", "OOM command not allowed")
        assert_healthy(kit)

    def test_an_eviction_before_the_load_is_named(self, kit: Deploy, store: redis.Redis) -> None:
        """Behind every chunk others store more than it has room for."""
        store_junk = "for n = 1, 40 do redis.call('SET', 'junk:' .. n, ARGV[1]) end"
        others = behind_each_store(store, ("EVAL", store_junk, 0, os.urandom(500_000)))
        room = store.info("memory")["used_memory"] + 10_000_000
        with configured(store, {"maxmemory": str(room)}), others:
            data = named(kit, "store_evicts")
        store.flushall()
        assert data["redis"]["evicted_keys"] > 0
        assert_healthy(kit)

    def test_a_redis_full_of_other_keys_is_no_alarm(self, kit: Deploy, store: redis.Redis) -> None:
        """It evicts all the time, as it should: no alarm where everything was found."""
        for number in range(600):
            store.set(f"junk:{number}", os.urandom(100_000))
        room = store.info("memory")["used_memory"]
        with configured(store, {"maxmemory": str(room), "maxmemory-samples": "10"}):
            data = kit.ok("check", "--name", NAME, "--quick")
        assert data["redis"]["evicted_keys"] > 50
        assert data["passed"] and data["diagnosis"] == []
        store.flushall()

    def test_a_denied_command_is_named(self, kit: Deploy, store: redis.Redis) -> None:
        store.execute_command("ACL", "SETUSER", "default", "-set")
        try:
            named(kit, "store_denied", f"{PRODUCER} ", "noperm", "NOPERM")
        finally:
            store.execute_command("ACL", "SETUSER", "default", "+@all")
        assert_healthy(kit)

    def test_a_wrong_password_is_named(self, kit: Deploy, store: redis.Redis) -> None:
        """Engines that are connected stay so; whoever connects anew is refused."""
        store.execute_command("ACL", "SETUSER", "default", "resetpass", ">other")
        store.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        try:
            named(kit, "store_denied", "invalid username-password pair")
        finally:
            password = f">{kit.password(NAME)}"
            store.execute_command("ACL", "SETUSER", "default", "resetpass", password)
        assert eventually(lambda: healthy(kit))
        assert_healthy(kit)

    def test_a_read_only_replica_is_named(
        self, kit: Deploy, store: redis.Redis, elsewhere: int
    ) -> None:
        store.execute_command("REPLICAOF", "127.0.0.1", elsewhere)
        try:
            assert eventually(lambda: store.info("replication")["master_link_status"] == "up")
            named(kit, "store_read_only", f"{PRODUCER} ", "readonly")
        finally:
            store.execute_command("REPLICAOF", "NO", "ONE")
        assert_healthy(kit)

    def test_a_redis_that_cannot_save_is_named(self, kit: Deploy, store: redis.Redis) -> None:
        """As Redis does on a full disk."""
        in_the_way = Path(store.config_get("dir")["dir"]) / "dump.rdb"
        in_the_way.unlink(missing_ok=True)  # a replica leaves one
        in_the_way.mkdir()
        try:
            with configured(store, {"save": "3600 1"}):
                store.bgsave()
                assert eventually(
                    lambda: store.info("persistence")["rdb_last_bgsave_status"] == "err"
                )
                named(kit, "store_fails", f"{PRODUCER}: ", "misconf", "MISCONF")
        finally:
            in_the_way.rmdir()
        assert_healthy(kit)

    def test_a_redis_that_dies_during_the_check_is_named(
        self, kit: Deploy, store: redis.Redis
    ) -> None:
        def end() -> None:
            assert eventually(lambda: "set" in held(store))
            with pytest.raises(redis.ConnectionError):
                store.execute_command("SHUTDOWN", "NOSAVE")

        with writes_held(store):
            named(kit, "store_unreachable", during=end)
        repaired = kit.ok("up", "--name", NAME, "--port", str(PORT))
        assert list(repaired["started"]) == ["redis"]
        assert repaired["check"]["passed"]

    def test_a_dead_redis_is_named_and_up_repairs_it(self, kit: Deploy, store: redis.Redis) -> None:
        with pytest.raises(redis.ConnectionError):
            store.execute_command("SHUTDOWN", "NOSAVE")
        try:
            ran = kit.run("check", "--name", NAME)
            assert ran.code == 4, ran
            assert "redis" in ran.stderr and f"deploy up --resume --name {NAME}" in ran.stderr
            status = kit.run("status", "--name", NAME, "--json")
            assert status.code == 4
            states = {s["name"]: s["condition"] for s in status.data["services"]}
            assert states["redis"] == "exited" and states[PRODUCER] == "ready"
        finally:
            repaired = kit.run("up", "--name", NAME, "--port", str(PORT), "--json")
        assert repaired.code == 0, repaired
        assert list(repaired.data["started"]) == ["redis"]
        assert repaired.data["check"]["passed"]


class TestPrompts:
    """The user's own, from a file."""

    def send(self, kit: Deploy, prompt: str) -> tuple[str, ...]:
        file = kit.home / "prompt.txt"
        file.write_text(prompt)
        return ("--quick", "--prompt-file", str(file))

    def test_a_prompt_held_by_the_consumer_is_named(self, kit: Deploy) -> None:
        options = self.send(kit, f"{time.time_ns()} " * 40)
        first = kit.ok("check", "--name", NAME, *options)
        (prompt,) = first["prompts"]
        assert prompt["loaded"] == prompt["eligible"] > 0 and prompt["local"] == 0
        data = kit.ok("check", "--name", NAME, *options)
        (cause,) = data["diagnosis"]
        assert cause["code"] == "prefix_cache_hides" and CONSUMER in cause["message"]
        (prompt,) = data["prompts"]
        assert prompt["loaded"] == 0 and prompt["local"] >= prompt["eligible"]
        # The fix: another beginning.
        options = self.send(kit, f"now {time.time_ns()} " * 40)
        assert kit.ok("check", "--name", NAME, *options)["diagnosis"] == []

    def test_a_prompt_shorter_than_a_chunk_is_named(self, kit: Deploy) -> None:
        options = self.send(kit, "x" * (CHUNK - 10))
        data = named(kit, "prompt_under_chunk", f"no whole chunk of {CHUNK}", options=options)
        assert data["prompts"][0]["chunks"] == 0
        # The fix: a longer one.
        options = self.send(kit, f"{time.time_ns()}" + "y" * 2 * CHUNK)
        assert kit.ok("check", "--name", NAME, *options)["diagnosis"] == []

    def test_a_prompt_that_does_not_fit_is_refused(self, kit: Deploy) -> None:
        for prompt, words in (("", "empty"), ("x" * 40_000, f"an answer of {ANSWER_TOKENS}")):
            ran = kit.run("check", "--name", NAME, *self.send(kit, prompt))
            assert ran.code == 2, ran
            assert "--prompt-file" in ran.stderr and words in ran.stderr


def test_a_router_without_prefill_is_named(kit: Deploy, engines: Engines) -> None:
    """Started by hand with the consumer as its producer."""

    def misled(service: Service) -> Service:
        at = service.argv.index("--producer") + 1
        consumer = f"{PRODUCER}=127.0.0.1:{PORT + OFFSETS[CONSUMER]}"
        return replace(service, argv=(*service.argv[:at], consumer, *service.argv[at + 1 :]))

    engines.start_otherwise({ROUTER: misled})
    named(kit, "router_bypasses_producers")
    engines.start_otherwise({ROUTER: in_environ({})})
    assert_healthy(kit)


def test_a_consumer_that_dies_during_the_check_is_named(kit: Deploy, store: redis.Redis) -> None:
    def kill() -> None:
        with writes_held(store):
            assert eventually(lambda: "set" in held(store))
            os.kill(kit.pid(NAME, CONSUMER), signal.SIGKILL)

    data = named(kit, "engine_died", options=(), during=kill)
    assert f"{CONSUMER} exited during the check" in data["failures"]
    assert f"deploy up --resume --name {NAME}" in data["diagnosis"][0]["hint"]
    # Now it is known before anything is asked.
    ran = kit.run("check", "--name", NAME, "--json")
    assert ran.code == 4, ran
    assert CONSUMER in json.dumps(ran.envelope["errors"])


def another_model(service: Service) -> Service:
    """Start it with a copy that has one file more, at another path."""
    model = Path(service.argv[service.argv.index("--model") + 1])
    copy = model.with_name("another")
    shutil.copytree(model, copy, dirs_exist_ok=True)
    (copy / "more.json").write_text("{}")
    return with_arguments("--model", str(copy))(service)


def another_dtype(service: Service) -> Service:
    """Start it with the other of the two types that the plan chooses from, by the processor."""
    planned = service.argv[service.argv.index("--dtype") + 1]
    other = "float32" if planned == "bfloat16" else "bfloat16"
    return with_arguments("--dtype", other)(service)


def in_kv_transfer_config(**settings: Any) -> Change:
    """Return what changes the settings by which vLLM loads the connector."""

    def change(service: Service) -> Service:
        config = json.loads(service.argv[service.argv.index("--kv-transfer-config") + 1])
        return with_arguments("--kv-transfer-config", json.dumps({**config, **settings}))(service)

    return change


class Differs(NamedTuple):
    """A way in which a consumer does not fit its producer, and what the check says of it."""

    code: str
    words: str
    change: Change


# What is wrong with one consumer at once. Each is named, the likeliest first: none hides another.
TOGETHER = {
    "store, seed and element type": (
        Differs(
            "store_differs",
            f"{CONSUMER} 127.0.0.1:{ELSEWHERE}/0",
            with_settings(url=f"redis://:{PASSWORD}@127.0.0.1:{ELSEWHERE}"),
        ),
        Differs("hash_seed_differs", f"{CONSUMER} has 7", in_environ({"PYTHONHASHSEED": "7"})),
        Differs("layout_differs", f"element type: {PRODUCER} ", another_dtype),
    ),
    "name space, model, workers, chunks and hash": (
        Differs(
            "namespace_differs",
            f"{CONSUMER} pdkit:other:1",
            with_settings(namespace="pdkit:other:1"),
        ),
        Differs("model_differs", f"{CONSUMER} ", another_model),
        Differs(
            "tp_differs",
            f"{PRODUCER} 1; {CONSUMER} 2",
            with_arguments("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"),
        ),
        Differs("chunk_size_differs", f"{CONSUMER} 128", in_environ({"LMCACHE_CHUNK_SIZE": "128"})),
        Differs(
            "hash_algorithm_differs",
            f"{CONSUMER} sha256",
            in_environ({"LMCACHE_PRE_CACHING_HASH_ALGORITHM": "sha256"}),
        ),
    ),
    "fix, no seed and no room": (
        Differs(
            "fix_not_applied",
            f"fix B17 is disabled in {CONSUMER}",
            in_environ({"PDKIT_DISABLE_FIXES": "B17"}),
        ),
        Differs("hash_seed_differs", f"{CONSUMER} has none", without_environ("PYTHONHASHSEED")),
        Differs(
            "engine_differs",
            f"{CONSUMER} {CHUNK} (",
            with_arguments("--max-model-len", str(CHUNK)),
        ),
        Differs(
            "request_failed",
            f"{CONSUMER} did not answer: HTTP 400",
            with_arguments("--max-model-len", str(CHUNK)),
        ),
    ),
    # Its keys would be the others' by all that the plan sets, and the KV it finds would be wrong.
    "numbers of the model": (
        Differs(
            "engine_differs",
            f'overrides: {PRODUCER} {{}}; {CONSUMER} {{"rope_theta": 500.0}}',
            with_arguments("--hf-overrides", '{"rope_theta": 500.0}'),
        ),
        Differs(
            "engine_differs",
            f'variables: {PRODUCER} {{}}; {CONSUMER} {{"VLLM_CPU_ATTN_SPLIT_KV": "0"}}',
            in_environ({"VLLM_CPU_ATTN_SPLIT_KV": "0"}),
        ),
    ),
    "connector": (
        Differs(
            "connector_not_loaded",
            f"{CONSUMER} runs no KV connector",
            without_argument("--kv-transfer-config"),
        ),
    ),
}


@pytest.fixture(scope="module")
def diagnosed(kit: Deploy, engines: Engines, elsewhere: int) -> Callable[[str], dict[str, str]]:
    """Return what starts a consumer otherwise, once, and returns what the check says of it."""
    user = ("ACL", "SETUSER", "default", "on", f">{PASSWORD}")
    redis.Redis(port=elsewhere).execute_command(*user)

    @cache
    def diagnosis(how: str) -> dict[str, str]:
        ways = TOGETHER[how]
        engines.start_otherwise({CONSUMER: all_of(*(way.change for way in ways))})
        data = checked(kit, "--quick")
        assert data["hit_rate"]["hits"] == 0
        assert PASSWORD not in json.dumps(data) + kit.log(NAME, CONSUMER)
        codes = list(dict.fromkeys(way.code for way in ways))
        assert [cause["code"] for cause in data["diagnosis"]] == codes
        return {cause["code"]: cause["message"] for cause in data["diagnosis"]}

    return diagnosis


class TestEngines:
    """A consumer that does not fit its producer; whoever starts it next fixes it."""

    @pytest.mark.parametrize(
        ("how", "way"),
        [
            pytest.param(how, way, id=f"{way.code} of {how}")
            for how, ways in TOGETHER.items()
            for way in ways
        ],
    )
    def test_engines_that_differ_are_named_with_the_setting(
        self, diagnosed: Callable[[str], dict[str, str]], how: str, way: Differs
    ) -> None:
        assert way.words in diagnosed(how)[way.code]


def test_vllms_own_adapter_is_refused_at_the_start(kit: Deploy, engines: Engines) -> None:
    """It moves KV past all fixes: no engine serves with it, and what ends it is named."""
    native = in_kv_transfer_config(kv_connector_extra_config={"use_native": True})
    with pytest.raises(StackUnhealthy, match=r"consumer-0 died while starting.*use_native: true"):
        engines.start_otherwise({CONSUMER: native})
    ran = kit.run("check", "--name", NAME)
    assert ran.code == 4 and CONSUMER in ran.stderr, ran
    fixed = kit.ok("up", "--resume", "--name", NAME)
    assert fixed["check"]["passed"]


def test_a_producer_that_stores_nothing_is_named(kit: Deploy, engines: Engines) -> None:
    """Started by hand in the consumers' part."""
    role = in_kv_transfer_config(kv_role="kv_consumer")
    engines.start_otherwise({PRODUCER: role})
    named(kit, "not_stored", "0")


@pytest.fixture(scope="module")
def impatient(engines: Engines) -> None:
    """Start a producer that waits for less than a slow Redis takes to store.

    Redis may hold a store for as long as a busy machine takes until the consumer is asked.
    """
    settings = with_settings(store_s="120", silent_s="120")
    engines.start_otherwise(
        {PRODUCER: all_of(in_environ({"PDKIT_STORE_BARRIER_S": "1"}), settings)}
    )


@pytest.mark.usefixtures("impatient")
def test_answers_leave_before_their_kv_without_the_barrier(
    engines: Engines, store: redis.Redis
) -> None:
    """With a Redis that takes its time, answers leave before their KV."""
    store.flushall()
    with writes_held(store):
        engines.ask(PRODUCER, text(4 * CHUNK + 10, "gap"), 1)
        assert store.dbsize() == 0
        assert path(engines, PRODUCER).late > 0
    assert eventually(lambda: store.dbsize() == 4), "what was held is stored"


@pytest.mark.usefixtures("impatient")
def test_answers_that_leave_before_their_kv_are_named(
    kit: Deploy, engines: Engines, store: redis.Redis
) -> None:
    # While Redis is quick, the producer waits long enough, but for a machine that is not.
    assert eventually(lambda: healthy(kit))

    def seen() -> tuple[int, int]:
        """Return how often a consumer was asked, and how often the check looked for chunks."""
        looked = store.info("commandstats").get("cmdstat_scan", {"calls": 0})["calls"]
        return engines.metric(CONSUMER, "vllm:external_prefix_cache_queries_total"), looked

    over = threading.Event()

    def slow() -> None:
        before = seen()

        def too_late() -> bool:
            # Other than a store, the check itself waits to remove its keys.
            return over.is_set() or seen() != before or {*held(store)} != {"set"}

        assert eventually(too_late, every_s=0.01)
        let_through(store, NOTHING)

    with at_each_store(store, slow):
        try:
            named(kit, "stores_late", PRODUCER)
        finally:
            over.set()
    assert eventually(lambda: healthy(kit))


def test_down_ends_a_stack_whose_state_was_deleted(kit: Deploy) -> None:
    shutil.rmtree(kit.home / "stacks" / NAME)
    assert kit.run("status", "--name", NAME).stdout.startswith(f"the stack '{NAME}' is not up")
    assert not is_free(PORT)
    assert kit.run("down", "--name", NAME).code == 0
    kit.assert_nothing_left(NAME, PORT)


@contextmanager
def configured(store: redis.Redis, settings: Mapping[str, str]) -> Iterator[None]:
    """Change settings of a running Redis, and change them back."""
    before = {name: store.config_get(name)[name] for name in settings}
    for name, value in settings.items():
        store.config_set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            store.config_set(name, value)
