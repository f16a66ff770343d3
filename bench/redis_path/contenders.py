"""The contenders: each stores, retrieves and looks up the same values in its own way.

A contender lives in a process of its own (`side`). Only the kit's import its connector.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.redis_path.contender import PATIENCE_S, Contender, Where
from bench.redis_path.first_tier import FirstTier, PlainCopy
from bench.redis_path.lmcache_backend import LmcacheBackend
from bench.redis_path.raw_sockets import RawSocket, RawUnixSocket
from bench.redis_path.second_tier import OurSecondTier


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
    "second": OurSecondTier,
    "copy": PlainCopy,
    "first": FirstTier,
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
