"""The router's listening socket. The supervisor holds it, so that it outlives the router.

Clients that connect while no router runs wait in its queue. Whoever starts a router asks the
supervisor for the socket, over a Unix socket in the stack's private folder.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deploy import __version__
from deploy.runtime.home import is_private

LISTEN_ENV = "PDKIT_LISTEN_FD"
_BACKLOG = 1024
# A new supervisor imports the kit before it answers, which takes a moment.
_ANSWER_S = 30.0
_ANSWER_BYTES = 128
_STOP_S = 10.0


@dataclass(frozen=True)
class RunningSupervisor:
    """A supervisor that answers.

    Attributes:
        front: a copy of the router's listening socket, for the caller; None if it has none.
        version: the version of pdkit that runs it; "" if it does not answer that.
    """

    pid: int
    front: socket.socket | None
    version: str = ""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that clients can connect to from now on.

    Raises:
        OSError: the address is taken, or not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def is_bound(listening: socket.socket, host: str, port: int) -> bool:
    """Tell whether a socket listens on this address."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return listening.getsockname()[:2] in [address[:2] for *_, address in found]


def is_there(path: Path) -> bool:
    """Tell whether a supervisor runs, or is about to."""
    if not is_private(path.parent):
        return False
    with socket.socket(socket.AF_UNIX) as asking, suppress(OSError):
        asking.connect(str(path))
        return True
    return False


def ask(path: Path) -> RunningSupervisor | None:
    """Return the supervisor, with the socket it holds; None if no supervisor answers.

    In a folder that is not ours alone, another user could answer: with the process to end, and the
    socket to serve clients on.
    """
    if not is_private(path.parent):
        return None
    try:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_ANSWER_S)
            asking.connect(str(path))
            said, descriptors, _, _ = socket.recv_fds(asking, _ANSWER_BYTES, 1)
    except OSError:
        return None
    pid, _, version = said.decode("ascii", "replace").partition(" ")
    if not pid.isdigit():
        return None
    front = socket.socket(fileno=descriptors[0]) if descriptors else None
    return RunningSupervisor(int(pid), front, version)


def end(there: RunningSupervisor) -> None:
    """End a supervisor, and close our copy of the router's socket."""
    from deploy.runtime.process import sessions  # `deploy status` of containers does without psutil

    if there.front:
        there.front.close()
    sessions.end_sessions({there.pid: sessions.start_time(there.pid)}, grace_s=_STOP_S)


def open_door(path: Path) -> socket.socket:
    """Return the Unix socket on which a supervisor listens; only this user can connect."""
    path.unlink(missing_ok=True)
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(path))
    path.chmod(0o600)
    door.listen()
    return door


class Holder:
    """Holds the router's socket and hands it out, in a thread, until the door is closed.

    Attributes:
        front: None until there is one.
    """

    def __init__(
        self, door: socket.socket, front: socket.socket | None, pid: int | None = None
    ) -> None:
        """`pid` is the process to end, by default this one."""
        self._door, self._pid = door, pid or os.getpid()
        self.front = front
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Close both sockets."""
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._door.close()
        self.drop()

    def drop(self) -> None:
        """Close the router's socket, so that clients are refused."""
        front, self.front = self.front, None
        if front:
            front.close()

    def _serve(self) -> None:
        while True:
            try:
                asking, _ = self._door.accept()
            except OSError:
                return  # closed
            with asking, suppress(OSError):
                held = [self.front.fileno()] if self.front else []
                socket.send_fds(asking, [f"{self._pid} {__version__}".encode()], held)
