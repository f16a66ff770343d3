"""Serve only those who have the stack's own key: its router, and the kit's commands.

vLLM's own key guards its API only; counters, tokenization and development paths stay open.
"""

from __future__ import annotations

import hmac
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pdkit_connector.errors import ConnectorError
from pdkit_connector.identity.model_watch import unless_changed

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Send

MIDDLEWARE = "pdkit_connector.engine_key.RequireKey"
FILE_ENV = "PDKIT_ENGINE_KEY_FILE"
# Docker asks for it without a key. It says no more than that the engine serves.
_OPEN = "/health"
_REFUSAL = {
    "error": {
        "message": "this engine serves its own stack only; send requests to the router",
        "type": "Unauthorized",
        "code": 401,
    }
}


def read_key() -> str:
    """Return the stack's key.

    Raises:
        ConnectorError: no file is named, or it cannot be read, or is empty.
    """
    file = os.environ.get(FILE_ENV, "")
    try:
        key = Path(file).read_text(encoding="ascii").strip() if file else ""
    except (OSError, ValueError) as exc:
        raise ConnectorError(f"{FILE_ENV}: {file} cannot be read ({exc})") from exc
    if not key:
        raise ConnectorError(f"{FILE_ENV}: no key in '{file}'")
    return key


class RequireKey:
    """ASGI middleware: refuses whatever comes without `Authorization: Bearer` and the key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._expected = f"Bearer {read_key()}".encode("ascii")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, unless_changed(send))
        elif _is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _refuse(send)

    def _has_key(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def _is_open(scope: Message) -> bool:
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    return scope["type"] == "http" and scope["method"] == "GET" and path == _OPEN


async def _refuse(send: Send) -> None:
    body = json.dumps(_REFUSAL).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
        (b"connection", b"close"),  # with whatever of the body has not been read
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
