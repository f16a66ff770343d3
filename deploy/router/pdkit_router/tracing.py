"""Spans of requests, sent to an OpenTelemetry collector as OTLP over HTTP, in JSON.

No request waits for the collector: what it does not take in time is dropped and counted. A span
holds no text of a prompt or an answer, no key, and no address of a client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from pdkit_router.request import Refused
from pdkit_router.upstream import Engine, EngineLost

_log = logging.getLogger("router")
_WAITING, _BATCH = 2048, 64  # spans
_EVERY_S, _ANSWER_S, _LAST_S = 0.5, 5.0, 1.0
_KINDS = {"server": 2, "client": 3}
_FAILED = 2  # the status code of a span
# W3C Trace Context: version, trace, parent, flags.
_PARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass
class Span:
    """A step of a request.

    Attributes:
        parent: the span that it is a step of; "" if none.
        sampled: it is sent; else only its name is passed on.
        ended: takes it when it has ended.
        error: what kind of error ended it; "" if none.
    """

    name: str
    kind: Literal["server", "client"]
    trace: str
    parent: str
    sampled: bool
    ended: Callable[[Span], None]
    attributes: dict[str, str | int] = field(default_factory=dict)
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    began_ns: int = field(default_factory=time.time_ns)
    ended_ns: int = 0
    error: str = ""

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Return the `traceparent` that makes an engine's spans children of this one."""
        return (("traceparent", f"00-{self.trace}-{self.id}-{self.sampled:02x}"),)

    def answered(self, status: int) -> None:
        """Note the status of the answer."""
        self.attributes["http.response.status_code"] = status
        if status >= 500:
            self.error = str(status)

    def fail(self, error: str) -> None:
        """End it with an error, unless it has ended."""
        if not self.ended_ns:
            self.error = error
            self._end()

    def follow(self, answer: asyncio.Future[None]) -> None:
        """Note how an engine's answer ended: it may fail while another engine goes on."""
        if not answer.cancelled() and (problem := answer.exception()):
            self.fail(type(problem).__name__)

    def _end(self) -> None:
        self.ended_ns = self.ended_ns or max(self.began_ns, time.time_ns())

    @contextmanager
    def running(self, limit: asyncio.Timeout | None = None) -> Iterator[Span]:
        """Have it end with the block, with an error where the time `limit` ended that."""
        try:
            yield self
        except Refused as exc:
            self.answered(exc.status)
            raise
        except asyncio.CancelledError:
            if limit and limit.expired():
                self.fail("TimeoutError")
            elif not self.ended_ns:
                self.attributes["pdkit.cancelled"] = 1
            raise
        except Exception as exc:
            self.fail(type(exc).__name__)  # its text may be a client's
            raise
        finally:
            self._end()
            if self.sampled:
                self.ended(self)

    def as_otlp(self) -> dict[str, Any]:
        """Return it as OTLP's JSON has it: 64-bit numbers are text."""
        attributes = {**self.attributes, **({"error.type": self.error} if self.error else {})}
        return {
            "traceId": self.trace, "spanId": self.id, "parentSpanId": self.parent,
            "name": self.name, "kind": _KINDS[self.kind],
            "startTimeUnixNano": str(self.began_ns), "endTimeUnixNano": str(self.ended_ns),
            "attributes": _attributes(attributes),
            "status": {"code": _FAILED} if self.error else {},
        }  # fmt: skip


_UNTRACED = nullcontext()


def step(
    of: Span | None, name: str, engine: str, limit: asyncio.Timeout | None
) -> AbstractContextManager[Span | None]:
    """Trace what an engine is asked for within a time limit, if the request is traced."""
    if of is None:
        return _UNTRACED
    named: dict[str, str | int] = {"pdkit.engine": engine}
    return Span(name, "client", of.trace, of.id, of.sampled, of.ended, named).running(limit)


class Tracer:
    """Makes the spans of requests, and sends them."""

    def __init__(self, endpoint: str, stack: str, counts: Counter[str]) -> None:
        """`endpoint` is http://HOST:PORT, and a path, to which OTLP's own is added."""
        parts = urlsplit(endpoint)
        self._collector = Engine("collector", parts.hostname or "", parts.port or 4318)
        self._path = f"{parts.path.rstrip('/')}/v1/traces"
        self._resource = _attributes({"service.name": "router", "service.namespace": stack})
        self._counts = counts
        self._waiting = deque[Span]()
        self._fails = False

    def request(self, method: str, path: str, headers: Sequence[tuple[str, str]]) -> Span:
        """Return the span of a request; it continues a client's trace."""
        given = [value for name, value in headers if name == "traceparent"]
        found = _PARENT.fullmatch(given[0]) if len(given) == 1 else None
        trace, parent, flags = found.groups() if found else (secrets.token_hex(16), "", "01")
        named: dict[str, str | int] = {
            "http.request.method": method, "url.path": path,
        }  # fmt: skip
        name = f"{method} {path}"
        return Span(name, "server", trace, parent, bool(int(flags, 16) & 1), self._end, named)

    def _end(self, span: Span) -> None:
        if len(self._waiting) < _WAITING:
            self._waiting.append(span)
        else:
            self._counts["spans_dropped"] += 1

    async def run(self) -> None:
        """Send what has ended, forever."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self._flush()

    async def leave(self) -> None:
        """Send what is left, if the collector takes it at once."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_S):
                await self._flush()

    async def _flush(self) -> None:
        while self._waiting:
            count = min(len(self._waiting), _BATCH)
            problem = await self._send([self._waiting.popleft() for _ in range(count)])
            self._counts["spans_dropped" if problem else "spans_sent"] += count
            if bool(problem) is not self._fails:
                self._fails = bool(problem)
                _log.warning("traces: %s", problem or "the collector accepts spans again")
            if problem:
                return

    async def _send(self, spans: Sequence[Span]) -> str:
        """Have the collector take spans; return what went wrong, "" if nothing did."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                status, _ = await self._collector.ask("POST", self._path, self._body(spans))
        except EngineLost as exc:
            return f"no collector: {exc}"
        except TimeoutError:
            return f"the collector does not answer within {_ANSWER_S:g} s"
        except Exception as exc:  # noqa: BLE001 - spans are dropped; the next ones are sent
            return f"no collector: {type(exc).__name__}: {exc}"
        return "" if status < 300 else f"the collector answers {status}"

    def _body(self, spans: Sequence[Span]) -> bytes:
        scope = {"scope": {"name": "pdkit"}, "spans": [span.as_otlp() for span in spans]}
        traces = [{"resource": {"attributes": self._resource}, "scopeSpans": [scope]}]
        return json.dumps({"resourceSpans": traces}).encode()


def _attributes(given: dict[str, str | int]) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value},
        }
        for key, value in given.items()
    ]
