"""The contenders: each stores, retrieves and looks up the same values in its own way.

A contender lives in a process of its own (`side`). Only `OurPath` imports the kit's connector.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

MIB = 1 << 20
# One layer of KV of a chunk of 256 tokens with 8 heads of 128 in bfloat16 is 1 MiB.
CHUNK, HEADS, HEAD_SIZE = 256, 8, 128
# Values that are only looked up have a KiB.
TINY_BYTES = 1024
_POOL_SPARE_BYTES = 64 * MIB
PATIENCE_S = 120.0


@dataclass
class Span:
    """When an operation began and ended (the same clock for all processes), and what it took."""

    began_s: float = 0.0
    ended_s: float = 0.0
    cpu_s: float = 0.0


@contextlib.contextmanager
def measured() -> Iterator[Span]:
    """Measure what is done inside, on all threads of this process."""
    span = Span()
    before = _cpu_s()
    span.began_s = time.perf_counter()
    yield span
    span.ended_s = time.perf_counter()
    span.cpu_s = _cpu_s() - before


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class Where:
    """Where Redis is: a port of 127.0.0.1, and Unix sockets, between `os.pathsep`."""

    port: int
    socket: str


class Contender(Protocol):
    """Moves a prompt of equal values; `engine` tells the processes of a contender apart."""

    def open(self, value_bytes: int, count: int) -> None:
        """Get ready for prompts of `count` values."""

    def store(self) -> Span:
        """Store a prompt; the span ends when all of it is in Redis."""

    def retrieve(self) -> Span:
        """Retrieve the prompt; raise where a byte that is looked at is not what was stored."""

    def lookup(self, count: int) -> Span:
        """Ask which of the first values are there; raise unless all are."""


class RawSocket:
    """The reference: one connection, one value after the other, memory that is used again."""

    def __init__(self, where: Where, engine: int) -> None:
        self._socket = self._connected(where)
        self._engine = engine
        self._keys: list[bytes] = []
        self._memory: list[bytearray] = []

    def _connected(self, where: Where) -> socket.socket:
        connected = socket.create_connection(("127.0.0.1", where.port))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected

    def open(self, value_bytes: int, count: int) -> None:
        self._keys = [b"raw:%d:%d:%d" % (self._engine, value_bytes, n) for n in range(count)]
        self._memory = [bytearray(b"\1" * value_bytes) for _ in range(count)]

    def store(self) -> Span:
        for number, memory in enumerate(self._memory):
            memory[0] = memory[-1] = number % 251
        with measured() as span:
            for key, memory in zip(self._keys, self._memory, strict=True):
                head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, len(memory))
                self._socket.sendall(head)
                self._socket.sendall(memory)
                self._socket.sendall(b"\r\n")
                if self._line() != b"+OK":
                    raise RuntimeError("SET failed")
        return span

    def retrieve(self) -> Span:
        for memory in self._memory:
            memory[0] = memory[-1] = 255
        with measured() as span:
            for key, memory in zip(self._keys, self._memory, strict=True):
                self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key))
                self._read_string(memoryview(memory))
        for number, memory in enumerate(self._memory):
            if memory[0] != number % 251 or memory[-1] != number % 251:
                raise RuntimeError("wrong bytes")
        return span

    def lookup(self, count: int) -> Span:
        with measured() as span:
            asked = [b"*2\r\n$6\r\nSTRLEN\r\n$%d\r\n%s\r\n" % (len(k), k) for k in self._keys]
            self._socket.sendall(b"".join(asked[:count]))
            answer = b""
            while answer.count(b"\n") < count:
                answer += self._socket.recv(1 << 16)
            found = [int(line[1:]) for line in answer.split()]
        if not all(found):
            raise RuntimeError("values are missing")
        return span

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            line += self._socket.recv(1)
        return line[:-2]

    def _read_string(self, memory: memoryview) -> None:
        peeked = self._socket.recv(64, socket.MSG_PEEK)
        size = peeked.index(b"\n") + 1
        self._socket.recv(size)
        if int(peeked[1 : size - 2]) != len(memory):
            raise RuntimeError("another length")
        filled = 0
        while filled < len(memory):
            filled += self._socket.recv_into(memory[filled:])
        self._socket.recv(2, socket.MSG_WAITALL)


class RawUnixSocket(RawSocket):
    """The same over a Unix socket."""

    def _connected(self, where: Where) -> socket.socket:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(where.socket)
        return connected


class LmcacheBackend:
    """A storage backend of LMCache with a real staging pool; `_backend` makes it."""

    scheme = "redis"
    extra_config: dict[str, Any] | None = None

    def __init__(self, where: Where, engine: int) -> None:
        self._where = where
        self._engine = engine
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._allocator: Any = None
        self.backend: Any = None

    def open(self, value_bytes: int, count: int) -> None:
        # The backend before is left as it is: stock LMCache's `close` waits for itself, forever.
        self._make(value_bytes, count)
        self._keys = [self._key(number) for number in range(count)]

    def _make(self, value_bytes: int, count: int) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        layers, chunk, heads, size = _shape(value_bytes)
        self._tensor_shape = torch.Size((2, layers, chunk, heads * size))
        pool_bytes = value_bytes * count + _POOL_SPARE_BYTES
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=chunk, local_cpu=False, save_unfull_chunk=False,
            max_local_cpu_size=max(pool_bytes, 256 * MIB) / (1 << 30),
            remote_url=self._url(), remote_serde="naive", extra_config=self._extra_config(),
        )  # fmt: skip
        facts = LMCacheMetadata(
            model_name=self._model(), world_size=1, local_world_size=1, worker_id=0,
            local_worker_id=0, kv_dtype=torch.bfloat16, kv_shape=(layers, 2, chunk, heads, size),
            chunk_size=chunk,
        )  # fmt: skip
        # One pool for all sizes: memory that has been used, as in an engine that runs.
        pool = LocalCPUBackend(config, facts, dst_device="cpu", memory_allocator=self._allocator)
        self._allocator = pool.memory_allocator
        self.backend = self._backend(config, facts, pool)

    def _url(self) -> str | None:
        return f"{self.scheme}://127.0.0.1:{self._where.port}"

    def _extra_config(self) -> dict[str, Any] | None:
        return self.extra_config

    def _model(self) -> str:
        return f"meta-llama/Llama-3.1-8B-Instruct-{type(self).__name__}-{self._engine}"

    def _backend(self, config: Any, facts: Any, pool: Any) -> Any:
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        return RemoteBackend(config, facts, self._loop, pool, dst_device="cpu")

    def _key(self, number: int) -> Any:
        import torch
        from lmcache.utils import CacheEngineKey

        chunk_hash = 0x9E3779B97F4A7C15 * (number + 1) % (1 << 63)
        return CacheEngineKey(self._model(), 1, 0, chunk_hash, torch.bfloat16)

    def store(self) -> Span:
        objects = [self._filled(number) for number in range(len(self._keys))]
        stored = _Countdown(len(objects))
        with measured() as span:
            self.backend.batched_submit_put_task(
                self._keys, objects, on_complete_callback=stored.one
            )
            stored.wait()
        # Stock LMCache gives the caller's reference back itself; the kit's takes one of its own.
        for memory_obj in objects:
            if memory_obj.get_ref_count() > 0:
                memory_obj.ref_count_down()
        return span

    def _filled(self, number: int) -> Any:
        import torch
        from lmcache.v1.memory_management import MemoryFormat

        memory_obj = self.backend.local_cpu_backend.allocate(
            self._tensor_shape, torch.bfloat16, fmt=MemoryFormat.KV_2LTD
        )
        memory_obj.tensor.fill_(number)
        return memory_obj

    def retrieve(self) -> Span:
        with measured() as span:
            objects = self.backend.batched_get_blocking(self._keys)
        for number, memory_obj in enumerate(objects):
            if memory_obj is None:
                raise RuntimeError(f"value {number} of {len(objects)} is missing")
            ends = memory_obj.tensor.flatten()[[0, -1]]
            if not bool((ends == number).all()):
                raise RuntimeError(f"wrong bytes in value {number}")
            memory_obj.ref_count_down()
        return span

    def lookup(self, count: int) -> Span:
        keys = self._keys[:count]
        with measured() as span:
            found = self.backend.batched_contains(keys)
        if found != count:
            raise RuntimeError(f"{found} of {count} values are there")
        return span


def _shape(value_bytes: int) -> tuple[int, int, int, int]:
    """Return layers, tokens, heads and head size of a chunk."""
    if value_bytes == TINY_BYTES:
        return 1, 16, 2, 8
    return value_bytes // MIB, CHUNK, HEADS, HEAD_SIZE


class _Countdown:
    """Waits until as many values are stored as were handed over."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()
        self._none_left = threading.Event()

    def one(self, _key: Any) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._none_left.set()

    def wait(self) -> None:
        if not self._none_left.wait(PATIENCE_S):
            raise RuntimeError(f"{self._left} values were not stored")


