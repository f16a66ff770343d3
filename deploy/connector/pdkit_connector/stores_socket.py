"""The socket on which LMCache's server says when stores have ended, as far as other engines know.

An engine is told that a store has ended as soon as its blocks have been read. Other engines find
the KV when the server has noted it as written, which takes milliseconds, and engines of other hosts
when it is in Redis.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from pdkit_connector.store_barrier import LATE, STORED, deadline_s

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
    said = asyncio.ensure_future(reader.read(1))
    try:
        writer.write(f"{where} {limit_s:.3f} {deadline_s():.3f}\n".encode())
        while answers() and clock() < until:
            if (await asyncio.wait({said}, timeout=_LOOK_S))[0]:
                return said.result() != LATE
        return not answers()
    except ConnectionError:
        return True
    finally:
        said.cancel()
        writer.close()
