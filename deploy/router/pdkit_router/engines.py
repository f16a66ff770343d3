"""The engines: which are there, and which is asked next."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from pdkit_router.engine_side import Connections, EngineLost, Exchange
from pdkit_router.timers import timeout

_log = logging.getLogger("router")
_EVERY_S = 0.4
_ANSWER_S = 0.5  # so that a death is known within a second
_GREET_S = 5.0  # of what is not used yet: a busy machine may take its time
# Raised when an engine's answer is not the JSON that was expected. It may be any JSON, with
# infinite numbers or too many levels, or no JSON at all.
_ODD = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError)
# An engine that computes may be silent for a while. After the first limit, requests that have no
# answer yet move to another engine; after the second, streams that have begun end.
_SILENT_S, _LONG_SILENT_S = 5.0, 30.0
# The first request of an engine that came back is the router's own.
_WARM_UP_S, _WARM_UP_TRIES = 20.0, 3

State = Literal["up", "silent", "down"]
_BLOCK_BYTES = 256
_BLOCKS = 256  # of a prompt; the rest does not matter for where it goes
_KNOWN = 2**17  # blocks that are remembered, of all prompts together
# An engine may have this many requests more than the idlest one before others get its prompts.
_AHEAD = 8


@dataclass(eq=False)
class Engine:
    """One engine.

    Attributes:
        state: "up"; "silent" if it takes connections and has not answered in time; "down".
        busy: requests that it is working on.
        key: that it asks for; "" if none.
        drained: it gets no new requests, because the operator said so.
        gone: it took no connection, so that its process must be another one when it answers.
        asked: for its health, once at least.
        unlisted: it lists no models, and the log says so.
    """

    name: str
    host: str
    port: int
    state: State = "down"
    busy: int = 0
    key: str = field(default="", repr=False)
    drained: bool = False
    gone: bool = False
    asked: bool = False
    unlisted: bool = False
    connections: Connections = field(init=False)

    def __post_init__(self) -> None:
        self.connections = Connections(self.host, self.port)

    def request(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> bytes:
        """Return a request as it is sent."""
        lines = [f"{method} {path} HTTP/1.1", f"host: {self.host}:{self.port}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if self.key:
            lines.append(f"authorization: Bearer {self.key}")
        if method == "POST":
            lines.append(f"content-length: {len(body)}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body

    @asynccontextmanager
    async def exchange(
        self, request: bytes, *, for_client: bool = False
    ) -> AsyncIterator[Exchange]:
        """Send a request; break it off if the block ends before its answer.

        Args:
            request: as it is sent.
            for_client: it is a client's work, not the router's own question.

        Raises:
            EngineLost: it cannot be reached, or closed before the first byte of its answer.
        """
        connection = await self.connections.get()
        exchange = connection.start(request, for_client=for_client)
        try:
            await exchange.started
            yield exchange
        except EngineLost as exc:
            if exc.stale:
                self.connections.drop_idle()  # so that the next try is on a new one
            raise
        finally:
            if connection.exchange is exchange:
                connection.abandon()

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return status and body of a small answer."""
        headers = (("content-type", "application/json"),) if body else ()
        request = self.request(method, path, headers, body)
        try:
            return await self._answer(request)
        except EngineLost as exc:
            if not exc.stale:
                raise
            return await self._answer(request)

    async def health(self, within_s: float = _ANSWER_S) -> State:
        """Ask for `/health`; "up" only if it answers 200."""
        try:
            async with timeout(within_s):
                status, _ = await self.ask("GET", "/health")
        except EngineLost as exc:
            self.gone |= not exc.asked
            return "down"
        except TimeoutError:
            return "silent"
        return "up" if status == 200 else "down"

    async def _answer(self, request: bytes) -> tuple[int, bytes]:
        async with self.exchange(request) as exchange:
            await exchange.rest()
            return exchange.status, bytes(exchange.held)

    def lost(self) -> None:
        """Note that the engine is gone: it is used again when it answers."""
        if self.state != "down":
            _log.warning("%s does not answer", self.name)
        self.state = "down"
        self.connections.drop_idle()

    @property
    def serves(self) -> bool:
        """Whether it answers and gets requests."""
        return self.state == "up" and not self.drained


