"""LMCache's server, by which engines of a machine share KV with `--connector lmcache-mp`.

Its own memory is the first tier; Redis, the kit's or the user's own, is the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from deploy.config.fields import MP
from deploy.config.model import Model
from deploy.config.runtimes import RUNTIMES
from deploy.config.spec import SettledSpec
from deploy.config.vendors import vendor_named
from deploy.errors import ConfigError
from deploy.planning.topology import Topology

# LMCache evicts a fifth of its memory when it is four fifths full.
_USABLE = 0.8


@dataclass(frozen=True)
class LmcacheServerPlan:
    """The server.

    Attributes:
        kv_mib: memory for KV, taken when it starts.
        base_mib: resident host memory besides.
        metrics_port: on this machine, for Prometheus; 0 if none watches the stack, or where it
            does so inside the containers' network.
    """

    name: str
    kv_mib: int
    base_mib: int
    metrics_port: int = 0

    @property
    def memory_mib(self) -> int:
        """Expected resident host memory."""
        return self.kv_mib + self.base_mib

    def tokens(self, kv_bytes_per_token: int) -> int:
        """Return the tokens of KV that it holds before it evicts some."""
        return int(self.kv_mib * 2**20 * _USABLE) // kv_bytes_per_token


def kv_server(spec: SettledSpec, topology: Topology, default_mib: int) -> LmcacheServerPlan | None:
    """Return the server; None if engines share no KV, or through Redis."""
    if spec.connector != MP or not topology.redis:
        return None
    asked = spec.lmcache.server_gib
    scraped = spec.monitoring and not RUNTIMES[spec.runtime].own_network
    return LmcacheServerPlan(
        "kv-server",
        round(asked * 1024) if asked else default_mib,
        vendor_named(spec.vendor).server.base_mib,
        metrics_port=spec.port + 5 if scraped else 0,
    )


def check_kv_server(spec: SettledSpec, topology: Topology, model: Model) -> None:
    """Refuse what the server cannot do, or not yet.

    Raises:
        ConfigError: naming the setting.
    """
    if spec.connector != MP:
        if spec.lmcache.server_gib is not None and topology.redis:
            raise ConfigError(
                f"{spec.lmcache.server_gib:g} is for {MP}, and the connector is {spec.connector}",
                setting="lmcache.server_gib",
                retry=({"--connector": MP},),
                hint="leave lmcache.server_gib out of the file",
            )
        return
    _check_place(spec)
    if "@" in model.ref:
        raise ConfigError(
            f"{model.ref} has an @, which keys of LMCache's server cannot contain",
            setting="model",
            hint="name a link to it without @",
        )
    if not topology.redis:
        raise ConfigError(
            f"the engines of {topology} share no KV", setting="connector",
            retry=({"--connector": "lmcache"},),
        )  # fmt: skip
    for field, is_set, why in _unsupported(spec):
        if is_set:
            value = attrgetter(field)(spec)
            raise ConfigError(
                f"{str(value).lower() if value is True else value} does not work with {MP}: {why}",
                setting=field,
                retry=({"--connector": "lmcache"},),
            )


def _check_place(spec: SettledSpec) -> None:
    reason = vendor_named(spec.vendor).server.not_in_containers
    if spec.runtime == "compose" and reason:
        raise ConfigError(
            f"{MP} does not work in containers on {spec.vendor}: {reason}",
            setting="connector",
            retry=({"--connector": "lmcache"}, {"--runtime": "process"}),
        )


def _unsupported(spec: SettledSpec) -> tuple[tuple[str, object, str], ...]:
    redis = spec.redis
    return (
        ("layerwise", spec.layerwise, "its server moves whole chunks"),
        ("lmcache.staging_gib", spec.lmcache.staging_gib, "engines have no staging memory"),
        ("redis.client", redis.client != "pdkit", "its server reaches Redis by the kit's client"),
    )
