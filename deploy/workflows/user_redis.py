"""The user's own Redis: its URL, what it means in containers, and whether it answers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.config.spec import RedisSpec
from deploy.connector.pdkit_connector.redis_url import (
    SCHEMES,
    RedisUrl,
    is_loopback,
    parse_redis_url,
    scheme_of,
)
from deploy.errors import Changes, ConfigError, RedisUnreachable
from deploy.runtime.secrets import Secret, keep_secret, read_secret_file, read_secrets
from deploy.stack.layout import REDIS_URL
from deploy.workflows.prepare import Prepared
from deploy.workflows.software import Containers

if TYPE_CHECKING:
    from deploy.runtime.url_store import UrlStore

_FIELD = "redis.url_file"
# The only scheme that is supported with LMCache's own client.
_LMCACHE_SCHEME = "redis"
_URLS = ", ".join(f"{one}://" for one in SCHEMES)
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{0,19}")
_BY_PROCESS: Changes = {"--runtime": "process"}


def redis_url(prepared: Prepared) -> str | None:
    """Return the URL of the user's Redis, or None if the stack has one of the kit's.

    Raises:
        ConfigError: it cannot be read or used; messages show only its scheme and hosts.
    """
    file = prepared.spec.redis.url_file
    if file is None:
        return None
    text = read_secret_file(_FIELD, file)
    _require_scheme(text, file, prepared.spec.redis.client)
    url = _parsed(text, file)
    if isinstance(prepared.facts.software, Containers):
        _require_seen_in_containers(url, prepared.spec.redis)
        for mounted in prepared.spec.redis.tls_files:
            _require_readable(mounted, prepared.facts.software)
    return text


def require_url_for_pods(redis: RedisSpec) -> None:
    """Refuse a URL that no pod can use. Only its text is read, and only if its file is here.

    Raises:
        ConfigError: see `redis_url`.
    """
    file = redis.url_file
    if file is None or not os.path.lexists(file):
        return
    text = read_secret_file(_FIELD, file)
    _require_scheme(text, file, redis.client)
    _require_seen_in_containers(_parsed(text, file), redis, retry=())


def provide_redis_url(prepared: Prepared, folder: Path) -> None:
    """Write the URL into the stack's secrets; if its file was removed, the old one stays.

    Raises:
        ConfigError: it cannot be used, or is not there and never was.
    """
    if _is_taken_away(prepared) and (folder / REDIS_URL).is_file():
        return
    if text := redis_url(prepared):
        keep_secret(folder, REDIS_URL, text)


def is_other_redis(prepared: Prepared, kept: Mapping[str, Secret]) -> bool:
    """Tell whether running engines have another URL than the user's current one.

    Raises:
        ConfigError: it cannot be used.
    """
    if not prepared.plan.user_redis or _is_taken_away(prepared):
        return False
    held = kept.get(REDIS_URL)
    return held is None or held.reveal() != redis_url(prepared)


def require_redis(prepared: Prepared, folder: Path) -> None:
    """Check that the user's Redis answers and accepts the log-in. Changes nothing.

    If the file with the URL was removed, the copy in the stack's secrets is used.

    Raises:
        RedisUnreachable: it does not answer or refuses, with its own words.
        ConfigError: the URL cannot be used, or means the container itself inside a container.
    """
    file = prepared.spec.redis.url_file
    if file is None:
        return
    held = read_secrets(folder, (REDIS_URL,)).get(REDIS_URL)
    text = held.reveal() if held and _is_taken_away(prepared) else redis_url(prepared)
    url = _parsed(text or "", file)
    from deploy.runtime.url_store import open_url_store

    with open_url_store(url) as store:
        trouble = store.trouble()
        if trouble:
            raise RedisUnreachable(
                f"the Redis at {url.shown} cannot be used: {trouble}",
                setting=_FIELD,
                hint=f"start that Redis or fix {file}, then deploy up --dry-run",
            )
        if isinstance(prepared.facts.software, Containers):
            _require_names_for_containers(url, store, file)


def _is_taken_away(prepared: Prepared) -> bool:
    file = prepared.spec.redis.url_file
    return file is not None and not os.path.lexists(file)


def _require_scheme(text: str, file: Path, client: str) -> None:
    scheme = scheme_of(text)
    if scheme not in SCHEMES:
        raise ConfigError(
            f"{file} does not contain a Redis URL: "
            + (f"unsupported scheme {scheme}://" if _SCHEME.fullmatch(scheme) else "no scheme"),
            setting=_FIELD,
            hint=f"write one URL to {file}: {_URLS}",
        )
    if client == "lmcache" and scheme != _LMCACHE_SCHEME:
        raise ConfigError(
            f"lmcache is supported with one {_LMCACHE_SCHEME}:// server only, and {_FIELD} "
            f"({file}) has a {scheme}:// URL",
            setting="redis.client",
            hint="leave redis.client out of deploy.yaml: the default client supports it",
        )


def _parsed(text: str, file: Path) -> RedisUrl:
    from deploy.runtime.url_store import UrlStore

    try:
        # The text goes into a configuration file, between quotation marks.
        if not text.isascii() or not text.isprintable() or set(text) & set(" '\"\\"):
            raise ValueError
        url = parse_redis_url(text)
        UrlStore(url).close()
    except ValueError:
        raise ConfigError(
            f"the {scheme_of(text)}:// URL in {file} is invalid",
            setting=_FIELD,
            hint=f"check host, port, database, a Sentinel's /MASTER and the options after '?' in "
            f"{file}; write special characters of a password as %XX",
        ) from None
    return url


def _require_seen_in_containers(
    url: RedisUrl, redis: RedisSpec, retry: tuple[Changes, ...] = (_BY_PROCESS,)
) -> None:
    """Refuse a URL that cannot work inside a container.

    Raises:
        ConfigError: a socket, an address that means the container itself, or a file that it does
            not see.
    """
    if url.socket:
        raise ConfigError(
            f"{url.shown} is a socket of this machine, which containers cannot reach",
            setting=_FIELD,
            retry=retry,
            hint=f"write a host that they reach to {redis.url_file}, such as redis://HOST:6379",
        )
    for host, _ in url.nodes:
        _refuse_loopback(host, url.shown, retry)
    for file in map(Path, url.files):
        if file not in redis.tls_files:
            raise ConfigError(
                f"its URL names {file}, which containers cannot read",
                setting=_FIELD,
                hint=f"redis: {{tls_files: [{', '.join(url.files)}]}} in deploy.yaml mounts them",
            )


def _require_names_for_containers(url: RedisUrl, store: UrlStore, file: Path) -> None:
    """Refuse server names of Sentinels or a cluster that mean the container itself.

    Raises:
        ConfigError: it does.
    """
    try:
        hosts = store.server_names()
    except store.errors:
        return  # it answered a moment ago, and engines ask again
    for host in hosts:
        _refuse_loopback(host, f"{url.shown} ({file}) names a server {host}, which")


def _refuse_loopback(host: str, what: str, retry: tuple[Changes, ...] = (_BY_PROCESS,)) -> None:
    if is_loopback(host):
        raise ConfigError(
            f"{what} means the container itself inside a container",
            setting=_FIELD,
            retry=retry,
            hint="use an address that other machines can reach",
        )


def _require_readable(file: Path, software: Containers) -> None:
    field = "redis.tls_files"
    if not file.is_file():
        raise ConfigError(
            f"{file} is not a file", setting=field, hint=f"fix {field} in deploy.yaml"
        )
    found, (uid, _, gid) = file.stat(), software.user.partition(":")
    # The first that fits, as the kernel does it.
    who = (uid == str(found.st_uid), 0o400), (gid == str(found.st_gid), 0o040), (True, 0o004)
    needed = next(bit for fits, bit in who if fits)
    if uid != "0" and not found.st_mode & needed:
        raise ConfigError(
            f"{file} cannot be read by user {software.user}, which containers run as",
            setting=field,
            hint=f"sudo chown {software.user} {file}",
        )