class Group:
    """The engines of one role, which take turns.

    Attributes:
        wanted: the stack has such engines, even if none is there now.
    """

    def __init__(self, engines: Sequence[Engine], *, slips: bool = False) -> None:
        """Begin each round one engine later if the group `slips`.

        Consumers do: if both roles took turns in step, each producer would always meet the same
        consumer.
        """
        self._all = tuple(engines)
        self.wanted = bool(self._all)
        self._slips = slips
        self._chosen = 0

    @property
    def all(self) -> tuple[Engine, ...]:
        """The engines, in the order in which they take turns."""
        return self._all

    def become(self, engines: Sequence[Engine]) -> None:
        """Have other engines from now on."""
        self._all = tuple(engines)

    @property
    def up(self) -> int:
        """How many get requests and answer."""
        return sum(engine.serves for engine in self.all)

    def beginning(self, prompt: Any) -> Sequence[bytes]:  # noqa: ARG002
        """Return an empty key: this choice ignores the prompt."""
        return ()

    def choose(
        self,
        without: Collection[Engine],
        beginning: Sequence[bytes] = (),  # noqa: ARG002
    ) -> Engine | None:
        """Return the engine with the fewest requests among those that are there, None without any.

        A silent one may only be slow, which is better than nothing.
        """
        count = len(self.all) or 1
        first = (self._chosen + (self._chosen // count if self._slips else 0)) % count
        self._chosen += 1
        turns = (*self.all[first:], *self.all[:first])
        left = [engine for engine in turns if engine not in without and not engine.drained]
        up = [engine for engine in left if engine.state == "up"]
        there = up or [engine for engine in left if engine.state == "silent"]
        return min(there, key=lambda engine: engine.busy, default=None)


class Everyone(Group):
    """The engines of several groups."""

    def __init__(self, *groups: Group) -> None:
        super().__init__(())
        self._groups = groups

    @property
    def all(self) -> tuple[Engine, ...]:
        """The engines of all groups."""
        return tuple(engine for group in self._groups for engine in group.all)


class HealthChecker:
    """Asks each engine for its health, again and again."""

    def __init__(self, engines: Sequence[Engine], on_context: Callable[[int], None]) -> None:
        """`on_context` is told how many tokens prompt and answer of an engine may have."""
        self._engines = engines
        self._on_context = on_context
        self.asked = asyncio.Event()
        if not engines:
            self.asked.set()

    async def run(self) -> None:
        """Watch forever; `asked` is set once each engine was asked."""
        await asyncio.gather(*(self.watch(engine) for engine in self._engines))

    async def watch(self, engine: Engine) -> None:
        """Watch one engine forever."""
        missed = 0
        while True:
            # A router that starts on a busy machine would otherwise refuse all requests.
            state = await engine.health(_GREET_S if engine.state == "down" else _ANSWER_S)
            if state == "up" and engine.state == "down" and not await self._greet(engine):
                state = "down"
            if state == "up":
                missed = 0
                engine.state = "up"
            else:
                # Not by the clock: the router itself may have been held up.
                missed += 1
                silent_s = missed * (_EVERY_S + _ANSWER_S)
                self._end_silent(engine, silent_s)
                if state == "down" or silent_s > _SILENT_S:
                    engine.lost()
                elif engine.state == "up":
                    engine.state = "silent"
            engine.asked = True
            if all(one.asked for one in self._engines):
                self.asked.set()
            await asyncio.sleep(_EVERY_S)

    async def _greet(self, engine: Engine) -> bool:
        """Learn an engine's model before clients reach it; warm up one that was restarted.

        Returns:
            Whether it lists its models, as engines do. What only answers `/health` may be another
            program on the port of an engine that died.
        """
        status = 0  # no answer
        try:
            async with timeout(_GREET_S):
                status, body = await engine.ask("GET", "/v1/models")
            models = json.loads(body)["data"]
            name = str(models[0]["id"])
            lengths = (model["max_model_len"] for model in models)  # null for a LoRA adapter
            context = max(int(length) for length in lengths if length is not None)
        except (EngineLost, TimeoutError, *_ODD):
            if not engine.unlisted:
                _log.warning(
                    "%s answers /health, but %s: not used",
                    engine.name,
                    f"/v1/models with {status}" if status >= 400 else "lists no models",
                )
            engine.unlisted = True
            return False
        engine.unlisted = False
        self._on_context(context)
        if engine.gone:
            with suppress(EngineLost, TimeoutError):
                await self._warm_up(engine, name)
        engine.gone = False
        _log.info("%s answers", engine.name)
        return True

    async def _warm_up(self, engine: Engine, model: str) -> None:
        """Send a request of one token, and again if the engine fails on it.

        A model without completions refuses it, which will do: the engine has answered.
        """
        body = json.dumps({"model": model, "prompt": "warm up", "max_tokens": 1}).encode()
        headers = (("content-type", "application/json"),)
        request = engine.request("POST", "/v1/completions", headers, body)
        async with asyncio.timeout(_WARM_UP_S):
            for _ in range(_WARM_UP_TRIES):
                async with engine.exchange(request) as exchange:
                    await exchange.rest()
                    if exchange.status < 500:
                        return

    def _end_silent(self, engine: Engine, silent_s: float) -> None:
        for connection in list(engine.connections.open):
            exchange = connection.exchange
            if exchange is None or silent_s < _SILENT_S:
                continue
            if not exchange.started.done() or silent_s > _LONG_SILENT_S:
                connection.abandon()


class PrefixGroup(Group):
    """A group that sends a prompt to the engine that served the longest beginning of it."""

    def __init__(self, engines: Collection[Engine]) -> None:
        super().__init__(tuple(engines))
        self._served = OrderedDict[bytes, Engine]()

    def beginning(self, prompt: Any) -> Sequence[bytes]:
        """Return a name for each block of a prompt's beginning."""
        return tuple(_blocks(prompt))

    def choose(self, without: Collection[Engine], beginning: Sequence[bytes] = ()) -> Engine | None:
        """Return the engine that served the longest beginning, unless it is much busier."""
        idlest = super().choose(without)
        if idlest is None:
            return None
        known = (self._served.get(block) for block in reversed(beginning))
        holder = next((engine for engine in known if engine is not None), idlest)
        fits = holder not in without and holder.state == idlest.state and not holder.drained
        chosen = holder if fits and holder.busy <= idlest.busy + _AHEAD else idlest
        self._note(beginning, chosen)
        return chosen

    def _note(self, blocks: Sequence[bytes], engine: Engine) -> None:
        for block in blocks:
            self._served[block] = engine
            self._served.move_to_end(block)
        while len(self._served) > _KNOWN:
            self._served.popitem(last=False)


def _blocks(prompt: Any) -> Iterator[bytes]:
    """Yield a name for each whole block at the start of a prompt, made from all text up to its end.

    `prompt` is text, token ids or messages.
    """
    end = _BLOCKS * _BLOCK_BYTES
    if isinstance(prompt, list):
        # Each entry takes a byte at least. Without the closing bracket, what is added later only
        # adds to the text.
        prompt = json.dumps(prompt[:end])[:-1]
    if not isinstance(prompt, str):
        return
    text = prompt[:end].encode("utf-8", "surrogatepass")[:end]
    digest = hashlib.blake2b(digest_size=16)
    for at in range(0, len(text) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        digest.update(text[at : at + _BLOCK_BYTES])
        yield digest.digest()
