"""A frame of a watch: a reading of the stack, and what is new since the ones before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from deploy.metrics.engine import CacheCounters, EngineCounts, EngineLoad, hits_as_dict
from deploy.metrics.events import Event, events_between
from deploy.metrics.following import (
    Followed,
    Interval,
    StoreInterval,
    followed,
    store_interval,
)
from deploy.metrics.page import MetricsPage
from deploy.metrics.reading import ServiceCondition, ServiceReading, StackReading
from deploy.metrics.router import RouterCounts, RouterView
from deploy.metrics.store import StoreStats
from deploy.planning.plan import DECODE, ENGINE_ROLES
from deploy.verify.store_path import StorePath


@dataclass(frozen=True)
class EngineFrame:
    """An engine at a moment.

    Attributes:
        load, counts: now, and since the last frame; None where nothing is known of it.
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
        return _rate(self.counts.prompt_tokens, self.seconds) if self.counts else None

    @property
    def generation_tokens_s(self) -> float | None:
        return _rate(self.counts.generation_tokens, self.seconds) if self.counts else None

    def as_dict(self) -> dict[str, Any]:
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
    """The router at a moment; `counts` are those since the last frame, None where not known."""

    view: RouterView
    counts: RouterCounts | None
    seconds: float
    watched: RouterCounts

    @property
    def requests_s(self) -> float | None:
        return _rate(self.counts.requests, self.seconds) if self.counts else None

    def as_dict(self) -> dict[str, Any]:
        rates = {"seconds": round(self.seconds, 3), "requests_s": _rounded(self.requests_s)}
        return {
            "engines": asdict(self.view),
            "interval": {**rates, **asdict(self.counts)} if self.counts else None,
            "watch": asdict(self.watched),
        }


