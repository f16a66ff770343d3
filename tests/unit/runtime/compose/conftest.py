"""A Docker engine of pretence: its containers, networks and images, as the client shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from docker.errors import APIError, ImageNotFound, NotFound

from deploy.runtime.compose import docker as docker_module
from deploy.runtime.compose import images as images_module
from deploy.runtime.compose import launcher as launcher_module

_REAL = (docker_module.docker_client, docker_module.answering_engine)


@dataclass
class FakeContainer:
    """One container; what is done to it is noted in `done`."""

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

    @property
    def attrs(self) -> dict[str, Any]:
        usual = {
            "Running": True, "Status": "running", "ExitCode": 0, "OOMKilled": False, "Error": "",
            "Pid": 4711, "StartedAt": "2026-01-01T00:00:00.123456789Z",
        }  # fmt: skip
        return {
            "State": {**usual, **self.state},
            "Config": {"Env": self.env},
            "RestartCount": self.restarts,
        }

    def reload(self) -> None:
        if self.removed:
            raise NotFound("no such container")

    def start(self) -> None:
        self.done.append("start")
        if self.refuses:
            raise APIError("500 Server Error", explanation=self.refuses)

    def stop(self, timeout: int) -> None:
        self.done.append(("stop", timeout))

    def remove(self, **options: Any) -> None:
        self.done.append(("remove", options))
        self.removed = True

    def update(self, restart_policy: dict[str, str]) -> None:
        self.done.append(("restart", restart_policy["Name"]))

    def logs(self, **_: Any) -> bytes:
        return self.log

    def stats(self, **_: Any) -> dict[str, Any]:
        self.reload()
        return {"memory_stats": self.memory}


@dataclass
class FakeNetwork:
    """Or a volume."""

    name: str
    labels: dict[str, str]
    removed: bool = False

    def remove(self) -> None:
        self.removed = True


@dataclass
class FakeImage:
    attrs: dict[str, Any]


@dataclass
class FakeDocker:
    """The client, and the engine behind it."""

    all_containers: list[FakeContainer] = field(default_factory=list)
    all_networks: list[FakeNetwork] = field(default_factory=list)
    all_volumes: list[FakeNetwork] = field(default_factory=list)
    all_images: dict[str, dict[str, Any]] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)

    @property
    def containers(self) -> _Listing:
        return _Listing([one for one in self.all_containers if not one.removed])

    @property
    def networks(self) -> _Listing:
        return _Listing([one for one in self.all_networks if not one.removed])

    @property
    def volumes(self) -> _Listing:
        return _Listing([one for one in self.all_volumes if not one.removed])

    @property
    def images(self) -> FakeDocker:
        return self

    def get(self, reference: str) -> FakeImage:
        if reference not in self.all_images:
            raise ImageNotFound(f"no such image: {reference}")
        return FakeImage(self.all_images[reference])

    def info(self) -> dict[str, Any]:
        return self.told

    def add(self, service: str, *, root: str, project: str = "pdkit", **more: Any) -> FakeContainer:
        labels = {
            "com.docker.compose.project": project,
            "com.docker.compose.service": service,
            "dev.pdkit.root": root,
        }
        made = FakeContainer(f"{project}-{service}-1", labels, **more)
        self.all_containers.append(made)
        return made


@dataclass
class _Listing:
    found: list[Any]

    def list(self, *, filters: dict[str, Any], **_: Any) -> list[Any]:
        wanted = filters["label"]
        pairs = [text.split("=", 1) for text in ([wanted] if isinstance(wanted, str) else wanted)]
        return [one for one in self.found if all(one.labels.get(k) == v for k, v in pairs)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    """An engine that answers, in place of any that is here."""
    fake = FakeDocker()
    for module in (docker_module, images_module, launcher_module):
        monkeypatch.setattr(module, "docker_client", lambda: fake)
    monkeypatch.setattr(docker_module, "answering_engine", lambda: "unix:///fake")
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
    for remembered in _REAL:
        remembered.cache_clear()

    def install(script: str) -> Path:
        file = folder / "docker"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        return file

    yield install
