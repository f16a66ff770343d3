"""Answers on their way from an engine to a client, and streams that another engine finishes.

Little of an answer is held. Of a stream the router keeps what it takes to go on with it: which can
be continued, and what the next engine is asked for, is decided here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdkit_router.request import MESSAGES, error_body
from pdkit_router.serve import ClientResponse
from pdkit_router.upstream import HELD_BYTES, EngineLost, Exchange

TRACE = "x-pdkit-trace"
# In the usage of an answer. Within a text of JSON every quote has a backslash.
_CACHED = re.compile(rb'"cache(?:d|_read_input)_tokens": ?(\d+)')

Headers = tuple[tuple[str, str], ...]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Fields that hold for the rest of an answer as for its beginning. All others but these and the next
# two lists stand in the way: what was computed so far would have to count, and does not.
_KEPT = frozenset({
    "model", "stream", "stream_options", "user", "priority",
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
})  # fmt: skip
_LENGTHS = frozenset({"max_tokens", "max_completion_tokens", "min_tokens"})
# The engine says which tokens the prompt became.
_PROMPT = frozenset({
    "prompt", "messages", "add_special_tokens", "add_generation_prompt", "continue_final_message",
    "chat_template", "chat_template_kwargs", "truncate_prompt_tokens",
})  # fmt: skip
_REST = _KEPT | _LENGTHS
_CONTINUES = _REST | _PROMPT
# Values, as JSON, with which a field is the same as left out. So is null, always.
_NEUTRAL: Mapping[str, tuple[str, ...]] = {
    "n": ("1",),
    "best_of": ("1",),
    "echo": ("false",),
    "logprobs": ("false",),
    "presence_penalty": ("0", "0.0"),
    "frequency_penalty": ("0", "0.0"),
    "tools": ("[]",),
    "tool_choice": ('"none"',),
    "response_format": ('{"type": "text"}',),
    "store": ("false",),
}
_HEAD = ("id", "object", "created", "model")  # of an event, beside its choices
_DEFAULT_TOKENS = 16  # of a completion that names no limit
_TAIL = 32  # tokens of the prompt before an answer: some tokenizers write a first token otherwise


def begin_transcript(path: str, fields: Mapping[str, Any], *, others: bool) -> Transcript:
    """Begin the transcript of a stream that a client asks for.

    Args:
        others: there is more than one engine that could answer.
    """
    problem = next(_obstacles(path, fields), "") if others else "there is no other engine"
    small = {name: value for name, value in fields.items() if name in _REST}
    return Transcript(path, small, problem)


def _obstacles(path: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a stream could not be continued."""
    if path not in (COMPLETIONS, CHAT):
        yield f"a stream of {path} cannot be continued"
    for name, value in fields.items():
        if value is None or name in _CONTINUES:
            continue
        if json.dumps(value) not in _NEUTRAL.get(name, ()):
            yield f"a stream with '{name}' cannot be continued"
    if fields.get("seed") is not None and fields.get("temperature") != 0:
        yield "a stream with 'seed' can be continued with temperature 0 only"
    if (fields.get("stream_options") or {}).keys() - {"include_usage"}:
        yield "a stream with usage in each event cannot be continued"
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        yield "a stream of several prompts cannot be continued"
    messages = fields.get("messages")
    if isinstance(messages, list) and not all(map(_is_text, messages)):
        yield "a stream with more than text in its prompt cannot be continued"


def _is_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else []
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


