"""Fuzzers of what the kit's commands read: answers of Redis and pages."""

from __future__ import annotations

import errno
import random
import socket
from collections import Counter
from collections.abc import Iterable
from unittest import mock

import httpcore

from deploy.metrics.connector import ConnectorReport
from deploy.metrics.engine import CacheCounters, EngineLoad
from deploy.metrics.page import parsed_page
from deploy.metrics.router import EngineView, RouterView
from deploy.runtime import http_client
from deploy.runtime.redis_client import open_store
from tests.fuzz.mutations import mutated


class _Socket:
    """A socket whose other end has said all that it says."""

    def __init__(self, said: bytes) -> None:
        self._left = said

    def recv(self, size: int) -> bytes:
        taken, self._left = self._left[:size], self._left[size:]
        return taken

    def recv_into(self, buffer: memoryview) -> int:
        taken = self.recv(len(buffer))
        buffer[: len(taken)] = taken
        return len(taken)

    def gettimeout(self) -> None:
        return None

    def sendall(self, _: bytes) -> None: ...
    def settimeout(self, _: float | None) -> None: ...
    def shutdown(self, _: int) -> None: ...
    def setsockopt(self, *_: int) -> None: ...
    def connect(self, _: str) -> None: ...
    def close(self) -> None: ...


_INFO = (
    b"# Server\r\nredis_version:8.4.0\r\nrun_id:ab12\r\nused_memory:5\r\nmaxmemory:9\r\n"
    b"evicted_keys:0\r\nmaxmemory_policy:allkeys-lru\r\nerrorstat_ERR:count=3\r\n"
)
_CALLS = b"cmdstat_get:calls=3,usec=5\r\ncmdstat_flushall:calls=1\r\n"


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


_STATS = (_bulk(_INFO), _bulk(_CALLS), b":7\r\n")
_PAGES = (b"*2\r\n$1\r\n7\r\n*1\r\n$3\r\nk@m\r\n", b"*2\r\n$1\r\n0\r\n*0\r\n")


class _RedisSocket(_Socket):
    """A socket whose other end answers one question after another."""

    def __init__(self, answers: Iterable[bytes]) -> None:
        super().__init__(b"")
        self._answers, self._waits = iter(answers), True

    def sendall(self, asked: bytes) -> None:
        names = asked.count(b"SETINFO")  # the client names itself
        self._left += b"+OK\r\n" * names if names else next(self._answers, b"")

    def settimeout(self, seconds: float | None) -> None:
        self._waits = seconds != 0

    def recv(self, size: int) -> bytes:
        if not self._left and not self._waits:
            raise BlockingIOError(errno.EAGAIN, "")
        return super().recv(size)


def redis_answers(rng: random.Random, rounds: int) -> Counter[str]:
    """Answer the kit's commands as no Redis would: they understand it, or know nothing."""
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        asks_stats = bool(rng.randrange(2))
        answers = _STATS if asks_stats else _PAGES
        odd = rng.randrange(len(answers))
        said = [mutated(one, rng) if at == odd else one for at, one in enumerate(answers)]
        opened = _RedisSocket(said)
        with (
            mock.patch.object(socket, "socket", lambda *_, opened=opened: opened),
            open_store("nowhere", None) as store,
        ):
            found: object = store.stats() if asks_stats else store.marked_keys("@m")
        seen["nothing" if found is None else "understood"] += 1
    return seen


_BODY = b"page\xff" * 20
_CHUNKED = b"".join(b"a\r\n%b\r\n" % _BODY[at : at + 10] for at in range(0, 100, 10)) + b"0\r\n\r\n"
_ANSWERS = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nContent-Type: text/plain\r\n\r\n" + _BODY,
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    + _CHUNKED,
    b"HTTP/1.0 503 No\r\n\r\n" + _BODY,
)


def http_pages(rng: random.Random, rounds: int) -> Counter[str]:
    """Answer a GET with damaged HTTP: a page that is named in whole comes in whole."""
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        said = mutated(rng.choice(_ANSWERS), rng)
        stream = httpcore.MockStream([said])
        with mock.patch.object(httpcore.SyncBackend, "connect_tcp", lambda *_, s=stream, **__: s):
            try:
                page = http_client.get("http://127.0.0.1:9", "/", timeout_s=30)
                assert len(page.text) <= len(said)
                seen["a page"] += 1
            except OSError as error:
                assert not isinstance(error, TimeoutError), "it waits for what was announced"
                seen["refused"] += 1
    return seen


_METRICS = b"""# HELP a what it counts
vllm:prefix_cache_queries_total{engine="0",model_name="m \\"x\\" {}"} 1000.0
vllm:prefix_cache_hits_total 96 1395066363000
vllm:external_prefix_cache_queries_total{engine="0"} 904.0
vllm:external_prefix_cache_hits_total{engine="0",} 5.12e2
vllm:num_requests_running 2.0
pdkit_connector_info{lmcache="0.5.6",tested="yes"} 1.0
pdkit_fix_info{fix="B1",state="active",evidence="seen"} 1.0
pdkit_kv_info{facts="{\\"chunk\\": 256}"} 1.0
pdkit_store_last_failure_timestamp_seconds{kind="full",way="storing",said="OOM"} 1.7e+09
pdkit_router_engine_healthy{engine="producer-0",role="producer"} 1
pdkit_router_engine_busy{engine="producer-0",role="producer"} 3
"""
_MORE = (b"NaN", b"-Inf", b"1e309", b'"', b"{", b"}", b"\\", b" ", b"_", b"\x1b[2J", b"\xff", b"1")


def metrics_pages(rng: random.Random, rounds: int) -> Counter[str]:
    """Damage a page of metrics: it is refused as a whole, or all that reads it gets on with it."""
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        text = bytearray(mutated(_METRICS, rng))
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(text) + 1)
            text[at : at + rng.randrange(4)] = rng.choice(_MORE)
        try:
            page = parsed_page(text.decode("utf-8", "replace"))
        except ValueError:
            seen["refused"] += 1
            continue
        ConnectorReport.read(page)
        EngineLoad.read(page)
        EngineView.read_all(page)
        RouterView.read(page)
        try:
            CacheCounters.read(page).since(CacheCounters.read(page + page))
            seen["read"] += 1
        except LookupError:
            seen["counters are missing"] += 1
    return seen
