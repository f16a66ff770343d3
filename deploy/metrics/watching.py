"""From readings of a stack to the frames of a watch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deploy.metrics.engine import EngineCounts, EngineLoad
from deploy.metrics.events import Event, events_between
from deploy.metrics.following import (
    CountedInterval,
    Followed,
    StoreInterval,
    followed,
    store_interval,
)
from deploy.metrics.frame import EngineFrame, Frame, RouterFrame, StoreFrame, Totals
from deploy.metrics.reading import ServiceReading, StackReading
from deploy.metrics.router import RouterCounts, RouterView
from deploy.metrics.store_stats import StoreStats
from deploy.planning.engines import ENGINE_ROLES


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
    remote = {name for name, service in now.services.items() if service.remote}
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
        counts=Totals.of(
            {n: (services[n].role, one.counted) for n, one in intervals.items()}, remote
        ),
        watched=Totals.of({n: (one.role, one.watched) for n, one in services.items()}, remote),
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
) -> tuple[dict[str, Followed], dict[str, CountedInterval]]:
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
    now: StackReading, services: Mapping[str, Followed], intervals: Mapping[str, CountedInterval]
) -> tuple[EngineFrame, ...]:
    return tuple(
        _engine(service, services[name], intervals.get(name))
        for name, service in now.services.items()
        if service.role in ENGINE_ROLES
    )


def _engine(
    service: ServiceReading, seen: Followed, interval: CountedInterval | None
) -> EngineFrame:
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
    now: StackReading, services: Mapping[str, Followed], intervals: Mapping[str, CountedInterval]
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
