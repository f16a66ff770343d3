"""What dies comes back by itself, and what a command restarts is not missed by a client.

The last module of this stack: it replaces processes that others look at.
"""

from __future__ import annotations

import os
import signal
import threading

import httpx
import psutil

from deploy.runtime.home import Home
from deploy.runtime.process.front import ask
from tests.e2e.conftest import Deploy, eventually
from tests.e2e.one_stack.conftest import NAME, PORT

URL = f"http://127.0.0.1:{PORT}/v1/completions"
BODY = {"model": "pdkit-tiny", "prompt": "x" * 700, "max_tokens": 4, "temperature": 0}


def events(kit: Deploy, service: str) -> list[str]:
    # What is just dead makes the command exit with 4.
    found = kit.run("status", "--name", NAME, "--json").data["events"]
    return [event["kind"] for event in found if event["service"] == service]


def answered() -> bool:
    return httpx.post(URL, json=BODY, timeout=120, trust_env=False).status_code == 200


def test_clients_only_wait_if_the_router_is_killed(kit: Deploy) -> None:
    old = kit.pid(NAME, "router")
    os.kill(old, signal.SIGKILL)
    answers: list[bool] = []
    clients = [threading.Thread(target=lambda: answers.append(answered())) for _ in range(8)]
    for client in clients:
        client.start()  # all of them connect; the port is never closed
    for client in clients:
        client.join(180)
    assert answers == [True] * 8
    assert kit.pid(NAME, "router") != old
    assert eventually(lambda: events(kit, "router") == ["died", "back"])


def test_engines_find_the_new_redis_if_the_old_one_is_killed(kit: Deploy) -> None:
    old = kit.pid(NAME, "redis")
    os.kill(old, signal.SIGKILL)
    assert eventually(lambda: events(kit, "redis") == ["died", "back"])
    assert kit.pid(NAME, "redis") != old
    assert answered()
    assert eventually(lambda: kit.run("check", "--quick", "--name", NAME).code == 0)


def test_the_only_consumer_cannot_be_drained(kit: Deploy) -> None:
    for command in ("drain", "restart"):
        ran = kit.run(command, "consumer-0", "--name", NAME)
        assert ran.code == 2, ran
        assert "the only consumer" in ran.stderr and "--force" in ran.stderr
    assert (
        "consumer-0 gets no new requests"
        in kit.run("drain", "consumer-0", "--force", "--name", NAME).stdout
    )
    assert httpx.post(URL, json=BODY, trust_env=False, timeout=60).status_code == 503
    kit.ok("undrain", "consumer-0", "--name", NAME)
    assert eventually(answered)


def test_no_request_fails_if_the_router_is_restarted(kit: Deploy) -> None:
    ended, lost, good = threading.Event(), list[str](), list[int]()

    def client() -> None:
        with httpx.Client(trust_env=False, timeout=120) as http:
            while not ended.wait(0.02):
                try:
                    good.append(http.post(URL, json=BODY).raise_for_status().status_code)
                except httpx.HTTPError as exc:
                    lost.append(repr(exc))

    clients = [threading.Thread(target=client) for _ in range(2)]
    for one in clients:
        one.start()
    assert eventually(lambda: len(good) > 4)
    ran = kit.run("restart", "router", "--name", NAME)
    before = len(good)
    assert eventually(lambda: len(good) > before + 4)
    ended.set()
    for one in clients:
        one.join(120)
    assert ran.code == 0, ran
    assert lost == []


def test_down_ends_the_supervisor_too(kit: Deploy) -> None:
    """That it is gone afterwards, the end of this stack looks at."""
    there = ask(Home(kit.home, kit.home).stack(NAME).supervisor_socket)
    assert there is not None
    assert there.front is not None
    there.front.close()
    assert there.pid in {process.pid for process in kit.processes(NAME)}
    keeper = psutil.Process(there.pid)
    workers = keeper.children()
    assert len(workers) == 1
    assert sum(one.memory_info().rss for one in (keeper, *workers)) < 200 * 2**20
