"""The load generator: streams completions, and notes when each request was sent and answered.

An inter-token gap is the time between two pieces of an answer. An engine that falls behind sends
several tokens in one piece; `output_tokens` counts them all.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from deploy.benchmark.results import RequestRecord
from deploy.benchmark.stream import BadStatus, post
from deploy.benchmark.workloads import Conversation, Prompt, Turn
from deploy.errors import printable

_EXCERPT = 160
_IDS = re.compile(r"\b[0-9a-f][0-9a-f-]{15,}\b")  # request ids would make every error another one
_NOT_SENT = "not sent: an earlier turn failed"


@dataclass(frozen=True)
class LoadTarget:
    """What is loaded.

    Attributes:
        timeout_s: for a whole answer.
    """

    url: str
    model: str
    timeout_s: float
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """The result of one pass.

    Attributes:
        late_s: how much later than due the latest request was sent; 0 in a closed loop.
        cpu_s: what the generator itself used.
    """

    records: Sequence[RequestRecord]
    duration_s: float
    late_s: float
    cpu_s: float


class _Failed(Exception):
    """A request without a complete answer."""


@dataclass
class _Answer:
    """An answer as it comes in, by the generator's clock."""

    first: float | None = None
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    done: bool = False

    def add(self, event: bytes, now: float) -> None:
        """Note one server-sent event.

        Raises:
            _Failed: it is an error.
        """
        if not event.startswith(b"data:"):
            return
        data = event[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        document = json.loads(data)
        if "error" in document:
            raise _Failed(_said(data.decode("utf-8", "replace")))
        if usage := document.get("usage"):
            self.input_tokens = int(usage["prompt_tokens"])
            self.output_tokens = int(usage["completion_tokens"])
        for choice in document.get("choices") or ():
            self._piece(choice, now)

    def _piece(self, choice: Mapping[str, Any], now: float) -> None:
        delta = choice.get("delta")
        if delta is not None and not delta.get("content"):
            return  # a chat's first event names the role and has no token
        self.tokens += choice.get("token_ids") or ()
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(now - self.last)
        self.last = now


def run_load(
    target: LoadTarget,
    conversations: Sequence[Conversation],
    *,
    repeat: int = 0,
    concurrency: int | None = None,
    on_done: Callable[[int], None] = lambda _: None,
) -> Load:
    """Send every conversation at its time, or at most `concurrency` at once.

    `on_done` gets the number of requests done, after each.
    """
    return asyncio.run(_Generator(target, repeat, on_done).run(conversations, concurrency))


def run_routes(
    routes: Sequence[Sequence[LoadTarget]],
    conversations: Sequence[Conversation],
    *,
    concurrency: int,
) -> Load:
    """Send every conversation to the targets of a route, one after the other.

    Routes take turns. There is a record for each target that was asked.
    """
    return asyncio.run(_in_turn(routes, conversations, concurrency))


async def _in_turn(
    routes: Sequence[Sequence[LoadTarget]], conversations: Sequence[Conversation], concurrency: int
) -> Load:
    legs = {one.url: _Generator(one, 0, lambda _: None) for route in routes for one in route}
    waiting = zip(conversations, cycle(routes), strict=False)

    async def user() -> None:
        for conversation, route in waiting:
            for target in route:
                await legs[target.url].converse(conversation)

    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(user() for _ in range(concurrency)))
    records = [record for leg in legs.values() for record in leg.records]
    return Load(records, time.perf_counter() - began, 0.0, time.process_time() - cpu)


