"""The first tier of LMCache's server: its memory, to and from that of an engine; and a plain copy.

The server is a process of its own, as in a stack, and has no Redis. An engine's KV lies in shared
memory, which the server reads and writes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from bench.kit import cpu_s
from bench.redis_path.contender import (
    CHUNK,
    HEAD_SIZE,
    HEADS,
    MIB,
    PATIENCE_S,
    Span,
    Where,
    measured,
)

_BLOCK = 32
_SERVER_GIB = 2  # it drops earlier prompts
_POLL_S = 0.0002
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")  # this process is killed
_STARTS_WITHIN_S = 120.0
_LOOKS = "lookups are measured where Redis answers them"


class PlainCopy:
    """The reference: one copy of a prompt from memory to memory that is there already."""

    def __init__(self, where: Where, engine: int) -> None:  # noqa: ARG002 - no Redis
        self._here: Any = None
        self._there: Any = None

    def open(self, value_bytes: int, count: int) -> None:
        import torch

        self._here, self._there = (
            torch.zeros((count, value_bytes), dtype=torch.uint8) for _ in range(2)
        )

    def store(self) -> Span:
        self._here.fill_(1)
        with measured() as span:
            self._there.copy_(self._here)
        return span

    def retrieve(self) -> Span:
        self._here.fill_(0)
        with measured() as span:
            self._here.copy_(self._there)
        if not bool((self._here[:, [0, -1]] == 1).all()):
            raise RuntimeError("wrong bytes")
        return span

    def lookup(self, count: int) -> Span:
        raise NotImplementedError(_LOOKS)


class FirstTier:
    """An engine's adapters, with a server that is started for them."""

    def __init__(self, where: Where, engine: int) -> None:  # noqa: ARG002 - no Redis
        from pdkit_connector.server_connector import SOCKET_ENV

        self._folder = tempfile.TemporaryDirectory()
        requests, pages = (str(Path(self._folder.name, name)) for name in ("kv", "pages"))
        os.environ[SOCKET_ENV] = requests
        self._address = f"ipc://{requests}"
        self._server = subprocess.Popen(
            (
                *_ENDS_WITH_US,
                sys.executable, "-m", "pdkit_connector.lmcache_server", requests, pages,
                "--l1-size-gb", str(_SERVER_GIB), "--no-l1-use-lazy", "--eviction-policy", "LRU",
                "--chunk-size", str(CHUNK), "--supported-transfer-mode", "lmcache_driven",
                "--max-gpu-workers", "1",
            ),
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        _wait_for(pages, self._server)
        self._prompts = 0
        self._worker: Any = None
        self._scheduler: Any = None
        self._kv: list[Any] = []
        self._count = 0

    def open(self, value_bytes: int, count: int) -> None:
        import torch
        import zmq
        from lmcache.integration.vllm.vllm_multi_process_adapter import ParallelStrategy
        from lmcache.v1.multiprocess.group_view import EngineGroupInfo
        from pdkit_connector.server_connector import GuardedAdapter, GuardedSchedulerAdapter

        self._count = count
        layers, heads, size = (value_bytes // MIB, HEADS, HEAD_SIZE)
        if not layers:  # a value of a KiB
            layers, heads, size = 1, 1, 1
        facts: Any = (
            zmq.Context.instance(), f"bench/{value_bytes}", _BLOCK,
            ParallelStrategy(False, 1, 0, 1, 1, 1),
        )  # fmt: skip
        more = {"extra_config": {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}}
        self._worker = GuardedAdapter(self._address, *facts, **more)
        self._scheduler = GuardedSchedulerAdapter([self._address], *facts, **more)
        # As vLLM keeps it on CPUs: heads before tokens, and K beside V.
        shape = (count * CHUNK // _BLOCK, heads, _BLOCK, 2 * size)
        self._kv = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(layers)]
        self._worker.register_kv_caches(
            {f"layer.{n}": kv for n, kv in enumerate(self._kv)},
            [EngineGroupInfo(0, tuple(range(layers)), _BLOCK)],
            {"kv_layout": "HND"},
        )

    def store(self) -> Span:
        self._prompts += 1
        for kv in self._kv:
            for number, chunk in enumerate(kv.split(CHUNK // _BLOCK)):
                chunk.fill_(number)
        return self._moved(self._worker.submit_store_request, self._worker.store_futures)

    def retrieve(self) -> Span:
        for kv in self._kv:
            kv.fill_(-1)
        self._locked()
        span = self._moved(self._worker.submit_retrieve_request, self._worker.retrieve_futures)
        for kv in self._kv:
            for number, chunk in enumerate(kv.split(CHUNK // _BLOCK)):
                if not bool((chunk[[0, -1]] == number).all()):
                    raise RuntimeError(f"wrong bytes in value {number}, or it is missing")
        return span

    def lookup(self, count: int) -> Span:
        raise NotImplementedError(_LOOKS)

    @property
    def _name(self) -> str:
        return f"prompt-{self._prompts}"

    @property
    def _tokens(self) -> list[int]:
        length = self._count * CHUNK
        return list(range(self._prompts * length, (self._prompts + 1) * length))

    def _locked(self) -> None:
        """Look the prompt up, which keeps it in the server's memory until it is retrieved."""
        self._scheduler.maybe_submit_lookup_request(self._name, self._tokens)
        deadline = time.monotonic() + PATIENCE_S
        while (found := self._scheduler.check_lookup_result(self._name)) is None:
            if time.monotonic() > deadline:
                raise RuntimeError("no answer to a lookup in time")
            time.sleep(_POLL_S)
        if found != self._count * CHUNK:
            raise RuntimeError(f"{found} tokens of {self._count * CHUNK} are there")

    def _moved(self, submit: Callable[..., Any], under_way: Any) -> Span:
        """Move the prompt's blocks, and wait until that is done; the server's CPU counts, too."""
        from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp

        blocks = list(range(self._count * CHUNK // _BLOCK))
        op = LoadStoreOp(self._tokens, [blocks], 0, self._count * CHUNK)
        event = self._worker.create_recorded_event()
        before, deadline = cpu_s(self._server.pid), time.monotonic() + PATIENCE_S
        with measured() as span:
            submit(self._name, op, event)
            while under_way:
                self._worker.get_finished({self._name})
                if time.monotonic() > deadline:
                    raise RuntimeError("a transfer did not end in time")
                time.sleep(_POLL_S)
        span.cpu_s += cpu_s(self._server.pid) - before
        return span


def _wait_for(pages: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN_S
    with httpx.Client(transport=httpx.HTTPTransport(uds=pages), timeout=PATIENCE_S) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                client.get("http://localhost/healthcheck").raise_for_status()
                return
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("LMCache's server does not start")
            time.sleep(0.1)
