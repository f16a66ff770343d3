"""Requests to the Docker engine, over a real socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import DockerUnavailable
from deploy.runtime import http_client
from deploy.runtime.compose import api
from deploy.runtime.compose.api import DockerRefused, ask_engine, inspect
from deploy.runtime.compose.containers import FoundContainer, find_containers
from deploy.runtime.compose.docker import answering_engine
from tests.unit.docker_stand_in import hanging_engine
from tests.unit.runtime.compose.conftest import FakeDocker


@contextmanager
def serving(
    monkeypatch: pytest.MonkeyPatch, path: Path, status: int = 200, **pages: bytes
) -> Iterator[None]:
    with hanging_engine(path / "s", status, **pages) as address:
        monkeypatch.setenv("DOCKER_HOST", address)
        answering_engine.cache_clear()
        yield
    answering_engine.cache_clear()


def test_what_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serving(monkeypatch, tmp_path, **{"a:1/json": b'{"Id": "x"}', "start": b""}):
        assert inspect("/images/b/a:1") == {"Id": "x"}
        FoundContainer({"Id": "x"}).start()


def test_one_that_is_removed_meanwhile_is_left_out(
    engine: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add("redis", root="/a")
    router = engine.add("router", root="/a")

    def ask(*args: Any, **more: Any) -> tuple[int, bytes]:
        answer = engine.ask(*args, **more)
        router.removed = True
        return answer

    monkeypatch.setattr(http_client, "ask", ask)
    assert [one.service for one in find_containers("dev.pdkit.root=/a")] == ["redis"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"message": "no space left"}', "no space left"),
        (b"<html>bad\n", "<html>bad"),
        (b"[]", "[]"),
    ],
)
def test_a_refusal_has_the_engines_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: bytes, reason: str
) -> None:
    with serving(monkeypatch, tmp_path, 500, json=body), pytest.raises(DockerRefused) as caught:
        inspect("/containers/x")
    assert (caught.value.status, caught.value.reason) == (500, reason)
    assert str(caught.value) == (
        f"the Docker engine refused GET /containers/x/json (500): {reason}"
    )


def test_one_that_does_not_answer_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = r"did not answer GET /networks \(no answer in 0\.2 s\)"
    with serving(monkeypatch, tmp_path), pytest.raises(OSError, match=words):
        ask_engine("GET", "/networks", timeout_s=0.2)


def test_one_that_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang_up(*_: object, **__: object) -> None:
        raise ConnectionError("it hung up")

    monkeypatch.setattr(api, "answering_engine", lambda: "unix:///s")
    monkeypatch.setattr(http_client, "ask", hang_up)
    with pytest.raises(OSError, match=r"did not answer POST /x \(it hung up\)"):
        ask_engine("POST", "/x")


@pytest.mark.parametrize("host", ["tcp://192.0.2.1:2376", "ssh://box"])
def test_another_machines_is_not_asked(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    answering_engine.cache_clear()
    with pytest.raises(DockerUnavailable, match="is on another machine"):
        find_containers("a=b")


@pytest.mark.skipif(os.getuid() == 0, reason="root may use any socket")
def test_a_socket_that_is_not_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        (tmp_path / "s").chmod(0)
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/s")
        answering_engine.cache_clear()
        with pytest.raises(DockerUnavailable, match="permission denied; is this user in the group"):
            find_containers("a=b")
