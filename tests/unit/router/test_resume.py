"""A stream whose engine is lost goes on from another one, or ends with the reason why not."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.unit.router.conftest import Router, Start
from tests.unit.router.stand_in import DONE, Connection, Seen, StandIn

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [10, 11, 12]
TOKENS = 12
ASKED = {
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": TOKENS, "stream": True},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": TOKENS, "stream": True},
}


def spelled(token: int) -> bytes:
    """Return what a token says: every fifth one ends the character that the one before begins."""
    return {3: b"\xc3", 4: b"\xa9"}.get(token % 5, b"<%d>" % token)


def decoded(tokens: Sequence[int]) -> str:
    return b"".join(map(spelled, tokens)).decode(errors="replace")


@dataclass
class Model:
    """An engine's model: each token is the one before plus 1.

    Attributes:
        losses: after how many events with tokens the first engine that streams is lost, and so on;
            0 if it is not.
            -1 if it is before the first, with `code`.
        code: instead of being lost, the engine says that it failed, as one whose core died.
        swallows: text that does not reach the client.
        tells_tokens: as vLLM does if it is asked to.
        says_done: behind the last token.
        refuses: all streams but the first.
        asked: engines and what they were asked to stream, in turn.
    """

    losses: Sequence[int] = ()
    code: int = 0
    swallows: str = ""
    tells_tokens: bool = True
    says_done: bool = True
    refuses: bool = False
    delta: str = "content"
    limit: int = 99
    asked: list[tuple[str, Seen]] = field(default_factory=list)

    async def __call__(self, engine: StandIn, to: Connection) -> None:
        seen = to.asked
        if seen.path == "/detokenize":
            await to.whole(200, json.dumps({"prompt": decoded(seen.json["tokens"])}).encode())
            return
        if not seen.json.get("stream"):  # a prefill
            await to.whole(200, b"{}")
            return
        self.asked.append((engine.name, seen))
        turn = len(self.asked) - 1
        if self.refuses and turn:
            await to.whole(400, b'{"error": {"message": "no"}}')
            return
        await to.begin()
        last = dict(enumerate(self.losses)).get(turn)
        for number, event in enumerate(self.events(engine.name, seen.path, seen.json), 1):
            if last != -1:
                await to.piece(event)
            if last in (-1, number):
                if self.code:
                    await to.piece(event_of({"error": {"message": "core died", "code": self.code}}))
                    await to.piece(DONE)
                    await to.send(b"0\r\n\r\n")
                else:
                    to.writer.transport.abort()
                return
        if not self.says_done:
            to.writer.transport.abort()
            return
        if (seen.json.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(seen.json.get("prompt", PROMPT))}
            usage["completion_tokens"] = seen.json["max_tokens"]
            await to.piece(event_of({"id": engine.name, "choices": [], "usage": usage}))
        await to.piece(DONE)
        await to.send(b"0\r\n\r\n")

    def events(self, name: str, path: str, asked: dict[str, Any]) -> Iterator[bytes]:
        prompt = asked.get("prompt", PROMPT)
        prompt = prompt if isinstance(prompt[0], int) else PROMPT
        limit = min(asked.get("max_tokens") or TOKENS, self.limit)
        told = self.tells_tokens and asked.get("return_token_ids")
        reader = codecs.getincrementaldecoder("utf-8")("replace")
        reader.decode(b"".join(map(spelled, prompt)))
        for number in range(limit):
            token = prompt[-1] + 1 + number
            text = reader.decode(spelled(token)).replace(self.swallows or "\0", "")
            chunk: dict[str, Any] = {"id": name, "object": path, "created": 7, "model": "m"}
            choice: dict[str, Any] = {
                "index": 0,
                **({"delta": {self.delta: text}} if path == CHAT else {"text": text}),
                "finish_reason": "length" if number + 1 == limit else None,
                "prompt_token_ids": prompt if told and not number else None,
                "token_ids": [token] if told else None,
            }
            yield event_of({**chunk, "choices": [choice]})


def event_of(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n".encode()


def text_of(body: bytes) -> str:
    """Return what a client reads in a stream."""
    choices = [choice for chunk in chunks(body) for choice in chunk.get("choices", ())]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


def chunks(body: bytes) -> list[dict[str, Any]]:
    events = [event.removeprefix("data: ") for event in body.decode().split("\n\n")]
    return [json.loads(event) for event in events if event not in ("", "[DONE]")]


Asks = Callable[..., bytes]


@pytest.fixture
def ask(router: Router) -> Asks:
    """Ask for a stream of a model; return what came."""

    def asking(path: str, model: Model, **fields: Any) -> bytes:
        for engine in router.engines:
            engine.does = model
        return router.client.post(path, json={**ASKED[path], **fields}).content

    return asking


def error_of(body: bytes) -> str:
    (error,) = [chunk["error"] for chunk in chunks(body) if "error" in chunk]
    assert not body.endswith(DONE)
    return str(error["message"])


WHOLE = decoded([*PROMPT, *(13 + n for n in range(TOKENS))]).removeprefix(decoded(PROMPT))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
class TestGoesOn:
    @pytest.mark.parametrize("after", range(1, TOKENS))
    def test_a_continued_stream_has_the_same_text(self, ask: Asks, path: str, after: int) -> None:
        """Wherever it breaks, in the middle of a character too."""
        model = Model([after])
        body = ask(path, model)
        assert text_of(body) == WHOLE
        assert body.endswith(DONE) and body.count(b"[DONE]") == 1
        (first, _), (second, rest) = model.asked
        assert first != second
        came = chunks(body)
        heads = {(chunk["id"], chunk["object"], chunk["created"]) for chunk in came}
        assert heads == {(first, path, 7)}
        assert [c["choices"][0]["finish_reason"] for c in came][-1] == "length"
        if after > 1:
            begun = len(rest.json["prompt"]) - len(PROMPT)
            assert after - 1 <= begun <= after
            assert rest.json["max_tokens"] == TOKENS - begun

    @pytest.mark.parametrize("after", [-1, 1, 5, TOKENS - 1])
    def test_a_stream_whose_engine_reports_its_own_failure_is_continued(
        self, ask: Asks, path: str, after: int
    ) -> None:
        body = ask(path, Model([after], code=500))
        assert text_of(body) == WHOLE
        assert body.endswith(DONE) and body.count(b"[DONE]") == 1
        assert b"core died" not in body

    def test_a_stream_without_output_is_asked_again_from_the_beginning(
        self, ask: Asks, path: str
    ) -> None:
        model = Model([1])
        ask(path, model)
        (_, first), (_, second) = model.asked
        assert (first.path, first.body) == (second.path, second.body)

    def test_a_continued_stream_is_counted(self, router: Router, ask: Asks, path: str) -> None:
        before = router.count("continued"), router.count("errors")
        ask(path, Model([4]))
        assert (router.count("continued"), router.count("errors")) == (before[0] + 1, before[1])

    def test_usage_covers_the_whole_answer(self, ask: Asks, path: str) -> None:
        body = ask(path, Model([4]), stream_options={"include_usage": True})
        (usage,) = [chunk["usage"] for chunk in chunks(body) if "usage" in chunk]
        assert usage == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}

    def test_a_stream_broken_after_its_last_token_is_completed(self, ask: Asks, path: str) -> None:
        """Nobody is asked for what the router knows."""
        model = Model(says_done=False)
        body = ask(path, model, stream_options={"include_usage": True})
        assert text_of(body) == WHOLE and body.endswith(DONE)
        assert chunks(body)[-1]["usage"]["completion_tokens"] == TOKENS
        assert len(model.asked) == 1

    def test_a_stream_without_a_loss_is_passed_on_unchanged(self, ask: Asks, path: str) -> None:
        model = Model()
        body = ask(path, model)
        assert body == b"".join((*Model().events(model.asked[0][0], path, ASKED[path]), DONE))

    def test_a_request_without_a_token_limit_keeps_its_default(self, ask: Asks, path: str) -> None:
        """A chat may fill the context; a completion has 16 tokens."""
        model = Model([4], limit=TOKENS)
        ask(path, model, max_tokens=None)
        rest = model.asked[1][1].json
        told = len(rest["prompt"])
        assert rest["max_tokens"] == (2048 - told if path == CHAT else 16 - told + len(PROMPT))


class TestEnds:
    @pytest.mark.parametrize(
        ("path", "fields", "why"),
        [
            (COMPLETIONS, {"logprobs": 1}, "'logprobs'"),
            (COMPLETIONS, {"logprobs": 0}, "'logprobs'"),
            (COMPLETIONS, {"echo": True}, "'echo'"),
            (COMPLETIONS, {"n": 2}, "'n'"),
            (COMPLETIONS, {"presence_penalty": 0.5}, "'presence_penalty'"),
            (COMPLETIONS, {"structured_outputs": {"regex": "a"}}, "'structured_outputs'"),
            (COMPLETIONS, {"return_token_ids": True}, "'return_token_ids'"),
            (COMPLETIONS, {"of_a_later_vllm": 1}, "'of_a_later_vllm'"),
            (COMPLETIONS, {"prompt": ["a", "b"]}, "several prompts"),
            (COMPLETIONS, {"prompt": [[1], [2]]}, "several prompts"),
            (COMPLETIONS, {"seed": 1}, "temperature 0"),
            (CHAT, {"seed": 1, "temperature": 0.5}, "temperature 0"),
            (CHAT, {"tools": [{"type": "function"}]}, "'tools'"),
            (CHAT, {"response_format": {"type": "json_object"}}, "'response_format'"),
            (CHAT, {"stream_options": {"continuous_usage_stats": True}}, "usage in each event"),
            (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        ],
    )
    def test_a_stream_that_cannot_be_continued_correctly_ends_with_an_error(
        self, router: Router, ask: Asks, path: str, fields: dict[str, Any], why: str
    ) -> None:
        before, model = router.count("errors"), Model([3])
        assert why in error_of(ask(path, model, **fields))
        assert len(model.asked) == 1
        assert router.count("errors") == before + 1

    @pytest.mark.parametrize(
        ("fields", "path"),
        [
            ({"seed": 1, "temperature": 0}, COMPLETIONS),
            ({"tools": [], "n": 1, "logprobs": False, "presence_penalty": 0}, CHAT),
            ({"response_format": {"type": "text"}, "stop": None, "top_logprobs": None}, CHAT),
        ],
    )
    def test_fields_without_effect_do_not_prevent_a_continuation(
        self, ask: Asks, path: str, fields: dict[str, Any]
    ) -> None:
        model = Model([3])
        assert ask(path, model, **fields).endswith(DONE)
        assert len(model.asked) == 2

    @pytest.mark.parametrize(
        ("model", "why"),
        [
            (Model([8], tells_tokens=False), "does not report token ids"),
            (Model([8], swallows="<15>"), "do not match its text"),
            (Model([8], delta="reasoning_content"), "more than text"),
            (Model([8, 1]), "the next one, too"),
            (Model([8], refuses=True), "no other engine continued it"),
        ],
    )
    def test_a_stream_that_cannot_be_continued_ends_with_the_reason(
        self, ask: Asks, model: Model, why: str
    ) -> None:
        model.asked.clear()
        body = ask(CHAT, model)
        assert why in error_of(body)
        assert WHOLE.replace(model.swallows or "\0", "").startswith(text_of(body))

    def test_engines_that_all_fail_are_quoted(self, ask: Asks) -> None:
        body = ask(CHAT, Model([8, 1], code=500))
        wanted = "the engine failed (core died) while it answered, and the next one, too; "
        assert error_of(body) == wanted + "the answer is not complete"

    def test_a_refusal_within_a_stream_is_passed_on(self, ask: Asks) -> None:
        model = Model([8], code=400)
        body = ask(CHAT, model)
        assert b'"message":"core died","code":400' in body and body.endswith(DONE)
        assert len(model.asked) == 1

    def test_a_stream_ends_with_an_error_without_another_engine(self, start_router: Start) -> None:
        router, model = start_router(names=("producer-0", "consumer-0")), Model([3])
        for engine in router.engines:
            engine.does = model
        body = router.client.post(COMPLETIONS, json=ASKED[COMPLETIONS]).content
        assert "no other engine" in error_of(body)
        assert "return_token_ids" not in model.asked[0][1].json
