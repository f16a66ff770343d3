"""Redis as its operator sees it: reachable or not, how full, flushed or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, NamedTuple, Protocol

from deploy.metrics.store_stats import StoreStats
from deploy.runtime.redis_socket import RedisError, RedisSocket, SocketAddress
from deploy.runtime.secrets import Secret

_SCAN_COUNT = 1000
# For all keys of a server, and for those of a check. A hostile one never says that this was all.
_SCAN_S = 300.0
_MOST_MARKED = 1 << 20
# First words of errors: the server serves all the same; it does not let this client in.
_NO_REFUSAL = ("NOPERM", "LOADING")
_DENIED = ("NOAUTH", "WRONGPASS")

# A page of keys: cursor, pattern and count → the next cursor and keys.
Scan = Callable[[int, str, int], tuple[int, list[bytes]]]


class Refusal(NamedTuple):
    """An error that Redis gives instead of serving; `denied`: because of the log-in."""

    said: str
    denied: bool


class Store(Protocol):
    """A stack's Redis, however it is reached."""

    def refusal(self) -> Refusal | None:
        """Return what Redis says instead of serving; None if it serves, or says nothing."""

    def stats(self) -> StoreStats | None:
        """Return a reading, or None if Redis does not answer."""

    def count_marked(self, mark: str) -> int | None:
        """Return how many keys contain a mark; None if unknown."""

    def remove_marked(self, mark: str) -> int | None:
        """Remove the keys that contain a mark, and their twins, which lack only the mark.

        The mark is the beginning of a tag that goes on in digits and dashes. Returns how many were
        removed; None if Redis does not let its user do that.
        """


def with_twins(keys: Collection[bytes], mark: str) -> list[bytes]:
    """Return marked keys, and their twins (see `Store.remove_marked`)."""
    return sorted({*keys, *(_plain_twin(key, mark.encode()) for key in keys)})


def _plain_twin(key: bytes, mark: bytes) -> bytes:
    """Return a key without the tag that a mark begins; LMCache's own client appends to it."""
    before, _, after = key.partition(mark)
    return before + after.lstrip(b"-0123456789")


def key_pages(scan: Scan, pattern: str) -> Iterator[list[bytes]]:
    """Yield the keys of a server that fit a pattern; some may come twice.

    Raises:
        TimeoutError: its list of keys does not end.
    """
    cursor, until = None, time.monotonic() + _SCAN_S
    while cursor != 0:
        if time.monotonic() > until:
            raise TimeoutError(f"it did not list all its keys within {_SCAN_S:g} s")
        cursor, keys = scan(cursor or 0, pattern, _SCAN_COUNT)
        yield keys


def marked_keys(scan: Scan, mark: str) -> set[bytes]:
    """Return the keys of a server that contain a mark of letters, digits and '@%-'."""
    found = set[bytes]()
    for keys in key_pages(scan, f"*{mark}*"):
        found.update(keys)
        if len(found) > _MOST_MARKED:
            raise ConnectionError(f"more than {_MOST_MARKED} keys of one check")
    return found


def stats_from(info: Mapping[str, Any], calls: Mapping[str, int], keys: int) -> StoreStats:
    """Return a reading, from INFO's fields, calls by command, and the number of keys.

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
        **traffic(info),
        **manner(info),
    )


def info_fields(text: str) -> dict[str, str]:
    """Return the fields of what INFO answers."""
    lines = (line.strip().partition(":") for line in text.splitlines())
    return {name: value for name, colon, value in lines if colon}


def calls_of(fields: Mapping[str, str]) -> dict[str, int]:
    """Return command → calls from fields such as 'cmdstat_get:calls=3,usec=…'."""
    return {
        name.removeprefix("cmdstat_"): int(value.partition("calls=")[2].partition(",")[0])
        for name, value in fields.items()
        if name.startswith("cmdstat_")
    }


def traffic(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a server has served."""
    return {
        "commands": optional_int(info.get("total_commands_processed")),
        "received_bytes": optional_int(info.get("total_net_input_bytes")),
        "sent_bytes": optional_int(info.get("total_net_output_bytes")),
        "clients": optional_int(info.get("connected_clients")),
    }


def manner(info: Mapping[str, Any]) -> dict[str, Any]:
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


def optional_int(value: Any) -> int | None:
    """Return a field as a number; None if it is missing."""
    return None if value is None else int(value)


class SocketStore:
    """A connection to a stack's own Redis."""

    def __init__(self, address: SocketAddress, password: Secret | None) -> None:
        self._redis = RedisSocket(address, password)

    def ping(self) -> bool:
        """Tell whether Redis answers and accepts the password."""
        try:
            return bool(self._redis.ask("PING") == b"PONG")
        except (RedisError, OSError):
            return False

    def refusal(self) -> Refusal | None:
        """Return what Redis says instead of serving; None if it serves, or says nothing."""
        try:
            self._redis.ask("PING")
        except RedisError as exc:
            code = str(exc).partition(" ")[0]
            return None if code in _NO_REFUSAL else Refusal(str(exc), code in _DENIED)
        except OSError:
            pass
        return None

    def stats(self) -> StoreStats | None:
        """Return a reading, or None if Redis does not answer."""
        ask = self._redis.ask
        try:
            info, commands = (
                info_fields(_text(ask(*words))) for words in (("INFO",), ("INFO", "commandstats"))
            )
            return stats_from(info, calls_of(commands), _count(ask("DBSIZE")))
        except (RedisError, OSError, KeyError, ValueError):
            return None

    def marked_keys(self, mark: str) -> set[bytes] | None:
        """Return the keys that contain a mark; None if Redis does not answer."""
        try:
            return marked_keys(self._scan, mark)
        except (RedisError, OSError):
            return None

    def unlink(self, keys: Sequence[bytes]) -> int | None:
        """Remove what there is of the keys; None if Redis does not answer."""
        try:
            return _count(self._redis.ask("UNLINK", *keys)) if keys else 0
        except (RedisError, OSError):
            return None

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()

    def _scan(self, cursor: int, pattern: str, count: int) -> tuple[int, list[bytes]]:
        answer = self._redis.ask("SCAN", cursor, "MATCH", pattern, "COUNT", count)
        match answer:
            case [bytes() as after, list() as keys] if after.isdigit() and len(after) < 21:
                if all(isinstance(key, bytes) for key in keys):
                    return int(after), keys
        raise _not_redis(answer)


def _text(answer: Any) -> str:
    if not isinstance(answer, bytes):
        raise _not_redis(answer)
    return answer.decode()


def _count(answer: Any) -> int:
    if not isinstance(answer, int):
        raise _not_redis(answer)
    return answer


def _not_redis(answer: object) -> ConnectionError:
    return ConnectionError(f"not a Redis reply: {str(answer)[:40]}")


def open_store(
    address: SocketAddress, password: Secret | None
) -> AbstractContextManager[SocketStore]:
    """Return a store for a with block, which closes it."""
    return closing(SocketStore(address, password))
