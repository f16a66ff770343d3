"""Starts that cannot succeed: each says why, with an exit code of its own, and leaves nothing."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Deploy, eventually
from tests.e2e.docker.conftest import (
    BASE,
    BROKEN,
    ENGINES,
    Project,
    docker,
    failed,
    make_project,
    own_name,
    taken_down,
    write_settings,
)
from tests.ports import free_row, taken

NO_ENGINE = {"DOCKER_HOST": "unix:///nonexistent.sock"}


@pytest.fixture
def own(images: None, tmp_path: Path) -> Iterator[Project]:
    """Return a project of the test's own, which is not up."""
    with taken_down(make_project(tmp_path, own_name("refused"), free_row())) as made:
        yield made


def refused(own: Project, *options: str, code: int, name: str, logs: bool = False) -> Any:
    """Run `up`, expect it to fail and to leave nothing, and return its error."""
    error = failed(own.run("up", *options, "--json"), code=code, name=name)
    own.assert_nothing_left(logs=logs)
    return error


def with_env(project: Project, **env: str) -> Project:
    kit = Deploy(project.kit.home, {**project.kit.env, **env})
    return Project(kit, project.name, project.port)


def fake_docker(folder: Path, answer: str) -> str:
    """Return a PATH whose `docker compose version` gives an answer of ours."""
    folder.mkdir()
    real = shutil.which("docker")
    (folder / "docker").write_text(
        f'#!/bin/sh\nif [ "$1 $2" = "compose version" ]; then {answer}; fi\nexec {real} "$@"\n'
    )
    (folder / "docker").chmod(0o755)
    return f"{folder}:{Deploy(folder).environ()['PATH']}"


class TestImages:
    def test_an_engine_image_that_cannot_be_pulled_is_an_error(self, own: Project) -> None:
        error = refused(own, "--image", "pdkit-e2e/nosuch:1", code=3, name="missing_image")
        assert "pdkit-e2e/nosuch:1 is not on this machine" in error["message"]

    def test_a_redis_image_that_cannot_be_pulled_is_an_error(self, own: Project) -> None:
        write_settings(own.kit.home, own.name, own.port, redis={"image": "pdkit-e2e/redis:1"})
        error = refused(own, code=3, name="missing_image")
        assert "pdkit-e2e/redis:1 is not on this machine" in error["message"]


class TestPorts:
    def test_a_port_taken_by_a_program_is_an_error(self, own: Project) -> None:
        with taken(own.port + 10):
            error = failed(own.run("up", "--json"), code=3, name="port_taken")
        assert f"port {own.port + 10} (for producer-0) is taken" in error["message"]
        own.assert_nothing_left()

    def test_a_port_taken_by_a_container_is_an_error(self, own: Project) -> None:
        port = f"127.0.0.1:{own.port}:80"
        other = docker("run", "-d", "--rm", "-p", port, BASE, "sleep", "60").strip()
        try:
            error = failed(own.run("up", "--json"), code=3, name="port_taken")
        finally:
            docker("rm", "-f", other)
        assert f"port {own.port} (for router) is taken" in error["message"]
        own.assert_nothing_left()


class TestDocker:
    def test_a_missing_docker_engine_is_an_error(self, own: Project) -> None:
        error = refused(with_env(own, **NO_ENGINE), code=3, name="docker_unavailable")
        assert "/nonexistent.sock" in error["message"] and "--runtime process" in error["hint"]

    def test_a_stack_survives_commands_that_cannot_reach_docker(self, stack: Project) -> None:
        """Nothing is said of containers that cannot be seen, and nothing is forgotten."""
        blind = with_env(stack, **NO_ENGINE)
        for command in ("status", "check", "down", "up", "logs"):
            failed(blind.run(command, "--json"), code=3, name="docker_unavailable")
        assert stack.ok("status")["healthy"]

    def test_an_old_compose_plugin_is_an_error(self, own: Project, tmp_path: Path) -> None:
        old = with_env(own, PATH=fake_docker(tmp_path / "old", "echo 2.19.1; exit"))
        error = refused(old, code=3, name="docker_unavailable")
        assert "2.19.1" in error["message"] and "2.20" in error["message"]
        new = with_env(own, PATH=fake_docker(tmp_path / "new", "echo v2.99.0; exit"))
        assert new.run("up", "--dry-run").code == 0

    def test_a_missing_compose_plugin_is_an_error(self, own: Project, tmp_path: Path) -> None:
        none = with_env(own, PATH=fake_docker(tmp_path / "none", "echo unknown >&2; exit 1"))
        error = refused(none, code=3, name="docker_unavailable")
        assert "not installed" in error["message"] and "2.20" in error["message"]


class TestEnginesThatDie:
    def test_an_engine_killed_for_memory_is_named(self, own: Project) -> None:
        write_settings(own.kit.home, own.name, own.port, engine={"memory_gib": 0.25})
        error = refused(own, code=4, name="out_of_memory", logs=True)
        assert "its memory ran out" in error["message"]
        assert "engine.memory_gib" in error["hint"]

    def test_an_engine_that_lacks_memory_is_named(self, own: Project) -> None:
        engine = {"memory_gib": 2, "kv_cache_gib": 2}
        write_settings(own.kit.home, own.name, own.port, topology="1a", engine=engine)
        error = refused(own, code=4, name="out_of_memory", logs=True)
        assert "engine.memory_gib" in error["hint"]
        assert "Available memory" in error["message"] and "2.0 GiB" in error["message"]

    def test_an_engine_that_dies_at_its_start_is_named_with_its_log(self, own: Project) -> None:
        error = refused(own, "--image", BROKEN, code=4, name="stack_unhealthy", logs=True)
        assert "died while starting (exit code 1)" in error["message"]
        assert "ImportError" in error["message"]
        log = Path(error["message"].rsplit("log: ", 1)[1])
        assert error["details"] and error["details"][-1] in log.read_text()
        engine = log.stem
        assert engine in ENGINES
        shown = own.run("logs", engine, "-n", "100")
        assert shown.code == 0 and "ImportError" in shown.stdout, shown
        assert own.run("down").code == 0
        assert not log.exists()


class TestInterrupted:
    def half_started(self, own: Project) -> subprocess.Popen[str]:
        process = own.kit.start("up")
        assert eventually(lambda: set(ENGINES) <= own.containers().keys())
        return process

    def test_ctrl_c_stops_what_was_started(self, own: Project) -> None:
        process = self.half_started(own)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 130 and stdout == "", stderr
        assert "interrupted" in stderr
        own.assert_nothing_left(logs=True)

    def test_killed_start_is_cleaned_up_by_down(self, own: Project) -> None:
        process = self.half_started(own)
        process.kill()
        process.communicate()
        assert own.containers()
        assert own.run("down").code == 0
        own.assert_nothing_left()


def test_a_stack_of_the_same_name_from_another_home_is_refused(
    stack: Project, tmp_path: Path
) -> None:
    other = make_project(tmp_path, stack.name, free_row())
    before = stack.ids()
    error = failed(other.run("up", "--json"), code=3, name="machine")
    assert str(stack.files.root) in error["message"] and "--name" in error["hint"]
    assert "is not up" in other.run("status").stdout
    assert other.run("down").code == 0
    assert stack.ids() == before and stack.ok("status")["healthy"]
