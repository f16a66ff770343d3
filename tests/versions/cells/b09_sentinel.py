"""B9: behind a real Sentinel, an absent key is absent and a stored one comes back."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lmcache_objects import chunk, config, key, metadata, remote_backend
from redis_path import client, fill_of, on_loop

from bench.redis_server import HOST, RedisServer

SERVICE = "pdkit"


def cell() -> None:
    client()
    os.environ["REDIS_SERVICE_NAME"] = SERVICE
    with sentinel() as port:
        backend = remote_backend(
            config(remote_url=f"redis-sentinel://127.0.0.1:{port}"), metadata()
        )
        assert backend.contains(key(1)) is False, "an absent key exists"
        backend.submit_put_task(key(1), chunk(backend, 7)).result(10)
        assert backend.contains(key(1)) is True, "a stored key does not exist"
        found = backend.get_blocking(key(1))
        assert found is not None, "a stored chunk does not come back"
        assert fill_of(found) == 7
        assert [*map(fill_of, backend.batched_get_blocking([key(1)]))] == [7]
        assert on_loop(backend, backend.batched_async_contains("a", [key(1), key(2)])) == 1
        assert backend.connection.exists_sync(key(1)) is True
        assert backend.connection.exists_sync(key(2)) is False


@contextlib.contextmanager
def sentinel() -> Iterator[int]:
    """Run a Sentinel that watches the trial's Redis; give its port."""
    with tempfile.TemporaryDirectory() as folder:
        settings = f"sentinel monitor {SERVICE} {HOST} {os.environ['REDIS_PORT']} 1\n"
        with RedisServer(Path(folder), "--sentinel", config=settings) as server:
            assert SERVICE in server.ask("SENTINEL MASTERS")
            yield server.port
