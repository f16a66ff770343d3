"""Spans of what the connector does for a request, sent by the exporter that vLLM has set up.

A request has trace headers only if vLLM traces: without an endpoint none of this does anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

_TRACEPARENT = "traceparent"

Headers = Mapping[str, str]


def now() -> int:
    """Return the time, as `note` takes it."""
    return time.time_ns()


def note(
    name: str, headers: Headers | None, began_ns: int, ended_ns: int = 0, **attributes: str | int
) -> None:
    """Note a step of a request that ended then, or ends now; nothing if it is not traced."""
    if not headers:
        return
    try:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        return  # vLLM traces nothing then, and somebody else has sent the headers

    context = TraceContextTextMapPropagator().extract(headers)
    named: Any = {f"pdkit.{key}": value for key, value in attributes.items()}
    span = trace.get_tracer("pdkit").start_span(
        name, context=context, start_time=began_ns, attributes=named
    )
    span.end(max(began_ns, ended_ns or time.time_ns()))


def of_scope(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the trace headers of an HTTP request, as ASGI has them."""
    found = [value for name, value in headers if name == _TRACEPARENT.encode()]
    return {_TRACEPARENT: found[0].decode("latin-1")} if len(found) == 1 else {}
