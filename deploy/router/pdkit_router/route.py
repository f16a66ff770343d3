"""Route a request: prefill on a producer, decode on a consumer; on another one if one is lost.

Without producers, consumers stand for aggregated engines: each does both.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import operator
import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pdkit_router.handoff import Admission, Fields, Handoff, Ticket
from pdkit_router.handoff.store import StoreHandoff
from pdkit_router.request import Refused, Request, as_utf8, parsed, prefill_fields
from pdkit_router.resume import (
    COMPLETIONS,
    TRACE,
    Events,
    Headers,
    Trace,
    Transcript,
    begin_transcript,
    pass_on,
    whole,
)
from pdkit_router.serve import ClientResponse
from pdkit_router.tracing import Span, Tracer, step
from pdkit_router.upstream import BodyPart, Engine, EngineLost, Exchange

_log = logging.getLogger("router")

Degrade = Literal["recompute", "refuse"]
# A request that breaks engines is not tried on all of them.
_MOST_BROKEN = 2
_MOST_ENDED = 2  # engines that a request may end, in both phases
_FAILED = (500, 502, 503, 504)
# Tokens at the end of an answer of which the client may not have the text yet.
_HELD_BACK = 16
_LARGE_BYTES = 2**19  # a body that takes more than ten milliseconds to read
_EVENTS, _JSON = "text/event-stream", "application/json"

_BUSY = operator.attrgetter("busy")

Use = Callable[[Engine, Exchange], Awaitable[None]]


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

    def there(self, without: Collection[Engine], first: int = 0) -> Sequence[Engine]:
        """Return the engines that can be asked, from the `first` on.

        A silent one may only be slow, which is better than nothing.
        """
        turns = (*self.all[first:], *self.all[:first])
        left = [engine for engine in turns if engine not in without and not engine.drained]
        up = [engine for engine in left if engine.state == "up"]
        return up or [engine for engine in left if engine.state == "silent"]

    def choose(
        self,
        without: Collection[Engine],
        beginning: Sequence[bytes] = (),  # noqa: ARG002
        takes: Callable[[Engine], bool] | None = None,
    ) -> Engine | None:
        """Return the engine with the fewest requests among those that are there, None without any.

        Args:
            without: engines that are left out.
            beginning: of the prompt.
            takes: tells whether an engine can take one more request; all can without it.
        """
        count = len(self.all) or 1
        first = (self._chosen + (self._chosen // count if self._slips else 0)) % count
        self._chosen += 1
        there = self.there(without, first)
        return min(filter(takes, there) if takes else there, key=_BUSY, default=None)


class Everyone(Group):
    """The engines of several groups."""

    def __init__(self, *groups: Group) -> None:
        super().__init__(())
        self._groups = groups

    @property
    def all(self) -> tuple[Engine, ...]:
        """The engines of all groups."""
        return tuple(engine for group in self._groups for engine in group.all)


_BLOCK_BYTES = 256
_BLOCKS = 256  # of a prompt; the rest does not matter for where it goes
_KNOWN = 2**17  # blocks that are remembered, of all prompts together
# An engine may have this many requests more than the idlest one before others get its prompts.
_AHEAD = 8


class PrefixGroup(Group):
    """A group that sends a prompt to the engine that served the longest beginning of it."""

    def __init__(self, engines: Collection[Engine]) -> None:
        super().__init__(tuple(engines))
        self._served = OrderedDict[bytes, Engine]()

    def beginning(self, prompt: Any) -> Sequence[bytes]:
        """Return a name for each block of a prompt's beginning."""
        return tuple(_blocks(prompt))

    def choose(
        self,
        without: Collection[Engine],
        beginning: Sequence[bytes] = (),
        takes: Callable[[Engine], bool] | None = None,
    ) -> Engine | None:
        """Return the engine that served the longest beginning, unless it is much busier."""
        idlest = super().choose(without, beginning, takes)
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


_PROMPTS = ("messages", "prompt", "input")
# They steer how engines move KV, which is the stack's to decide.
_STEERING = ("kv_transfer_params", "ec_transfer_params")
_BEGIN_AT_ONCE = (
    "/v1/responses",
)  # the first events of such a stream come before the engine starts
_CONTENT_TYPE = re.compile(r"[\x20-\x7e]{1,128}")


