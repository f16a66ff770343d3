"""Remaining keys: what engines stored in the user's own Redis, which outlives the stack."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from deploy.connector.pdkit_connector.redis_url import parse_redis_url
from deploy.runtime.secrets import read_secret_file, read_secrets
from deploy.runtime.url_store import UrlStore
from deploy.stack.kv_identity import key_prefix
from deploy.stack.layout import REDIS_URL

_COUNT_S = 3.0


@dataclass(frozen=True)
class RemainingKeys:
    """The keys of one stack, by what they begin with.

    Attributes:
        keys: how many stay, or were removed; None if unknown.
        all_seen: the count is complete.
        why_not: why they could not be counted or removed; "" if they were.
    """

    prefix: str
    removed: bool
    keys: int | None = None
    all_seen: bool = True
    why_not: str = ""


def remaining_keys_url(secrets_dir: Path, url_file: Path | None) -> str:
    """Return the URL of the Redis that a stack left keys in; "" if the user supplied none.

    `url_file` is used if the stack no longer exists.

    Raises:
        ConfigError: that file cannot be read.
    """
    held = read_secrets(secrets_dir, (REDIS_URL,)).get(REDIS_URL)
    if held is not None:
        return held.reveal()
    return read_secret_file("redis.url_file", url_file) if url_file else ""


def remaining_keys(url: str, stack: str, *, client: str, remove: bool) -> RemainingKeys:
    """Count the keys that a stack left, or remove them. `client` is what stored them."""
    prefix = key_prefix(stack)
    if client == "lmcache":
        why = "LMCache's own client does not name the stack in its keys"
        return RemainingKeys(prefix, removed=False, why_not=why)
    try:
        store = UrlStore(parse_redis_url(url))
    except ValueError:
        return RemainingKeys(prefix, removed=False, why_not="its URL is invalid")
    with closing(store):
        try:
            if remove:
                return RemainingKeys(prefix, removed=True, keys=store.remove_keys(prefix))
            found = store.count_keys(prefix, within_s=_COUNT_S)
        except store.errors as exc:
            return RemainingKeys(prefix, removed=False, why_not=store.said(exc))
    return RemainingKeys(prefix, removed=False, keys=found.count, all_seen=found.all_seen)
