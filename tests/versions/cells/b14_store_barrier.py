"""B14: when a producer's answer is let go, the consumer must find the prompt's KV in Redis."""

from __future__ import annotations

import asyncio
import os

import redis
from lmcache_objects import chunk, config, key, metadata, remote_backend
from pdkit_connector.store_barrier import HoldUntilStored
from pdkit_connector.worker_socket import NAME_ENV

STALL_MS = 400


def cell() -> None:
    os.environ[NAME_ENV] = f"cell-{os.getpid()}"
    client = redis.Redis(port=int(os.environ["REDIS_PORT"]))
    client.flushall()
    backend = remote_backend(config(), metadata())
    client.client_pause(STALL_MS, all=False)
    backend.batched_submit_put_task([key(1)], [chunk(backend)])
    assert asyncio.run(answer(client)) > 0, "the answer left before the chunk was in Redis"


async def answer(client: redis.Redis) -> int:
    """Answer a request through the engine's middleware; return Redis's keys as the client sees."""
    keys: list[int] = []

    async def engine(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answer"})

    async def send(message):
        if message["type"] == "http.response.body":
            keys.append(client.dbsize())

    await HoldUntilStored(engine)({"type": "http", "method": "POST"}, None, send)
    return keys[0]