@dataclass(slots=True)
class Body:
    """A JSON object, as it came and with fields that are set behind it; it does not change.

    The last of several equal names counts, and writing a prompt of a million tokens anew would hold
    up all other requests. Bodies with other fields share the bytes that came.

    Attributes:
        came: from the client.
        has_fields: it is not an empty object.
        added: fields, each with a comma before it.
    """

    came: bytes
    has_fields: bool = True
    added: bytes = b""

    def having(self, changes: Mapping[str, Any]) -> Body:
        """Return it with some fields set."""
        if not changes:
            return self
        added = self.added + b"," + json.dumps(changes)[1:-1].encode()
        return Body(self.came, self.has_fields, added)

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)

    @property
    def parts(self) -> Sequence[BodyPart]:
        """Return what is sent, one part after the other."""
        if not self.added:
            return (self.came,)
        end = self.came.rindex(b"}")
        added = self.added if self.has_fields else self.added[1:]
        # Without a copy; of a short one that takes longer.
        start = memoryview(self.came)[:end] if end > _LARGE_BYTES else self.came[:end]
        return start, added, b"}"


_NO_HANDOFF = Ticket(StoreHandoff(), Admission(0, 0), Counter(), {})  # of what one engine answers


@dataclass
class Work:
    """What engines are sent for a request.

    Attributes:
        name: of the request; the client's, if it sent one.
        prefill: the body for a producer, until it has it; None if one engine answers alone.
        beginning: start of the prompt, by which engines are chosen.
        transcript: of an answer that comes in events; None of others.
        ticket: of the hand-off from a producer to a consumer.
        span: of the request, where it is traced.
        limit: of the time that its tries have.
        own: the router's own name for it, which no client chooses; "" if engines get the client's.
        attempts: times that it was sent to an engine, in both phases.
        ended: engines that ended while they had it, in both phases.
    """

    method: str
    path: str
    name: str
    content_type: str
    body: Body
    prefill: Body | None = None
    beginning: Sequence[bytes] = ()
    transcript: Transcript | None = None
    ticket: Ticket = _NO_HANDOFF
    span: Span | None = None
    limit: asyncio.Timeout | None = None
    own: str = ""
    attempts: int = 0
    ended: list[str] = field(default_factory=list)

    @property
    def begins_with_token(self) -> bool:
        """Whether the answer begins with its first token; one that comes whole has all of them."""
        return self.transcript is not None and self.path not in _BEGIN_AT_ONCE


def work(
    request: Request,
    *,
    others: bool,
    beginning: Callable[[Any], Sequence[bytes]] = lambda _: (),
    handoff: Callable[[str, Fields], Ticket] = lambda _path, _fields: _NO_HANDOFF,
) -> Work:
    """Return the bodies for engines; the request keeps no copy of its own.

    Args:
        others: more than one engine can answer, so that a stream may outlive the first.
        beginning: of a prompt; the prompt itself, an object for each token, is not kept.
        handoff: makes the ticket of a request, by its path and fields.

    Raises:
        Refused: the body is no JSON object that an engine could read.
    """
    came, prefill, transcript = bytes(request.body), None, None
    request.body.clear()
    blocks: Sequence[bytes] = ()
    ticket = _NO_HANDOFF
    if request.method == "GET":
        body = Body(b"")
    else:
        came = as_utf8(came)
        fields = parsed(request.path, came)
        steering = {name: None for name in _STEERING if name in fields}
        extra = fields.get("vllm_xargs")
        if isinstance(extra, dict) and not extra.keys().isdisjoint(_STEERING):
            steering["vllm_xargs"] = None
        body = Body(came, bool(fields)).having(steering)
        if wanted := prefill_fields(request.path, fields):
            ticket = handoff(request.path, fields)
            prefill = body.having({**wanted, **ticket.asks})
            blocks = beginning(next((fields[name] for name in _PROMPTS if name in fields), None))
            if fields.get("stream"):
                transcript = begin_transcript(request.path, fields, others=others)
                if not transcript.problem:
                    body = body.having({"return_token_ids": True})
    given = request.header("content-type") or ""
    content_type = given if _CONTENT_TYPE.fullmatch(given) else "application/octet-stream"
    return Work(
        request.method, request.path, request.name(), content_type, body, prefill, blocks,
        transcript, ticket,
    )  # fmt: skip


