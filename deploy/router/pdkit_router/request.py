"""A client's request: which ones are served, what is refused, and how its body is read.

The router is one process, which reads nothing else while it makes the objects of a body. The time
for that depends on the number of values more than on bytes: a photo of 64 MiB is one value. So
values are counted before any is made, and their number is limited besides the bytes.
"""

from __future__ import annotations

import gc
import hmac
import ipaddress
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn


class Refused(Exception):
    """A request that is answered here with an error.

    Attributes:
        retry_after_s: when it is worth trying again; None if it is not.
        final: clients must not try again, as OpenAI's do after other errors of a server.
    """

    def __init__(
        self, status: int, message: str, *, retry_after_s: int | None = None, final: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        self.final = final

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers of the answer, beside those that every answer has."""
        if self.final:
            return (("x-should-retry", "false"),)
        return () if self.retry_after_s is None else (("retry-after", str(self.retry_after_s)),)

    def body(self) -> bytes:
        """Return the body of the answer."""
        return error_body(self.status, self.message)


def error_body(status: int, message: str) -> bytes:
    """Return an error as JSON."""
    error = {"message": message, "type": _type(status), "param": None, "code": status}
    return json.dumps({"error": error}).encode()


def _type(status: int) -> str:
    named = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return named.get(status, "server_error" if status >= 500 else "invalid_request_error")


_PREFILL = {"stream": False, "n": 1, "best_of": 1, "min_tokens": 0, "stream_options": None}
MESSAGES = "/v1/messages"  # of Anthropic's API
# What makes a request compute its prompt and one token, for each path that generates. Fields other
# than the limit are set only where the client set them.
PREFILL: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"max_tokens": 1, **_PREFILL},
    "/v1/chat/completions": {"max_tokens": 1, **_PREFILL, "max_completion_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1, "stream": False, "background": False, "store": False},
    MESSAGES: {"max_tokens": 1, "stream": False},
}
# Fields that a prefill sets even where the client did not.
_LIMITS = ("max_tokens", "max_output_tokens")


def prefill_fields(path: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields to set in a prefill, none of which changes the prompt.

    Empty where one engine answers alone.
    """
    changes = PREFILL.get(path, {})
    wanted = {name: value for name, value in changes.items() if name in _LIMITS or name in fields}
    thinking = fields.get("thinking")
    if path == MESSAGES and isinstance(thinking, dict) and thinking.get("type") == "enabled":
        wanted["thinking"] = None  # vLLM refuses a budget for it above the limit
    return wanted


# Paths that one engine answers alone.
_PASSED = {
    "/v1/embeddings": "POST", "/tokenize": "POST", "/detokenize": "POST", "/v1/models": "GET",
    f"{MESSAGES}/count_tokens": "POST",
}  # fmt: skip
OWN = ("/health", "/liveness", "/readiness")
METHODS = {**dict.fromkeys(PREFILL, "POST"), **_PASSED, **dict.fromkeys(OWN, "GET")}
_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


@dataclass
class Request:
    """One request of a client.

    Attributes:
        target: as it was sent, with the query.
        headers: names in lower case.
        path: the target without its query.
    """

    method: str
    target: str
    headers: Sequence[tuple[str, str]]
    body: bytearray = field(default_factory=bytearray)
    path: str = field(init=False)

    def __post_init__(self) -> None:
        self.path = self.target.partition("?")[0]
        self._values = dict(self.headers)

    def header(self, name: str) -> str | None:
        """Return a header's value, None if it was not sent; refuse one that was sent twice."""
        if len(self._values) < len(self.headers):
            times = sum(given == name for given, _ in self.headers)
            if times > 1:
                raise Refused(400, f"the header '{name}' was sent {times} times")
        return self._values.get(name)

    @property
    def content_length(self) -> int | None:
        """The announced length; None if the body is chunked or there is no body."""
        given = self.header("content-length")
        return int(given) if given else None

    def name(self) -> str:
        """Return the client's own name for the request, or a new one."""
        given = self._values.get("x-request-id", "")
        return given if _ID.fullmatch(given) else secrets.token_hex(16)


class Doorkeeper:
    """Says by its head whether a request is let in."""

    def __init__(self, key: str) -> None:
        """Let everybody in who comes from this machine or by address if `key` is empty."""
        self._expected = f"Bearer {key}".encode() if key else b""

    def check(self, request: Request) -> None:
        """Raise Refused for what is not served, or not to this client."""
        path, method = request.path, METHODS.get(request.path)
        self._check_origin(request)
        if path not in OWN and not self._has_key(request):
            raise Refused(401, "a valid API key is needed: Authorization: Bearer KEY")
        if method is None:
            raise Refused(404, f"{request.method} {path[:200]} is not served here")
        if request.method != method:
            raise Refused(405, f"{path} is served with {method} only")
        if (request.header("content-encoding") or "identity") != "identity":
            raise Refused(415, "compressed bodies are not accepted; send the JSON as it is")
        if (request.header("transfer-encoding") or "chunked").strip().lower() != "chunked":
            raise Refused(501, "the only transfer-encoding is 'chunked'")

    def _has_key(self, request: Request) -> bool:
        given = (request.header("authorization") or "").encode("utf-8", "surrogateescape")
        return not self._expected or hmac.compare_digest(given, self._expected)

    def _check_origin(self, request: Request) -> None:
        """Keep out web pages that a browser on this machine has open.

        A page can send requests to any address, and have its own name resolved to this machine.
        The key, which no page knows, is as good a proof as the name of the host.
        """
        host, origin = request.header("host"), request.header("origin")
        if not host:
            raise Refused(400, "the header 'host' is missing")
        if not self._expected and not _is_local(host):
            raise Refused(
                403, "without an API key, use an IP address or localhost as the host in the URL"
            )
        if origin is not None and origin.partition("://")[2] != host:
            raise Refused(403, "requests from other web pages are not accepted")


@lru_cache(maxsize=16)  # nearly all clients name the same one
def _is_local(host: str) -> bool:
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


# vLLM reports what is wrong with each item, and answers nothing else meanwhile: 100,000 items of a
# wrong type take it half a minute and gigabytes. Long lists that are right are token ids, and
# messages and tools of an agent's session, whose items are looked at here if there are many.
_MOST_ITEMS = 8192
# Lists, objects and strings take up to thirty times their text. So many are the ten thousand turns
# of an agent, and take 25 MB.
_MOST_PARTS = 2**18
# Values of any kind, token ids among them: several prompts of the longest contexts.
_MOST_VALUES = 2**22
_LARGEST = 2**63 - 1  # vLLM answers 500 to a larger one
_TOKENS = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/detokenize": "tokens"}
# Lists of objects, and a field that each of them has, as text.
_SESSIONS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "/v1/chat/completions": {"messages": ("role",), "tools": ("type",)},
    "/v1/responses": {"input": ("type", "role"), "tools": ("type",)},
    "/tokenize": {"messages": ("role",), "tools": ("type",)},
    MESSAGES: {"messages": ("role",), "tools": ("name",)},
    f"{MESSAGES}/count_tokens": {"messages": ("role",), "tools": ("name",)},
}
# vLLM answers 500 where one of these is something else.
_OBJECTS = ("stream_options", "structured_outputs", "response_format")
_PARTS = b'[{"'
_REST = bytes(set(range(256)) - set(_PARTS + b","))  # a comma is between two values


