"""The fuzzers: each does some rounds from a seed, and counts what came of them.

A round fails by an exception that is not among those that its caller is ready for.
"""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryFormat
from pdkit_connector.errors import ConnectorError
from pdkit_connector.redis_path.address import parse
from pdkit_connector.redis_path.link import Deadline, Link, LinkBroken, ReplyError
from pdkit_connector.redis_path.reading import Reading
from pdkit_connector.redis_path.tensors import OwnTensors
from pdkit_connector.redis_path.topology import _by_slot
from pdkit_connector.redis_path.value import HEADER_BYTES, BadValue, Codec, Header, digest

from deploy.connector.pdkit_connector.redis_url import parse_redis_url
from tests.fuzz.mutations import mutated

Fuzzer = Callable[[random.Random, int], Counter[str]]

CODEC = Codec("a layout")
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


def _value(payload: bytes, **said: Any) -> bytes:
    facts = {
        "dtype": "bfloat16",
        "shape": SHAPE,
        "memory_format": FORMAT,
        "payload_bytes": len(payload),
        "layout": CODEC.layout,
        "key": digest(KEY),
        **said,
    }
    return CODEC.header(Header(**facts), payload) + payload


def damaged_values(rng: random.Random, rounds: int) -> Counter[str]:
    """Decode damaged values: what is taken is what was stored."""
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        payload = rng.randbytes(64)
        whole = _value(payload)
        damaged = mutated(whole, rng)
        try:
            if len(damaged) < HEADER_BYTES:
                raise BadValue("corrupt", "short")
            _, check = CODEC.parse(damaged[:HEADER_BYTES], KEY)
            check.update(damaged[HEADER_BYTES:])
            check.require()
            assert damaged == whole, damaged
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
    "forged values": forged_values,
    "protocol streams": protocol_streams,
    "cluster slots": cluster_slots,
    "URLs": urls,
}