@dataclass
class Tries:
    """The engines of one phase of a request, as they are tried.

    Attributes:
        tried: they are not chosen again, but for stale ones.
        stale: their old connection broke off. They are asked once more, on a new one, if there is
            no other to try. Until then they count as broken: a request that breaks engines looks
            alike.
        broken: how many broke off or failed.
    """

    group: Group
    beginning: Sequence[bytes]
    tried: set[Engine]
    stale: set[Engine] = field(default_factory=set)
    broken: int = 0

    def there(self) -> Collection[Engine]:
        """Return the engines of which one is chosen next."""
        fresh = self.group.there(self.tried) if self.broken < _MOST_BROKEN else ()
        return fresh or (self.group.there(self._but_stale()) if self.stale else ())

    def choose(self, takes: Callable[[Engine], bool] | None) -> Engine | None:
        """Return the next engine to try, if one is left that `takes` it."""
        engine = None
        if self.broken < _MOST_BROKEN:
            engine = self.group.choose(self.tried, self.beginning, takes)
        if engine is None and self.stale:
            engine = self.group.choose(self._but_stale(), takes=takes)
        return engine

    def _but_stale(self) -> Collection[Engine]:
        return set(self.group.all) - self.stale


class NoEngine(Exception):
    """None is left to try.

    Attributes:
        last: the last one that answered, and its answer; None if none did.
    """

    def __init__(self, last: tuple[Engine, Exchange] | None = None) -> None:
        super().__init__()
        self.last = last


@dataclass
class Budget:
    """Limits retries of all requests together, so that they do not make a failure worse."""

    size: float = 256.0
    a_second: float = 16.0
    left: float = 256.0
    at: float = 0.0

    def take(self) -> bool:
        """Take one retry from the budget; False if none is left."""
        now = asyncio.get_running_loop().time()
        self.left = min(self.size, self.left + (now - self.at) * self.a_second)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


