"""A frame of a watch: a reading of the stack, and what is new since the ones before."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from deploy.metrics.engine import CacheCounters, EngineCounts, EngineLoad, hits_as_dict
from deploy.metrics.events import Event
from deploy.metrics.following import StoreInterval
from deploy.metrics.lmcache_server import tiers_of
from deploy.metrics.page import MetricsPage
from deploy.metrics.reading import ServiceCondition
from deploy.metrics.router import RouterCounts, RouterView
from deploy.metrics.store_stats import StoreStats
from deploy.planning.engines import DECODE, ENGINE_ROLES
from deploy.verify.hits import Tiers
from deploy.verify.store_path import StorePath


@dataclass(frozen=True)
class EngineFrame:
    """An engine at a moment.

    Attributes:
        load, counts: now, and since the last frame; None if unknown.
        seconds: what `counts` are of.
        watched: since the watch began.
    """

    name: str
    role: str
    condition: ServiceCondition
    load: EngineLoad | None
    counts: EngineCounts | None
    seconds: float
    watched: EngineCounts

    @property
    def prompt_tokens_s(self) -> float | None:
        """Prompt tokens a second since the last frame; None if nothing is known."""
        return _rate(self.counts.prompt_tokens, self.seconds) if self.counts else None

    @property
    def generation_tokens_s(self) -> float | None:
        """Generated tokens a second since the last frame; None if nothing is known."""
        return _rate(self.counts.generation_tokens, self.seconds) if self.counts else None

    def as_dict(self) -> dict[str, Any]:
        """Return the engine as `status --watch --json` shows it."""
        rates = {
            "seconds": round(self.seconds, 3),
            "prompt_tokens_s": _rounded(self.prompt_tokens_s),
            "generation_tokens_s": _rounded(self.generation_tokens_s),
        }
        return {
            "name": self.name,
            "role": self.role,
            "condition": self.condition,
            "load": asdict(self.load) if self.load else None,
            "interval": {**rates, **self.counts.as_dict()} if self.counts else None,
            "watch": self.watched.as_dict(),
        }


@dataclass(frozen=True)
class StoreFrame:
    """Redis at a moment; `evicted_keys` are those since the watch began."""

    stats: StoreStats
    interval: StoreInterval | None
    evicted_keys: int

    def as_dict(self) -> dict[str, Any]:
        """Return Redis as `status --watch --json` shows it."""
        interval = self.interval
        rates = interval and {
            "received_bytes_s": _rounded(interval.rate(interval.received_bytes)),
            "sent_bytes_s": _rounded(interval.rate(interval.sent_bytes)),
            "commands_s": _rounded(interval.rate(interval.commands)),
        }
        return {
            **asdict(self.stats),
            "interval": interval and {**asdict(interval), **(rates or {})},
            "watch": {"evicted_keys": self.evicted_keys},
        }


@dataclass(frozen=True)
class RouterFrame:
    """The router at a moment; `counts` are those since the last frame, None if not known."""

    view: RouterView
    counts: RouterCounts | None
    seconds: float
    watched: RouterCounts

    @property
    def requests_s(self) -> float | None:
        """Requests a second since the last frame; None if nothing is known."""
        return _rate(self.counts.requests, self.seconds) if self.counts else None

    def as_dict(self) -> dict[str, Any]:
        """Return the router as `status --watch --json` shows it."""
        rates = {"seconds": round(self.seconds, 3), "requests_s": _rounded(self.requests_s)}
        return {
            "engines": asdict(self.view),
            "interval": {**rates, **asdict(self.counts)} if self.counts else None,
            "watch": asdict(self.watched),
        }


@dataclass(frozen=True)
class Totals:
    """What the engines of a stack, and LMCache's server, counted together in a time.

    Attributes:
        cache: hits in the engines' own caches, and those in the store of the engines that answer:
            producers ask it, too, and need not find anything.
        answers: each request is one of a producer's as well, if there are producers.
        path: what went to and from Redis; None if LMCache's own client moves it.
        tiers: where KV came from, in the engines of this host; None without LMCache's server, or
            where it did not answer.
    """

    cache: CacheCounters = field(default_factory=CacheCounters)
    answers: float = 0
    path: StorePath | None = None
    tiers: Tiers | None = None

    @classmethod
    def of(
        cls, counted: Mapping[str, tuple[str, MetricsPage]], remote: Collection[str] = ()
    ) -> Totals:
        """Return the totals of pages, by the names of services and with their roles.

        Args:
            counted: the pages.
            remote: names of engines of other hosts, which LMCache's server here does not serve.
        """
        # One that never answered has an empty page.
        servers = [page for role, page in counted.values() if role == "kv-server" and page.samples]
        pages = [page for role, page in counted.values() if role in ENGINE_ROLES]
        every = _together([*pages, *servers])
        ends = _together(page for role, page in counted.values() if role in DECODE)
        external = ends.cache
        cache = replace(
            every.cache,
            external_queries=external.external_queries,
            external_hits=external.external_hits,
        )
        here = _together(
            page
            for name, (role, page) in counted.items()
            if role in ENGINE_ROLES and name not in remote
        )
        tiers = tiers_of(here.cache, servers[0]) if servers else None
        return cls(cache, ends.answers, every.path, tiers)

    def as_dict(self) -> dict[str, Any]:
        """Return all engines together as `status --watch --json` shows them."""
        return {
            **hits_as_dict(self.cache),
            "answers": self.answers,
            "store_path": self.path.as_dict() if self.path else None,
            "tiers": asdict(self.tiers) if self.tiers else None,
        }


@dataclass(frozen=True)
class Frame:
    """What a watch shows at a moment.

    Attributes:
        seconds, watched_s: since the frame before, 0 for the first, and since the watch began.
        conditions: of all services.
        counts, watched: of the whole stack since the frame before, and since the watch began.
        events: that are new in this frame.
    """

    name: str
    at: datetime
    seconds: float
    watched_s: float
    up: bool
    trouble: str = ""
    what: str = ""
    user_redis: bool = False
    shares_kv: bool = True
    conditions: Mapping[str, ServiceCondition] = field(default_factory=dict)
    engines: tuple[EngineFrame, ...] = ()
    store: StoreFrame | None = None
    router: RouterFrame | None = None
    counts: Totals = Totals()
    watched: Totals = Totals()
    events: tuple[Event, ...] = ()

    @property
    def sick(self) -> list[str]:
        """The services that are not ready."""
        redis = ["the Redis of redis.url_file"] if self.user_redis and not self.store else []
        ill = [name for name, condition in self.conditions.items() if condition != "ready"]
        return (ill + redis) if self.up else []

    def as_dict(self) -> dict[str, Any]:
        """Return the frame as `status --watch --json` prints it."""
        return {
            "name": self.name,
            "at": self.at.isoformat(timespec="milliseconds"),
            "seconds": round(self.seconds, 3),
            "watched_s": round(self.watched_s, 3),
            "up": self.up,
            "healthy": self.up and not self.trouble and not self.sick,
            "trouble": self.trouble,
            "services": dict(self.conditions),
            "engines": [engine.as_dict() for engine in self.engines],
            "redis": self.store.as_dict() if self.store else None,
            "router": self.router.as_dict() if self.router else None,
            "interval": self.counts.as_dict(),
            "watch": self.watched.as_dict(),
            "events": [
                {**asdict(e), "at": e.at.isoformat(timespec="seconds")} for e in self.events
            ],
        }


def _together(pages: Iterable[MetricsPage]) -> EngineCounts:
    return EngineCounts.read(sum(pages, MetricsPage()))


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 4)
