"""Sockets between engines and LMCache's server, beside those that LMCache has.

One says whether the server still runs: a connection that only its end closes. The number of its
process would do as well, but an engine in another container cannot see it.

On the other the server says when stores have ended, as far as other engines know. An engine is told
that a store has ended as soon as its blocks have been read. Other engines find the KV when the
server has noted it as written, which takes milliseconds, and engines of other hosts when it is in
Redis.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from pdkit_connector.store_barrier import LATE, STORED, deadline_s

_HOLD_CONNECT_S = 2.0


def life_socket(requests: str) -> str:
    """Return the socket beside the one for requests, on which nothing is ever sent."""
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
            self._connection.settimeout(_HOLD_CONNECT_S)
            self._connection.connect(life_socket(requests))
            self._connection.setblocking(False)
        except OSError:
            self._connection.close()
            raise

    @property
    def ended(self) -> bool:
        """Whether it can read and write nothing any more."""
        return _has_ended(self._connection)


# Where KV must be before it counts as stored.
MEMORY, REDIS = "memory", "redis"

_QUESTION_S = 5.0
# How often an engine that waits looks whether its pings are still answered.
_LOOK_S = 0.2
# For an answer to arrive after its limit.
_MORE_S = 0.5

# Waits until stores have ended: where, for how many seconds, and after how many a store is given up
# for good; tells whether they have.
Wait = Callable[[str, float, float], Awaitable[bool]]


def stores_socket(requests: str) -> str:
    """Return the socket beside the one for requests."""
    return f"{requests}.done"


def serve(requests: str, wait: Wait) -> None:
    """Answer engines until the process ends; returns once it listens.

    Raises:
        OSError: the socket cannot be made.
    """
    path = stores_socket(requests)
    Path(path).unlink(missing_ok=True)  # an earlier server's
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    listening.listen(1024)
    listening.setblocking(False)

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), _QUESTION_S)
            where, limit_s, whole_s = line.decode().split()
            ended = await wait(where, float(limit_s), float(whole_s))
            writer.write(STORED if ended else LATE)
            await writer.drain()
        except (ConnectionError, ValueError, asyncio.TimeoutError):
            pass  # the engine went away, or asks something else
        finally:
            writer.close()

    async def run() -> None:
        async with await asyncio.start_unix_server(reply, sock=listening) as server:
            await server.serve_forever()

    threading.Thread(target=asyncio.run, args=(run(),), name="pdkit-stores", daemon=True).start()


async def stored_by_server(
    requests: str, where: str, answers: Callable[[], bool], limit_s: float
) -> bool:
    """Wait until the stores that the server has under way have ended; False if they have not.

    Args:
        requests: the server's socket for requests.
        where: the KV must be.
        answers: tells whether the server answers pings. One that does not, or has ended, takes no
            stores, so none is awaited.
        limit_s: how long to wait.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + limit_s + _MORE_S
    try:
        reader, writer = await asyncio.open_unix_connection(stores_socket(requests))
    except OSError as exc:
        return isinstance(exc, FileNotFoundError | ConnectionError)
    reply = asyncio.ensure_future(reader.read(1))
    try:
        writer.write(f"{where} {limit_s:.3f} {deadline_s():.3f}\n".encode())
        while answers() and clock() < until:
            if (await asyncio.wait({reply}, timeout=_LOOK_S))[0]:
                return reply.result() != LATE
        return not answers()
    except ConnectionError:
        return True
    finally:
        reply.cancel()
        writer.close()