class Turns:
    """Lets large bodies be read one after the other, with all else that waits between two."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self, body_bytes: int) -> None:
        """Return when a body of this size may be read, which must happen at once."""
        if body_bytes >= _LARGE_BYTES:
            async with self._lock:
                await asyncio.sleep(0)


@dataclass
class Forwarder:
    """Serves the requests that engines answer.

    Attributes:
        degrade: what happens to requests where no producer is left.
        answer_s: for the first byte of an answer, all tries together.
        counts: what the metrics page tells.
        handoff: from a prefill to its decode.
        admission: of hand-offs that hold blocks of a producer.
        context: tokens that prompt and answer may have, as engines say.
        tracer: where requests are traced.
    """

    producers: Group
    consumers: Group
    degrade: Degrade
    answer_s: float
    counts: Counter[str]
    handoff: Handoff = field(default_factory=StoreHandoff)
    admission: Admission = field(default_factory=lambda: Admission(32, 30.0))
    budget: Budget = field(default_factory=Budget)
    turns: Turns = field(default_factory=Turns)
    context: int = 0
    tracer: Tracer | None = None

    def __post_init__(self) -> None:
        self._everyone = Everyone(self.consumers, self.producers)

    async def serve(self, request: Request, answer: ClientResponse) -> None:
        """Answer a request; raises Refused where no engine does."""
        if self.tracer is None:
            await self._serve(request, answer, Trace(), None)
            return
        trace = Trace()
        with self.tracer.request(request.method, request.path, request.headers).running() as span:
            try:
                await self._serve(request, answer, trace, span)
                span.answered(answer.status)
            finally:
                span.attributes |= trace.attributes()

    async def _serve(
        self, request: Request, answer: ClientResponse, trace: Trace, span: Span | None
    ) -> None:
        last = self.consumers
        await self.turns.wait(len(request.body))
        todo = work(
            request, others=len(last.all) > 1, beginning=last.beginning, handoff=self._ticket
        )
        todo.span = span
        self.counts["requests"] += 1
        traced = request.header(TRACE) is not None

        async def use(engine: Engine, exchange: Exchange) -> None:
            trace.consumer, trace.engine_id = engine.name, todo.own
            todo.ticket.settle(read=todo.begins_with_token or todo.transcript is None)
            trace.handoff = todo.ticket.outcome if self.handoff.pins else ""
            streams = exchange.content_type.startswith(_EVENTS)
            if not streams:
                await exchange.beginning()
                if traced or span:
                    trace.read(exchange.held)
            headers: Headers = (("x-request-id", todo.name),)
            if traced:
                headers += ((TRACE, trace.header()),)
            if streams:
                limit.reschedule(None)
                answer.begin(exchange.status, (*headers, ("content-type", exchange.content_type)))
                events = Events(answer, todo.transcript, trace if traced else None)
                await self._pass(engine, exchange, events, todo)
                answer.end()
                return
            if exchange.ended.done():
                await exchange.ended
                whole(exchange, headers, answer)
                return
            limit.reschedule(None)
            if not await pass_on(exchange, headers, answer):
                self._broke_off(todo)

        try:
            async with asyncio.timeout(self.answer_s) as limit:
                todo.limit = limit
                if todo.prefill is not None and self.producers.wanted:
                    await self._prefill(todo, todo.prefill, trace)
                group = self._everyone if todo.prefill is None else last
                todo.prefill = None
                await self._try(group, todo, todo.body, trace, use)
        except TimeoutError:
            self.counts["errors"] += 1
            raise Refused(504, f"no answer within {self.answer_s:g} s") from None
        except NoEngine as exc:
            self.counts["errors"] += 1
            await self._give_up(exc, todo, answer)
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            raise
        finally:
            todo.ticket.settle()

    def _ticket(self, path: str, fields: Fields) -> Ticket:
        asks = self.handoff.asks(path, fields)
        return Ticket(self.handoff, self.admission, self.counts, asks)

    async def _give_up(self, left: NoEngine, todo: Work, answer: ClientResponse) -> None:
        """Pass on the last engine's failure; raise Refused if that engine is gone, too."""
        if why := self._deadly(todo):
            raise Refused(500, why, final=True) from None
        if left.last is None or await left.last[0].health() == "down":
            raise Refused(503, "no engine can answer", retry_after_s=1) from None
        whole(left.last[1], (("x-request-id", todo.name),), answer)

    async def _prefill(self, todo: Work, body: Body, trace: Trace) -> None:
        """Have a producer compute the prompt's KV, and hand it over.

        Where it refuses the request, so will the consumer, which says it of the whole request.
        """

        async def use(engine: Engine, exchange: Exchange) -> None:
            await todo.ticket.take(exchange)
            trace.producer = engine.name

        todo.ticket.begin()
        try:
            await self._try(self.producers, todo, body, trace, use)
        except NoEngine:
            todo.ticket.fail()
            if len(todo.ended) >= _MOST_ENDED:
                raise
            self.counts["degraded"] += 1
            if self.degrade == "refuse":
                raise Refused(503, "no producer can compute", retry_after_s=1) from None

    async def _try(
        self, group: Group, todo: Work, body: Body, trace: Trace, use: Use,
        lost: Collection[Engine] = (),
    ) -> None:  # fmt: skip
        """Have `use` take the answer of an engine, and of another one if that breaks off.

        Args:
            lost: engines that were tried before.

        Raises:
            NoEngine: none is left, or no try, or two engines have ended by this request.
        """
        tries, ticket, last = Tries(group, todo.beginning, set(lost)), todo.ticket, None
        prefills = group is self.producers

        def on_sent() -> None:
            ticket.send(streams=todo.begins_with_token)

        admission = ticket.admission if prefills else None
        while engine := await self._next(tries, admission):
            again = engine in tries.stale
            tries.stale.discard(engine)
            tries.tried.add(engine)
            trace.tries += 1
            engine.busy += 1
            given: Fields = {}
            if prefills:
                ticket.ask(engine)
            else:
                given = ticket.offer()
            try:
                with step(todo.span, self._phase(group), engine.name, todo.limit) as span:
                    request = self._request(engine, todo, body.having(given), span)
                    async with engine.exchange(
                        request, for_client=True, on_sent=on_sent
                    ) as exchange:
                        if span:
                            span.answered(exchange.status)
                            exchange.ended.add_done_callback(span.follow)
                        if exchange.status not in _FAILED:
                            await use(engine, exchange)
                            return
                        ticket.lose()
                        await exchange.rest()
                        last = engine, exchange
                        tries.broken += 1
                        if exchange.status == 500:
                            await self._note_end(engine, todo)
            except EngineLost as exc:
                tries.broken += exc.asked
                ticket.lose()
                if not exc.asked:
                    engine.lost()
                elif not await self._note_end(engine, todo) and exc.stale and not again:
                    tries.stale.add(engine)
            finally:
                engine.busy -= 1
            if len(todo.ended) >= _MOST_ENDED:
                break
        raise NoEngine(last)

    async def _next(self, tries: Tries, admission: Admission | None) -> Engine | None:
        """Return the engine to try next, once it may have a hand-off more; None without any."""
        if admission:
            await admission.wait(tries.there, again=bool(tries.tried))
        engine = tries.choose(admission.has_room if admission else None)
        if engine and tries.tried:
            if not self.budget.take():
                return None
            self.counts["retries"] += 1
        return engine

    def _request(self, engine: Engine, todo: Work, body: Body, span: Span | None) -> bytes:
        """Return what an engine is sent; its id, and so its blocks', is that of this try alone."""
        if self.handoff.own_ids:
            todo.own = todo.own or secrets.token_hex(16)
            todo.attempts += 1
        name = f"{todo.own}-{todo.attempts}" if todo.own else todo.name
        headers = (("content-type", todo.content_type), ("x-request-id", name))
        traced = span.headers() if span else ()
        return engine.request(todo.method, todo.path, (*headers, *traced), *body.parts)

    async def _note_end(self, engine: Engine, todo: Work) -> bool:
        """Tell whether an engine that failed on a request has ended; note it if so.

        One that refused the connection, or answered 503, never had the request. A crashed one
        refuses connections at once; one that takes them and is silent is only slow, or hangs.
        """
        if await engine.health() != "down":
            engine.connections.drop_idle()  # so that the next try is on a new one
            return False
        todo.ended.append(engine.name)
        return True

    def _deadly(self, todo: Work) -> str:
        """Return the reason not to try a request on another engine; "" without one."""
        if len(todo.ended) < _MOST_ENDED:
            return ""
        names = " and ".join(todo.ended)
        _log.error("%s %s: %s crashed while serving it", todo.path, todo.name, names)
        return (
            f"{names} crashed while serving this request; it is not retried; their logs may say why"
        )

    def _broke_off(self, todo: Work) -> None:
        """Note an answer whose client has seen its beginning, and sees no whole one."""
        self.counts["errors"] += 1
        if todo.span:
            todo.span.error = "EngineLost"

    def _phase(self, group: Group) -> str:
        if group is self.producers:
            return "prefill"
        return "decode" if group is self.consumers and self.producers.wanted else "answer"

    async def _pass(self, engine: Engine, exchange: Exchange, events: Events, todo: Work) -> None:
        """Pass events on as they come; where the engine is lost or fails, those of another one."""
        exchange.pass_to(events.feed)
        events.answer.paces(exchange.pause)
        with suppress(EngineLost):
            await exchange.ended
            if not events.transcript.engine_error:
                return
        await self._note_end(engine, todo)
        await self._continue(engine, events, todo)

    async def _continue(self, lost: Engine, events: Events, todo: Work) -> None:
        """Have another engine go on with a stream, or end it with an error."""
        events.transcript.losses += 1
        lost.busy -= 1  # this stream no longer runs there
        try:
            await self._finish(lost, events, todo)
        finally:
            lost.busy += 1

    async def _finish(self, lost: Engine, events: Events, todo: Work) -> None:
        transcript = events.transcript
        if events.drop_part():
            self._broke_off(todo)
            events.answer.break_off()
            return
        if transcript.finished:
            events.answer.piece(transcript.ending())
            return
        why = transcript.why_not() if transcript.losses < _MOST_BROKEN else "the next one, too"
        if not why and len(todo.ended) < _MOST_ENDED:
            why = "no other engine continued it"
            with suppress(NoEngine, EngineLost, TimeoutError, ValueError, LookupError):
                why = await self._rest(lost, events, todo)
            if not why:
                return
        self._broke_off(todo)
        if deadly := self._deadly(todo):
            events.answer.piece(transcript.failure(deadly, 500))
        else:
            events.answer.piece(transcript.failure(why))

    async def _rest(self, lost: Engine, events: Events, todo: Work) -> str:
        """Pass the rest of a stream on; return the reason if there is no rest, else ""."""
        async with asyncio.timeout(self.answer_s) as limit:
            todo.limit = limit
            if not events.transcript.again():
                settled = await self._settled(lost, events.transcript)
                if settled is None:
                    return "its token ids do not match its text"
                rest = events.transcript.rest(settled, self.context)
                todo = replace(todo, path=COMPLETIONS, content_type=_JSON, body=Body(rest))

            async def use(engine: Engine, exchange: Exchange) -> None:
                if exchange.status != 200:
                    raise NoEngine
                limit.reschedule(None)
                self.counts["continued"] += 1
                await self._pass(engine, exchange, events, todo)

            await self._try(self.consumers, todo, todo.body, Trace(), use, {lost})
        return ""

    async def _settled(self, lost: Engine, transcript: Transcript) -> int | None:
        """Return the number of tokens in the text that the client has; None if unknown.

        An engine holds text back while a character, or what may be a stop string, is not complete.
        """
        engine = self.consumers.choose({lost})
        if engine is None:
            raise NoEngine

        async def text(tokens: list[int]) -> str:
            body = json.dumps({"model": transcript.fields.get("model"), "tokens": tokens}).encode()
            _, found = await engine.ask("POST", "/detokenize", body)
            return str(json.loads(found)["prompt"])

        before = await text(transcript.shown(0)[0])
        for tokens in range(transcript.tokens, max(0, transcript.tokens - _HELD_BACK), -1):
            if transcript.fits(before, await text(transcript.shown(tokens)[1])):
                return tokens
        return None