@dataclass(frozen=True)
class Totals:
    """What the engines of a stack counted together in a time.

    Attributes:
        cache: hits in the engines' own caches, and those in the store of the engines that answer:
            producers ask it, too, and need not find anything.
        answers: each request is one of a producer's as well, if there are producers.
        path: what went to and from Redis; None where LMCache's own client moves it.
    """

    cache: CacheCounters = field(default_factory=CacheCounters)
    answers: float = 0
    path: StorePath | None = None

    @classmethod
    def of(cls, counted: Mapping[str, tuple[str, MetricsPage]]) -> Totals:
        """Return the totals of pages, by the names of services and with their roles."""
        every = _together(page for role, page in counted.values() if role in ENGINE_ROLES)
        ends = _together(page for role, page in counted.values() if role in DECODE)
        external = ends.cache
        cache = replace(
            every.cache,
            external_queries=external.external_queries,
            external_hits=external.external_hits,
        )
        return cls(cache, ends.answers, every.path)

    def as_dict(self) -> dict[str, Any]:
        return {
            **hits_as_dict(self.cache),
            "answers": self.answers,
            "store_path": self.path.as_dict() if self.path else None,
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
        """What of the stack is not ready."""
        redis = ["the Redis of redis.url_file"] if self.user_redis and not self.store else []
        ill = [name for name, condition in self.conditions.items() if condition != "ready"]
        return (ill + redis) if self.up else []

    def as_dict(self) -> dict[str, Any]:
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


@dataclass(frozen=True)
class Memory:
    """What a watch keeps from frame to frame.

    Attributes:
        reading: the last one without trouble.
        clock_s: of the last one, with trouble or without.
        store, store_clock_s: the last that Redis told, and when.
    """

    began_s: float
    clock_s: float
    reading: StackReading | None = None
    trouble: str = ""
    services: Mapping[str, Followed] = field(default_factory=dict)
    store: StoreStats | None = None
    store_clock_s: float = 0.0
    evicting: bool = False
    evicted_keys: int = 0


def next_frame(memory: Memory | None, now: StackReading) -> tuple[Memory, Frame]:
    """Return the frame that a reading makes, and what to keep for the next one."""
    if now.trouble:
        return _troubled(memory, now)
    first = memory is None or memory.reading is None
    kept = memory or Memory(now.clock_s, now.clock_s)
    services, intervals = _follow_all(kept, now, first=first)
    store = _store_interval(kept, now)
    evicted = kept.evicted_keys + ((store and store.evicted_keys) or 0)
    events = (
        events_between(kept.reading, now, intervals, store, evicting=kept.evicting)
        if kept.reading
        else ()
    )
    frame = Frame(
        name=now.name,
        at=now.at,
        seconds=now.clock_s - kept.clock_s,
        watched_s=now.clock_s - kept.began_s,
        up=now.up,
        what=now.what,
        user_redis=now.user_redis,
        shares_kv=now.shares_kv,
        conditions={name: service.condition for name, service in now.services.items()},
        engines=_engines(now, services, intervals),
        store=StoreFrame(now.store, store, evicted) if now.store else None,
        router=_router(now, services, intervals),
        counts=Totals.of({n: (services[n].role, one.counted) for n, one in intervals.items()}),
        watched=Totals.of({n: (one.role, one.watched) for n, one in services.items()}),
        events=events,
    )
    after = replace(
        kept,
        clock_s=now.clock_s,
        reading=now,
        trouble="",
        services=services,
        store=now.store or kept.store,
        store_clock_s=now.clock_s if now.store else kept.store_clock_s,
        evicting=bool(store and store.evicted_keys),
        evicted_keys=evicted,
    )
    return after, frame


def _troubled(memory: Memory | None, now: StackReading) -> tuple[Memory, Frame]:
    kept = memory or Memory(now.clock_s, now.clock_s)
    new = kept.trouble != now.trouble
    frame = Frame(
        name=now.name,
        at=now.at,
        seconds=now.clock_s - kept.clock_s,
        watched_s=now.clock_s - kept.began_s,
        up=False,
        trouble=now.trouble,
        events=(Event(now.at, "trouble", "stack", now.trouble),) if new else (),
    )
    return replace(kept, clock_s=now.clock_s, trouble=now.trouble), frame


def _follow_all(
    kept: Memory, now: StackReading, *, first: bool
) -> tuple[dict[str, Followed], dict[str, Interval]]:
    services = dict(kept.services)
    intervals = {}
    for name, service in now.services.items():
        services[name], interval = followed(
            kept.services.get(name), service, clock_s=kept.clock_s, first=first
        )
        if interval is not None:
            intervals[name] = interval
    return services, intervals


def _store_interval(kept: Memory, now: StackReading) -> StoreInterval | None:
    if kept.store is None or now.store is None:
        return None
    return store_interval(kept.store, now.store, now.clock_s - kept.store_clock_s)


def _engines(
    now: StackReading, services: Mapping[str, Followed], intervals: Mapping[str, Interval]
) -> tuple[EngineFrame, ...]:
    return tuple(
        _engine(service, services[name], intervals.get(name))
        for name, service in now.services.items()
        if service.role in ENGINE_ROLES
    )


def _engine(service: ServiceReading, seen: Followed, interval: Interval | None) -> EngineFrame:
    return EngineFrame(
        service.name,
        service.role,
        service.condition,
        EngineLoad.read(service.page) if service.page else None,
        EngineCounts.read(interval.counted) if interval else None,
        interval.seconds if interval else 0.0,
        EngineCounts.read(seen.watched),
    )


def _router(
    now: StackReading, services: Mapping[str, Followed], intervals: Mapping[str, Interval]
) -> RouterFrame | None:
    for name, service in now.services.items():
        if service.role == "router" and service.page is not None:
            interval = intervals.get(name)
            return RouterFrame(
                RouterView.read(service.page),
                RouterCounts.read(interval.counted) if interval else None,
                interval.seconds if interval else 0.0,
                RouterCounts.read(services[name].watched),
            )
    return None


def _together(pages: Iterable[MetricsPage]) -> EngineCounts:
    return EngineCounts.read(sum(pages, MetricsPage()))


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 4)
