"""What happened to a stack between two readings: deaths, restarts, losses, complaints in logs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from deploy.metrics.following import CountedInterval, StoreInterval
from deploy.metrics.reading import ServiceReading, StackReading
from deploy.verify.store_path import StorePath

_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class Event:
    """Something worth knowing.

    Attributes:
        at: when it was seen; it happened in the interval before.
        kind: a stable word for scripts.
        about: a service, or 'stack'.
        count: how often it happened, or to how many.
    """

    at: datetime
    kind: str
    about: str
    text: str
    count: int = 1

    @property
    def like(self) -> tuple[str, str, str]:
        """What is the same in events that differ by numbers only."""
        return self.kind, self.about, _NUMBERS.sub("#", self.text)


def remembered(old: Sequence[Event], new: Sequence[Event], most: int) -> tuple[Event, ...]:
    """Return the most recent events, the newest last; those that are alike become one."""
    kept = list(old)
    for event in new:
        before = [one for one in kept if one.like == event.like]
        kept = [one for one in kept if one.like != event.like]
        kept.append(replace(event, count=event.count + sum(one.count for one in before)))
    return tuple(kept[-most:])


def events_between(
    before: StackReading,
    now: StackReading,
    intervals: Mapping[str, CountedInterval],
    store: StoreInterval | None,
    *,
    evicting: bool,
) -> tuple[Event, ...]:
    """Return the events between two complete readings.

    `evicting` says that Redis already evicted keys in the interval before.
    """
    return tuple(
        event
        for found in (
            _of_the_stack(before, now),
            _of_services(before, now),
            _of_the_store(before, now, store, evicting=evicting),
            _of_the_path(now, intervals),
            _of_logs(before, now),
        )
        for event in found
    )


def _of_the_stack(before: StackReading, now: StackReading) -> Iterator[Event]:
    if now.up and not before.up:
        yield Event(now.at, "up", "stack", "the stack was started")
    if before.up and not now.up:
        yield Event(now.at, "down", "stack", "the stack was taken down")


def _of_services(before: StackReading, now: StackReading) -> Iterator[Event]:
    for name, service in now.services.items():
        was = before.services.get(name)
        if was is not None:
            for kind, text in _change(was, service):
                yield Event(now.at, kind, name, text)


def _change(was: ServiceReading, now: ServiceReading) -> Iterator[tuple[str, str]]:
    """Yield kind and text of what happened to a service."""
    another_life = bool(now.life) and now.life != was.life
    if another_life:
        after = "restarted" if was.life else "started again"
        since = f"running since {now.life}" if isinstance(now.life, str) else f"process {now.life}"
        yield "restarted", f"{after}, {since}"
    if now.condition == was.condition:
        return
    if now.condition == "ready":
        yield "ready", "is ready"
    elif now.condition == "exited":
        yield "exited", "has exited"
    elif now.condition == "not started":
        yield "gone", "is gone"
    elif was.condition == "ready" and not another_life:
        yield "not_ready", "runs but does not answer"


def _of_the_store(
    before: StackReading, now: StackReading, interval: StoreInterval | None, *, evicting: bool
) -> Iterator[Event]:
    if before.user_redis and before.up and now.up:
        if before.store and not now.store:
            yield Event(now.at, "not_ready", "redis", "does not answer")
        if now.store and not before.store:
            yield Event(now.at, "ready", "redis", "answers")
    if interval is None:
        return
    if interval.restarted:
        text = "a different server answers: stored KV may be lost"
        yield Event(now.at, "redis_restarted", "redis", text)
    if interval.flushes:
        yield Event(now.at, "redis_flushed", "redis", "was flushed", interval.flushes)
    if interval.evicted_keys and not evicting:
        text = "is full and began to evict keys"
        yield Event(now.at, "evictions", "redis", text, interval.evicted_keys)


def _of_the_path(now: StackReading, intervals: Mapping[str, CountedInterval]) -> Iterator[Event]:
    for name, interval in intervals.items():
        path = StorePath.read(interval.counted.samples)
        for kind, text, count in _losses(path) if path else ():
            if count > 0:
                yield Event(now.at, kind, name, text, round(count))


def _losses(path: StorePath) -> tuple[tuple[str, str, float], ...]:
    return (
        ("refused", "refused a chunk that was corrupt or foreign", path.refused),
        ("not_loaded", "did not get a chunk in time, or it was gone", path.not_loaded),
        ("not_stored", "could not store a chunk", path.left_out),
        ("redis_failures", "a call to Redis failed", path.failures),
        ("late", "an answer was sent before its KV was stored", path.late),
    )


def _of_logs(before: StackReading, now: StackReading) -> Iterator[Event]:
    for one in now.complaints:
        # A starting service warns of much that is normal.
        serves = all(_is_ready(reading, one.service) for reading in (before, now))
        if one.level == "error" or serves:
            yield Event(now.at, one.level, one.service, one.text, one.count)


def _is_ready(reading: StackReading, name: str) -> bool:
    service = reading.services.get(name)
    return service is not None and service.condition == "ready"