class StockRedis(LmcacheBackend):
    """LMCache's `redis://` through redis-py, whose parser is hiredis where that is installed."""


class StockResp(LmcacheBackend):
    """LMCache's own client in C++, `resp://`, which stores no metadata."""

    scheme = "resp"
    extra_config = {"save_chunk_meta": False}  # noqa: RUF012 - never changed


class OurPath(LmcacheBackend):
    """The kit's storage plug-in, by the Unix socket, as a stack of processes uses it."""

    def _url(self) -> None:
        return None

    def _extra_config(self) -> dict[str, Any]:
        return {
            "pdkit.url": self._address(),
            "pdkit.namespace": f"pdkit:bench:{self._engine}",
            # A machine that does other work may be slow; that is measured, not given up.
            "pdkit.load_s": PATIENCE_S,
            "pdkit.store_s": PATIENCE_S,
        }

    def _address(self) -> str | list[str]:
        urls = [f"unix://{path}" for path in self._where.socket.split(os.pathsep)]
        return urls if len(urls) > 1 else urls[0]

    def _backend(self, config: Any, facts: Any, pool: Any) -> Any:
        from pdkit_connector.redis_path.backend import RedisPath

        return RedisPath(
            dst_device="cpu",
            config=config,
            metadata=facts,
            local_cpu_backend=pool,
            loop=self._loop,
        )


