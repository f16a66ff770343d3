"""Redis as its operator sees it: is it there, how full is it, was it flushed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from deploy.metrics.store import StoreStats
from deploy.runtime.bounded_redis import STEP_S, bounded
from deploy.runtime.secrets import Secret

_SCAN_COUNT = 1000


class Refusal(NamedTuple):
    """What Redis says instead of serving; `denied`: to those whom it does not know."""

    said: str
    denied: bool


class Store(Protocol):
    """A stack's Redis, however it is reached."""

    def ping(self) -> bool:
        """Tell whether Redis answers and accepts the password."""
        ...

    def refusal(self) -> Refusal | None:
        """Return what Redis says instead of serving; None where it serves, or says nothing."""
        ...

    def stats(self) -> StoreStats | None:
        """Return a reading, or None if Redis does not answer."""
        ...

    def count_marked(self, mark: str) -> int | None:
        """Return how many keys contain a mark; None where Redis does not tell."""
        ...

    def remove_marked(self, mark: str) -> int | None:
        """Remove the keys that contain a mark, and those that are the same but for it.

        The mark is the beginning of a tag that goes on in digits and dashes. Returns how many were
        removed; None where Redis does not let its user do that.
        """
        ...

    def close(self) -> None: ...


def plain_twin(key: bytes, mark: bytes) -> bytes:
    """Return a key without the tag that a mark begins; LMCache's own client appends to it."""
    before, _, after = key.partition(mark)
    return before + after.lstrip(b"-0123456789")


def marked(client: Any, mark: str) -> Iterator[list[bytes]]:
    """Yield the keys of a server that contain a mark of letters, digits and '@%-'."""
    cursor = None
    while cursor != 0:
        cursor, keys = client.scan(cursor or 0, match=f"*{mark}*", count=_SCAN_COUNT)
        yield keys


def remove_marked(client: Any, mark: str, unlink: Callable[[list[bytes]], int]) -> int:
    """Remove what a server has of marked keys, and their twins wherever `unlink` finds them."""
    found = sorted({key for keys in marked(client, mark) for key in keys})
    twins = {plain_twin(key, mark.encode()) for key in found}
    return unlink([*found, *sorted(twins)]) if found else 0


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
        **_traffic(info),
        **_manner(info),
    )


def server_stats(client: Any) -> StoreStats:
    """Return what a server tells this client's user, who may not be allowed to ask.

    Raises:
        RedisError, OSError: it does not answer, or does not let the user in.
    """
    info = if_allowed(client.info) or {}
    commands = if_allowed(client.info, "commandstats")
    calls = commands and [
        int(commands.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in ("flushall", "flushdb")
    ]
    return StoreStats(
        keys=_number(if_allowed(client.dbsize)),
        used_memory_bytes=_number(info.get("used_memory")),
        max_memory_bytes=_number(info.get("maxmemory")),
        evicted_keys=_number(info.get("evicted_keys")),
        flushes=sum(calls) if calls else None,
        run_id=str(info["run_id"]) if "run_id" in info else None,
        **_traffic(info),
        **_manner(info),
    )


def _traffic(info: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "commands": _number(info.get("total_commands_processed")),
        "received_bytes": _number(info.get("total_net_input_bytes")),
        "sent_bytes": _number(info.get("total_net_output_bytes")),
        "clients": _number(info.get("connected_clients")),
    }


def _manner(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a server behaves: its errors so far, its policy, its release, and so on."""
    errors = {
        name.removeprefix("errorstat_"): int(dict(value).get("count", 0))
        if isinstance(value, Mapping)
        else int(str(value).partition("count=")[2] or 0)
        for name, value in info.items()
        if name.startswith("errorstat_")
    }
    policy = info.get("maxmemory_policy")
    replica = str(info.get("role", "")) == "slave"
    return {
        "errors": errors,
        "policy": str(policy) if policy else None,
        "replica": replica,
        "version": str(info["redis_version"]) if "redis_version" in info else None,
    }


def refusal_of(client: Any) -> Refusal | None:
    """Return what a server says instead of serving; None where it serves, or says nothing."""
    from redis.exceptions import (
        AuthenticationError,
        NoPermissionError,
        RedisError,
        ResponseError,
    )

    try:
        client.ping()
    except NoPermissionError:
        return None  # who may store and load need not be allowed to ping
    except (AuthenticationError, ResponseError) as exc:
        return Refusal(str(exc), isinstance(exc, AuthenticationError))
    except (RedisError, OSError):
        pass
    return None


def if_allowed(ask: Callable[..., Any], *arguments: str) -> Any:
    """Return an answer, or None where Redis refuses this command."""
    from redis.exceptions import ResponseError

    try:
        return ask(*arguments)
    except ResponseError:
        return None


def _number(value: Any) -> int | None:
    return None if value is None else int(value)


class SocketStore:
    """A connection to a stack's Redis, by its Unix socket."""

    def __init__(self, socket: str, password: Secret | None) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._errors = (redis.RedisError, OSError)
        pool = redis.ConnectionPool(
            connection_class=bounded(redis.UnixDomainSocketConnection),
            path=socket,
            password=password.reveal() if password else None,
            socket_timeout=STEP_S,
            socket_connect_timeout=STEP_S,
            # Whoever asks decides whether to ask again; the client's own retries hide a dead Redis.
            retry=Retry(NoBackoff(), 0),
            # In the newer form of the protocol, who is not let in is told of HELLO instead.
            protocol=2,
        )
        self._client: Any = redis.Redis(connection_pool=pool)

    def ping(self) -> bool:
        """Tell whether Redis answers and accepts the password."""
        try:
            return bool(self._client.ping())
        except self._errors:
            return False

    def refusal(self) -> Refusal | None:
        """Return what Redis says instead of serving; None where it serves, or says nothing."""
        return refusal_of(self._client)

    def stats(self) -> StoreStats | None:
        """Return a reading, or None if Redis does not answer."""
        try:
            return server_stats(self._client)
        except self._errors:
            return None

    def count_marked(self, mark: str) -> int | None:
        """Return how many keys contain a mark; None where Redis does not answer."""
        keys = self.marked_keys(mark)
        return None if keys is None else len(keys)

    def marked_keys(self, mark: str) -> set[bytes] | None:
        """Return the keys that contain a mark; None where Redis does not answer."""
        try:
            return {key for keys in marked(self._client, mark) for key in keys}
        except self._errors:
            return None

    def unlink(self, keys: Sequence[bytes]) -> int | None:
        """Remove what there is of the keys; None where Redis does not answer."""
        try:
            return int(self._client.unlink(*keys)) if keys else 0
        except self._errors:
            return None

    def remove_marked(self, mark: str) -> int | None:
        """Remove marked keys and their twins (see `Store`); None where Redis does not answer."""
        try:
            return remove_marked(self._client, mark, lambda keys: int(self._client.unlink(*keys)))
        except self._errors:
            return None

    def close(self) -> None:
        self._client.close()
        self._client.connection_pool.disconnect()


@contextmanager
def open_store(socket: str, password: Secret | None) -> Iterator[SocketStore]:
    """Open a store and close it again."""
    store = SocketStore(socket, password)
    try:
        yield store
    finally:
        store.close()
