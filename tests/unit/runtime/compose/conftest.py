"""A Docker engine of pretence: its containers, networks and images, as its API shows them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from deploy.runtime import http_client
from deploy.runtime.compose import api as api_module
from deploy.runtime.compose import docker as docker_module

_REAL = docker_module.answering_engine
Answer = tuple[int, Any]
GONE: Answer = (404, {"message": "no such thing"})


def frame(stream: int, payload: bytes) -> bytes:
    """Return what a container wrote, as the engine sends it."""
    return bytes((stream, 0, 0, 0)) + len(payload).to_bytes(4, "big") + payload


@dataclass
class FakeContainer:
    """One container; what is done to it is noted in `done`, how its log is read in `asked`."""

    name: str
    labels: dict[str, str]
    state: dict[str, Any] = field(default_factory=dict)
    env: list[str] = field(default_factory=list)
    log: bytes = b""
    memory: dict[str, Any] = field(default_factory=dict)
    refuses: str = ""
    restarts: int = 0
    removed: bool = False
    done: list[Any] = field(default_factory=list)
    asked: list[dict[str, str]] = field(default_factory=list)

    @property
    def attrs(self) -> dict[str, Any]:
        usual = {
            "Running": True, "Status": "running", "ExitCode": 0, "OOMKilled": False, "Error": "",
            "Pid": 4711, "StartedAt": "2026-01-01T00:00:00.123456789Z",
        }  # fmt: skip
        return {
            "Id": self.name,
            "Name": f"/{self.name}",
            "State": {**usual, **self.state},
            "Config": {"Env": self.env, "Labels": self.labels},
            "RestartCount": self.restarts,
        }

    def answer(self, request: str, query: dict[str, str], body: Any) -> Answer:
        """Do what is asked of it."""
        if self.removed:
            return GONE
        if request == "POST start":
            self.done.append("start")
            return (500, {"message": self.refuses}) if self.refuses else (204, b"")
        if request == "POST stop":
            self.done.append(("stop", int(query["t"])))
        elif request == "POST update":
            self.done.append(("restart", body["RestartPolicy"]["Name"]))
        elif request == "DELETE":
            self.done.append(("remove", query))
            self.removed = True
        elif request == "GET logs":
            self.asked.append(query)
            return 200, frame(1, self.log)
        answers = {"GET json": self.attrs, "GET stats": {"memory_stats": self.memory}}
        return 200, answers.get(request, b"")


@dataclass
class FakeNetwork:
    """Or a volume."""

    name: str
    labels: dict[str, str]
    removed: bool = False

    @property
    def attrs(self) -> dict[str, Any]:
        return {"Id": self.name, "Name": self.name}


@dataclass
class FakeDocker:
    """The engine."""

    all_containers: list[FakeContainer] = field(default_factory=list)
    all_networks: list[FakeNetwork] = field(default_factory=list)
    all_volumes: list[FakeNetwork] = field(default_factory=list)
    all_images: dict[str, dict[str, Any]] = field(default_factory=dict)

    def ask(
        self, method: str, url: str, path: str, *, body: bytes | None = None, **_: Any
    ) -> tuple[int, bytes]:
        """Answer a request, in place of `http_client.ask`."""
        assert url == "unix:///fake"
        parts = urlsplit(path)
        kind, _, rest = parts.path.lstrip("/").partition("/")
        query = dict(parse_qsl(parts.query))
        status, answer = self._answer(method, kind, rest, query, json.loads(body or b"null"))
        return status, answer if isinstance(answer, bytes) else json.dumps(answer).encode()

    def _answer(
        self, method: str, kind: str, rest: str, query: dict[str, str], body: Any
    ) -> Answer:
        if kind == "images":
            found = self.all_images.get(rest.removesuffix("/json"))
            return (200, found) if found else GONE
        things = {
            "containers": self.all_containers, "networks": self.all_networks,
            "volumes": self.all_volumes,
        }[kind]  # fmt: skip
        there: list[Any] = [one for one in things if not one.removed]
        if "filters" in query:
            wanted = dict(text.split("=", 1) for text in json.loads(query["filters"])["label"])
            listed = [one.attrs for one in there if wanted.items() <= one.labels.items()]
            return 200, {"Volumes": listed or None} if kind == "volumes" else listed
        name, _, action = rest.partition("/")
        one = next((one for one in there if one.name == name), None)
        if one is None:
            return GONE
        if isinstance(one, FakeContainer):
            return one.answer(f"{method} {action}".strip(), query, body)
        one.removed = method == "DELETE"
        return 204, b""

    def add(self, service: str, *, root: str, project: str = "pdkit", **more: Any) -> FakeContainer:
        labels = {
            "com.docker.compose.project": project,
            "com.docker.compose.service": service,
            "dev.pdkit.root": root,
        }
        made = FakeContainer(f"{project}-{service}-1", labels, **more)
        self.all_containers.append(made)
        return made


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    """An engine that answers, in place of any that is here."""
    fake = FakeDocker()
    monkeypatch.setattr(http_client, "ask", fake.ask)
    for module in (docker_module, api_module):
        monkeypatch.setattr(module, "answering_engine", lambda: "unix:///fake")
    return fake


@pytest.fixture
def docker_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Path]]:
    """Put a shell script in the place of the `docker` command; it alone is on PATH.

    A context is chosen, so that the command is asked for the engine's address; no plugin is found.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    monkeypatch.setenv("DOCKER_CONTEXT", "box")
    monkeypatch.setattr(docker_module, "_PLUGIN_FOLDERS", ())
    _REAL.cache_clear()

    def install(script: str) -> Path:
        file = folder / "docker"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        return file

    yield install
