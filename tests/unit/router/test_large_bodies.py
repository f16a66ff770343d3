"""Large bodies: how large they may be, and the memory that they take."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
from pdkit_router import route
from pdkit_router.request import Refused, Request
from pdkit_router.route import Group
from pdkit_router.serve import ClientResponse

from tests.unit.router.conftest import Router, Start, forget_peak, peak
from tests.unit.router.test_doors import answers, head, post

LIMIT = 4 * 2**20


@pytest.fixture(scope="module")
def long_router(start_router: Start) -> Router:
    return start_router("--max-body-mib", "4")


def test_bodies_are_limited_to_64_mib(start_router: Start) -> None:
    router = start_router()
    ((status, body),) = answers(router, head("POST /v1/completions", "Content-Length: 67108865"))
    assert status == 413
    assert b"larger than 67108864 bytes" in body
    assert b"router.max_body_mib" in body


@pytest.fixture(scope="module", autouse=True)
def idle(long_router: Router) -> int:
    """Return the memory of a router that has had no body yet."""
    forget_peak(long_router)
    return peak(long_router)


# Nearly as large as allowed, of what takes the most memory once it is JSON.
FULL = {
    "lists": b'{"prompt": [' + b"[]," * (LIMIT // 3 - 10) + b"[]]}",
    "objects": b'{"a": [' + b'{"":0},' * (LIMIT // 7 - 10) + b"0]}",
    "fields": b"{" + b",".join(b'"%x":0' % n for n in range(400_000)) + b"}",
    "token ids": b'{"prompt": [' + b"300," * (LIMIT // 4 - 10) + b"300]}",
    "texts": b'{"prompt": [' + b'"ab",' * (LIMIT // 5 - 10) + b'"ab"]}',
    "brackets in a text": b'{"prompt": "' + b"[{\\n" * (LIMIT // 4 - 10) + b'"}',
    "empty texts": b'{"prompt": ' + b"[" * 20_000 + b'"",' * (LIMIT // 3 - 7_000),
    "a text without an end": b'{"prompt": ' + b"[" * 20_000 + b'"' + b'\\"' * (LIMIT // 2 - 11_000),
}
FIT = {"token ids", "brackets in a text"}


def status_of(router: Router, body: bytes) -> int:
    """Return what a body is answered with; a million tokens take a busy machine seconds."""
    return answers(router, post(body=body), within_s=60)[0][0]


def test_a_body_up_to_the_limit_is_accepted(long_router: Router) -> None:
    fits = b'{"prompt": "' + b"a" * (LIMIT - 100) + b'"}'
    assert status_of(long_router, fits) == 200
    assert status_of(long_router, fits + b" " * 200) == 413


@pytest.mark.parametrize("name", FULL)
def test_a_body_takes_little_more_memory_than_its_bytes(
    long_router: Router, idle: int, name: str
) -> None:
    body = FULL[name]
    assert 3 * 2**20 < len(body) <= LIMIT
    forget_peak(long_router)
    status = status_of(long_router, body)
    assert status == (200 if name in FIT else 400)
    assert peak(long_router) - idle < 16 * len(body)


def test_other_requests_are_served_between_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one takes the time of thousands of small requests."""
    turns: list[str] = []
    read = route.work

    def noted(request: Request, **options: Any) -> Any:
        turns.append("large" if len(request.body) > 2**20 else "small")
        return read(request, **options)

    monkeypatch.setattr(route, "work", noted)

    async def serve(forwarder: route.Forwarder, size: int) -> None:
        headers = [("host", "localhost")]
        request = Request("POST", "/v1/completions", headers, bytearray(b" " * size + b"{}"))
        with suppress(Refused):
            await forwarder.serve(request, mock.Mock(spec=ClientResponse))

    async def all_at_once() -> None:
        forwarder = route.Forwarder(Group(()), Group(()), "recompute", 1.0, Counter())
        requests = [serve(forwarder, size) for size in (2**21, 2**21, 2**21, 0, 0)]
        waiting = asyncio.gather(*requests)
        while not waiting.done():
            await asyncio.sleep(0)
            turns.append("other")

    asyncio.run(all_at_once())
    assert [one for one in turns if one != "other"] == ["small"] * 2 + ["large"] * 3
    assert ("large", "large") not in itertools.pairwise(turns)
