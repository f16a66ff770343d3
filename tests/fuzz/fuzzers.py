"""The fuzzers: each does some rounds from a seed, and counts what came of them.

A round fails by an exception that is not among those that its caller is ready for.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from lmcache.v1.memory_management import MemoryFormat
from pdkit_connector.engine_key import FILE_ENV, RequireKey
from pdkit_connector.errors import ConnectorError
from pdkit_connector.redis_path.backend import OwnTensors
from pdkit_connector.redis_path.protocol import Deadline, Link, LinkBroken, Reading, ReplyError
from pdkit_connector.redis_path.servers import _by_slot, parse
from pdkit_connector.redis_path.value import HEADER_BYTES, BadValue, Codec, Header, digest

from deploy.connector.pdkit_connector.redis_url import parse_redis_url
from tests.fuzz.front import front_streams
from tests.fuzz.mutations import mutated
from tests.fuzz.readers import http_pages, metrics_pages, redis_answers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deploy" / "router"))

from pdkit_router.resume import begin_transcript

Fuzzer = Callable[[random.Random, int], Counter[str]]

CODEC = Codec("a layout")
SIGNED = Codec("a layout", secret=b"the stack's own")
OTHER = Codec("a layout", secret=b"another's")
KEY = b"model@0@0123"
SHAPE = (2, 2, 16, 16)
BYTES = 2 * 2 * 16 * 16 * 2
FORMAT = MemoryFormat.KV_2LTD.value
OWN = OwnTensors(
    SimpleNamespace(
        save_unfull_chunk=False, use_layerwise=False, enable_blending=False, chunk_size=16
    ),
    SimpleNamespace(use_mla=False, kv_shape=(2, 2, 16, 2, 8), kv_dtype=torch.bfloat16),
)


def _value(payload: bytes, codec: Codec = CODEC, **said: Any) -> bytes:
    facts = {
        "dtype": "bfloat16",
        "shape": SHAPE,
        "memory_format": FORMAT,
        "payload_bytes": len(payload),
        "layout": codec.layout,
        "key": digest(KEY),
        **said,
    }
    return codec.header(Header(**facts), payload) + payload


def _take(codec: Codec, value: bytes) -> None:
    """Decode a value as an engine that loads it does; raise BadValue if it is refused."""
    if len(value) < HEADER_BYTES:
        raise BadValue("corrupt", "short")
    _, check = codec.parse(value[:HEADER_BYTES], KEY)
    check.update(value[HEADER_BYTES:])
    check.require()


def damaged_values(rng: random.Random, rounds: int) -> Counter[str]:
    """Decode damaged values: what is taken is what was stored."""
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        payload = rng.randbytes(64)
        whole = _value(payload)
        damaged = mutated(whole, rng)
        try:
            _take(CODEC, damaged)
            assert damaged == whole, damaged
            seen["as stored"] += 1
        except BadValue as bad:
            seen[bad.kind] += 1
    return seen


def signed_values(rng: random.Random, rounds: int) -> Counter[str]:
    """Decode values that the stack signed, damaged, and such as others made: none of them is taken.

    Of these, some say that they are of the stack's layout, which is no secret.
    """
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        payload = rng.randbytes(64)
        codec, layout = rng.choice(
            ((SIGNED, SIGNED), (CODEC, SIGNED), (OTHER, SIGNED), (OTHER, OTHER))
        )
        whole = _value(payload, codec, layout=layout.layout)
        damaged = rng.choice((whole, mutated(whole, rng)))
        if codec is not SIGNED and rng.randrange(2):
            named = bytearray(damaged)
            named[9:10] = bytes([rng.choice((3, 4))])  # the number of a MAC
            damaged = bytes(named)
        try:
            _take(SIGNED, damaged)
            assert codec is SIGNED and damaged == whole, damaged
            seen["as stored"] += 1
        except BadValue as bad:
            seen[bad.kind] += 1
    return seen


def forged_values(rng: random.Random, rounds: int) -> Counter[str]:
    """Describe tensors in values whose checksums hold: what is taken is the engine's own."""
    seen: Counter[str] = Counter()
    names = ("bfloat16", "float16", "uint8", "Tensor", "__class__", "", "float32", "int64")
    for _ in range(rounds):
        size = rng.choice((0, 1, BYTES // 2, BYTES, 2 * BYTES))
        dims = rng.choice(
            (SHAPE, tuple(rng.choice((0, 1, 2, 16, 2**16, 2**32 - 1)) for _ in "abcd"))
        )
        shape = tuple(dims[: rng.randint(0, 6)]) if rng.randrange(2) else dims
        said = {
            "dtype": rng.choice(names),
            "shape": shape,
            "memory_format": rng.choice((FORMAT, rng.randrange(256))),
        }
        header, _ = CODEC.parse(_value(bytes(size), **said)[:HEADER_BYTES], KEY)
        try:
            tensor = OWN.of(header)
            assert (*tensor[:2], header.payload_bytes) == (SHAPE, torch.bfloat16, BYTES), header
            seen["our own"] += 1
        except BadValue as bad:
            seen[bad.kind] += 1
    return seen


def _stream(payload: bytes) -> bytes:
    value = _value(payload)
    ranges = (value, b"", b"")
    return b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in ranges)


def protocol_streams(rng: random.Random, rounds: int) -> Counter[str]:
    """Answer what no Redis would to each question that an engine asks."""
    seen: Counter[str] = Counter()
    answers = (b":1\r\n" * 8, b"+OK\r\n", b"-ERR no\r\n", b"$3\r\nabc\r\n", b"$-1\r\n")
    for _ in range(rounds):
        payload = rng.randbytes(64)
        stream = _stream(payload) if rng.randrange(2) else rng.choice(answers)
        seen[_asked(mutated(stream, rng), rng.randrange(4), payload)] += 1
    return seen


def _asked(stream: bytes, question: int, payload: bytes) -> str:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(stream)
        theirs.shutdown(socket.SHUT_WR)
        link = Link(SimpleNamespace(_sock=ours, disconnect=ours.close))
        deadline = Deadline(30)
        try:
            if question == 0:
                link.status(deadline)
            elif question == 1:
                assert len(link.numbers(8, deadline, lambda _: 0)) == 8
            elif question == 2:
                link.length(deadline)
            else:
                return _read(Reading(link, KEY, deadline), payload)
        except (LinkBroken, ReplyError, BadValue) as error:
            return type(error).__name__
        except OSError as error:
            assert not isinstance(error, TimeoutError), "it waits for what was announced"
            return type(error).__name__
    return "understood"


def _read(reading: Reading, payload: bytes) -> str:
    raw = reading.header()
    if raw is None:
        return "missing"
    header, check = CODEC.parse(raw, KEY)
    memory = memoryview(bytearray(header.payload_bytes))
    reading.payload(memory, check, lambda: None)
    assert bytes(memory) == payload
    return "as stored"


def cluster_slots(rng: random.Random, rounds: int) -> Counter[str]:
    """Name slots that no cluster has: what is taken is a server for each of the 16,384."""
    seen: Counter[str] = Counter()
    ends = (0, 1, 8191, 8192, 16383, 16384, -1, 2**31, 200_000_000, None, b"7", [1])
    hosts = (b"h", None, b"\xff", 5)
    for _ in range(rounds):
        ranges: Any = [
            [
                rng.choice(ends),
                rng.choice(ends),
                [rng.choice(hosts), rng.choice(ends)],
            ]
            for _ in range(rng.randint(0, 4))
        ]
        try:
            nodes = _by_slot(rng.choice((ranges, ranges, None, b"x")), ("asked", 1))
            assert len(nodes) == 16384
            assert all(0 < port < 65536 for _, port in nodes)
            seen["a cluster"] += 1
        except (ConnectionError, TypeError, ValueError):
            seen["refused"] += 1
    return seen


def engine_requests(rng: random.Random, rounds: int) -> Counter[str]:
    """Ask an engine without its key, or nearly with it: nothing gets through but `GET /health`."""
    seen: Counter[str] = Counter()
    passed: list[int] = []

    async def engine(*_: Any) -> None:
        passed.append(1)

    with tempfile.NamedTemporaryFile("w") as file:
        file.write("0123456789abcdef" * 4)
        file.flush()
        with mock.patch.dict(os.environ, {FILE_ENV: file.name}):
            guard = RequireKey(engine)
    key = b"Bearer " + b"0123456789abcdef" * 4
    names = (b"authorization", b"Authorization", b"proxy-authorization", b"cookie")
    paths = (
        "/health",
        "//health",
        "/health/",
        "/HEALTH",
        "/metrics",
        "/v1/models",
        "/health%2f",
        "",
    )

    async def ignore(_: Any) -> None:
        """Take what is answered."""

    for _ in range(rounds):
        values = [
            rng.choice((key, mutated(key, rng), key.lower(), b"")) for _ in range(rng.randrange(3))
        ]
        headers = [(rng.choice(names), value) for value in values]
        kind = rng.choice(("http", "http", "websocket"))
        method, path = rng.choice(("GET", "POST", "HEAD")), rng.choice(paths)
        passed.clear()
        scope = {"type": kind, "method": method, "path": path, "headers": headers}
        drive(guard(scope, ignore, ignore))
        is_open = (kind, method, path) == ("http", "GET", "/health")
        sent = [value for name, value in headers if name == b"authorization"]
        assert bool(passed) == (is_open or sent == [key]), scope
        seen["served" if passed else "refused"] += 1
    return seen


def drive(work: Any) -> None:
    """Run a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


_EVENTS = (
    b'data: {"id":"a","choices":[{"index":0,"text":"x","token_ids":[1,2],"prompt_token_ids":[3]}]}',
    b'data: {"choices":[{"delta":{"content":"\\"token_ids\\":[9]"},"token_ids":[5]}]}',
    b'data: {"choices":[],"usage":{"prompt_tokens":1}}',
    b"data: [DONE]",
    b'data: {"error":{"message":"x"}}',
)


def stream_events(rng: random.Random, rounds: int) -> Counter[str]:
    """Note an engine's events, some of them broken: no token ids reach the client that asked not.

    A broken event ends its own request, which the router answers for; nothing hangs.
    """
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        told = begin_transcript("/v1/completions", {"prompt": "x", "stream": True}, others=True)
        events = [rng.choice(_EVENTS) for _ in range(rng.randint(1, 4))]
        broken = rng.randrange(2)
        try:
            for event in events:
                shown = told.note(mutated(event, rng) if broken else event)
                assert broken or b'token_ids":[' not in shown.replace(b'\\"', b""), shown
            ready = told.tokens and not told.why_not()
            rest = json.loads(told.rest(told.tokens, 100)) if ready else {}
            assert broken or not rest or rest["prompt"][0] == 3, rest
            seen["can go on" if rest else "cannot"] += 1
        except (ValueError, LookupError, AttributeError, TypeError):
            assert broken, events
            seen["broken"] += 1
    return seen


_URLS = (
    "redis://user:hunter2hunter2@127.0.0.1:6379/3",
    "rediss://:hunter2hunter2@[::1]:6379?ssl_ca_certs=/ca.pem",
    "unix://:hunter2hunter2@/run/redis.sock?db=1",
    "redis-sentinel://:hunter2hunter2@a:1,b:2/master?sentinel_password=hunter2hunter2",
    "redis-cluster://:hunter2hunter2@a:1,[::2]:2,c",
)


def urls(rng: random.Random, rounds: int) -> Counter[str]:
    """Read broken URLs, as the kit and as an engine: no refusal shows a password."""
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        url = mutated(rng.choice(_URLS).encode(), rng).decode("utf-8", "replace")
        for read, refusal in ((parse, ConnectorError), (parse_redis_url, ValueError)):
            try:
                read(url)
                seen["read"] += 1
            except refusal as error:
                assert "hunter2hunter2" not in str(error), (url, error)
                seen["refused"] += 1
    return seen


FUZZERS: dict[str, Fuzzer] = {
    "damaged values": damaged_values,
    "signed values": signed_values,
    "forged values": forged_values,
    "protocol streams": protocol_streams,
    "cluster slots": cluster_slots,
    "URLs": urls,
    "engines' key": engine_requests,
    "clients' requests": front_streams,
    "events of streams": stream_events,
    "answers to the kit's commands": redis_answers,
    "pages over HTTP": http_pages,
    "pages of metrics": metrics_pages,
}
