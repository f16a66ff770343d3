"""The shared stack is swapped to LMCache's server in a container, and back; then it goes down."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import eventually
from tests.e2e.docker.conftest import ENGINES, MODEL, SERVICES, Project, complete, failed
from tests.e2e.docker.test_isolation import is_bare

SERVER = "kv-server"
CHUNK = 256
# Docker's resolver of names, which is in every container of a network, as the kernel writes it.
RESOLVER = "0B00007F:"
LISTENING = "0A"


@pytest.fixture(scope="module")
def swapped(stack: Project) -> Any:
    """Let engines share KV through LMCache's server."""
    before = stack.ids()
    there = stack.ok("swap", "--connector", "lmcache-mp")
    after = stack.ids()
    assert set(after) == {*SERVICES, SERVER}
    assert after["redis"] == before["redis"]
    return there


def row(stack: Project) -> Any:
    """Return what `status` says of the server."""
    return next(one for one in stack.ok("status")["services"] if one["name"] == SERVER)


def stored(stack: Project, word: str) -> list[int]:
    """Have the producer store a prompt of three chunks; return it when Redis has them."""
    keys = int(stack.redis("DBSIZE")[0])
    with stack.api("producer-0") as producer:
        prompt = producer.tokenize(MODEL, f"{time.time_ns()} {word} " * 60)[: 3 * CHUNK + 1]
        producer.complete(MODEL, prompt, max_tokens=1)
    assert eventually(lambda: int(stack.redis("DBSIZE")[0]) >= keys + 3)
    return prompt


def loaded(stack: Project, prompt: list[int]) -> int:
    """Return how many tokens of a prompt the consumer loads."""
    with stack.api("consumer-0") as consumer:
        before = consumer.cache_counters()
        consumer.complete(MODEL, prompt, max_tokens=1)
        return consumer.cache_counters().since(before).external_hits


def test_every_eligible_token_is_loaded(stack: Project, swapped: Any) -> None:
    assert swapped["connectors"] == ["lmcache", "lmcache-mp"]
    assert swapped["check"]["hit_rate"]["eligible_rate"] == 1.0
    check = stack.ok("check")
    assert check["hit_rate"]["eligible_rate"] == 1.0
    assert check["hit_rate"]["hits"] == check["hit_rate"]["eligible"] > 1000
    assert check["equivalence"]["compared"] > 0
    assert check["equivalence"]["mismatched"] == 0
    assert check["second_tier"]["hits"] == check["second_tier"]["eligible"] > 0
    assert check["store_path"]["refused"] == 0


def test_status_and_logs_show_it_as_any_service(stack: Project, swapped: Any) -> None:
    status = stack.ok("status")
    assert status["healthy"]
    assert row(stack)["condition"] == "ready"
    assert status["kv_server"]["found_tokens"] > 0
    assert stack.run("logs", SERVER, "-n", "5").stdout.strip()


def test_the_server_has_no_port_and_no_capabilities(stack: Project, swapped: Any) -> None:
    container = stack.containers()[SERVER]
    assert not any(container["NetworkSettings"]["Ports"].values())
    assert container["HostConfig"]["IpcMode"] == "private"
    table = stack.execute(SERVER, "cat", "/proc/net/tcp", "/proc/net/tcp6").stdout.splitlines()
    sockets = [line.split() for line in table]
    listening = [one[1] for one in sockets if one[3] == LISTENING]
    assert [one for one in listening if not one.startswith(RESOLVER)] == []
    assert eventually(lambda: all(map(is_bare, stack.pids(SERVER))))
    held = stack.execute("producer-0", "sh", "-c", "ls /dev/shm; ls /run/pdkit-kv")
    assert held.returncode != 0, "no engine has the folder of its pages"
    assert "kv.sock" in held.stdout
    assert {"pdkit-producer-0-0", "pdkit-consumer-0-0"} <= {
        name.rpartition("-")[0] for name in held.stdout.split()
    }


def test_a_killed_server_is_restarted_and_found_again(stack: Project, swapped: Any) -> None:
    prompt = stored(stack, "kept")
    before = stack.containers()[SERVER]
    # Not by Docker, which would take it for a stop.
    (server,) = psutil.Process(before["State"]["Pid"]).children()
    server.kill()
    assert complete(stack.url("router"), "served meanwhile?")
    # The command itself fails as long as the server is not back.
    assert eventually(lambda: stack.run("status", "--json").data["healthy"], every_s=1)
    after = stack.containers()[SERVER]
    assert (after["Id"], after["RestartCount"]) == (before["Id"], before["RestartCount"] + 1)
    assert all(stack.containers()[one]["RestartCount"] == 0 for one in ENGINES)
    assert eventually(lambda: stack.run("check", "--quick").code == 0, every_s=1)
    assert loaded(stack, prompt) == 3 * CHUNK, "from Redis: its memory was empty"
    assert stack.ok("check")["hit_rate"]["eligible_rate"] == 1.0


def test_a_swap_back_leaves_no_server(stack: Project, swapped: Any) -> None:
    redis = stack.ids()["redis"]
    back = stack.ok("swap", "--connector", "lmcache")
    assert back["connectors"] == ["lmcache-mp", "lmcache"]
    assert back["check"]["hit_rate"]["eligible_rate"] == 1.0
    assert set(stack.ids()) == set(SERVICES)
    assert stack.ids()["redis"] == redis
    assert stack.ok("status")["kv_server"] is None


def test_down_leaves_nothing(stack: Project) -> None:
    """Nor the memory that engines and server shared."""
    data = stack.ok("down")
    assert data["was_up"] and set(data["stopped"]) == set(SERVICES)
    stack.assert_nothing_left()
    again = stack.run("down")
    assert again.code == 0 and "was not up" in again.stdout, again
    assert "is not up" in stack.run("status").stdout
    failed(stack.run("swap", "--connector", "lmcache-mp", "--json"), code=2, name="state")
