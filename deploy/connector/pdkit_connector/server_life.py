"""Whether LMCache's server still runs: a connection that only its end closes.

The number of its process would do as well, but an engine in another container cannot see it.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path

_CONNECT_S = 2.0


def life_socket(requests: str) -> str:
    """Return the socket beside the one for requests, on which nothing is ever said."""
    return f"{requests}.life"


def hold_connections(requests: str) -> None:
    """Take connections, and hold each to the end of this process or of the other one."""
    path = Path(life_socket(requests))
    path.unlink(missing_ok=True)  # an earlier server's
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen(128)
    # Nothing frees the variables of a daemon thread. So the kernel closes its sockets, and only
    # when no thread of the process can write to memory any more.
    threading.Thread(target=_hold, args=(listening,), name="pdkit-life", daemon=True).start()


def _hold(listening: socket.socket) -> None:
    held: list[socket.socket] = []
    while True:
        held = [one for one in held if not _has_ended(one)]
        held.append(listening.accept()[0])


def _has_ended(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:  # reset
        return True


class Server:
    """The server that listens at this moment, by a connection that no other process gets."""

    def __init__(self, requests: str) -> None:
        """Take hold of it.

        Raises:
            OSError: nothing listens.
        """
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connection.settimeout(_CONNECT_S)
            self._connection.connect(life_socket(requests))
            self._connection.setblocking(False)
        except OSError:
            self._connection.close()
            raise

    @property
    def ended(self) -> bool:
        """Whether it can read and write nothing any more."""
        return _has_ended(self._connection)