@dataclass
class Transcript:
    """What a client has received of a stream, and what it takes to go on.

    Attributes:
        fields: fields of the client's request that also apply to the rest.
        problem: why it cannot be continued; "" if it can.
        asks: the engine is asked for token ids, which the client did not ask for.
        losses: engines that were lost meanwhile.
        engine_error: with which the last engine ended it, as one whose core died does; the client
            does not see it, as another engine may go on.
    """

    path: str
    fields: Mapping[str, Any]
    problem: str
    losses: int = 0
    finished: bool = False
    engine_error: str = ""
    _prompt: bytes = b""
    _tokens: list[int] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _head: dict[str, Any] = field(default_factory=dict)
    _continued: bool = False
    _usage_sent: bool = False

    def __post_init__(self) -> None:
        self.asks = not self.problem

    def note(self, event: bytes) -> bytes:
        """Write down an event; return it as the client is to see it."""
        if not self.asks or not event.startswith(b"data: {"):
            return event
        event, prompt = _cut(event, b'"prompt_token_ids":[')
        event, tokens = _cut(event, b'"token_ids":[')
        if self.problem:
            return event
        chunk = json.loads(event[6:])
        if not isinstance(chunk.get("choices"), list):
            self._read_error(chunk.get("error"))
            return event
        self._prompt = self._prompt or prompt
        self._usage_sent = self._usage_sent or bool(chunk.get("usage"))
        self._head = self._head or {name: chunk.get(name) for name in _HEAD}
        for choice in chunk["choices"]:
            self._note(choice, json.loads(b"[%b]" % tokens) if tokens else [])
        return self._as_begun(chunk) if self._continued else event

    def _read_error(self, error: Any) -> None:
        code = error.get("code") if isinstance(error, dict) else None
        if isinstance(code, int) and code >= 500:
            self.engine_error = str(error.get("message") or "without a reason")
        else:
            self.problem = "its engine refused it"

    def _note(self, choice: Mapping[str, Any], tokens: list[int]) -> None:
        delta = choice.get("delta") or {}
        text = _text_of(choice)
        if any(value for name, value in delta.items() if name not in ("role", "content")):
            self.problem = "its answer is more than text"
        elif text and not tokens and not self._tokens:
            self.problem = "its engine does not report token ids"
        if text:
            self._text.append(text)
        self._tokens += tokens
        self.finished = self.finished or bool(choice.get("finish_reason"))

    def _as_begun(self, chunk: Mapping[str, Any]) -> bytes:
        """Return an event of the rest in the form and under the name of the stream's beginning."""
        choices = [self._choice(choice) for choice in chunk["choices"]]
        event = {**self._head, "choices": choices}
        if usage := chunk.get("usage"):
            event["usage"] = {**usage, **self._usage()}
        return _event(event)

    def _choice(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        text = _text_of(choice)
        delta = {"content": text} if text else {}
        shown = {"delta": delta} if self.path == CHAT else {"text": text}
        return {
            "index": 0, **shown, "logprobs": None, "finish_reason": choice.get("finish_reason"),
            "stop_reason": choice.get("stop_reason"), "token_ids": None,
        }  # fmt: skip

    def _usage(self) -> dict[str, int]:
        prompt, answer = self._prompt_tokens, len(self._tokens)
        return {
            "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer,
        }  # fmt: skip

    def ending(self) -> bytes:
        """Return the events behind the last token."""
        options = self.fields.get("stream_options") or {}
        usage = {**self._head, "choices": [], "usage": self._usage()}
        wanted = options.get("include_usage") and not self._usage_sent
        events = [_event(usage)] if wanted else []
        return b"\n\n".join([*events, b"data: [DONE]", b""])

    def why_not(self) -> str:
        """Return the reason it cannot go on; "" if it can."""
        if self.problem:
            return self.problem
        # Before its first event, all of it is asked for again.
        return "" if self._prompt or not self._head else "its engine does not report token ids"

    def shown(self, tokens: int) -> tuple[list[int], list[int]]:
        """Return the prompt's end, and the same with the first tokens of the answer."""
        end = json.loads(b"[%b]" % self._prompt)[-_TAIL:]
        return end, end + self._tokens[:tokens]

    @property
    def _prompt_tokens(self) -> int:
        return self._prompt.count(b",") + 1

    @property
    def tokens(self) -> int:
        """How many tokens of the answer came."""
        return len(self._tokens)

    def fits(self, before: str, after: str) -> bool:
        """Tell whether the client has exactly the text between two texts of `shown`."""
        return after == before + "".join(self._text)

    def again(self) -> bool:
        """Tell whether nothing was shown, so that the same can be asked once more; forget it."""
        if self._text:
            return False
        self._tokens.clear()
        self._continued, self.engine_error = True, ""
        return True

    def rest(self, tokens: int, context: int) -> bytes:
        """Return the request for all behind the first tokens of the answer; those are settled.

        Args:
            context: tokens of prompt and answer at most.
        """
        del self._tokens[tokens:]
        self._continued, self.engine_error = True, ""
        kept = {name: value for name, value in self.fields.items() if name in _KEPT}
        kept["max_tokens"] = self._most(context) - tokens
        kept["min_tokens"] = max(0, (self.fields.get("min_tokens") or 0) - tokens)
        kept["return_token_ids"] = True
        answer = json.dumps(self._tokens)[1:-1].encode()
        return json.dumps(kept)[:-1].encode() + b',"prompt":[%b,%b]}' % (self._prompt, answer)

    def _most(self, context: int) -> int:
        asked = self.fields.get("max_completion_tokens") or self.fields.get("max_tokens")
        if asked is None and self.path == COMPLETIONS:
            return _DEFAULT_TOKENS
        room = context - self._prompt_tokens
        return room if asked is None else int(asked)

    def failure(self, why: str, status: int = 502) -> bytes:
        """Return the event that ends a stream that cannot go on."""
        how = f"failed ({self.engine_error})" if self.engine_error else "was lost"
        message = f"the engine {how} while it answered, and {why}; the answer is not complete"
        error = json.loads(error_body(status, message))
        if self.path == MESSAGES:  # whose clients read the names of events
            return b"event: error\n%b\n\n" % _event({"type": "error", **error})
        return _event(error) + b"\n\n"


def _text_of(choice: Mapping[str, Any]) -> str:
    return (choice.get("delta") or {}).get("content") or choice.get("text") or ""


def _event(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return b"data: %b" % text.encode()


def _cut(event: bytes, key: bytes) -> tuple[bytes, bytes]:
    """Replace a list by null, as if it had not been requested; return what was in it, too.

    Within a text of JSON every quote has a backslash, so that none looks like the key.
    """
    start = event.find(key)
    if start < 0:
        return event, b""
    first = start + len(key)
    end = event.index(b"]", first)
    return event[: first - 1] + b"null" + event[end + 1 :], event[first:end]


@dataclass
class Trace:
    """The outcome of a request.

    Attributes:
        handoff: the outcome of a direct hand-off; "" of others.
        engine_id: with which the ids begin that engines get; "" if they get the client's.
        cached: tokens of the prompt that the last engine did not compute; "" if it does not say.
    """

    producer: str = "-"
    consumer: str = "-"
    tries: int = 0
    handoff: str = ""
    engine_id: str = ""
    cached: str = ""

    def header(self) -> str:
        """Return the trace as the value of a response header."""
        found = f"producer={self.producer}; consumer={self.consumer}; tries={self.tries}"
        more = {"handoff": self.handoff, "id": self.engine_id, "cached": self.cached}
        return found + "".join(f"; {name}={value}" for name, value in more.items() if value)

    def attributes(self) -> dict[str, str | int]:
        """Return it as a span of the request has it."""
        cached = {"pdkit.cached_tokens": int(self.cached)} if self.cached else {}
        named = {"pdkit.producer": self.producer, "pdkit.consumer": self.consumer}
        direct = {"pdkit.handoff": self.handoff, "pdkit.engine_id": self.engine_id}
        given = {name: value for name, value in direct.items() if value}
        return {**named, "pdkit.tries": self.tries, **given, **cached}

    def read(self, answer: bytes | bytearray) -> bool:
        """Note the cached tokens of an answer or an event; return whether it has them."""
        return self._find(answer) is not None

    def _find(self, answer: bytes | bytearray) -> re.Match[bytes] | None:
        last = None
        for last in _CACHED.finditer(answer):
            self.cached = last[1].decode()
        return last

    def follow(self, events: bytes) -> bytes:
        """Return whole events, with this as a comment behind the one that completes it."""
        found = self._find(events)
        if found is None:
            return events
        end = events.index(b"\n\n", found.end()) + 2
        return events[:end] + f": {TRACE} {self.header()}\n\n".encode() + events[end:]


def whole(exchange: Exchange, headers: Headers, answer: ClientResponse) -> None:
    """Pass on an answer of which all came."""
    answer.whole(exchange.status, (*headers, *_kind(exchange)), bytes(exchange.held))


async def pass_on(exchange: Exchange, headers: Headers, answer: ClientResponse) -> bool:
    """Pass on an answer of which some came, as fast as the client reads.

    Returns:
        Whether all of it came; the client's connection is closed if not.
    """
    answer.begin(exchange.status, (*headers, *_kind(exchange)))
    exchange.pass_to(answer.piece)
    answer.paces(exchange.pause)
    try:
        await exchange.ended
    except EngineLost:
        answer.break_off()
        return False
    answer.end()
    return True


def _kind(exchange: Exchange) -> Headers:
    return (("content-type", exchange.content_type),) if exchange.content_type else ()


class Events:
    """Server-sent events on their way: each whole, so that others can follow the last one.

    A large one goes in parts if no other engine could go on with the stream in any case. Those that
    can be continued have none: their events are tokens, and the first one the prompt's.

    Attributes:
        transcript: what has gone to the client.
    """

    def __init__(
        self,
        answer: ClientResponse,
        transcript: Transcript | None,
        trace: Trace | None = None,
    ) -> None:
        self.answer, self._trace = answer, trace
        self.transcript = transcript or Transcript(
            "", {}, problem="it is not a stream that can be continued"
        )
        self._part = bytearray()
        self._begun = False  # the client has the beginning of what is in the part
        # Nothing is read in most streams, whose events are nearly all that a router does for them.
        self._pass = self._send if self.transcript.asks or trace else answer.piece

    def feed(self, data: bytes) -> None:
        """Pass on whole events, and hold back one that has not ended."""
        if not self._part and data.endswith(b"\n\n"):  # as engines send them
            self._pass(data)
            return
        searched = max(0, len(self._part) - 1)
        self._part += data
        end = self._part.rfind(b"\n\n", searched) + 2
        if end > 1:
            self._begun = False
        elif len(self._part) > HELD_BYTES and not self.transcript.asks:
            self._begun = True
            end = len(self._part) - 1  # its last byte may be half of an end
        else:
            return
        ready = bytes(self._part[:end])
        del self._part[:end]
        self._pass(ready)

    def _send(self, ready: bytes) -> None:
        if self.transcript.asks:
            noted = map(self.transcript.note, ready[:-2].split(b"\n\n"))
            # One by one: behind an error comes the end of a stream, which may go on.
            ready = b"".join(
                [event + b"\n\n" for event in noted if not self.transcript.engine_error]
            )
        if self._trace and not self._begun:
            ready = self._trace.follow(ready)
        if ready:  # an empty piece would be the end
            self.answer.piece(ready)

    def drop_part(self) -> bool:
        """Forget the beginning of an event whose end does not come.

        Returns:
            Whether the client has a part of it.
        """
        self._part.clear()
        return self._begun
