"""Containers, as the Docker engine tells of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from deploy.errors import MachineError
from deploy.runtime.compose.api import ask_engine, inspect

_STOP_MARGIN_S = 60


@dataclass(frozen=True)
class FoundContainer:
    """A container, as it was when the engine was asked.

    Its methods raise OSError if the engine does not answer, DockerRefused if it refuses.

    Attributes:
        attrs: what `docker inspect` shows.
    """

    attrs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name, without the engine's slash."""
        return str(self.attrs["Name"]).lstrip("/")

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels; those of its image among them."""
        return self.attrs["Config"].get("Labels") or {}

    @property
    def service(self) -> str:
        """The service of the Compose project."""
        return self.labels["com.docker.compose.service"]

    @property
    def state(self) -> Mapping[str, Any]:
        """Whether it runs, and how it ended."""
        found: Mapping[str, Any] = self.attrs["State"]
        return found

    @property
    def running(self) -> bool:
        """Whether its first process runs."""
        return bool(self.state["Running"])

    def now(self) -> FoundContainer | None:
        """Return the container as it is now; None if it was removed."""
        found = inspect(self._path)
        return FoundContainer(found) if found else None

    def start(self) -> None:
        """Start it."""
        ask_engine("POST", f"{self._path}/start")

    def stop(self, timeout_s: int) -> None:
        """Stop it, after `timeout_s` by force."""
        limit_s = timeout_s + _STOP_MARGIN_S
        ask_engine("POST", f"{self._path}/stop", timeout_s=limit_s, t=timeout_s)

    def remove(self) -> None:
        """Remove it with its nameless volumes, even if it runs."""
        ask_engine("DELETE", self._path, force=1, v=1)

    def set_restart(self, policy: Literal["no", "unless-stopped"]) -> None:
        """Set whether Docker starts it again when it ends."""
        ask_engine("POST", f"{self._path}/update", {"RestartPolicy": {"Name": policy}})

    def log(self, **query: Any) -> str:
        """Return its log; `query` has the `tail`, or the seconds `since` and `until`."""
        answer = ask_engine("GET", f"{self._path}/logs", stdout=1, stderr=1, **query)
        return _payload(answer).decode("utf-8", "replace")

    def memory(self) -> Mapping[str, Any]:
        """Return the memory of its processes, in bytes."""
        answer = ask_engine("GET", f"{self._path}/stats", **{"stream": 0, "one-shot": 1})
        found: Mapping[str, Any] = json.loads(answer).get("memory_stats") or {}
        return found

    def run(self, argv: Sequence[str]) -> bytes:
        """Run a command in it and return its stdout."""
        wanted = {"AttachStdout": True, "Cmd": list(argv)}
        begun = json.loads(ask_engine("POST", f"{self._path}/exec", wanted))["Id"]
        return _payload(ask_engine("POST", f"/exec/{begun}/start", {"Detach": False}))

    @property
    def _path(self) -> str:
        return f"/containers/{self.attrs['Id']}"


def find_containers(*labels: str) -> list[FoundContainer]:
    """Return the containers that have all of the labels, also those that do not run."""
    filters = json.dumps({"label": labels})
    listed = json.loads(ask_engine("GET", "/containers/json", all=1, filters=filters))
    found = (inspect(f"/containers/{one['Id']}") for one in listed)
    return [FoundContainer(attrs) for attrs in found if attrs]  # others were removed meanwhile


def end_containers(containers: list[FoundContainer], grace_s: float) -> None:
    """Stop containers together, then remove them.

    Raises:
        MachineError: Docker could not remove one.
    """

    def end(container: FoundContainer) -> None:
        with contextlib.suppress(OSError):
            container.set_restart("no")
            container.stop(max(1, round(grace_s)))
        with contextlib.suppress(OSError):
            container.remove()

    with ThreadPoolExecutor(max_workers=max(1, len(containers))) as pool:
        list(pool.map(end, containers))
    left = [container.name for container in containers if container.now() is not None]
    if left:
        raise MachineError(
            f"Docker could not remove {', '.join(left)}; their ports and GPUs may be in use",
            hint=f"docker rm -f {' '.join(left)}, else restart Docker; then deploy down again",
        )


def remove_networks_and_volumes(label: str) -> None:
    """Remove those that have a label, as far as they are not in use."""
    filters = json.dumps({"label": [label]})
    networks = json.loads(ask_engine("GET", "/networks", filters=filters))
    volumes = json.loads(ask_engine("GET", "/volumes", filters=filters))["Volumes"] or ()
    paths = [f"/networks/{one['Id']}" for one in networks]
    paths += [f"/volumes/{one['Name']}" for one in volumes]
    for path in paths:
        with contextlib.suppress(OSError):
            ask_engine("DELETE", path)


def _payload(frames: bytes) -> bytes:
    """Return the payload of the engine's frames: 8 bytes of head, the last 4 its size."""
    found, at = [], 0
    while at < len(frames):
        ends = at + 8 + int.from_bytes(frames[at + 4 : at + 8], "big")
        found.append(frames[at + 8 : ends])
        at = ends
    return b"".join(found)