def as_utf8(body: bytes) -> bytes:
    """Return a body in UTF-8 without a byte order mark, as PowerShell does not send it.

    Raises:
        Refused: it is not text.
    """
    if body[:1] in b"{ \n" and 0 not in body[:4]:  # nearly all
        return body
    try:
        return body.decode(json.detect_encoding(body)).encode()
    except ValueError as exc:
        raise _not_json(exc) from None


def parsed(path: str, body: bytes) -> dict[str, Any]:
    """Return the fields of a body; raises Refused where an engine could not read it."""
    if sum(map(body.count, _PARTS)) > _MOST_PARTS or body.count(b",") > _MOST_VALUES:
        _count(body)
    try:
        text = body.decode("utf-8")
        gc.disable()  # it would look at each of ten million lists again and again, for nothing
        fields = _JSON.decode(text)
        if "\\u" in text:
            json.dumps(fields, ensure_ascii=False).encode()  # halves of a character
    except RecursionError:
        raise Refused(400, "the body is JSON of too many levels") from None
    except ValueError as exc:
        raise _not_json(exc) from None
    finally:
        gc.enable()
    if not isinstance(fields, dict):
        raise Refused(400, "the body must be a JSON object")
    _check(path, fields)
    return fields


def _not_json(exc: ValueError) -> Refused:
    return Refused(400, f"the body is not valid JSON: {str(exc)[:200]}")


