"""The socket on which LMCache's server says when stores have ended, as far as other engines know.

An engine is told that a store has ended as soon as its blocks have been read. Other engines find
the KV when the server has noted it as written, which takes milliseconds, and engines of other hosts
when it is in Redis.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from pathlib import Path

from pdkit_connector.store_barrier import LATE, STORED, stores_ended

# Where KV must be before it counts as stored.
MEMORY, REDIS = "memory", "redis"

_QUESTION_S = 5.0
# For an answer to arrive after its limit.
_MORE_S = 0.5

UnderWay = Callable[[], set[Hashable]]


def stores_socket(requests: str) -> str:
    """Return the socket beside the one for requests."""
    return f"{requests}.done"


def serve(requests: str, under_way: Mapping[str, UnderWay]) -> None:
    """Answer engines until the process ends.

    Args:
        requests: the server's socket for requests.
        under_way: returns what stands for each store that has not ended, by where it must be.
    """
    path = stores_socket(requests)
    Path(path).unlink(missing_ok=True)  # an earlier server's
    waits = {where: stores_ended(one) for where, one in under_way.items()}

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, KeyError, ValueError, asyncio.TimeoutError):
            line = await asyncio.wait_for(reader.readline(), _QUESTION_S)
            where, limit_s = line.decode().split()
            writer.write(STORED if await waits[where](float(limit_s)) else LATE)
            await writer.drain()
        writer.close()

    async def run() -> None:
        async with await asyncio.start_unix_server(reply, path) as server:
            await server.serve_forever()

    threading.Thread(target=asyncio.run, args=(run(),), name="pdkit-stores", daemon=True).start()


async def stored_by_server(requests: str, where: str, limit_s: float) -> bool:
    """Wait until the stores that the server has under way have ended; False if they have not.

    With a server that has ended, so have its stores.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(stores_socket(requests))
        try:
            writer.write(f"{where} {limit_s:.3f}\n".encode())
            return await asyncio.wait_for(reader.read(1), limit_s + _MORE_S) != LATE
        finally:
            writer.close()
    except asyncio.TimeoutError:  # it hangs
        return False
    except OSError:
        return True
