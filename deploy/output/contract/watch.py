"""The data of a line of `deploy status --watch --json`."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import TypedDict

from deploy.document import with_fields_of
from deploy.metrics.engine import CacheCounters, EngineLoad
from deploy.metrics.events import Event
from deploy.metrics.following import StoreInterval
from deploy.metrics.reading import ServiceCondition
from deploy.metrics.router import RouterCounts, RouterView
from deploy.metrics.store_stats import StoreStats
from deploy.verify.hits import Tiers
from deploy.verify.store_path import RedisTraffic


@with_fields_of(CacheCounters)
class CacheHits(TypedDict):
    """Tokens asked for and found; a rate is null if nothing was asked.

    Attributes:
        external_queries, external_hits: of the store.
        local_queries, local_hits: of the engines' own prefix caches.
    """

    external_hit_rate: float | None
    local_hit_rate: float | None


class Totals(CacheHits):
    """What a stack's engines counted together.

    Attributes:
        answers: finished requests.
    """

    answers: float
    store_path: RedisTraffic | None


class StackTotals(Totals):
    """What a stack's engines and LMCache's server counted together.

    Attributes:
        tiers: where KV came from, for this host's engines; null without such a server, or where it
            did not answer.
    """

    tiers: Tiers | None


class EngineCounts(Totals):
    """What an engine counted.

    Attributes:
        first_token_p95_within_s: 95 % of the first tokens came within this time.
    """

    prompt_tokens: float
    generation_tokens: float
    first_token_mean_s: float | None
    first_token_p95_within_s: float | None


class EngineInterval(EngineCounts):
    """What an engine counted since the last frame."""

    seconds: float
    prompt_tokens_s: float | None
    generation_tokens_s: float | None


class EngineFrame(TypedDict):
    """An engine.

    Attributes:
        load: now; null if unknown.
        interval: since the last frame; null if unknown.
        watch: since the watch began.
    """

    name: str
    role: str
    condition: ServiceCondition
    load: EngineLoad | None
    interval: EngineInterval | None
    watch: EngineCounts


class Evictions(TypedDict):
    """Keys that Redis evicted since the watch began."""

    evicted_keys: int


@with_fields_of(RouterCounts)
class RouterInterval(TypedDict):
    """What the router counted since the last frame."""

    seconds: float
    requests_s: float | None


class Router(TypedDict):
    """The router.

    Attributes:
        engines: those that it knows, and how many of them are healthy.
        watch: since the watch began.
    """

    engines: RouterView
    interval: RouterInterval | None
    watch: RouterCounts


@with_fields_of(StoreInterval)
class StoreRates(TypedDict):
    """What Redis did since the last frame."""

    received_bytes_s: float | None
    sent_bytes_s: float | None
    commands_s: float | None


@with_fields_of(StoreStats)
class Redis(TypedDict):
    """Redis; null is what its user may not see.

    Attributes:
        watch: since the watch began.
    """

    interval: StoreRates | None
    watch: Evictions


class Frame(TypedDict):
    """A stack at a moment.

    Attributes:
        at: the time, ISO 8601.
        seconds: since the frame before; 0 for the first.
        watched_s: since the watch began.
        trouble: why the stack could not be read; "" if it could.
        services: service → its condition.
        interval: of the whole stack since the last frame.
        watch: of the whole stack since the watch began.
        events: new ones.
    """

    name: str
    at: str
    seconds: float
    watched_s: float
    up: bool
    healthy: bool
    trouble: str
    services: Mapping[str, ServiceCondition]
    engines: list[EngineFrame]
    redis: Redis | None
    router: Router | None
    interval: StackTotals
    watch: StackTotals
    events: list[Event]
