"""Run each service of a stack as a container of one Compose project."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from deploy.errors import MachineError, OutOfMemory, StackUnhealthy
from deploy.runtime.compose.api import DockerRefused
from deploy.runtime.compose.container_store import ContainerStore, open_container_store
from deploy.runtime.compose.containers import (
    FoundContainer,
    end_containers,
    find_containers,
    remove_networks_and_volumes,
)
from deploy.runtime.compose.docker import run_docker
from deploy.runtime.compose.project import COMPOSE_FILE, write_project
from deploy.runtime.compose.refusals import describe_end, of_another, refusal
from deploy.runtime.home import StackHome, write_private
from deploy.runtime.launcher import (
    LOG_TAIL,
    NO_RECORDS,
    ServiceState,
    Started,
    remove_files,
)
from deploy.runtime.logs import first_error, last_lines, plain
from deploy.runtime.secrets import Secret
from deploy.runtime.state import ServiceRecord
from deploy.stack.compose import LABEL, project_name
from deploy.stack.service import Service, Stack

_CREATE_TIMEOUT_S = 300
_NO_MEMORY = "Available memory on node"


@dataclass(frozen=True)
class StartedContainer:
    """A container that this command started. It is not restarted if it dies during the start."""

    record: ServiceRecord
    started_monotonic: float
    container: FoundContainer

    @property
    def ended(self) -> str | None:
        found = self.container.now()
        if found is None:
            return "removed by another program"
        if found.running or found.state["Status"] == "created":
            return None
        return describe_end(found.state)


class ComposeLauncher:
    """Starts, finds and ends the containers of one stack."""

    poll_s = 2.0  # Docker is asked by HTTP

    def __init__(
        self, name: str, home: StackHome, seen: Mapping[str, FoundContainer] | None = None
    ) -> None:
        self._name = name
        self._home = home
        self._file = home.root / COMPOSE_FILE
        self._root = str(home.root)
        self._seen = seen

    def at_once(self) -> ComposeLauncher:
        """Return a launcher that knows of containers what Docker says now, asked once for all."""
        seen = {one.service: one for one in self._containers()}
        return ComposeLauncher(self._name, self._home, seen)

    def prepare(self, stack: Stack, secrets: Mapping[str, Secret], *, stop_s: float) -> None:
        """Write the project's file, and the files that its containers see.

        Raises:
            MachineError: a project of its name is another folder's.
        """
        self.require_own_name()
        write_project(stack, self._home, secrets, stop_s=stop_s)

    def start(
        self,
        service: Service,
        secrets: Mapping[str, Secret],  # noqa: ARG002 - `prepare` wrote them into files
        *,
        starts: int = 1,
    ) -> StartedContainer:
        """Create the service's container, anew if it has changed, and start it.

        Raises:
            MissingImage, MissingGpus, PortTaken, MachineError: Docker refuses.
        """
        self._compose("up", "--no-start", "--no-deps", "--no-build", service.name)
        container = self._require(service.name)
        # A container that dies while it starts must stay dead, so that its exit code can be read.
        container.set_restart("no")
        began = time.monotonic()
        self._run(service, container)
        record = ServiceRecord(service.name, starts=starts)
        return StartedContainer(record, began, container)

    def keep_up(self, records: Mapping[str, ServiceRecord]) -> None:
        for name in records:
            container = self._find(name)
            if container is not None:
                container.set_restart("unless-stopped")

    def take_front(self) -> None:
        """Return nothing: Docker's own proxy holds the port."""

    def holds(self, service: Service) -> bool:  # noqa: ARG002
        return False

    def died(self, started: Started) -> StackUnhealthy:
        """Return the error for a container that ended during the start; its log is kept."""
        name = started.record.name
        container = self._find(name)
        self._keep_log(name)
        lines = self.log_lines(name)
        cause = first_error(lines)
        killed = container is not None and container.state["OOMKilled"]
        # vLLM checks the free memory first, and exits by itself.
        short = killed or _NO_MEMORY in cause
        kind = OutOfMemory if short else StackUnhealthy
        return kind(
            f"{name} died while starting ({started.ended}){f', {cause}' if cause else ''}; "
            f"log: {self.log_path(name)}",
            hint="raise engine.memory_gib in deploy.yaml, or lower engine.kv_cache_gib"
            if short
            else f"less {self.log_path(name)}",
            details=lines[-LOG_TAIL:],
        )

    def state(self, record: ServiceRecord | None) -> ServiceState:
        if (container := self._find(record.name) if record else None) is None:
            return "not started"
        return "running" if container.running else "exited"

    def pid(self, record: ServiceRecord) -> int:
        container = self._find(record.name)
        return int(container.state["Pid"]) if container else 0

    def uptime_s(self, record: ServiceRecord) -> float:
        if (container := self._running(record.name)) is None:
            return 0.0
        # Docker writes up to nine decimals, which older Pythons cannot parse.
        text = container.state["StartedAt"].partition(".")[0].rstrip("Z")
        started = datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
        return (datetime.now(timezone.utc) - started).total_seconds()

    def restarts(self, record: ServiceRecord) -> int:
        container = self._find(record.name)
        return record.starts - 1 + int(container.attrs["RestartCount"] if container else 0)

    def resident_mib(self, record: ServiceRecord) -> int:
        """Return the memory of the container's processes, without droppable file pages."""
        if (container := self._find(record.name)) is None:
            return 0
        memory: Mapping[str, Any] = {}
        with contextlib.suppress(OSError):  # it went meanwhile
            memory = container.memory()
        details = memory.get("stats", {})
        droppable = details.get("total_inactive_file", details.get("inactive_file", 0))
        return int(memory.get("usage", 0) - droppable) // 2**20

    def environment(self, record: ServiceRecord) -> Mapping[str, str]:
        if (container := self._running(record.name)) is None:
            return {}
        pairs = (text.partition("=") for text in container.attrs["Config"]["Env"])
        return {name: value for name, _, value in pairs}

    def arguments(self, record: ServiceRecord) -> tuple[str, ...]:
        if (container := self._running(record.name)) is None:
            return ()
        return (container.attrs["Path"], *container.attrs["Args"])

    def open_store(
        self,
        redis: Service,
        password: Secret | None,  # noqa: ARG002 - read from its file inside the container
    ) -> AbstractContextManager[ContainerStore]:
        return open_container_store(self._running(redis.name))

    def log_path(self, name: str) -> Path:
        """Return where the log of a container that was removed is kept."""
        return self._home.logs_dir / f"{name}.log"

    def where_log(self, name: str) -> str:
        container = self._find(name)
        return f"docker logs {container.name}" if container else str(self.log_path(name))

    def logs(self) -> tuple[str, ...]:
        running = {container.service for container in self._containers()}
        kept = {path.stem for path in self._home.logs_dir.glob("*.log")}
        return tuple(sorted(running | kept))

    def log_lines(self, name: str, count: int | None = None) -> tuple[str, ...]:
        container = self._find(name)
        if container is None:
            return last_lines(self.log_path(name), count)
        text = container.log(tail="all" if count is None else count)
        return tuple(plain(line) for line in text.splitlines())

    def log_reader(self, names: tuple[str, ...]) -> ContainerReader:
        return ContainerReader(self._find, names)

    def stop(self, records: Mapping[str, ServiceRecord], *, grace_s: float) -> None:
        """Stop and remove the services' containers; the log of each is kept till `clear`."""
        found = [container for name in records if (container := self._find(name))]
        for container in found:
            self._keep_log(container.service)
        end_containers(found, grace_s)

    def marked(self) -> int:
        """Count the containers with this stack's mark."""
        return len(self._containers())

    def stop_marked(
        self,
        *,
        grace_s: float,
        records: Mapping[str, ServiceRecord] = NO_RECORDS,  # noqa: ARG002 - labels are always seen
    ) -> int:
        """End the stack's containers and remove its networks and volumes, by their marks."""
        found = self._containers()
        end_containers(found, grace_s)
        if not find_containers(self._project):  # no stack of that name from another folder
            remove_networks_and_volumes(self._project)
        return len(found)

    def clear(self, *, keep_logs: bool) -> None:
        shutil.rmtree(self._home.temp_dir, ignore_errors=True)
        remove_files(self._home.root, keep_logs=keep_logs)

    def require_own_name(self) -> None:
        """Check that the Compose project of the stack's name is not somebody else's.

        Raises:
            MachineError: it is another folder's, or of something else.
        """
        project = project_name(self._name)
        for container in find_containers(self._project):
            root = container.labels.get(f"{LABEL}.root", "")
            if root != self._root:
                raise of_another(project, root)

    @property
    def _project(self) -> str:
        """The label of everything of the Compose project."""
        return f"com.docker.compose.project={project_name(self._name)}"

    def _compose(self, *arguments: str) -> None:
        command = ("compose", "-p", project_name(self._name), "-f", str(self._file))
        done = run_docker((*command, *arguments), timeout_s=_CREATE_TIMEOUT_S, check=False)
        if done.returncode:
            raise refusal(done.stderr, arguments[-1])

    def _run(self, service: Service, container: FoundContainer) -> None:
        try:
            container.start()
        except OSError as exc:
            said = exc.reason if isinstance(exc, DockerRefused) else str(exc)
            with contextlib.suppress(OSError):
                container.remove()
            raise refusal(said, service.name) from exc

    def _require(self, name: str) -> FoundContainer:
        container = self._find(name)
        if container is None:
            raise MachineError(f"Docker created no container for {name}", hint="docker ps -a")
        return container

    def _find(self, name: str) -> FoundContainer | None:
        """Return the service's container, now or as read `at_once`, no matter who made it."""
        if self._seen is not None:
            return self._seen.get(name)
        found = self._containers(f"com.docker.compose.service={name}")
        return found[0] if found else None

    def _running(self, name: str) -> FoundContainer | None:
        container = self._find(name)
        return container if container and container.running else None

    def _containers(self, *labels: str) -> list[FoundContainer]:
        """Return the stack's containers that have all of the labels."""
        return find_containers(self._project, f"{LABEL}.root={self._root}", *labels)

    def _keep_log(self, name: str) -> None:
        if (container := self._find(name)) is not None:
            write_private(self.log_path(name), container.log(tail="all"))


class ContainerReader:
    """Reads what containers write from now on. They are looked up by name, as they come and go."""

    poll_s = 0.5

    def __init__(
        self, find: Callable[[str], FoundContainer | None], names: tuple[str, ...]
    ) -> None:
        self._find = find
        self._since = dict.fromkeys(names, time.time())

    def read(self) -> list[tuple[str, str]]:
        return [(name, line) for name in self._since for line in self._written(name)]

    def _written(self, name: str) -> list[str]:
        container, now = self._find(name), time.time()
        if container is None:
            return []
        text = container.log(since=self._since[name], until=now)
        self._since[name] = now
        return [plain(line) for line in text.splitlines()]