class OurPathByPort(OurPath):
    """The kit's storage plug-in over TCP, as containers and a Redis of one's own need it."""

    def _address(self) -> str:
        return f"redis://127.0.0.1:{self._where.port}"


class OurPathSigned(OurPath):
    """The kit's storage plug-in with a MAC instead of the checksum (`redis.integrity: mac`)."""

    def __init__(self, where: Where, engine: int) -> None:
        super().__init__(where, engine)
        self._folder = tempfile.TemporaryDirectory()

    def _extra_config(self) -> dict[str, Any]:
        file = Path(self._folder.name, "key")
        file.write_text("of this benchmark", encoding="ascii")
        return {**super()._extra_config(), "pdkit.mac_key_file": str(file)}


class OurPathUnchecked(OurPath):
    """The kit's storage plug-in with a checksum that looks at nothing: what the checksum costs."""

    def __init__(self, where: Where, engine: int) -> None:
        super().__init__(where, engine)
        from pdkit_connector.redis_path import value

        value._checksums = lambda: {99: ("none", _NoSum)}


class _NoSum:
    def __init__(self, _data: Any = b"") -> None:
        pass

    def update(self, _piece: Any) -> None:
        pass

    def digest(self) -> bytes:
        return bytes(8)


def _second_tier(where: Where, engine: int) -> Contender:
    from bench.redis_path.second_tier import OurSecondTier

    return OurSecondTier(where, engine)


CONTENDERS: dict[str, Callable[[Where, int], Contender]] = {
    "raw": RawSocket,
    "rawunix": RawUnixSocket,
    "redis": StockRedis,
    "hiredis": StockRedis,
    "resp": StockResp,
    "ours": OurPath,
    "oursport": OurPathByPort,
    "signed": OurPathSigned,
    "unchecked": OurPathUnchecked,
    "second": _second_tier,
}


def check_surroundings(name: str) -> None:
    """Raise where this process is not what its contender's name says."""
    from redis.utils import HIREDIS_AVAILABLE

    if name in ("redis", "hiredis") and (name == "hiredis") != HIREDIS_AVAILABLE:
        raise RuntimeError(f"hiredis is {'' if HIREDIS_AVAILABLE else 'not '}installed")


def names() -> Sequence[str]:
    """Return the contenders' names."""
    return tuple(CONTENDERS)


def quiet() -> None:
    """Set what LMCache reads when it is imported."""
    os.environ.update(
        LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR", OMP_NUM_THREADS="1",
        PYTHONHASHSEED="0",
    )  # fmt: skip
