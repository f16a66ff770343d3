"""What the router counts, on the metrics page that it serves beside its own port."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.metrics.page import MetricsPage


@dataclass(frozen=True)
class RouterCounts:
    """Requests that the router received, and those that no engine answered to the end."""

    requests: float = 0
    errors: float = 0

    @classmethod
    def read(cls, page: MetricsPage) -> RouterCounts:
        return cls(
            page.total("pdkit_router_requests_total") or 0,
            page.total("pdkit_router_errors_total") or 0,
        )


@dataclass(frozen=True)
class EngineView:
    """An engine as the router sees it.

    Attributes:
        busy: requests that it has from the router.
        awaited: answers that it owes clients, without those that slow ones hold up.
    """

    name: str
    role: str
    healthy: bool
    drained: bool
    busy: int
    awaited: int

    @classmethod
    def read_all(cls, page: MetricsPage) -> tuple[EngineView, ...]:
        """Return every engine on a metrics page of the router."""

        def value(gauge: str, name: str) -> int:
            return page.count(f"pdkit_router_engine_{gauge}", engine=name)

        return tuple(
            cls(
                name := sample.labels.get("engine", ""),
                sample.labels.get("role", ""),
                bool(sample.value),
                bool(value("drained", name)),
                value("busy", name),
                value("awaited", name),
            )
            for sample in page.named("pdkit_router_engine_healthy")
        )


@dataclass(frozen=True)
class RouterView:
    """How many engines it knows, and how many of them are healthy."""

    engines: int
    healthy: int

    @classmethod
    def read(cls, page: MetricsPage) -> RouterView:
        health = [sample.value for sample in page.named("pdkit_router_engine_healthy")]
        return cls(len(health), sum(map(bool, health)))
