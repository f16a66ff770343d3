"""What the router reports about itself: health for clients, counters for operators."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from pdkit_router.handoff import OUTCOMES
from pdkit_router.request import OWN, Refused, Request
from pdkit_router.route import Forwarder, Group
from pdkit_router.serve import ClientResponse

_COUNTED = {
    "requests": "requests for engines",
    "errors": "requests that no engine answered to the end",
    "retries": "retries on another engine",
    "continued": "streams continued on another engine",
    "degraded": "requests without a producer",
    "cancelled": "requests cancelled by the client",
    "spans_sent": "spans that the OpenTelemetry collector accepted",
    "spans_dropped": "spans that the OpenTelemetry collector did not accept in time",
}
_HANDOFFS = "hand-offs of a prompt's KV from a prefill to its decode"
_GAUGES = {
    "healthy": "1 if the engine answers",
    "busy": "its requests",
    "awaited": "requests it is answering, without those that wait for slow clients",
    "drained": "1 if it gets no new requests",
    "handoffs": "hand-offs that may hold its KV blocks",
    "abandoned": "those of them that no consumer will read, until their lease ends",
}


class FrontDoor:
    """What clients reach: health is answered here, all else by engines."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder

    async def serve(self, request: Request, answer: ClientResponse) -> None:
        """Answer health checks; forward all other requests."""
        if request.path not in OWN:
            await self._forwarder.serve(request, answer)
            return
        forwarder = self._forwarder
        prefill, decode = _health(forwarder.producers), _health(forwarder.consumers)
        prefills = bool(prefill["healthy"]) or not forwarder.producers.wanted
        ready = bool(decode["healthy"]) and prefills
        serves = bool(decode["healthy"]) and (ready or forwarder.degrade == "recompute")
        good = {"/liveness": True, "/health": serves, "/readiness": ready}[request.path]
        status = "ready" if ready else "degraded" if serves else "not ready"
        body = json.dumps({"status": status, "prefill": prefill, "decode": decode}).encode()
        answer.whole(200 if good else 503, (), body)


def _health(group: Group) -> dict[str, int]:
    drained = sum(engine.drained for engine in group.all)
    return {"healthy": group.up, "drained": drained, "total": len(group.all)}


class MetricsDoor:
    """Accepts requests for the page only."""

    def check(self, request: Request) -> None:
        if (request.method, request.path) != ("GET", "/metrics"):
            raise Refused(404, "only GET /metrics is served here")


class RouterMetrics:
    """The counts in Prometheus's text form."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder

    async def serve(self, request: Request, answer: ClientResponse) -> None:  # noqa: ARG002
        """Answer with the counters in Prometheus' text format."""
        text = "\n".join(self._lines(self._forwarder.counts)) + "\n"
        answer.whole(200, (("content-type", "text/plain; version=0.0.4"),), text.encode())

    def _lines(self, counts: Counter[str]) -> Iterator[str]:
        for name, meaning in _COUNTED.items():
            yield f"# HELP pdkit_router_{name}_total {meaning}"
            yield f"# TYPE pdkit_router_{name}_total counter"
            yield f"pdkit_router_{name}_total {counts[name]}"
        producers, consumers = self._forwarder.producers, self._forwarder.consumers
        if producers.wanted:
            yield f"# HELP pdkit_router_handoffs_total {_HANDOFFS}"
            yield "# TYPE pdkit_router_handoffs_total counter"
            protocol = self._forwarder.handoff.name
            for outcome in OUTCOMES:
                labels = f'protocol="{protocol}",outcome="{outcome}"'
                yield f"pdkit_router_handoffs_total{{{labels}}} {counts[f'handoffs_{outcome}']}"
        last = "consumer" if producers.wanted else "aggregated"
        groups = (("producer", producers), (last, consumers))
        for name, meaning in _GAUGES.items():
            yield f"# HELP pdkit_router_engine_{name} {meaning}"
            yield f"# TYPE pdkit_router_engine_{name} gauge"
            for role, group in groups:
                for engine in group.all:
                    value = {
                        "healthy": int(engine.state == "up"),
                        "busy": engine.busy,
                        "awaited": engine.connections.awaited,
                        "drained": int(engine.drained),
                        "handoffs": engine.handoffs,
                        "abandoned": engine.abandoned,
                    }[name]
                    labels = f'engine="{engine.name}",role="{role}"'
                    yield f"pdkit_router_engine_{name}{{{labels}}} {value}"
