"""`deploy render -o`: the folder alone is enough for `docker compose`, without pdkit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.runtime.engine_api import EngineApi
from deploy.runtime.secrets import read_secrets
from deploy.stack.layout import ENGINE_KEY
from tests.e2e.docker.conftest import Project, complete, docker, make_project, own_name
from tests.ports import free_row

KEY = "5f" * 32
LONG = "Of all that was written by hand and carried by foot, most is lost. " * 40


@pytest.fixture(scope="module")
def written(
    images: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Project, Path]]:
    """Yield a project, rendered into a folder and started by Compose alone."""
    home = tmp_path_factory.mktemp("home")
    project = make_project(home, own_name("written"), free_row())
    folder = tmp_path_factory.mktemp("written")
    key = tmp_path_factory.mktemp("key") / "api.key"
    key.write_text(KEY + "\n")
    data: Any = project.ok("render", "-o", str(folder), "--api-key-file", str(key))
    document = folder / "compose.yaml"
    assert str(document) in data["files"] and str(document) in data["start"]
    compose = ("compose", "-f", str(document))
    try:
        docker(*compose, "up", "--detach", "--wait")
        yield project, folder
    finally:
        docker(*compose, "down")
        assert project.containers() == {} and project.networks() == []
        project.assert_nothing_left()


def test_a_rendered_stack_serves_with_kv_from_redis(written: tuple[Project, Path]) -> None:
    project, folder = written
    key = read_secrets(folder / "secrets", (ENGINE_KEY,))[ENGINE_KEY]
    with EngineApi(project.url("consumer-0"), api_key=key) as consumer:
        before = consumer.cache_counters()
        assert complete(project.url("router"), LONG, bearer(KEY))
        assert consumer.cache_counters().since(before).external_hits >= 256


def test_a_rendered_stack_asks_clients_for_the_key(written: tuple[Project, Path]) -> None:
    project, folder = written
    url = f"http://127.0.0.1:{project.port}"
    body = {"model": "pdkit-tiny", "prompt": "Hello", "max_tokens": 2}
    for given, code in (({}, 401), (bearer(KEY[:-1] + "0"), 401), (bearer(KEY), 200)):
        answer = httpx.post(
            f"{url}/v1/completions", json=body, headers=given, trust_env=False, timeout=60
        )
        assert answer.status_code == code, answer.text
    closed = httpx.get(f"{url}/workers", headers=bearer(KEY), trust_env=False, timeout=60)
    assert closed.status_code == 404
    shown = (docker("inspect", name) for name in project.ids().values())
    assert not any(KEY in text for text in (*shown, (folder / "compose.yaml").read_text()))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_rendered_stack_is_not_a_started_one(written: tuple[Project, Path]) -> None:
    project, _ = written
    assert "is not up" in project.run("status").stdout
    ran = project.run("up", "--port", str(free_row()))
    assert ran.code == 3 and "belongs to the stack in" in ran.stderr, ran
    assert complete(project.url("router"), "still there?", bearer(KEY))


def test_a_rendered_stack_has_the_password_in_private_files_only(
    written: tuple[Project, Path],
) -> None:
    _, folder = written
    password = (folder / "secrets" / "redis_password").read_text().strip()
    files = [file for file in folder.rglob("*") if file.is_file()]
    holders = [file for file in files if password in file.read_text()]
    assert len(holders) >= 4 and folder / "compose.yaml" not in holders
    assert all(file.stat().st_mode & 0o077 == 0 for file in holders)
