"""Ask the Docker engine by its HTTP API.

Docker's own Python client would take more CPU to import than all else in `deploy status`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from deploy.runtime.compose.docker import answering_engine, reason_of

_TIMEOUT_S = 60
_REFUSED, _NOT_FOUND = 400, 404


class DockerRefused(OSError):
    """The engine refused a request.

    Attributes:
        status: of HTTP; 404 if there is no such thing.
        reason: the engine's own words.
    """

    def __init__(self, request: str, status: int, reason: str) -> None:
        super().__init__(f"the Docker engine refused {request} ({status}): {reason}")
        self.status = status
        self.reason = reason


def ask_engine(
    method: str, path: str, body: Any = None, *, timeout_s: float = _TIMEOUT_S, **query: Any
) -> bytes:
    """Send a request to the engine that the `docker` command would talk to; return its answer.

    Raises:
        DockerUnavailable: there is none, it does not answer a ping, or it is another machine's.
        OSError: it did not answer the request; DockerRefused if it refused.
    """
    host = answering_engine()
    from deploy.runtime.http_client import ask

    request = quote(path, safe="/:@") + (f"?{urlencode(query)}" if query else "")
    headers = {"Content-Type": "application/json"} if body else {}
    content = json.dumps(body).encode() if body else None
    try:
        status, answer = ask(
            method, host, request, timeout_s=timeout_s, headers=headers, body=content
        )
    except OSError as exc:
        reason = reason_of(exc, timeout_s)
        raise OSError(f"the Docker engine did not answer {method} {path} ({reason})") from exc
    if status >= _REFUSED:
        raise DockerRefused(f"{method} {path}", status, _said(answer))
    return answer


def inspect(path: str) -> Mapping[str, Any] | None:
    """Inspect a container or an image; None if it does not exist."""
    try:
        found: Mapping[str, Any] = json.loads(ask_engine("GET", f"{path}/json"))
    except DockerRefused as exc:
        if exc.status != _NOT_FOUND:
            raise
        return None
    return found


def _said(answer: bytes) -> str:
    """Return the message of a refusal."""
    text = answer.decode("utf-8", "replace")
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()[:200]
