"""Engines that share KV through LMCache's server and Redis; Prometheus watches."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import psutil
import pytest

from bench.check_power.server import meddled_check, payload, replace_in_memory, stored_keys
from bench.check_power.stack import measured_noise
from deploy.metrics.connector import ConnectorReport
from deploy.runtime.engine_api import EngineApi
from deploy.runtime.home import Home
from deploy.stack.service import Service
from deploy.verify.equivalence import Completion
from deploy.workflows.check.session import Session
from deploy.workflows.running import require_stack
from tests.e2e.conftest import Deploy, eventually, running_stack
from tests.e2e.engines import CHUNK, Engines, assert_same, with_arguments
from tests.e2e.prometheus import found, names_on, prometheus_of, recorded, without_data
from tests.e2e.store_vandals import spoil
from tests.e2e.traffic import MODEL
from tests.ports import free_row

NAME = "mp"
PORT = free_row()
METRICS = PORT + 5
SHARED_MEMORY = Path("/dev/shm")
LONG = 400
SAID = "vllm:generation_tokens_total"
ROOM_FOR_SIX_CHUNKS = "0.0029296875"  # GiB


@pytest.fixture(scope="module")
def kit(shared_home: Path) -> Deploy:
    return Deploy(shared_home)


def segments(prefix: str) -> list[str]:
    return sorted(file.name for file in SHARED_MEMORY.glob(f"{prefix}-*"))


def prefix_of(kit: Deploy, engine: str, name: str = NAME) -> str:
    """Return how the names of an engine's shared memory begin, and no other stack's."""
    running = require_stack(Home(kit.home, kit.home / "cache"), name)
    return running.stack.service(engine).env["PDKIT_SHARED_MEMORY"]


@pytest.fixture(scope="module")
def up(kit: Deploy) -> Iterator[Any]:
    options = ("--connector", "lmcache-mp", "--save-decode-cache")
    with running_stack(kit, NAME, PORT, *options, "--monitoring", "--no-check") as data:
        own = prefix_of(kit, "producer-0").removesuffix("-producer-0")
        assert len(segments(own)) == 2
        yield data
    assert not segments(own)


@pytest.fixture(scope="module")
def engines(kit: Deploy, up: Any) -> Engines:
    return Engines(kit, NAME, PORT)


def prompt(word: str) -> str:
    return f"{word} " * (3 * CHUNK // (len(word) + 1))


def in_redis(engines: Engines, asked: str, chunks: int = 3) -> None:
    """Have the producer store a prompt, and wait until the server has put it into Redis."""
    before = int(engines.store().dbsize())
    engines.ask("producer-0", asked)
    assert eventually(lambda: int(engines.store().dbsize()) >= before + chunks)


def computed(engines: Engines, asked: str, max_tokens: int = 16) -> Completion:
    """Return the producer's answer to a prompt whose KV it shares with nobody."""
    with engines.api("producer-0") as api:
        return api.complete(MODEL, list(asked.encode()), max_tokens=max_tokens, salt=token_hex(4))


def test_every_rank_stores_and_loads_its_part(kit: Deploy) -> None:
    """Each has memory of its own, and a value of its own for each chunk in Redis."""
    name, port, ranks = "ranks", free_row(), 2
    options = ("--connector", "lmcache-mp", "--tp", str(ranks), "--save-decode-cache")
    with running_stack(kit, name, port, *options, "--no-check"):
        own = [prefix_of(kit, engine, name) for engine in ("producer-0", "consumer-0")]
        assert [len(segments(prefix)) for prefix in own] == [ranks, ranks]
        engines = Engines(kit, name, port)
        engines.ask("producer-0", prompt("ranks") + "?")
        assert eventually(lambda: engines.store().dbsize() == 3 * ranks)
        found = kit.ok("check", "--name", name)
        assert found["hit_rate"]["eligible_rate"] == 1.0
        for phase in ("store_race", "turns", "decode_reuse", "second_tier"):
            assert found[phase]["hits"] == found[phase]["eligible"] > 0, phase
        assert found["equivalence"]["mismatched"] == 0 < found["equivalence"]["compared"]
    assert not any(segments(prefix) for prefix in own)


