"""The process runtime: run each service of a stack as a local process."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deploy.errors import MachineError, MissingTool, StackUnhealthy
from deploy.runtime import sessions
from deploy.runtime.home import StackHome
from deploy.runtime.logs import first_error, last_lines
from deploy.runtime.secrets import Secret, fill_in
from deploy.runtime.state import ServiceRecord, write_private
from deploy.stack.service import Service

# Set in every process of a stack, so that they can be found even without a state file.
MARKER = "PDKIT_STACK_HOME"
LOG_TAIL = 12
_POLL_S = 0.25
_HEARTBEAT_S = 10.0

ServiceState = Literal["running", "exited", "not started"]


@dataclass(frozen=True)
class Launched:
    """A process this command itself started, which it can therefore ask for its exit code."""

    record: ServiceRecord
    process: subprocess.Popen[bytes]
    started_monotonic: float

    @property
    def exit_code(self) -> int | None:
        """The exit code (minus a signal's number), or None while it runs."""
        return self.process.poll()


class ProcessLauncher:
    """Starts, finds and ends the processes of one stack."""

    def __init__(self, home: StackHome) -> None:
        self._home = home

    def log_path(self, name: str) -> Path:
        return self._home.logs_dir / f"{name}.log"

    def start(
        self, service: Service, secrets: Mapping[str, Secret], *, starts: int = 1
    ) -> Launched:
        """Write the service's files and start it.

        Raises:
            MissingTool: its program cannot be started.
        """
        folder = self._home.run_dir / service.name
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make_private(self._home.temp_dir)
        for file in service.files:
            write_private(Path(file.path), fill_in(file.text, secrets))
        log = self.log_path(service.name)
        if starts == 1:
            log.unlink(missing_ok=True)
        try:
            process = sessions.spawn(service.argv, self._environment(service), log=log, cwd=folder)
        except OSError as exc:
            raise MissingTool(
                f"{service.name}: {service.argv[0]} cannot be started ({exc.strerror})",
                hint="deploy plan shows the programs a stack needs",
            ) from exc
        started = sessions.start_time(process.pid)
        record = ServiceRecord(service.name, process.pid, started, str(log), starts)
        return Launched(record, process, time.monotonic())

    def state(self, record: ServiceRecord | None) -> ServiceState:
        if record is None:
            return "not started"
        return "running" if sessions.is_running(record.pid, record.start_time) else "exited"

    def resident_mib(self, record: ServiceRecord) -> int:
        """Return the resident memory of the service and all it started."""
        return sessions.resident_mib(sessions.session_members(record.pid, record.start_time))

    def environment(self, record: ServiceRecord) -> Mapping[str, str]:
        """Return the environment the service really runs with; empty if it does not run."""
        for process in sessions.session_members(record.pid, record.start_time):
            if process.pid == record.pid:
                return process.environ()
        return {}

    def stop(self, records: Mapping[str, ServiceRecord], *, grace_s: float) -> None:
        """End the services together, their helpers too."""
        sessions.end_sessions(
            {record.pid: record.start_time for record in records.values()}, grace_s=grace_s
        )

    def stop_marked(self, *, grace_s: float) -> int:
        """End every process that carries this stack's mark; return how many sessions that were."""
        found = sessions.marked_sessions(MARKER, self._home.root)
        sessions.end_sessions(found, grace_s=grace_s)
        return len(found)

    def clear(self, *, keep_logs: bool) -> None:
        """Remove the stack's files, secrets included; logs too unless they are to be read."""
        shutil.rmtree(self._home.temp_dir, ignore_errors=True)
        if not keep_logs:
            shutil.rmtree(self._home.root, ignore_errors=True)
            return
        self._home.state_file.unlink(missing_ok=True)
        for folder in (self._home.run_dir, self._home.secrets_dir):
            shutil.rmtree(folder, ignore_errors=True)

    def died(self, launched: Launched) -> StackUnhealthy:
        """Return the error for a service that ended during the start."""
        record = launched.record
        cause = first_error(Path(record.log))
        return StackUnhealthy(
            f"{record.name} died while starting ({describe_exit(launched.exit_code)})"
            f"{f', {cause}' if cause else ''}; log: {record.log}",
            hint=f"less {record.log}",
            details=last_lines(Path(record.log), LOG_TAIL),
        )

    def _environment(self, service: Service) -> dict[str, str]:
        # LMCache lets its variables overrule its file, and so the plan.
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")
        }
        env = {**inherited, **service.env, MARKER: str(self._home.root)}
        if "PYTHONPATH" in service.env and inherited.get("PYTHONPATH"):
            env["PYTHONPATH"] = os.pathsep.join(
                (service.env["PYTHONPATH"], inherited["PYTHONPATH"])
            )
        return env


def _make_private(folder: Path) -> None:
    """Make a folder in the shared temporary one; refuse another user's of that name.

    Raises:
        MachineError: it is there, and not ours alone.
    """
    folder.mkdir(exist_ok=True, mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise MachineError(
            f"{folder} is there and is not a folder of yours alone", hint=f"rm -r {folder}"
        )


def describe_exit(code: int | None) -> str:
    """Return an exit code in words, signals by what they commonly mean."""
    if code is None:
        return "still running"
    if code == -9:
        return "killed by signal 9; the kernel does that when memory runs out"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def wait_ready(
    launched: Mapping[str, tuple[Service, Launched]],
    is_ready: Callable[[Service], bool],
    report: Callable[[str], None],
    launcher: ProcessLauncher,
    *,
    only: set[str],
) -> dict[str, float]:
    """Wait until the services in `only` are ready; return seconds from each one's start till then.

    All of `launched` are watched meanwhile: one that served and then died is a failure as well.

    Raises:
        StackUnhealthy: one died, or was not ready by its deadline; its last log lines are details.
    """
    took: dict[str, float] = {}
    heartbeat = time.monotonic() + _HEARTBEAT_S
    while True:
        for name, (service, process) in launched.items():
            if process.exit_code is not None:
                raise launcher.died(process)
            if name not in only or name in took:
                continue
            elapsed = time.monotonic() - process.started_monotonic
            if is_ready(service):
                took[name] = elapsed
                report(f"{name} is ready after {elapsed:.1f} s")
            elif elapsed > service.ready_s:
                raise _too_slow(process.record, service)
        waiting = sorted(only - took.keys())
        if not waiting:
            return took
        if time.monotonic() > heartbeat:
            heartbeat = time.monotonic() + _HEARTBEAT_S
            report(f"still starting: {', '.join(waiting)}")
        time.sleep(_POLL_S)


def _too_slow(record: ServiceRecord, service: Service) -> StackUnhealthy:
    return StackUnhealthy(
        f"{record.name} runs but was not ready within {service.ready_s:g} s; log: {record.log}",
        hint="raise timeouts.ready_s in deploy.yaml if it only needs longer",
        details=last_lines(Path(record.log), LOG_TAIL),
    )
