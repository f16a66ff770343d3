"""B14: when a producer's answer is let go, the consumer must find the prompt's KV in Redis."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Hashable

from lmcache_objects import chunk, config, key, metadata, remote_backend
from pdkit_connector import store_barrier
from pdkit_connector.store_barrier import HoldUntilStored
from pdkit_connector.worker_socket import NAME_ENV
from redis import Redis
from redis_path import client, gate

LOOKS = 3


def cell() -> None:
    os.environ[NAME_ENV] = f"cell-{os.getpid()}"
    redis = client()
    backend = remote_backend(config(), metadata())
    # Redis takes no chunk until someone has seen, and waited for, the store.
    with gate(redis) as opened:
        store_barrier._under_way = Watched(opened)
        backend.batched_submit_put_task([key(1)], [chunk(backend)])
        assert asyncio.run(answer(redis)) > 0, "the answer left before the chunk was in Redis"


class Watched(set[Hashable]):
    """The stores under way; calls `then` at the last of some looks at which there is one."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then
        self._looks = 0

    def copy(self) -> set[Hashable]:
        self._looks += bool(self)
        if self and self._looks == LOOKS:
            self._then()
        return super().copy()


async def answer(redis: Redis) -> int:
    """Answer a request through the engine's middleware; return Redis's keys as the client sees."""
    keys: list[int] = []

    async def engine(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answer"})

    async def send(message):
        if message["type"] == "http.response.body":
            keys.append(redis.dbsize())

    await HoldUntilStored(engine)({"type": "http", "method": "POST"}, None, send)
    return keys[0]
