"""Questions to Redis through redis-py, as a user who may not be allowed to ask all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deploy.metrics.store_stats import StoreStats
from deploy.runtime.store import Refusal, Scan, stats_from


def server_stats(client: Any) -> StoreStats:
    """Return a reading of a server; fields that this user may not ask for are left out.

    Raises:
        RedisError, OSError: it does not answer, or does not let the user in.
    """
    info = if_allowed(client.info) or {}
    commands = if_allowed(client.info, "commandstats") or {}
    keys = if_allowed(client.dbsize)
    return stats_from({**info, **commands}, None if keys is None else int(keys))


def refusal_of(client: Any) -> Refusal | None:
    """Return what a server says instead of serving; None if it serves, or says nothing."""
    from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

    try:
        client.ping()
    except NoPermissionError:
        return None  # a user who may store and load need not be allowed to PING
    except (AuthenticationError, ResponseError) as exc:
        return Refusal(str(exc), isinstance(exc, AuthenticationError))
    except (RedisError, OSError):
        pass
    return None


def if_allowed(ask: Callable[..., Any], *arguments: str) -> Any:
    """Return an answer, or None if Redis refuses this command."""
    from redis.exceptions import ResponseError

    try:
        return ask(*arguments)
    except ResponseError:
        return None


def scan_of(client: Any) -> Scan:
    """Return a function that asks this client for a page of keys."""
    return lambda cursor, pattern, count: client.scan(cursor, match=pattern, count=count)
