"""The process runtime: run each service of a stack as a local process."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from deploy.errors import MachineError, MissingTool, NotEnoughMemory, PortTaken, StackUnhealthy
from deploy.runtime.home import StackHome, is_private, write_private
from deploy.runtime.launcher import (
    LOG_TAIL,
    NO_RECORDS,
    ServiceState,
    Started,
    remove_files,
)
from deploy.runtime.logs import FileReader, first_error, last_lines
from deploy.runtime.own_files import remove_other
from deploy.runtime.process import sessions
from deploy.runtime.process.front import LISTEN_ENV, ask, end, is_bound, is_there, listen
from deploy.runtime.process.sessions import kept_back
from deploy.runtime.redis_client import SocketStore, open_store
from deploy.runtime.secrets import Secret, fill_in
from deploy.runtime.state import ServiceRecord
from deploy.runtime.usage import resident_bytes
from deploy.stack.service import Service, Stack

# Set in every process of a stack, so that they can be found even without a state file.
MARKER = "PDKIT_STACK_HOME"

# Too little memory for a process, too many processes, or too many open files.
_SHORT = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only what has the stack's own name is touched
_HIDING_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Launched:
    """A process this command itself started, which it can therefore ask for its exit code."""

    record: ServiceRecord
    process: subprocess.Popen[bytes]
    started_monotonic: float

    @property
    def ended(self) -> str | None:
        code = self.process.poll()
        return None if code is None else describe_exit(code)


class ProcessLauncher:
    """Starts, finds and ends the processes of one stack."""

    poll_s = 0.2  # short: the kernel reports the first end of a process

    def __init__(self, home: StackHome) -> None:
        self._home = home
        self._log_begins: dict[str, int] = {}  # service → size of its log before the start
        self._front: socket.socket | None = None

    def log_path(self, name: str) -> Path:
        """Return the file that a service logs to now."""
        return self._home.logs_dir / f"{name}.log"

    def at_once(self) -> ProcessLauncher:
        """Return this launcher: to ask the kernel again costs next to nothing."""
        return self

    def prepare(self, stack: Stack, secrets: Mapping[str, Secret], *, stop_s: float) -> None:
        """Do nothing: each process has its own files, which `start` writes."""

    def keep_up(self, records: Mapping[str, ServiceRecord]) -> None:
        """Do nothing: the supervisor restarts what died."""

    def take_front(self) -> socket.socket | None:
        """Return the listening socket that this command opened, and forget it; None without."""
        front, self._front = self._front, None
        return front

    def holds(self, service: Service) -> bool:
        """Tell whether the stack itself listens on a service's port while that does not run."""
        return service.role == "router" and is_there(self._home.supervisor_socket)

    def start(
        self, service: Service, secrets: Mapping[str, Secret], *, starts: int = 1
    ) -> Launched:
        """Write the service's files and start it.

        Raises:
            MissingTool: its program cannot be started.
            NotEnoughMemory: the machine has no room for it at the moment.
            OSError: the disk is full.
            MachineError: another user has the folder that the service would use.
        """
        folder = self._home.run_dir / service.name
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        temp_dir = self._home.temp_dir
        make_private(temp_dir)
        if service.env.get("TMPDIR", str(temp_dir)) != str(temp_dir):
            raise MachineError(
                f"{service.env['TMPDIR']} of {service.name} now belongs to another user",
                hint="deploy down, then deploy up, which chooses another folder",
            )
        for file in service.files:
            write_private(Path(file.path), fill_in(file.text, secrets))
        log = self.log_path(service.name)
        if starts == 1:
            log.unlink(missing_ok=True)
        remove_other(log)  # a FIFO would keep the start waiting
        self._log_begins[service.name] = log.stat().st_size if log.exists() else 0
        try:
            process = self._spawn(service, log, folder)
        except OSError as exc:
            if exc.errno in _SHORT:
                raise NotEnoughMemory(
                    f"{service.name} cannot be started: {exc.strerror}",
                    hint="free memory or processes, then run the command again",
                ) from exc
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise MissingTool(
                f"{service.name}: {service.argv[0]} cannot be started ({exc.strerror})",
                hint="deploy plan, which shows the programs that a stack needs",
            ) from exc
        started = sessions.start_time(process.pid)
        record = ServiceRecord(service.name, process.pid, started, str(log), starts)
        return Launched(record, process, time.monotonic())

    def _spawn(self, service: Service, log: Path, folder: Path) -> subprocess.Popen[bytes]:
        env = self._environment(service)
        if service.role != "router":
            return sessions.spawn(service.argv, env, log=log, cwd=folder)
        with self._listening(service) as front:
            env[LISTEN_ENV] = str(front.fileno())
            held = (front.fileno(),)
            return sessions.spawn(service.argv, env, log=log, cwd=folder, pass_fds=held)

    def _listening(self, router: Service) -> socket.socket:
        """Return the socket that the supervisor holds, else a new one that it is to hold.

        Raises:
            PortTaken: another program listens there.
        """
        there = ask(self._home.supervisor_socket)
        if there and there.front:
            if is_bound(there.front, router.host, router.port):
                return there.front
            end(there)  # an earlier plan's, with another address
        try:
            self._front = listen(router.host, router.port)
        except OSError as exc:
            raise PortTaken(
                f"cannot listen on port {router.port} (for {router.name}): {exc.strerror}",
                hint="deploy up --port PORT",
            ) from exc
        return self._front.dup()

    def state(self, record: ServiceRecord | None) -> ServiceState:
        if record is None:
            return "not started"
        return "running" if sessions.is_running(record.pid, record.start_time) else "exited"

    def pid(self, record: ServiceRecord) -> int:
        return record.pid

    def uptime_s(self, record: ServiceRecord) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) - record.start_time

    def restarts(self, record: ServiceRecord) -> int:
        return record.starts - 1

    def resident_mib(self, record: ServiceRecord) -> int:
        """Return the resident memory of the service and all it started."""
        members = sessions.session_members(record.pid, record.start_time)
        return resident_bytes(members) // 2**20

    def environment(self, record: ServiceRecord) -> Mapping[str, str]:
        """Return the environment the service really runs with; empty if it does not run."""
        process = self._leader(record)
        return process.environ() if process else {}

    def arguments(self, record: ServiceRecord) -> tuple[str, ...]:
        """Return the command line the service really runs with; empty if it does not run."""
        process = self._leader(record)
        return tuple(process.cmdline()) if process else ()

    def _leader(self, record: ServiceRecord) -> psutil.Process | None:
        members = sessions.session_members(record.pid, record.start_time)
        return next((process for process in members if process.pid == record.pid), None)

    def open_store(
        self, redis: Service, password: Secret | None
    ) -> AbstractContextManager[SocketStore]:
        return open_store(redis.socket or (redis.host, redis.port), password)

    def where_log(self, name: str) -> str:
        return str(self.log_path(name))

    def logs(self) -> tuple[str, ...]:
        return tuple(path.stem for path in sorted(self._home.logs_dir.glob("*.log")))

    def log_lines(self, name: str, count: int | None = None) -> tuple[str, ...]:
        return last_lines(self.log_path(name), count)

    def log_reader(self, names: tuple[str, ...]) -> FileReader:
        return FileReader({name: self.log_path(name) for name in names})

    def stop(self, records: Mapping[str, ServiceRecord], *, grace_s: float) -> None:
        """End the services together, their helpers too."""
        begun = {one.pid: one.start_time for one in records.values() if one.pid}
        sessions.end_sessions(begun, grace_s=grace_s)

    def require_own_name(self) -> None:
        """Do nothing: processes of other home folders have another mark."""

    def marked(self) -> int:
        """Count the sessions with this stack's mark."""
        return len(sessions.marked_sessions(MARKER, self._home.root))

    def stop_marked(
        self, *, grace_s: float, records: Mapping[str, ServiceRecord] = NO_RECORDS
    ) -> int:
        """End every process that carries this stack's mark; return how many sessions that were.

        Of `records`, those too whose mark cannot be seen, such as of a program that clears its
        environment. Those with another stack's mark run on: the records may be a copy of its own.
        """
        root = self._home.root
        found = sessions.marked_sessions(MARKER, root)
        found |= {
            record.pid: record.start_time
            for record in records.values()
            if self.state(record) == "running"
            and not sessions.bears_another_mark(MARKER, root, record.pid, record.start_time)
        }
        sessions.end_sessions(found, grace_s=grace_s)
        return len(found)

    def clear(self, *, keep_logs: bool) -> None:
        """Remove the stack's files, secrets included; keep its logs if `keep_logs`."""
        temp_dir = self._home.temp_dir
        for left in _SHARED_MEMORY.glob(f"{temp_dir.name}-*"):  # of engines that were killed
            with suppress(OSError):  # such as another user's
                left.unlink()
        shutil.rmtree(temp_dir, ignore_errors=True)
        remove_files(self._home.root, keep_logs=keep_logs)

    def died(self, started: Started) -> StackUnhealthy:
        """Return the error for a service that ended during the start."""
        record = started.record
        since = self._log_begins.get(record.name, 0)
        lines = last_lines(self.log_path(record.name), since=since)
        cause = first_error(lines)
        return StackUnhealthy(
            f"{record.name} died while starting ({started.ended})"
            f"{f', {cause}' if cause else ''}; log: {record.log}",
            hint=f"less {record.log}",
            details=lines[-LOG_TAIL:],
        )

    def _environment(self, service: Service) -> dict[str, str]:
        kept = kept_back(os.environ)
        inherited = {name: value for name, value in os.environ.items() if name not in kept}
        if service.devices:
            # The plan numbers all GPUs of the machine. A variable of the shell that hides some
            # (ROCm has three, which must agree) would shift those numbers.
            for name in _HIDING_GPUS:
                inherited.pop(name, None)
        env = {**inherited, **service.env, MARKER: str(self._home.root)}
        if "PYTHONPATH" in service.env and inherited.get("PYTHONPATH"):
            env["PYTHONPATH"] = os.pathsep.join(
                (service.env["PYTHONPATH"], inherited["PYTHONPATH"])
            )
        return env


def make_private(folder: Path) -> None:
    """Create a private folder below the shared /tmp; refuse one that belongs to another user.

    Raises:
        MachineError: it is there, and not ours alone.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not is_private(folder):
        owner = folder.lstat().st_uid
        raise MachineError(
            f"{folder} and the folders that pdkit would use instead exist, but are not private "
            f"folders of this user (owner: user {owner})",
            hint="deploy up --name OTHER, which uses another folder",
        )


def describe_exit(code: int) -> str:
    """Return an exit code in words, signals by what they commonly mean."""
    if code == -9:
        return "killed by signal 9; the kernel does that when memory runs out"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
