"""What vllm-router 0.1.17 counts, on the metrics page that it serves beside its own port."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.metrics.page import MetricsPage

_ERRORS = (
    "vllm_router_pd_errors_total",  # no engine to choose
    "vllm_router_pd_prefill_errors_total",
    "vllm_router_pd_decode_errors_total",
    "vllm_router_pd_stream_errors_total",
)


@dataclass(frozen=True)
class RouterCounts:
    """Requests that it took in a time, and what went wrong with them or before they were taken."""

    requests: float = 0
    errors: float = 0

    @classmethod
    def read(cls, page: MetricsPage) -> RouterCounts:
        """Return the counts of a page; it names what it counts when it happens first."""
        return cls(
            page.total("vllm_router_pd_requests_total") or 0,
            sum(page.total(name) or 0 for name in _ERRORS),
        )


@dataclass(frozen=True)
class RouterView:
    """How many engines it knows, and how many of them it takes for healthy."""

    engines: int
    healthy: int

    @classmethod
    def read(cls, page: MetricsPage) -> RouterView:
        health = [sample.value for sample in page.named("vllm_router_worker_health")]
        return cls(len(health), int(sum(health)))
