"""Start, keep alive and end the supervisor of a stack, which restarts services that die."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from deploy import __version__
from deploy.runtime.home import Home
from deploy.runtime.process import sessions
from deploy.runtime.process.front import ask, end, open_door
from deploy.runtime.process.launcher import MARKER, make_private

FDS_ENV = "PDKIT_SUPERVISOR_FDS"
_MODULE = "deploy.workflows.supervise"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def start_supervisor(home: Home, name: str, front: socket.socket | None) -> None:
    """Start a supervisor that holds the router's socket, unless a suitable one runs.

    A running one is suitable if it holds the socket already, that is if `front` is None. One of
    another version of the kit is replaced: it hands its socket on.
    """
    there = ask(home.stack(name).supervisor_socket)
    if there is None:
        _start(home, name, front)
        return
    with there.front or nullcontext():
        if front is None and there.version == __version__:
            return
        end(replace(there, front=None))
        _start(home, name, front or there.front)


def _start(home: Home, name: str, front: socket.socket | None) -> None:
    files = home.stack(name)
    make_private(files.temp_dir)
    files.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open_door(files.supervisor_socket) as door:
        held = [door.fileno(), *([front.fileno()] if front else [])]
        sessions.spawn(
            (sys.executable, "-m", _MODULE, str(home.state), str(home.cache), name),
            {**os.environ, MARKER: str(files.root), FDS_ENV: ",".join(map(str, held))},
            log=files.logs_dir / "supervisor.log",
            cwd=files.run_dir,
            pass_fds=held,
        )


def inherited_sockets() -> tuple[socket.socket, socket.socket | None]:
    """Return the supervisor's own socket and the router's, as inherited from the parent."""
    door, *front = (socket.socket(fileno=int(fd)) for fd in os.environ.pop(FDS_ENV).split(","))
    return door, front[0] if front else None


def end_supervisor(path: Path) -> None:
    """End the supervisor that answers at a Unix socket, if there is one."""
    if there := ask(path):
        end(there)


class Keeper:
    """The parent of one worker at a time, which ends with it.

    Attributes:
        ended: set in both once they are told to end.
    """

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._worker = 0
        for number in _SIGNALS:
            signal.signal(number, self._end)

    def forked(self) -> bool:
        """Start a worker; return True in it, and False in its keeper."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # else a worker might not get them
        self._worker = os.fork()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return self._worker == 0

    def death(self) -> int | None:
        """Wait for the worker's end; return its exit code (minus a signal's number).

        None if it has done its work, or was told to end.
        """
        _, status = os.waitpid(self._worker, 0)
        self._worker = 0
        return None if self.ended.is_set() else os.waitstatus_to_exitcode(status) or None

    def _end(self, *_: object) -> None:
        self.ended.set()
        if self._worker:
            os.kill(self._worker, signal.SIGTERM)
