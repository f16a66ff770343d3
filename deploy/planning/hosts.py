"""Checks of a stack that several hosts share: each host runs a part of its engines."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from deploy.config.runtimes import RUNTIMES
from deploy.config.spec import SettledSpec
from deploy.errors import ConfigError
from deploy.planning.address import is_loopback
from deploy.planning.topology import FIRST_ENGINE_OFFSET, Topology

_BOTH = ("producer", "consumer")


def check_hosts(spec: SettledSpec, topology: Topology) -> None:
    """Refuse a part of a stack that no other host could use, or that could use no other.

    Raises:
        ConfigError: naming the setting that is missing, or does not go with several hosts.
    """
    if not topology.engines:
        raise ConfigError(
            "0, and consumers is 0, too: a host runs at least one engine",
            setting="producers",
            retry=({"--producers": "1", "--consumers": "0"},),
        )
    _check_other_role(spec, topology)
    problem = next(_problems(spec, topology), None) if spans_hosts(spec, topology) else None
    if problem:
        setting, said, hint = problem
        raise ConfigError(said, setting=setting, hint=hint)


def spans_hosts(spec: SettledSpec, topology: Topology) -> bool:
    """Whether other hosts have engines of the stack, or a router that uses these."""
    listens = not ipaddress.ip_address(spec.engine.bind).is_loopback
    return topology.partial or listens or bool(spec.router.engines)


def _check_other_role(spec: SettledSpec, topology: Topology) -> None:
    """Refuse a lone role that nothing reaches, or whose other role is not listed."""
    if not topology.partial:
        return
    mine, other = _BOTH if topology.producers else _BOTH[::-1]
    if spec.router.engines:
        if not any(one.role == other for one in spec.router.engines):
            raise ConfigError(
                f"0, and router.engines lists no {other}",
                setting=f"{other}s",
                hint=f"add {{role: {other}, url: 'http://HOST:PORT'}} to router.engines",
            )
    elif ipaddress.ip_address(spec.engine.bind).is_loopback:
        raise ConfigError(
            f"0, and no router of another host reaches these {mine}s on {spec.engine.bind}",
            setting=f"{other}s",
            hint="set engine.bind to an address of this host, or list the other hosts' engines in "
            "router.engines",
        )


def _problems(spec: SettledSpec, topology: Topology) -> Iterator[tuple[str, str, str]]:
    """Yield the faults of a spec for several hosts: setting, message and hint."""
    shared = "a stack on several hosts"
    if not RUNTIMES[spec.runtime].several_hosts:
        yield ("runtime", f"{spec.runtime}: {shared} runs as processes so far",
               "add --runtime process")  # fmt: skip
    if topology.aggregated:
        yield ("topology", f"{topology}: {shared} has producers and consumers",
               "set producers and consumers instead")  # fmt: skip
    if spec.redis.url_file is None:
        yield ("redis.url_file", f"it is missing: {shared} needs a Redis that all of them reach",
               "write its URL into a file, and name that in redis.url_file")  # fmt: skip
    if spec.redis.client != "pdkit":
        yield ("redis.client", f"{spec.redis.client}: such engines do not report their KV's keys",
               "leave redis.client out")  # fmt: skip
    if spec.redis.integrity == "mac":
        yield ("redis.integrity", "with mac, each host has its own key, so no KV would be loaded",
               "leave redis.integrity out")  # fmt: skip
    if spec.engine.key_file is None:
        yield ("engine.key_file", f"it is missing: all engines of {shared} ask for the same key",
               "openssl rand -hex 32 > engine-key, copy that file to every host, and name it in "
               "engine.key_file")  # fmt: skip
    urls = [one.url for one in spec.router.engines]
    for url in (url for url in urls if urls.count(url) > 1):
        yield "router.engines", f"{url} is listed twice", "list each engine once"
    first = spec.port + FIRST_ENGINE_OFFSET
    for one in spec.router.engines:
        here = is_loopback(one.host) or one.host == spec.engine.bind
        if here and first <= one.port < first + topology.engines:
            yield ("router.engines", f"{one.url} is an engine of this host",
                   "list only engines of other hosts")  # fmt: skip
    if spec.monitoring and topology.partial and not spec.router.engines:
        yield ("monitoring", "this host has no router, so there is nothing to watch",
               "set monitoring on the host of the router")  # fmt: skip
