"""Two or more routers in turns, request by request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import uvloop

from bench.kit import cpu_s
from bench.router.load import connected

_SETTLE_S = 0.01  # for what a router does behind its last answer


@dataclass
class Turns:
    """The turns of one router.

    Attributes:
        spent_s: its processor time, from the first turn to what it does behind the last one.
        took_s: the clients' time for each turn.
    """

    spent_s: float = 0.0
    took_s: list[float] = field(default_factory=list)


def in_turns(
    routers: Mapping[str, tuple[int, int]], clients: int, turns: int, *, stream: bool
) -> dict[str, Turns]:
    """Have the clients of one router ask at once, then those of the next one: A, B, B, A, ...

    Args:
        routers: name → port and process.

    Raises:
        ConnectionError: a request failed.
    """
    return uvloop.run(_in_turns(routers, clients, turns, stream))


async def _in_turns(
    routers: Mapping[str, tuple[int, int]], clients: int, turns: int, stream: bool
) -> dict[str, Turns]:
    asking = {
        name: await connected(port, clients, stream=stream) for name, (port, _) in routers.items()
    }
    noted = {name: Turns() for name in routers}
    before = {name: cpu_s(pid) for name, (_, pid) in routers.items()}
    for turn in range(turns):
        for name in list(routers)[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            await asyncio.gather(*(client.ask() for client in asking[name]))
            noted[name].took_s.append(time.perf_counter() - began)
    await asyncio.sleep(_SETTLE_S)
    for name, (_, pid) in routers.items():
        noted[name].spent_s = cpu_s(pid) - before[name]
        for client in asking[name]:
            client.close()
    return noted
