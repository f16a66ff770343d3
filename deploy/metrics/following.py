"""One service, or Redis, followed from reading to reading through its restarts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from deploy.metrics.page import MetricsPage
from deploy.metrics.reading import ServiceReading
from deploy.metrics.store_stats import StoreStats


@dataclass(frozen=True)
class CountedInterval:
    """What a service counted between two readings of its page."""

    counted: MetricsPage
    seconds: float

    def rate(self, amount: float) -> float:
        """Return an amount a second."""
        return amount / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Followed:
    """A service as far as it was seen.

    Attributes:
        page, clock_s: its last reading in this life, and when that was; None without one, and then
            the time since which it is waited for.
        seen_born: this life began while somebody looked, so that all it counted belongs to that
            time.
        watched: all that was counted in all lives while somebody looked.
    """

    role: str
    life: int | str
    page: MetricsPage | None
    clock_s: float
    seen_born: bool
    watched: MetricsPage = field(default_factory=MetricsPage)


def followed(
    before: Followed | None, now: ServiceReading, *, clock_s: float, first: bool
) -> tuple[Followed, CountedInterval | None]:
    """Return a service with its new reading, and what it counted since the last one.

    `clock_s` is the time of the stack's reading before; `first` says that there is none. Nothing is
    known of an interval after the first reading of a life whose start was not seen, nor after one
    in which the service did not answer.
    """
    if before is None:
        before = Followed(now.role, now.life, None, clock_s, seen_born=not first)
    elif now.life not in (0, before.life):
        before = replace(before, life=now.life, page=None, clock_s=clock_s, seen_born=True)
    if now.page is None:
        return before, None
    read = replace(before, page=now.page, clock_s=now.clock_s)
    if before.page is None and not before.seen_born:
        return read, None
    counted = now.page.since(before.page or MetricsPage())
    interval = CountedInterval(counted, now.clock_s - before.clock_s)
    return replace(read, watched=before.watched + counted), interval


@dataclass(frozen=True)
class StoreInterval:
    """What Redis did for all clients between two readings; None is what is not known.

    Attributes:
        restarted: Redis restarted in between, so the counts are unknown.
    """

    seconds: float
    received_bytes: int | None
    sent_bytes: int | None
    commands: int | None
    evicted_keys: int | None
    flushes: int | None
    restarted: bool

    def rate(self, amount: int | None) -> float | None:
        """Return an amount a second."""
        return None if amount is None or self.seconds <= 0 else amount / self.seconds


def store_interval(before: StoreStats, now: StoreStats, seconds: float) -> StoreInterval:
    """Return the difference of two readings of Redis; None for values that one lacks."""
    return StoreInterval(
        seconds,
        now.grown("received_bytes", before),
        now.grown("sent_bytes", before),
        now.grown("commands", before),
        now.grown("evicted_keys", before),
        now.grown("flushes", before),
        now.restarted_since(before),
    )
