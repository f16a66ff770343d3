"""10,000 malformed requests from a seed: none harms the router, or reaches an engine unduly."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable

import pytest

from tests.unit.router.conftest import Router
from tests.unit.router.stand_in import Loop

REQUESTS, AT_ONCE, SEED = 10_000, 32, 20261122
PATHS = {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize"}
VALUES = [
    "NaN", "Infinity", "-1e999", "1" * 4400, "-1", "1e400", "null", "[]", "{}", '"\\ud800"', "\x00",
    "[" * 3000, '{"a":' * 2000, '"\\uZZZZ"', "tru", "'x'", "0x10", "+1", "01", ".5", "//",
]  # fmt: skip
HEADERS = [
    "Content-Length: 5", "Content-Length: -1", "Content-Length: 1e3", "Content-Length: 5, 5",
    "Transfer-Encoding: chunked", "Transfer-Encoding: chunked, chunked", "Transfer-Encoding: x",
    "Transfer-Encoding:\tchunked", "Transfer-Encoding : chunked", "Content-Encoding: br",
    "Host: evil.example", "Host: a\x00b", "Origin: https://evil.example", "Upgrade: websocket",
    "Connection: Upgrade", "Connection: close", "Expect: 200-ok", "X" * 9000 + ": a", ": a", "a",
    "X-Request-Id: \x7f", "Content-Length : 5", " Folded: x",
]  # fmt: skip
TARGETS = [
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/models", "http://x/v1/completions",
    "//v1/completions", "/v1/completions/..", "/%2e%2e/workers", "/v1%2fcompletions", "*", "",
    "/remove_worker?url=x", "/metrics", "/v1/completions?" + "a" * 5000, "/\x01",
    "/v1/completions ", "evil.example:443", "/v1/completions#", "/collective_rpc",
]  # fmt: skip
METHODS = ["POST", "POST", "POST", "GET", "PUT", "CONNECT", "post", "GE T", "", "PRI", "\x16\x03"]
VERSIONS = ["HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", "", "HTTP/1.1 x"]
BODIES = ['{"prompt": %s}', '{"prompt": "x", "temperature": %s}', "%s", '{"prompt": [%s]}{']


def malformed(chance: random.Random) -> bytes:
    """Return a request with at least one thing wrong, most often."""
    pick = chance.choice
    body = (pick(BODIES) % pick(VALUES)).encode("utf-8", "surrogatepass")
    if chance.random() < 0.2:
        body = chance.randbytes(chance.randrange(200))
    lines = [f"{pick(METHODS)} {pick(TARGETS)} {pick(VERSIONS)}"]
    lines += ["Host: localhost"] * pick([1, 1, 1, 1, 0, 2])
    lines += chance.sample(HEADERS, pick([0, 0, 1, 1, 2]))
    if chance.random() < 0.6:
        lines.append(f"Content-Length: {len(body) + pick([0, 0, 0, 0, -1, 3])}")
    ending = pick(["\r\n", "\r\n", "\r\n", "\r\n", "\n", "\r"])
    data = (ending.join(lines) + 2 * ending).encode("latin-1", "replace") + body
    for _ in range(pick([0, 0, 0, 1, 3])):
        at = chance.randrange(len(data))
        data = data[:at] + chance.randbytes(1) + data[at + 1 :]
    return data[: chance.randrange(1, len(data))] if chance.random() < 0.1 else data


async def send(port: int, data: bytes) -> bytes:
    """Send it, say that this was all, and return what is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def send_all(port: int, requests: list[bytes]) -> list[bytes]:
    left, answers = iter(requests), list[bytes]()

    async def client() -> None:
        for data in left:
            answers.append(await send(port, data))

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return answers


@pytest.mark.full
def test_ten_thousand_malformed_requests_leak_nothing(
    router: Router, loop: Loop, eventually: Callable[..., None]
) -> None:
    chance = random.Random(SEED)
    requests = [malformed(chance) for _ in range(REQUESTS)]
    loop.run(send_all(router.port, requests[:500]))  # what it allocates once, it has then
    memory, files = router.process.memory_info().rss, router.process.num_fds()
    answers = [answer for answer in loop.run(send_all(router.port, requests[500:])) if answer]
    assert len(answers) > REQUESTS // 2, "most are answered"
    refused = [answer for answer in answers if not answer.startswith(b"HTTP/1.1 200")]
    assert len(refused) > REQUESTS // 2, "or nothing was malformed"
    for answer in refused:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert int(head.split()[1]) in (*range(400, 500), 501), head
        assert json.loads(body)["error"]["message"], head
    seen = [seen for engine in router.engines for seen in engine.seen]
    assert {one.path for one in seen} <= PATHS
    assert {(one.method, one.path) for one in seen if one.method == "GET"} <= {
        ("GET", "/v1/models")
    }
    for one in seen:
        assert one.method == "GET" or isinstance(json.loads(one.body), dict)
    eventually(lambda: router.process.num_fds() <= files + 8)
    assert router.process.memory_info().rss < memory + 2**25
    assert router.client.post("/v1/completions", json={"prompt": "x"}).is_success