class _Generator:
    def __init__(self, target: LoadTarget, repeat: int, on_done: Callable[[int], None]) -> None:
        self._target, self._repeat, self._on_done = target, repeat, on_done
        self.records: list[RequestRecord] = []
        self._began = 0.0
        self._late_s = 0.0

    async def run(self, conversations: Sequence[Conversation], concurrency: int | None) -> Load:
        cpu, self._began = time.process_time(), time.perf_counter()
        if concurrency is None:
            await asyncio.gather(*map(self._at_its_time, conversations))
        else:
            waiting = iter(conversations)
            await asyncio.gather(*(self._user(waiting) for _ in range(concurrency)))
        duration = time.perf_counter() - self._began
        records = sorted(self.records, key=lambda record: record.index)
        return Load(records, duration, self._late_s, time.process_time() - cpu)

    async def _user(self, waiting: Iterator[Conversation]) -> None:
        for conversation in waiting:
            await self.converse(conversation)

    async def _at_its_time(self, conversation: Conversation) -> None:
        due = self._began + conversation.start_s
        await asyncio.sleep(due - time.perf_counter())
        self._late_s = max(self._late_s, time.perf_counter() - due)
        await self.converse(conversation)

    async def converse(self, conversation: Conversation) -> None:
        """Send the turns one after the other; each prompt has all that was said before."""
        said: tuple[int, ...] = ()
        broken = False
        several = len(conversation.turns) > 1
        for index, turn in enumerate(conversation.turns, conversation.first_request):
            of = conversation.index if several else None
            if broken:
                self._note(index, of, time.perf_counter(), _Answer(), _NOT_SENT)
                continue
            prompt = turn.after(said)
            began = time.perf_counter()
            answer, error = await self._ask(prompt, turn, ids=several)
            self._note(index, of, began, answer, error)
            broken = error is not None
            if several and isinstance(prompt, tuple):
                said = (*prompt, *answer.tokens)

    async def _ask(self, prompt: Prompt, turn: Turn, *, ids: bool) -> tuple[_Answer, str | None]:
        """Return an answer, and why it is not complete."""
        answer, target = _Answer(), self._target
        path, body = _request(target.model, prompt, turn, ids=ids)

        async def listen() -> None:
            async for event, now in post(target.url, path, target.headers, body):
                answer.add(event, now)

        try:
            await asyncio.wait_for(listen(), timeout=target.timeout_s)
        except _FAILURES as exc:
            return answer, _why(exc, target.timeout_s)
        if answer.output_tokens < turn.output_tokens or not answer.done:
            asked = turn.output_tokens
            return answer, f"the answer ended early: {answer.output_tokens} of {asked} tokens"
        return answer, None

    def _note(
        self, index: int, of: int | None, began: float, answer: _Answer, error: str | None
    ) -> None:
        ended = time.perf_counter()
        if error is None:
            ended = answer.last
        self.records.append(
            RequestRecord(
                repeat=self._repeat,
                index=index,
                arrival_s=round(began - self._began, 5),
                ttft_s=None if answer.first is None else round(answer.first - began, 5),
                itl_s=[round(gap, 5) for gap in answer.gaps],
                e2e_s=round(ended - began, 5),
                input_tokens=answer.input_tokens,
                output_tokens=answer.output_tokens,
                error=error,
                conversation=of,
            )
        )
        self._on_done(len(self.records))


_FAILURES = (
    _Failed, BadStatus, asyncio.TimeoutError, OSError, EOFError,
    ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


def _why(exc: Exception, timeout_s: float) -> str:
    """Return why a request failed, in the same words for the same failure."""
    if isinstance(exc, _Failed):
        return str(exc)
    if isinstance(exc, BadStatus):
        return f"HTTP {exc.status}: {_said(str(exc))}"
    if isinstance(exc, asyncio.TimeoutError):
        return f"no complete answer within {timeout_s:g} s"
    kind = "no complete answer" if isinstance(exc, (OSError, EOFError)) else "not a completion"
    return f"{kind} ({type(exc).__name__})"


def _request(model: str, prompt: Prompt, turn: Turn, *, ids: bool) -> tuple[str, bytes]:
    """Return path and body of a request; chat messages go to the chat API."""
    chat = isinstance(prompt, list)
    body = {
        "model": model,
        ("messages" if chat else "prompt"): prompt,
        "max_tokens": turn.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        # The next turn's prompt needs them; they come with the prompt's own, so only where needed.
        **({"return_token_ids": True} if ids else {}),
    }
    return ("/v1/chat/completions" if chat else "/v1/completions"), json.dumps(body).encode()


def _said(text: str) -> str:
    """Return an error's text, the same for all requests that fail alike."""
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        text = str(json.loads(text)["error"]["message"])
    return _IDS.sub("ID", printable(" ".join(text.split())))[:_EXCERPT]
