"""Spans of what the connector does for a request, sent by the exporter that vLLM has set up.

A request has trace headers only if vLLM traces: without an endpoint none of this does anything.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Any

_TRACEPARENT = "traceparent"

TraceHeaders = Mapping[str, str]


def note(
    name: str,
    headers: TraceHeaders | None,
    began_ns: int,
    ended_ns: int = 0,
    **attributes: str | int,
) -> None:
    """Note a step of a request that ended then, or ends now.

    Nothing is noted of a request that is not traced, or whose headers, which vLLM passes on as they
    came, name no trace.
    """
    if not headers:
        return
    try:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        return  # vLLM traces nothing then, and somebody else has sent the headers

    context = TraceContextTextMapPropagator().extract(headers)
    if not trace.get_current_span(context).get_span_context().is_valid:
        return
    named: Any = {f"pdkit.{key}": value for key, value in attributes.items()}
    tracer: Any = trace.get_tracer("pdkit")
    # One of the SDK takes ids from `random`, which vLLM seeds alike in all cores: spans of a
    # producer and a consumer would get the same ids in one trace.
    tracer.id_generator = _Ids
    span = tracer.start_span(name, context=context, start_time=began_ns, attributes=named)
    span.end(max(began_ns, ended_ns or time.time_ns()))


class _Ids:
    """Ids that no seed decides, of spans only: the trace's comes with the request."""

    @staticmethod
    def generate_span_id() -> int:
        return secrets.randbits(64) or 1  # 0 is not valid


def of_scope(headers: Iterable[tuple[bytes, bytes]]) -> TraceHeaders:
    """Return the trace headers of an HTTP request, as ASGI has them."""
    found = [value for name, value in headers if name == _TRACEPARENT.encode()]
    return {_TRACEPARENT: found[0].decode("latin-1")} if len(found) == 1 else {}
