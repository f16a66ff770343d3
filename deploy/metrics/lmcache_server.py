"""What LMCache's server reports about itself. The names are those of LMCache 0.5.6."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.metrics.engine import CacheCounters
from deploy.metrics.page import MetricsPage
from deploy.verify.hits import Tiers

_USED = "lmcache_mp_l1_memory_usage_bytes"
# In tokens of whole chunks, since the server's start. What an engine held itself is among them.
_ASKED = "lmcache_mp_lookup_requested_tokens_total"
_FOUND = "lmcache_mp_lookup_hit_l1_tokens_total"
_FOUND_IN_REDIS = "lmcache_mp_lookup_hit_l2_tokens_total"


_NO_ROOM = "lmcache_mp_l1_allocation_failure_chunks_total"
_NO_ROOM_TO_LOAD = "lmcache_mp_l2_prefetch_failure_chunks_total"
# Not the evicted chunks: what `check` drops itself is among them.
_EVICTIONS = "lmcache_mp_l1_eviction_loop_triggered_total"


def tiers_of(cache: CacheCounters, server: MetricsPage | None) -> Tiers:
    """Return where KV came from, by what engines and their server counted in the same time.

    Args:
        server: None where engines load from Redis themselves.
    """
    loaded = cache.external_hits
    # Their pages are not read at the same moment. Of one prompt, what Redis adds is its end.
    redis = loaded if server is None else min(loaded, server.count(_FOUND_IN_REDIS))
    computed = max(0, cache.prompt_tokens - cache.local_hits - loaded)
    return Tiers(cache.prompt_tokens, cache.local_hits, loaded - redis, redis, computed)


def looked_up_tokens(server: MetricsPage) -> int:
    """Return the tokens in whole chunks of prompts that engines asked for."""
    return server.count(_ASKED)


@dataclass(frozen=True)
class LmcacheServerPressure:
    """What LMCache's server had no memory for, in a time.

    Attributes:
        no_room: chunks of ranks that were not stored, or not loaded from Redis.
        evictions: how often it dropped a part of its KV.
    """

    no_room: int
    evictions: int

    @classmethod
    def read(cls, page: MetricsPage) -> LmcacheServerPressure:
        """Read a page, or the difference of two."""
        no_room = page.count(_NO_ROOM, during="l1_store")
        return cls(no_room + page.count(_NO_ROOM_TO_LOAD, reason="l1_oom"), page.count(_EVICTIONS))


@dataclass(frozen=True)
class LmcacheServerUse:
    """How full LMCache's server is, and what engines found there.

    Attributes:
        max_bytes: its memory for KV.
        asked_tokens: tokens in whole chunks of prompts that engines asked for, since its start.
        found_tokens: those that were in its memory.
        redis_tokens: those that were loaded from Redis instead.
    """

    used_bytes: int
    max_bytes: int
    asked_tokens: int
    found_tokens: int
    redis_tokens: int

    @classmethod
    def read(cls, page: MetricsPage, max_bytes: int) -> LmcacheServerUse | None:
        """Read a page; None if it lacks the memory in use."""
        if page.total(_USED) is None:
            return None
        # Counters without a count yet are not on the page.
        tokens = map(page.count, (_ASKED, _FOUND, _FOUND_IN_REDIS))
        return cls(page.count(_USED), max_bytes, *tokens)
