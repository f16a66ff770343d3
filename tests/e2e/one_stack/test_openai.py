"""A client that knows OpenAI's library only sees no difference from one vLLM server.

Each call goes to the router and, with the engines' key, to the consumer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import groupby
from typing import Any

import openai
import pytest

from tests.e2e.conftest import Deploy
from tests.e2e.one_stack.conftest import NAME, PORT

MODEL = "pdkit-tiny"
CONSUMER = PORT + 11
PROMPT = "To be, or not to be, that is the question. " * 4
MESSAGES = [{"role": "user", "content": PROMPT}]
PARTS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
OF_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
# Each answer has its own; and whose cache served it is for the accounting to say.
VARYING = {"id", "created", "created_at", "completed_at", "request_id", "item_id"}
CACHED = {"cached_tokens", "created_cache_tokens", "input_tokens_details", "prompt_tokens_details"}

Call = Callable[[openai.OpenAI], Any]


def completion(**changes: Any) -> Call:
    fields = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 12} | changes
    return lambda client: client.completions.create(**fields)


def chat(**changes: Any) -> Call:
    fields = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 12} | changes
    return lambda client: client.chat.completions.create(**fields)


def response(**changes: Any) -> Call:
    fields = {"model": MODEL, "input": PROMPT, "temperature": 0, "max_output_tokens": 8} | changes
    return lambda client: client.responses.create(**fields)


ANSWERED: dict[str, Call] = {
    "models": lambda client: client.models.list(),
    "completion": completion(),
    "completion of token ids": completion(prompt=[72, 101, 108, 108, 111]),
    "completions of several prompts": completion(prompt=["One", "Two"]),
    "completions, n": completion(n=2, seed=5, temperature=0.8),
    "completion, logprobs": completion(logprobs=2),
    "completion, echo": completion(echo=True),
    "completion, stop": completion(stop=["e"]),
    "completion, seed": completion(seed=5, temperature=0.8),
    "completion, vLLM's fields": completion(
        extra_body={"top_k": 1, "min_tokens": 3, "ignore_eos": True, "return_token_ids": True}
    ),
    "completion, stream": completion(stream=True),
    "completion, stream with usage": completion(**WITH_USAGE),
    "completions, stream of several prompts": completion(prompt=["One", "Two"], stream=True),
    "chat": chat(),
    "chat of parts": chat(messages=PARTS),
    "chat, max_completion_tokens": chat(max_tokens=None, max_completion_tokens=5),
    "chat, logprobs": chat(logprobs=True, top_logprobs=2),
    "chat, schema": chat(response_format=OF_SCHEMA, max_tokens=40),
    "chat, stream": chat(stream=True),
    "chat, stream with usage": chat(**WITH_USAGE),
    "chat, stream of logprobs": chat(stream=True, logprobs=True),
    "chat, stream of JSON": chat(stream=True, response_format={"type": "json_object"}),
    "response": response(),
    "response, stream": response(stream=True),
}
REFUSED: dict[str, Call] = {
    "unknown model": completion(model="nope"),
    "unknown model of a chat": chat(model="nope"),
    "unknown model of a stream": completion(model="nope", stream=True),
    "prompt over the context": completion(prompt="word " * 40_000),
    "temperature below 0": completion(temperature=-1),
    "max_tokens below 0": completion(max_tokens=-1),
    "max_tokens in words": completion(extra_body={"max_tokens": "many"}),
    "too many logprobs": completion(logprobs=99),
    "suffix": completion(suffix="x"),
    "no prompt": lambda client: client.post("/completions", body={"model": MODEL}, cast_to=object),
    "no messages": chat(messages=[]),
    "tools that the engine does not parse": chat(tools=[TOOL]),
    "embeddings of a model without": lambda client: client.embeddings.create(
        model=MODEL, input="x"
    ),
}
# Paths that vLLM does not have for this model, or that the router closes: only the text differs.
NOT_SERVED: dict[str, Call] = {
    "one model": lambda client: client.models.retrieve(MODEL),
    "deleting a model": lambda client: client.models.delete(MODEL),
    "a kept response": lambda client: client.responses.retrieve("resp_1"),
    "images": lambda client: client.images.generate(model=MODEL, prompt="x"),
    "moderations": lambda client: client.moderations.create(model=MODEL, input="x"),
    "files": lambda client: client.files.list(),
}


@pytest.fixture(scope="module")
def clients(kit: Deploy) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    key = kit.engine_key(NAME).reveal()
    with ExitStack() as stack:
        router, engine = (
            stack.enter_context(
                openai.OpenAI(
                    base_url=f"http://127.0.0.1:{port}/v1", api_key=api_key, max_retries=0
                )
            )
            for port, api_key in ((PORT, "none"), (CONSUMER, key))
        )
        yield router, engine


@pytest.mark.parametrize("name", ANSWERED)
def test_the_router_answers_as_the_engine_does(
    name: str, clients: tuple[openai.OpenAI, openai.OpenAI]
) -> None:
    router, engine = (comparable(ANSWERED[name](client)) for client in clients)
    assert router == engine


@pytest.mark.parametrize("name", REFUSED)
def test_the_router_fails_as_the_engine_does(
    name: str, clients: tuple[openai.OpenAI, openai.OpenAI]
) -> None:
    router, engine = (refusal(REFUSED[name], client) for client in clients)
    assert (type(router), router.body) == (type(engine), engine.body)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_the_router_gives_the_same_kind_of_error(
    name: str, clients: tuple[openai.OpenAI, openai.OpenAI]
) -> None:
    router, engine = (refusal(NOT_SERVED[name], client) for client in clients)
    assert type(router) is type(engine) is openai.NotFoundError
    assert isinstance(router.body, dict)
    assert set(router.body) == {"message", "type", "param", "code"}


def test_the_comparison_detects_a_difference(clients: tuple[openai.OpenAI, openai.OpenAI]) -> None:
    router, engine = clients
    for call in (completion, chat, response):
        short = {"max_output_tokens": 4} if call is response else {"max_tokens": 4}
        for stream in (False, True):
            one, other = call(stream=stream)(router), call(stream=stream, **short)(engine)
            assert comparable(one) != comparable(other)


def refusal(call: Call, client: openai.OpenAI) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        call(client)
    return caught.value


def comparable(answer: Any) -> Any:
    """Return what two servers must agree on; how a stream's text is cut depends on time."""
    if not isinstance(answer, openai.Stream):
        return plain(answer.model_dump())
    events = [plain(event.model_dump()) for event in answer]
    if "type" in events[0]:  # of a response
        for event in events:
            event.pop("sequence_number")
        return [
            (kind, "".join(event.pop("delta", "") for event in same), same[0])
            for kind, run in groupby(events, key=lambda event: event["type"])
            for same in [list(run)]
        ]
    pieces: dict[int, list[Any]] = {}
    for event in events:
        for choice in event.pop("choices"):
            pieces.setdefault(choice.pop("index"), []).append(choice)
    return said_last(events), {index: joined(choices) for index, choices in sorted(pieces.items())}


def joined(choices: list[Any]) -> tuple[str, list[Any], dict[str, Any]]:
    text, logprobs = "", []
    for choice in choices:
        place = choice.get("delta", choice)
        for name in ("text", "content"):
            text += place.pop(name, None) or ""
        logprobs += (choice.pop("logprobs") or {}).get("content") or []
    deltas = [choice.pop("delta", {}) for choice in choices]
    return text, logprobs, said_last(choices) | said_last(deltas)


def said_last(events: list[Any]) -> dict[str, Any]:
    """Return fields by what was said of each last: on a busy machine one event may say it all."""
    return {name: part for event in events for name, part in event.items() if part is not None}


def plain(value: Any) -> Any:
    """Return a value without what varies."""
    if isinstance(value, dict):
        return {
            name: plain(part)
            for name, part in value.items()
            if name not in CACHED and not (name in VARYING and part)
        }
    return [plain(part) for part in value] if isinstance(value, list) else value
