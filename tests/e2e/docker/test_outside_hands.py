"""What others do to a stack's containers: `status` sees it, and `up` or Docker itself fixes it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from deploy.runtime.home import Home
from deploy.runtime.supervisor import end_supervisor, start_supervisor
from tests.e2e.conftest import eventually
from tests.e2e.docker.conftest import (
    REPO,
    SERVICES,
    Project,
    complete,
    docker,
    docker_held,
    failed,
    inspected,
)

DOCKERD_PID = Path("/var/run/docker.pid")
MAY_RESTART_DOCKER = os.environ.get("CI") == "true" or os.environ.get("PDKIT_TEST_DAEMON") == "1"


def conditions(stack: Project) -> dict[str, str]:
    data = stack.run("status", "--json").data
    return {service["name"]: service["condition"] for service in data["services"]}


def is_healthy(stack: Project) -> bool:
    return stack.run("status").code == 0


def test_a_removed_and_a_killed_container_are_started_again(stack: Project) -> None:
    before = stack.ids()
    docker("rm", "--force", before["consumer-0"])
    docker("kill", before["router"])  # to Docker that is a wish, so it starts it no more
    ran = stack.run("status", "--json")
    assert ran.code == 4, ran
    assert "consumer-0" in ran.envelope["errors"][0]["message"]
    assert conditions(stack) == {
        "redis": "ready",
        "producer-0": "ready",
        "consumer-0": "not started",
        "router": "exited",
    }
    error = failed(stack.run("check", "--json"), code=4, name="stack_unhealthy")
    assert "consumer-0" in error["message"] and "producer-0" not in error["message"]
    data = stack.ok("up")
    assert set(data["started"]) == {"consumer-0", "router"}
    assert data["check"]["passed"] and data["check"]["hit_rate"]["eligible_rate"] == 1.0
    after = stack.ids()
    assert {name for name in SERVICES if after[name] == before[name]} == {"redis", "producer-0"}
    assert complete(stack.url("router"), "still there?")


@pytest.mark.quick
def test_an_engine_that_crashes_is_brought_back(stack: Project) -> None:
    """It does so while a check asks it, which says so, as a rule after it was restarted."""
    before = stack.ids()
    pid = int(docker("inspect", "-f", "{{.State.Pid}}", before["producer-0"]))
    with stack.store_held() as check:
        os.kill(pid, signal.SIGKILL)
    ran = stack.kit.ended(check)
    assert ran.code == 1, ran
    (cause,) = ran.data["diagnosis"]
    assert cause["code"] in ("engine_restarted", "engine_died"), cause
    assert "producer-0" in cause["message"]
    assert eventually(lambda: is_healthy(stack), every_s=1)
    assert stack.ids() == before
    restarts = {row["name"]: row["restarts"] for row in stack.ok("status")["services"]}
    assert restarts["producer-0"] == 1 and restarts["redis"] == 0
    assert stack.ok("check", "--quick")["hit_rate"]["eligible_rate"] == 1.0


def test_a_container_that_is_killed_by_docker_comes_back(stack: Project) -> None:
    """Docker takes `docker kill` for a wish; the supervisor does not."""
    before, home = stack.ids(), Home(stack.kit.home, stack.kit.home)
    start_supervisor(home, stack.name, None)
    try:
        for name in ("router", "redis"):
            docker("kill", before[name])
        assert eventually(lambda: is_healthy(stack), every_s=1)
        assert eventually(lambda: stack.run("check", "--quick").code == 0, every_s=1)
    finally:
        end_supervisor(stack.files.supervisor_socket)
    found = stack.ok("status")
    events = [(event["service"], event["kind"]) for event in found["events"]]
    assert {("router", "died"), ("router", "back"), ("redis", "died"), ("redis", "back")} <= {
        *events
    }
    policies = {
        one["HostConfig"]["RestartPolicy"]["Name"] for one in inspected(*stack.ids().values())
    }
    assert policies == {"unless-stopped"}


def test_a_stack_taken_down_by_docker_is_started_again(stack: Project) -> None:
    docker("compose", "-p", stack.project, "-f", str(stack.compose_file), "down")
    assert stack.containers() == {} and stack.networks() == []
    ran = stack.run("status", "--json")
    assert ran.code == 4, ran
    assert set(conditions(stack).values()) == {"not started"}
    data = stack.ok("up")
    assert set(data["started"]) == set(SERVICES)
    assert data["check"]["passed"] and data["check"]["hit_rate"]["eligible_rate"] == 1.0


@pytest.mark.skipif(not MAY_RESTART_DOCKER, reason="restarts Docker: PDKIT_TEST_DAEMON=1 allows it")
def test_the_stack_survives_a_restart_of_docker(stack: Project) -> None:
    before = stack.ids()
    with docker_held():
        daemon = psutil.Process(int(DOCKERD_PID.read_text()))
        daemon.terminate()
        daemon.wait(timeout=60)
        ran = stack.run("status", "--json")
        failed(ran, code=3, name="docker_unavailable")
        subprocess.run((REPO / "scripts" / "docker",), check=True, timeout=120)
    assert eventually(lambda: is_healthy(stack), every_s=1)
    data = stack.ok("up")
    assert data["check"]["passed"] and data["check"]["hit_rate"]["eligible_rate"] == 1.0
    assert stack.ids() == before
    assert complete(stack.url("router"), "still there?")