def test_every_eligible_token_is_loaded_at_once(kit: Deploy, up: Any) -> None:
    serving = {"redis", "kv-server", "producer-0", "consumer-0", "router"}
    assert set(up["started"]) - {"grafana"} == {*serving, "prometheus"}
    found = kit.ok("check", "--name", NAME)
    assert found["hit_rate"]["eligible_rate"] == 1.0
    (pair,) = found["pairs"]
    hits, asked = pair["hits"], found["hit_rate"]["queries"]
    assert pair["tiers"] == {
        "asked": asked, "local": 0, "server": hits, "redis": 0, "computed": asked - hits
    }  # fmt: skip
    assert found["store_race"]["eligible_rate"] == 1.0
    assert found["turns"]["hits"] == found["turns"]["eligible"] > 0
    assert found["decode_reuse"]["hits"] == found["decode_reuse"]["eligible"] > 0
    assert found["burst"]["failed"] == 0
    assert found["equivalence"]["mismatched"] == 0
    assert found["equivalence"]["compared"] > 0
    assert found["second_tier"]["hits"] == found["second_tier"]["eligible"] > 0
    assert found["store_path"]["loaded_chunks"] > 0
    assert found["store_path"]["refused"] == 0
    assert len(found["left_out"]) == 1
    again = kit.ok("check", "--quick", "--name", NAME)["canaries"]
    assert again["same"] == again["known"] == 1
    assert again["looks"][0]["loaded"] == 2 * CHUNK, "of the check before"
    used = kit.ok("status", "--name", NAME)["kv_server"]
    assert used["redis_tokens"] >= found["second_tier"]["hits"]
    assert used["found_tokens"] > 0


