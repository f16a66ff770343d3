"""The same trials with LMCache's server, whose memory or Redis is damaged."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import redis

from bench.check_power.damage import Damage, Stored
from bench.check_power.stack import Bench, CheckResult, seen
from bench.kit import ROOT
from deploy.runtime.home import Home
from deploy.verify.equivalence import Completion, Noise
from deploy.workflows.check.keys import CheckKeys
from deploy.workflows.check.probes import check_pair, drop_from_memory
from deploy.workflows.check.session import Session
from deploy.workflows.running import RunningStack

sys.path.insert(0, str(ROOT / "deploy" / "connector"))
from pdkit_connector.redis_path.value import HEADER_BYTES

_STORED_S, _POLL_S = 20.0, 0.02
# Of the process's own, with no file behind it: neither engines' memory nor a library.
_OWN_MEMORY = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0 *$")


class ServerBench(Bench):
    """A running stack with LMCache's server; nobody else uses it, nor its Redis.

    In Redis the headers stay as they were, checksums included.

    Attributes:
        tier: what is damaged.
    """

    heads_first = False

    def __init__(self, home: Home, name: str, store: redis.Redis, tier: str) -> None:
        self.tier = tier
        super().__init__(home, name, store)

    def checked_pair(self, damage: Damage, rng: random.Random) -> tuple[CheckResult, bytes]:
        """Do what a check does for one pair; its first prompt is damaged before its decode."""
        firsts = []
        self.store.flushdb()

        def meddle(session: Session, prompt: Sequence[int]) -> None:
            keys = stored_keys(self.store, len(prompt) // session.chunk)
            chunks = [payload(self.store, key) for key in keys]
            firsts.append(chunks[0])
            damaged = damage(Stored(chunks, self.foreign, self.layout), rng)
            if self.tier == "memory":
                pid = server_pid(self.running)
                replace_in_memory(pid, {chunks[at]: value for at, value in damaged.items()})
                return
            for at, value in damaged.items():
                self.store.setrange(keys[at], HEADER_BYTES, value)
            if not drop_from_memory(session.running, prompt):
                raise RuntimeError("the server does not drop the prompt's KV from its memory")

        drops = self.tier == "redis"
        found = meddled_check(self.running, self.pair, self.noise, meddle, drops=drops)
        return found, firsts[0]

    def chunk_of(self, prompt: Sequence[int]) -> bytes:
        """Have the producer store a prompt of one chunk; return its bytes."""
        self.store.flushdb()
        with self.running.api(self.producer) as api:
            api.complete(self.model, prompt, max_tokens=1)
        (key,) = stored_keys(self.store, 1)
        return payload(self.store, key)


Meddle = Callable[[Session, Sequence[int]], None]


def meddled_check(
    running: RunningStack,
    pair: tuple[str, str],
    noise: Noise,
    meddle: Meddle,
    *,
    drops: bool = False,
) -> CheckResult:
    """Do what a check does for one pair.

    Args:
        meddle: is called with the session and the first prompt, between its prefill and its decode.
        drops: whether `meddle` drops the prompt from the server's memory, so that loading it from
            Redis is right.
    """
    session = _MeddledSession(running, CheckKeys(tagged=False), lambda _: None)
    with session:
        session.found.noise = noise
        before = session.reading()
        session.meddle = meddle
        check_pair(session, *pair)
        session.found.counted = session.counted_since(before)
        if drops:
            session.found.past_server.clear()
        return seen(session.found)


class _MeddledSession(Session):
    meddle: Meddle | None = None

    def computed(
        self, producer: str, prompt: Sequence[int], tag: str, *, timeout_s: float | None = None
    ) -> Completion:
        answer = super().computed(producer, prompt, tag, timeout_s=timeout_s)
        if (meddle := self.meddle) is not None:
            self.meddle = None
            meddle(self, prompt)
        return answer


def stored_keys(store: redis.Redis, count: int) -> list[bytes]:
    """Wait until Redis has as many keys as a prompt has chunks, and return them."""
    until = time.monotonic() + _STORED_S
    while len(keys := sorted(set(store.scan_iter(count=1000)))) != count:
        if time.monotonic() > until:
            raise RuntimeError(f"{len(keys)} chunks were stored instead of {count}")
        time.sleep(_POLL_S)
    return keys


def payload(store: redis.Redis, key: bytes) -> bytes:
    """Return a chunk as the engine made it."""
    return bytes(store.get(key)[HEADER_BYTES:])


def server_pid(running: RunningStack) -> int:
    """Return the process of LMCache's server."""
    (server,) = (one for one in running.stack.services if one.role == "kv-server")
    return running.launcher.pid(running.state.services[server.name])


def replace_in_memory(pid: int, damaged: Mapping[bytes, bytes]) -> None:
    """Replace chunks in the memory of LMCache's server by bytes of the same length."""
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        found = {chunk: _addresses(memory, pid, chunk) for chunk in damaged}
        for chunk, new in damaged.items():
            for address in found[chunk]:
                memory.seek(address)
                memory.write(new)


def _addresses(memory: IO[bytes], pid: int, chunk: bytes) -> list[int]:
    """Return where a process has these bytes in its own memory; buffers may have them, too."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if (mapping := _OWN_MEMORY.match(line)) is None:
            continue
        start, end = (int(limit, 16) for limit in mapping.groups())
        if end - start < len(chunk):
            continue
        memory.seek(start)
        content, offset = memory.read(end - start), -1
        while (offset := content.find(chunk, offset + 1)) >= 0:
            found.append(start + offset)
    if not found:
        raise RuntimeError("the server does not have a chunk in its memory")
    return found
