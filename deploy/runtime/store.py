"""Redis as its operator sees it: is it there, how full is it, was it flushed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from deploy.runtime.secrets import Secret

_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class StoreStats:
    """A reading of Redis.

    Attributes:
        flushes: FLUSHALL and FLUSHDB commands since its start.
        run_id: changes when Redis restarts.
    """

    keys: int
    used_memory_bytes: int
    max_memory_bytes: int
    evicted_keys: int
    flushes: int
    run_id: str


class Store(Protocol):
    """A stack's Redis, however it is reached."""

    def ping(self) -> bool:
        """Tell whether Redis answers and accepts the password."""
        ...

    def stats(self) -> StoreStats | None:
        """Return a reading, or None if Redis does not answer."""
        ...

    def close(self) -> None: ...


def stats_from(info: Mapping[str, Any], calls: Mapping[str, int], keys: int) -> StoreStats:
    """Return the reading that INFO's fields, the calls of commands and DBSIZE make.

    Raises:
        KeyError, ValueError: a field is missing or no number.
    """
    return StoreStats(
        keys=keys,
        used_memory_bytes=int(info["used_memory"]),
        max_memory_bytes=int(info["maxmemory"]),
        evicted_keys=int(info["evicted_keys"]),
        flushes=sum(calls.get(name, 0) for name in ("flushall", "flushdb")),
        run_id=str(info["run_id"]),
    )


class SocketStore:
    """A connection to a stack's Redis."""

    def __init__(self, host: str, port: int, password: Secret | None) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._errors = (redis.RedisError, OSError)
        self._client: Any = redis.Redis(
            host=host,
            port=port,
            password=password.reveal() if password else None,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            # Whoever asks decides whether to ask again; the client's own retries hide a dead Redis.
            retry=Retry(NoBackoff(), 0),
        )

    def ping(self) -> bool:
        """Tell whether Redis answers and accepts the password."""
        try:
            return bool(self._client.ping())
        except self._errors:
            return False

    def stats(self) -> StoreStats | None:
        """Return a reading, or None if Redis does not answer."""
        try:
            info = self._client.info()
            commands = self._client.info("commandstats")
            keys = int(self._client.dbsize())
        except self._errors:
            return None
        calls = {
            name.removeprefix("cmdstat_"): int(value.get("calls", 0))
            for name, value in commands.items()
        }
        return stats_from(info, calls, keys)

    def close(self) -> None:
        self._client.close()


@contextmanager
def open_store(host: str, port: int, password: Secret | None) -> Iterator[Store]:
    """Open a store and close it again."""
    store = SocketStore(host, port, password)
    try:
        yield store
    finally:
        store.close()