@pytest.mark.parametrize("exchanged", [False, True])
def test_wrong_kv_in_the_servers_memory_fails_the_check(
    kit: Deploy, engines: Engines, exchanged: bool
) -> None:
    """The server's memory has no checksum: only the check's answers can tell."""
    pid = kit.pid(NAME, "kv-server")
    try:
        Path(f"/proc/{pid}/mem").open("r+b").close()
    except PermissionError:
        pytest.skip("this kernel lets no user write to other processes (kernel.yama.ptrace_scope)")
    store = engines.store()
    store.flushdb()

    def exchange(session: Session, asked: Sequence[int]) -> None:
        keys = stored_keys(store, len(asked) // session.chunk)
        one, two = (payload(store, key) for key in keys[:2])
        replace_in_memory(pid, {one: two, two: one} if exchanged else {one: one, two: two})

    running = require_stack(Home(kit.home, kit.home / "cache"), NAME)
    pair = "producer-0", "consumer-0"
    found = meddled_check(running, pair, measured_noise(running, pair), exchange)
    assert bool(found.failures) is exchanged, found
    assert exchanged == any("differ" in sentence for sentence in found.failures)


def test_the_server_knows_the_engines_by_the_numbers_that_they_report(
    kit: Deploy, engines: Engines, up: Any
) -> None:
    services = {one["name"]: one for one in kit.ok("status", "--name", NAME)["services"]}
    with EngineApi(f"unix://{services['kv-server']['url']}") as server:
        known, version = server.known_engines(), server.lmcache_version()
    reports = []
    for name in ("producer-0", "consumer-0"):
        with engines.api(name) as api:
            reports.append(ConnectorReport.read(api.metrics()).kv)
    assert len(known) == len(reports)
    assert {rank for kv in reports for rank in kv["instances"]} == set(known)
    assert {kv["lmcache"] for kv in reports} == {version.partition("+")[0]}


def test_nothing_listens_on_a_port_but_its_metrics(kit: Deploy, up: Any) -> None:
    server = psutil.Process(kit.pid(NAME, "kv-server"))
    listening = [one for one in server.net_connections("inet") if one.status == "LISTEN"]
    assert [tuple(one.laddr) for one in listening] == [("127.0.0.1", METRICS)]
    page = f"http://127.0.0.1:{METRICS}/metrics"
    assert httpx.get(page, trust_env=False, timeout=60).status_code == 200
    for path in ("/healthcheck", "/pdkit/forget", "/metrics/reset"):
        assert (
            httpx.get(page.replace("/metrics", path), trust_env=False, timeout=60).status_code
            == 404
        )
    services = {one["name"]: one for one in kit.ok("status", "--name", NAME)["services"]}
    socket = Path(services["kv-server"]["url"])
    assert services["kv-server"]["condition"] == "ready"
    assert socket.is_socket()
    assert socket.parent.stat().st_mode & 0o077 == 0, "other users may not enter"
    assert kit.ok("fixes", "--name", NAME)["not_for"]


def test_a_killed_server_costs_no_answer(
    kit: Deploy, engines: Engines, up: Any
) -> None:  # fmt: skip
    engines.ask("front", prompt("before"))
    damaged, stored = prompt("damaged") + "?", prompt("only stored") + "?"
    in_redis(engines, damaged)
    assert int(engines.store().execute_command(*spoil())) >= 3
    in_redis(engines, stored)
    os.kill(kit.pid(NAME, "kv-server"), signal.SIGKILL)
    asked = prompt("while it is gone")
    through = engines.ask("front", asked)
    assert_same(computed(engines, asked), through)
    failed = kit.run("check", "--name", NAME)
    assert failed.code == 4, failed
    assert "not running: kv-server" in failed.stderr
    again = kit.ok("up", "--resume", "--name", NAME)
    assert set(again["started"]) == {"kv-server"}
    # Its memory is empty, and the consumer was asked for neither before.
    answer, loaded = engines.ask_counting("consumer-0", stored)
    assert loaded == 3 * CHUNK, "from Redis"
    assert_same(computed(engines, stored), answer)
    answer, loaded = engines.ask_counting("consumer-0", damaged)
    assert loaded == 0
    assert_same(computed(engines, damaged), answer)
    services = {one["name"]: one for one in kit.ok("status", "--name", NAME)["services"]}
    assert services["kv-server"]["path"]["refused"] > 0
    assert kit.ok("check", "--name", NAME, "--quick")["hit_rate"]["eligible_rate"] == 1.0


def test_a_killed_redis_costs_no_answer(kit: Deploy, engines: Engines, up: Any) -> None:
    """The server goes on with what it has in memory."""
    os.kill(kit.pid(NAME, "redis"), signal.SIGKILL)
    asked = prompt("no redis up") + "?"
    engines.ask("producer-0", asked)
    answer, loaded = engines.ask_counting("consumer-0", asked)
    assert loaded == 3 * CHUNK
    assert_same(computed(engines, asked), answer)
    new = prompt("asked of all")
    assert_same(computed(engines, new), engines.ask("front", new))
    failed = kit.run("check", "--name", NAME)
    assert failed.code == 4 and "not running: redis" in failed.stderr, failed
    again = kit.ok("up", "--resume", "--name", NAME)
    assert set(again["started"]) == {"redis"}
    in_redis(engines, prompt("redis again") + "?")


def test_a_slow_server_touches_no_other_requests_kv(
    kit: Deploy, engines: Engines, up: Any
) -> None:  # fmt: skip
    pid = kit.pid(NAME, "kv-server")
    os.kill(pid, signal.SIGSTOP)
    try:
        other = prompt("other")
        assert_same(computed(engines, other), engines.ask("front", other))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert eventually(
        lambda: kit.run("check", "--name", NAME, "--quick").code == 0, within_s=300, every_s=3
    )


def test_an_engine_that_is_killed_leaves_no_shared_memory(kit: Deploy, up: Any) -> None:
    prefix = prefix_of(kit, "producer-0")
    before = segments(prefix)
    assert len(before) == 1
    os.kill(kit.pid(NAME, "producer-0"), signal.SIGKILL)
    kit.ok("restart", "producer-0", "--name", NAME)
    assert len(segments(prefix)) == 1
    assert segments(prefix) != before
    assert kit.ok("check", "--name", NAME, "--quick")["passed"]


# A server that begins no load while a file is there, and notes which loads it was asked for.
GATED = """
import functools, os, time
from pathlib import Path
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule
from pdkit_connector import lmcache_server
gate, load = Path(os.environ["PDKIT_TEST_GATE"]), LMCacheDrivenTransferModule.retrieve
@functools.wraps(load)
def wait(self, key, *more):
    (gate / key.request_id).touch()
    while (gate / "closed").exists():
        time.sleep(0.01)
    return load(self, key, *more)
LMCacheDrivenTransferModule.retrieve = wait
lmcache_server.main()
"""


@pytest.fixture(scope="module")
def gate(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the gate of a server that has taken the place of the stack's."""
    folder = tmp_path_factory.mktemp("gate")

    def gated(service: Service) -> Service:
        at = service.argv.index("-m")
        argv = (*service.argv[:at], "-c", GATED, *service.argv[at + 2 :])
        return replace(service, argv=argv, env={**service.env, "PDKIT_TEST_GATE": str(folder)})

    engines.start_otherwise({"kv-server": gated})
    return folder


@pytest.mark.parametrize("whom", ["producer-0", "consumer-0"])
def test_a_client_that_leaves_while_its_prompt_is_loaded_costs_nobody_an_answer(
    kit: Deploy, engines: Engines, up: Any, gate: Path, whom: str
) -> None:
    """Its blocks, which are the next that vLLM gives away, are given away after the load only."""
    pids = engines.pids()
    (other,) = pids.keys() - {whom}
    tried: list[str] = []

    def loads() -> bool:
        tried.append(prompt(f"{whom} tries {len(tried)}"))
        engines.ask(other, tried[-1])
        return engines.ask_counting(whom, tried[-1])[1] > 0

    assert eventually(loads, every_s=1), "the engines do not know the new server"
    asked = (f"{whom} leaves " * 60)[: 3 * CHUNK + 1]
    engines.ask(other, asked)
    # Shorter than a chunk, so that they neither load nor store. Their answers last.
    others = [f"{number} takes the blocks {'of whom left ' * 10}" for number in range(5)]
    wanted = [computed(engines, one, LONG) for one in others]
    before = set(gate.iterdir())
    closed = gate / "closed"
    closed.touch()
    with ThreadPoolExecutor(len(others)) as pool:
        try:
            leaving = engines.begin(whom, asked)
            assert eventually(lambda: set(gate.iterdir()) - before - {closed})
            leaving.close()
            assert eventually(lambda: engines.waiting(whom) == 0)
            said = engines.metric(whom, SAID)
            answers = [pool.submit(engines.ask, whom, one, LONG) for one in others]
            assert eventually(lambda: engines.metric(whom, SAID) > said, every_s=0.01)
        finally:
            closed.unlink()
        for one, answer in zip(wanted, answers, strict=True):
            assert_same(one, answer.result())
    assert eventually(lambda: engines.usage(whom) == 0)
    answer, loaded = engines.ask_counting(whom, asked)
    assert loaded == 3 * CHUNK
    assert_same(computed(engines, asked), answer)
    assert engines.pids() == pids
    assert all(engines.is_alive(name) for name in pids)


def test_prometheus_sees_the_server_and_its_lack_of_room(
    kit: Deploy, engines: Engines, up: Any
) -> None:
    """The dashboard has data for all that happens to a server, and the alert fires."""
    short = [f"short {number} " * 33 for number in range(10, 22)]
    long = [f"{name} long " * 586 for name in ("a", "b", "c")]
    for one in short:
        in_redis(engines, one, 1)
    for one in long:
        in_redis(engines, one, 16)
    services = {one["name"]: one for one in kit.ok("status", "--name", NAME)["services"]}
    engines.start_otherwise({"kv-server": with_arguments("--l1-size-gb", ROOM_FOR_SIX_CHUNKS)})
    with EngineApi(f"unix://{services['kv-server']['url']}") as server:
        assert eventually(lambda: len(server.known_engines()) == 2)
    engines.ask("producer-0", "other " * 700)  # no step of which fits
    asked: list[str] = []
    loaded: list[int] = []

    def use_the_server() -> None:
        """Have it look up, load from Redis, store and evict; panels show the last minute."""
        asked.append(prompt(f"asked {len(asked)}"))
        engines.ask("front", asked[-1])
        # For the long ones there is no room. What the engine asks before it learns of the server it
        # computes, and never asks for again.
        for one in (short, long):
            if one:
                loaded.append(engines.ask_counting("consumer-0", one.pop())[1])

    with prometheus_of(PORT) as prometheus:

        def empty() -> set[tuple[str, str, str]]:
            use_the_server()
            return without_data(prometheus, NAME, ("kv-server",))

        def done() -> bool:
            return not empty() and any(loaded) and not not_on_page()

        assert eventually(done, every_s=2), (empty(), loaded, not_on_page())
        firing = f'ALERTS{{stack="{NAME}",alertname="PdkitLmcacheServerFull",alertstate="firing"}}'
        assert eventually(lambda: found(prometheus, NAME, firing), every_s=1)
        assert found(prometheus, NAME, f'up{{stack="{NAME}",job="kv-server"}}') == [1]
    assert not not_on_page()


def not_on_page() -> set[str]:
    """Return the metrics on record that the server's page does not have yet."""
    page = httpx.get(f"http://127.0.0.1:{METRICS}/metrics", trust_env=False, timeout=60).text
    # LMCache's histograms are of a sample, and may be empty.
    names = {name for name in names_on(page) if not name.endswith(("_bucket", "_count", "_sum"))}
    return recorded("kv-server", names) - names
