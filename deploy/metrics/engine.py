"""Metrics of a vLLM engine, by the names that vLLM 0.25 to 0.32 give them."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import astuple, dataclass
from operator import add, sub
from typing import Any

from deploy.metrics.page import MetricsPage
from deploy.verify.store_path import StorePath

# In tokens: queries of the store are the tokens not found in the engine's own cache.
EXTERNAL_QUERIES = "vllm:external_prefix_cache_queries"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
LOCAL_QUERIES = "vllm:prefix_cache_queries"
LOCAL_HITS = "vllm:prefix_cache_hits"

_CACHE_CONFIG = "vllm:cache_config_info"
FINISHED = "vllm:request_success_total"
_FIRST_TOKEN = "vllm:time_to_first_token_seconds"  # noqa: S105 - no password
_MOST = 0.95  # the share of answers whose first token came within `Latency.most_s`


@dataclass(frozen=True)
class CacheCounters:
    """An engine's own prefix cache counters, in tokens since its start."""

    external_queries: int = 0
    external_hits: int = 0
    local_queries: int = 0
    local_hits: int = 0

    @classmethod
    def read(cls, page: MetricsPage) -> CacheCounters:
        """Return the counters of a page.

        Raises:
            LookupError: one is missing: an engine that does not count external hits runs without
                a connector.
        """
        names = (EXTERNAL_QUERIES, EXTERNAL_HITS, LOCAL_QUERIES, LOCAL_HITS)
        missing = [name for name in names if page.total(f"{name}_total") is None]
        if missing:
            raise LookupError(f"its metrics lack {', '.join(missing)}")
        return cls(*(page.count(f"{name}_total") for name in names))

    def __add__(self, other: CacheCounters) -> CacheCounters:
        return CacheCounters(*map(add, astuple(self), astuple(other)))

    def since(self, earlier: CacheCounters) -> CacheCounters:
        """Return the difference from an earlier reading."""
        return CacheCounters(*map(sub, astuple(self), astuple(earlier)))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts that were admitted: each is held, or the store is asked for it.

        Only of an engine with a connector: another one counts no external queries. Not
        `local_queries`, which stay at zero in an engine without prefix caching, and which vLLM 0.25
        counts again whenever it looks at a waiting request.
        """
        return self.external_queries + self.local_hits

    @property
    def external_rate(self) -> float | None:
        """Hits / queries of the store; None where nothing was asked of it."""
        return self.external_hits / self.external_queries if self.external_queries else None

    @property
    def local_rate(self) -> float | None:
        """Hits / queries of the engine's own cache; None where nothing was asked of it."""
        return self.local_hits / self.local_queries if self.local_queries else None


def caches_prefixes(page: MetricsPage) -> bool:
    """Tell whether an engine has its own prefix cache, by its reported configuration.

    However it was turned off: by one of several spellings of an option, by a file, by the model.
    """
    told = [one.labels.get("enable_prefix_caching") for one in page.named(_CACHE_CONFIG)]
    return "False" not in told


# Of the core, which computes: the API server only passes them on. A step of a long prompt, which
# gives no token yet, takes KV blocks.
_CORE = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:iteration_tokens_total_count",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    f"{LOCAL_QUERIES}_total",
)


def core_counts(page: MetricsPage) -> tuple[float, ...]:
    """Return numbers of which each step of an engine changes one; () where one is missing."""
    found = [page.total(name) for name in _CORE]
    return tuple(value for value in found if value is not None) if None not in found else ()


@dataclass(frozen=True)
class Latency:
    """Durations in seconds, as a histogram has them.

    Attributes:
        buckets: upper bound → how many took no longer.
    """

    count: float = 0
    sum_s: float = 0
    buckets: tuple[tuple[float, float], ...] = ()

    @classmethod
    def read(cls, page: MetricsPage, name: str) -> Latency:
        buckets: dict[float, float] = defaultdict(float)
        for sample in page.named(f"{name}_bucket"):
            buckets[float(sample.labels["le"])] += sample.value
        return cls(
            page.total(f"{name}_count") or 0,
            page.total(f"{name}_sum") or 0,
            tuple(sorted(buckets.items())),
        )

    @property
    def mean_s(self) -> float | None:
        """Mean in seconds; None without a request."""
        return self.sum_s / self.count if self.count else None

    @property
    def most_s(self) -> float | None:
        """The smallest bound within which 95 % of them lie; None where no finite one is."""
        if not self.count:
            return None
        bounds = (bound for bound, within in self.buckets if within >= _MOST * self.count)
        found = next(bounds, math.inf)
        return None if math.isinf(found) else found


@dataclass(frozen=True)
class EngineCounts:
    """What an engine, or several together, counted in a time.

    Attributes:
        answers: requests that ended, however they did.
        first_token: from a request's arrival at the engine to its first token.
        path: what went to and from Redis; None where LMCache's own client moves it.
    """

    cache: CacheCounters = CacheCounters()
    prompt_tokens: float = 0
    generation_tokens: float = 0
    answers: float = 0
    first_token: Latency = Latency()
    path: StorePath | None = None

    @classmethod
    def read(cls, page: MetricsPage) -> EngineCounts:
        """Return the counts of a page; zero is what it lacks."""
        try:
            cache = CacheCounters.read(page)
        except LookupError:
            cache = CacheCounters()
        return cls(
            cache,
            page.total("vllm:prompt_tokens_total") or 0,
            page.total("vllm:generation_tokens_total") or 0,
            page.total(FINISHED) or 0,
            Latency.read(page, _FIRST_TOKEN),
            StorePath.read(page.samples),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as JSON has them."""
        first = self.first_token
        return {
            **hits_as_dict(self.cache),
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "answers": self.answers,
            "first_token_mean_s": _rounded(first.mean_s),
            "first_token_p95_within_s": first.most_s,
            "store_path": self.path.as_dict() if self.path else None,
        }


@dataclass(frozen=True)
class EngineLoad:
    """How busy an engine is at a moment.

    Attributes:
        kv_use: the share of its KV blocks that are taken.
    """

    running: int
    waiting: int
    kv_use: float

    @classmethod
    def read(cls, page: MetricsPage) -> EngineLoad:
        """Return the load; engine cores are added up, of their KV use the highest is taken."""
        use = [sample.value for sample in page.named("vllm:kv_cache_usage_perc")]
        return cls(
            page.count("vllm:num_requests_running"),
            page.count("vllm:num_requests_waiting"),
            max(use, default=0.0),
        )


def hits_as_dict(cache: CacheCounters) -> dict[str, Any]:
    """Return queries, hits and rates as JSON has them; a rate is null where nothing was asked."""
    return {
        "external_queries": cache.external_queries,
        "external_hits": cache.external_hits,
        "external_hit_rate": _rounded(cache.external_rate),
        "local_queries": cache.local_queries,
        "local_hits": cache.local_hits,
        "local_hit_rate": _rounded(cache.local_rate),
    }


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 6)
