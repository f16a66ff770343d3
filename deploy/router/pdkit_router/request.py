"""A client's request: which ones are served, and which parts of it engines get."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pdkit_router.body import as_utf8, parsed
from pdkit_router.continuation import Transcript, transcript
from pdkit_router.errors import Refused
from pdkit_router.tracing import Span

_PREFILL = {"stream": False, "n": 1, "best_of": 1, "min_tokens": 0, "stream_options": None}
# What makes a request compute its prompt and one token, for each path that generates. Fields other
# than the limit are set only where the client set them.
PREFILL: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"max_tokens": 1, **_PREFILL},
    "/v1/chat/completions": {"max_tokens": 1, **_PREFILL, "max_completion_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1, "stream": False, "background": False, "store": False},
}
LIMITS = ("max_tokens", "max_output_tokens")
_PROMPTS = ("messages", "prompt", "input")
# Paths that one engine answers alone.
_PASSED = {
    "/v1/embeddings": "POST", "/tokenize": "POST", "/detokenize": "POST", "/v1/models": "GET",
}  # fmt: skip
OWN = ("/health", "/liveness", "/readiness")
METHODS = {**dict.fromkeys(PREFILL, "POST"), **_PASSED, **dict.fromkeys(OWN, "GET")}
# They steer how engines move KV, which is the stack's to decide.
_STEERING = ("kv_transfer_params", "ec_transfer_params")
_ID = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_CONTENT_TYPE = re.compile(r"[\x20-\x7e]{1,128}")


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


@dataclass
class Work:
    """What engines are sent for a request.

    Attributes:
        prefill: the body for a producer, until it has it; None if one engine answers alone.
        beginning: start of the prompt, by which engines are chosen.
        transcript: of an answer that comes in events; None of others.
        span: of the request, where it is traced.
        limit: of the time that its tries have.
        ended: engines that ended while they had it, in both phases.
    """

    method: str
    path: str
    name: str
    content_type: str
    body: bytes
    prefill: bytes | None = None
    beginning: Sequence[bytes] = ()
    transcript: Transcript | None = None
    span: Span | None = None
    limit: asyncio.Timeout | None = None
    ended: list[str] = field(default_factory=list)


def work(
    request: Request, *, others: bool, beginning: Callable[[Any], Sequence[bytes]] = lambda _: ()
) -> Work:
    """Return the body for engines; the request keeps no copy of it.

    Args:
        others: more than one engine can answer, so that a stream may outlive the first.
        beginning: of a prompt; the prompt itself, an object for each token, is not kept.

    Raises:
        Refused: the body is no JSON object that an engine could read.
    """
    body, prefill, told = bytes(request.body), None, None
    request.body.clear()
    blocks: Sequence[bytes] = ()
    if request.method == "GET":
        body = b""
    else:
        body = as_utf8(body)
        fields = parsed(request.path, body)
        steering = {name: None for name in _STEERING if name in fields}
        extra = fields.get("vllm_xargs")
        if isinstance(extra, dict) and not extra.keys().isdisjoint(_STEERING):
            steering["vllm_xargs"] = None
        body = _with(body, fields, steering)
        if changes := PREFILL.get(request.path):
            wanted = {name: value for name, value in changes.items() if _is_set(name, fields)}
            prefill = _with(body, fields, wanted)
            blocks = beginning(next((fields[name] for name in _PROMPTS if name in fields), None))
            if fields.get("stream"):
                told = transcript(request.path, fields, others=others)
                if not told.problem:
                    body = _with(body, fields, {"return_token_ids": True})
    given = request.header("content-type") or ""
    content_type = given if _CONTENT_TYPE.fullmatch(given) else "application/octet-stream"
    name = request.name()
    return Work(request.method, request.path, name, content_type, body, prefill, blocks, told)


def _is_set(name: str, fields: Mapping[str, Any]) -> bool:
    return name in LIMITS or name in fields


def _with(body: bytes, fields: Mapping[str, Any], changes: Mapping[str, Any]) -> bytes:
    """Return a JSON object with some fields set.

    They are appended: the last of several equal names counts, and writing a prompt of a million
    tokens anew would hold up all other requests.
    """
    if not changes:
        return body
    added = json.dumps(changes)[1:]
    start = body.rstrip()[:-1]
    return start + (b"," if fields else b"") + added.encode()
