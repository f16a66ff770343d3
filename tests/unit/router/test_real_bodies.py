"""Bodies as people send them, long sessions and photos, and what is too much of each."""

from __future__ import annotations

import base64
import codecs
import json
import random
from typing import Any

import pytest
from pdkit_router.request import Refused, Request, parsed
from pdkit_router.route import work

from tests.unit.router.conftest import Router

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}


def session(turns: int, tools: int) -> dict[str, Any]:
    """Return an agent's session: in each turn it calls a tool, which answers."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for turn in range(turns):
        function = {"name": "read", "arguments": '{"path": "a"}'}
        call = {"id": f"call-{turn}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call-{turn}", "content": "fine"},
        ]
    argument = {"type": "string", "description": "an argument"}
    schema = {"type": "object", "properties": {f"argument_{n}": argument for n in range(4)}}
    named = [{"name": f"tool_{n}", "parameters": schema} for n in range(tools)]
    functions = [{"type": "function", "function": one} for one in named]
    return {"model": "m", "max_tokens": 5, "messages": messages, "tools": functions}


def parts(messages: int) -> dict[str, Any]:
    said = {"role": "user", "content": [{"type": "text", "text": "yes"}]}
    return {"model": "m", "max_tokens": 5, "messages": [said] * messages}


def photo(size: int) -> dict[str, Any]:
    data = base64.b64encode(random.Random(size).randbytes(size)).decode()
    shown = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
    content = [{"type": "text", "text": "What is this?"}, shown]
    return {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    "fields",
    [session(550, 30), session(5000, 100), parts(1400), parts(20_000), photo(800_000),
     photo(5_000_000)],
    ids=["550 turns", "5,000 turns", "1,400 messages", "20,000 messages", "800 kB", "5 MB"],
)  # fmt: skip
def test_long_sessions_and_photos_reach_both_engines(router: Router, fields: Any) -> None:
    body = json.dumps(fields).encode()
    assert router.client.post(CHAT, content=body, headers=JSON).status_code == 200
    (prefill,) = [seen for one in router.producers for seen in one.seen if seen.method == "POST"]
    (decode,) = [seen for one in router.consumers for seen in one.seen if seen.method == "POST"]
    assert decode.body == body
    assert prefill.json == {**fields, "max_tokens": 1}


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_a_mark_before_a_body_is_left_out(router: Router, mark: bytes) -> None:
    body = '{"prompt": "Grüße", "max_tokens": 2}'.encode()
    assert router.client.post(COMPLETIONS, content=mark + body, headers=JSON).status_code == 200
    (decode,) = [seen for one in router.consumers for seen in one.seen if seen.method == "POST"]
    assert decode.body == body


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_of_json_are_passed_on_as_utf_8(encoding: str) -> None:
    text = '{"prompt": "Grüße \U0001f600", "max_tokens": 2}'
    body = bytearray(text.encode(encoding))
    todo = work(Request("POST", COMPLETIONS, (), body), others=False)
    assert bytes(todo.body) == text.encode()
    assert json.loads(bytes(todo.prefill or b""))["max_tokens"] == 1


@pytest.mark.parametrize(
    "body", [b"\xff\xfe\x00", b"\xff{}", '{"a": "\ud800"}'.encode("utf-16", "surrogatepass")]
)
def test_what_is_not_text_in_any_of_them_is_refused(body: bytes) -> None:
    with pytest.raises(Refused, match="not valid JSON") as caught:
        work(Request("POST", COMPLETIONS, (), bytearray(body)), others=False)
    assert caught.value.status == 400


MANY = 2**18
TOO_MUCH = {
    "levels": (COMPLETIONS, b'{"prompt": ' + b"[" * 100_000, "too many levels"),
    "messages": (
        CHAT, b'{"messages": [' + b'{"role":"user"},' * (MANY // 2) + b"{}]}",
        "more than 262144 lists, objects and strings",
    ),
    "numbers": (
        COMPLETIONS, b'{"prompt": [' + b"1," * (2**22 + 1) + b"1]}", "more than 4194304 values",
    ),
    "texts": (
        COMPLETIONS, json.dumps({"prompt": ["a"] * 8192}).encode(), "more than 8192 values other",
    ),
    "messages that are numbers": (
        CHAT, json.dumps({"messages": [1] * 8193}).encode(), r"messages\[0\] must be an object",
    ),
    "messages without a role": (
        CHAT, json.dumps({"messages": [{"role": "user"}] + [{"a": "b"}] * 8192}).encode(),
        r"messages\[1\] must be an object with 'role'",
    ),
    "content that is numbers": (
        CHAT, json.dumps({"messages": [{"role": "user", "content": [1] * 9000}]}).encode(),
        r"messages\[0\].content must be",
    ),
    "numbers in a tool": (
        CHAT, json.dumps({"tools": [{"type": "function", "a": [1] * MANY}]}).encode(),
        "tools has more than 262144 values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_much_is_refused_before_an_engine_has_it(name: str) -> None:
    path, body, message = TOO_MUCH[name]
    with pytest.raises(Refused, match=message) as caught:
        parsed(path, body)
    assert caught.value.status == 400


def test_engines_say_what_is_wrong_with_a_short_session() -> None:
    assert parsed(CHAT, b'{"messages": [1, {}, "x"]}') == {"messages": [1, {}, "x"]}


def test_brackets_in_texts_are_no_values() -> None:
    text = '[{,"\\"' * 2**20
    assert parsed(COMPLETIONS, json.dumps({"prompt": text}).encode()) == {"prompt": text}