def _count(body: bytes) -> None:
    """Refuse a body of too many values, however long they are; what is in texts does not count.

    Its time grows with the body's length, whatever is in it. A pattern for strings would read to
    the end of the body again at each quote of a string without an end.
    """
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _REST)
    strings = bare.count(b'"') // 2
    outside = b"".join(bare.split(b'"')[::2]) if strings <= _MOST_PARTS else b""
    values = outside.count(b",")
    if strings + len(outside) - values > _MOST_PARTS:
        raise Refused(400, f"the body has more than {_MOST_PARTS} lists, objects and strings")
    if values > _MOST_VALUES:
        raise Refused(400, f"the body has more than {_MOST_VALUES} values")


def _check(path: str, fields: Mapping[str, Any]) -> None:
    for name in _OBJECTS:
        if not isinstance(fields.get(name), (dict, type(None))):
            raise Refused(400, f"{name} must be an object")
    if len(fields) > _MOST_ITEMS:
        raise Refused(400, f"the body has more than {_MOST_ITEMS} fields")
    sessions, tokens = _SESSIONS.get(path, {}), _TOKENS.get(path)
    for name, keys in sessions.items():
        if isinstance(value := fields.get(name), list):
            _check_session(name, value, keys)
    beside = [
        value
        for name, value in fields.items()
        if not (name in sessions and isinstance(value, list))
        if name != tokens or not _are_tokens(value)
    ]
    if _items(beside, _MOST_ITEMS - len(fields)) is None:
        raise Refused(
            400,
            f"the body has more than {_MOST_ITEMS} values other than token ids, messages and tools",
        )


def _check_session(name: str, value: list[Any], keys: tuple[str, ...]) -> None:
    """Refuse a list of messages or tools that is too long, or long and of something else."""
    items = _items([value], _MOST_PARTS)
    if items is None:
        raise Refused(400, f"{name} has more than {_MOST_PARTS} values")
    if items <= _MOST_ITEMS:
        return  # an engine's own message says more
    for number, one in enumerate(value):
        if not isinstance(one, dict) or not any(isinstance(one.get(key), str) for key in keys):
            wanted = " or ".join(f"'{key}'" for key in keys)
            raise Refused(400, f"{name}[{number}] must be an object with {wanted}")
        content = one.get("content")
        if isinstance(content, list) and not all(isinstance(part, dict) for part in content):
            raise Refused(400, f"{name}[{number}].content must be text or a list of objects")


def _items(left: list[Any], most: int) -> int | None:
    """Count values, nested ones too; None if there are more than `most`."""
    items = 0
    while left:
        value = left.pop()
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise Refused(400, f"the body has a number beyond {_LARGEST}")
        if isinstance(value, (dict, list)):
            items += len(value)
            if items > most:
                return None
            left.extend(value.values() if isinstance(value, dict) else value)
    return items


def _are_tokens(value: object) -> bool:
    """Tell whether it is one list of token ids, or several."""
    if not isinstance(value, list):
        return False
    if value and len(value) <= _MOST_ITEMS and all(isinstance(one, list) for one in value):
        return all(_is_prompt(one) for one in value)
    return _is_prompt(value)


def _is_prompt(value: list[Any]) -> bool:
    if not set(map(type, value)) <= {int}:
        return False
    return min(value, default=0) >= 0 and max(value, default=0) <= _LARGEST


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:50]} is too large")
    return value


_JSON = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)
