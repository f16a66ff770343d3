"""`deploy doctor` where stacks are containers: real images, and Docker really missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Deploy
from tests.e2e.docker.conftest import UNTESTED, Project, make_project, own_name, write_settings
from tests.e2e.test_doctor import finding, statuses
from tests.ports import free_row


@pytest.fixture
def own(images: None, tmp_path: Path) -> Project:
    return make_project(tmp_path, own_name("doctor"), free_row())


def with_env(project: Project, **env: str) -> Project:
    kit = Deploy(project.kit.home, {**project.kit.env, **env})
    return Project(kit, project.name, project.port)


def test_nothing_fails_where_the_images_are_here(own: Project) -> None:
    ran = own.run("doctor", "--json")
    assert ran.code == 0, ran
    found = statuses(ran)
    assert set(found.values()) <= {"ok", "warn"}, ran
    for name in ("docker.engine", "docker.images", "engine.versions", "engine.plug_ins",
                 "engine.fixes", "ports.free"):  # fmt: skip
        assert found[name] == "ok", ran
    assert "starts containers" in finding(ran, "docker.engine")["message"]
    assert "trying the connector's fixes" not in own.run("doctor").stderr, "once is enough"
    own.assert_nothing_left()


def test_an_image_that_is_missing_is_named_with_the_command_that_gets_it(own: Project) -> None:
    write_settings(own.kit.home, own.name, own.port, redis={"image": "pdkit-e2e/redis:1"})
    ran = own.run("doctor", "--json")
    found = finding(ran, "docker.images")
    assert (ran.code, found["status"]) == (0, "warn"), ran
    assert found["fix"] == "docker pull pdkit-e2e/redis:1"


def test_an_image_with_untested_versions_is_reported(own: Project) -> None:
    ran = own.run("doctor", "--image", UNTESTED, "--json")
    assert ran.code == 2, ran
    found = finding(ran, "engine.versions")
    assert found["status"] == "fail" and "vLLM 0.99 with LMCache 0.1" in found["message"]


def test_a_dead_docker_engine_is_reported_as_up_reports_it(own: Project) -> None:
    dead = with_env(own, DOCKER_HOST="unix:///nonexistent.sock")
    ran, up = dead.run("doctor", "--json"), dead.run("up", "--json")
    assert (ran.code, up.code) == (3, 3), ran
    found = finding(ran, "docker.engine")
    assert found["message"] == up.envelope["errors"][0]["message"]
    assert statuses(ran)["ports.free"] == "ok", "the rest is looked at"
    auto = with_env(dead, PDKIT_RUNTIME="auto").run("doctor", "--json")
    assert auto.data["runtime"] == "process"
    assert finding(auto, "docker.engine")["status"] == "warn"
