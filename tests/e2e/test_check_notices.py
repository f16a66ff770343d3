"""The negative side of `check`: each way to break a real stack makes it fail and name the cause."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis

from deploy.runtime.home import Home
from deploy.runtime.process.launcher import ProcessLauncher
from deploy.runtime.readiness import wait_ready
from deploy.runtime.state import ServiceRecord, StackState, write_state
from deploy.workflows.running import RunningStack, require_stack, service_is_ready
from tests.e2e.conftest import Deploy, Ran, free_base, is_free, running_stack
from tests.e2e.store_vandals import meanwhile, spoiling

NAME = "broken"
PORT = free_base(19000)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Deploy:
    return Deploy(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module", autouse=True)
def healthy_stack(kit: Deploy) -> Iterator[None]:
    with running_stack(kit, NAME, PORT) as data:
        assert data["check"]["passed"]
        yield


def failed_check(kit: Deploy) -> Any:
    """Run the check, expect it to fail in both forms, and return its data."""
    ran: Ran = kit.run("check", "--name", NAME, "--json")
    assert ran.code == 1, ran
    envelope = ran.envelope
    assert envelope["status"] == "error" and envelope["errors"][0]["code"] == "check_failed"
    assert envelope["data"]["passed"] is False
    assert envelope["data"]["failures"]
    return envelope["data"]


def causes(data: Any) -> list[str]:
    return [cause["code"] for cause in data["diagnosis"]]


def restart(kit: Deploy, service: str, env: dict[str, str]) -> None:
    """End a service of the stack and start it with another environment, as an operator might."""
    running: RunningStack = require_stack(Home(kit.home, kit.home / "cache"), NAME)
    launcher: ProcessLauncher = running.launcher
    record: ServiceRecord = running.state.services[service]
    launcher.stop({service: record}, grace_s=10)
    changed = replace(
        running.stack.service(service), env={**running.stack.service(service).env, **env}
    )
    launched = launcher.start(changed, running.secrets, starts=record.starts + 1)
    state: StackState = running.state.with_service(launched.record)
    write_state(Home(kit.home, kit.home).stack(NAME).state_file, state)
    wait_ready(
        {service: (changed, launched)},
        lambda s: service_is_ready(s, launcher, None),
        lambda _: None,
        launcher,
        only={service},
    )


def test_redis_flushed_between_the_phases(kit: Deploy) -> None:
    store = kit.redis(NAME, PORT)
    with meanwhile(lambda: store.flushall() if store.dbsize() else None):
        data = failed_check(kit)
    assert causes(data)[0] == "keys_lost"
    assert "flushed" in data["diagnosis"][0]["message"]
    assert data["hit_rate"]["hits"] < data["hit_rate"]["eligible"]


def test_wrong_kv_in_redis(kit: Deploy) -> None:
    """Values are replaced by noise as they arrive: none is used, and the check says so."""
    store = kit.redis(NAME, PORT)
    store.flushall()
    with meanwhile(spoiling(store)) as spoiled:
        data = failed_check(kit)
    assert spoiled
    assert data["equivalence"]["mismatched"] == 0
    assert causes(data) == ["values_refused"]
    assert data["store_path"]["refused"] > 0


def test_redis_gone(kit: Deploy) -> None:
    store = kit.redis(NAME, PORT)
    with pytest.raises(redis.ConnectionError):
        store.execute_command("SHUTDOWN", "NOSAVE")
    try:
        ran = kit.run("check", "--name", NAME)
        assert ran.code == 4, ran
        assert "redis" in ran.stderr and f"deploy up --resume --name {NAME}" in ran.stderr
        status = kit.run("status", "--name", NAME, "--json")
        assert status.code == 4
        states = {s["name"]: s["condition"] for s in status.data["services"]}
        assert states["redis"] == "exited" and states["producer-0"] == "ready"
    finally:
        repaired = kit.run("up", "--name", NAME, "--port", str(PORT), "--json")
    assert repaired.code == 0, repaired
    assert list(repaired.data["started"]) == ["redis"]
    assert repaired.data["check"]["passed"]


def test_hash_seed_differs_and_mover_disabled(kit: Deploy) -> None:
    """Either is mended by a start without it; `check` passes at the end."""
    restart(kit, "consumer-0", {"PYTHONHASHSEED": "7"})
    try:
        data = failed_check(kit)
        assert causes(data)[0] == "hash_seed_differs"
        assert data["hit_rate"]["hits"] == 0
        restart(kit, "consumer-0", {"PDKIT_DISABLE_FIXES": "B17"})
        data = failed_check(kit)
        assert causes(data)[0] == "fix_not_applied"
        message = data["diagnosis"][0]["message"]
        assert "B17" in message and "consumer-0" in message and "producer-0" not in message
        assert data["hit_rate"]["hits"] == 0
        text = kit.run("check", "--name", NAME)
        assert text.code == 1 and "B17" in text.stdout
    finally:
        restart(kit, "consumer-0", {})
    assert kit.ok("check", "--name", NAME)["passed"]


def test_a_consumer_that_was_killed(kit: Deploy) -> None:
    """The engine's helpers are ended with it when the stack goes, though their parent is dead."""
    os.kill(kit.pid(NAME, "consumer-0"), 9)
    ran = kit.run("check", "--name", NAME, "--json")
    assert ran.code == 4, ran
    assert "consumer-0" in json.dumps(ran.envelope["errors"])


def test_state_that_was_deleted(kit: Deploy) -> None:
    """The router writes a title over its environment, and is found all the same."""
    shutil.rmtree(kit.home / "stacks" / NAME)
    assert kit.run("status", "--name", NAME).stdout.startswith(f"the stack '{NAME}' is not up")
    assert not is_free(PORT)
    assert kit.run("down", "--name", NAME).code == 0
    kit.assert_nothing_left(NAME, PORT)
