"""Serve the router's completions to clients that bring the key, and nothing else of it.

vllm-router asks nobody for a key, drops the client's Authorization header on its way to engines,
and has open paths that take workers out of service. So the key is asked for here, and only what
clients need is let through.
"""

from __future__ import annotations

import argparse
import hmac
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

# What clients may ask for, and with which method.
OPEN = {("GET", "/health"), ("GET", "/liveness"), ("GET", "/readiness")}
KEYED = {("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions")}
_MAX_BODY = 64 * 2**20  # bytes; a prompt of a million tokens is a tenth of it
_CONNECT_TIMEOUT_S = 5.0
# Of one connection, not of the message; or made anew for the other one.
_OF_THE_CONNECTION = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
    "transfer-encoding", "upgrade", "host", "content-length", "authorization", "expect",
}  # fmt: skip
_SESSION = web.AppKey("session", ClientSession)


class Gateway:
    """Lets requests with the key through to one upstream address."""

    def __init__(self, upstream: str, key: str) -> None:
        self._upstream = upstream.rstrip("/")
        self._expected = f"Bearer {key}".encode()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        wanted = (request.method, request.path)
        if wanted not in OPEN:
            if not self._has_key(request):
                return _refusal(401, "a valid API key is needed: Authorization: Bearer KEY")
            if wanted not in KEYED:
                return _refusal(404, f"{request.method} {request.path} is not served here")
        try:
            return await self._forward(request)
        except (ClientError, TimeoutError) as exc:
            return _refusal(502, f"the router did not answer ({type(exc).__name__})")

    def _has_key(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, self._expected)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        # The router takes a GET's body for the beginning of the next request.
        body = await request.read() if request.method == "POST" else None
        async with request.app[_SESSION].request(
            request.method,
            self._upstream + request.path,
            headers=_passed_on(request.headers),
            data=body,
            allow_redirects=False,
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers=_passed_on(answer.headers))
            await response.prepare(request)
            try:
                async for piece in answer.content.iter_any():
                    await response.write(piece)
            except (ClientError, TimeoutError):
                # Too late for another status: an end without its mark tells that it is none.
                if request.transport is not None:
                    request.transport.abort()
                return response
            await response.write_eof()
            return response


def _passed_on(headers: object) -> dict[str, str]:
    items = headers.items()  # type: ignore[attr-defined]
    return {name: value for name, value in items if name.lower() not in _OF_THE_CONNECTION}


def _refusal(status: int, message: str) -> web.Response:
    """Return an error in the shape that OpenAI's clients read."""
    body = {"error": {"message": message, "type": "invalid_request_error", "code": status}}
    return web.json_response(body, status=status)


def application(upstream: str, key: str) -> web.Application:
    """Return the application that lets clients with the key through to `upstream`."""

    async def session(app: web.Application) -> AsyncIterator[None]:
        timeout = ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        # Compressed answers pass through as they are.
        async with ClientSession(
            connector=TCPConnector(limit=0), timeout=timeout, auto_decompress=False
        ) as opened:
            app[_SESSION] = opened
            yield

    app = web.Application(client_max_size=_MAX_BODY)
    app.cleanup_ctx.append(session)
    app.router.add_route("*", "/{path:.*}", Gateway(upstream, key).handle)
    return app


def main() -> None:
    """Run the gateway until it is told to stop."""
    options = argparse.ArgumentParser(prog="pdkit_gateway", description=main.__doc__)
    options.add_argument("--host", required=True)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--upstream", required=True, help="address of the router")
    options.add_argument("--key-file", type=Path, required=True)
    given = options.parse_args()
    key = given.key_file.read_text(encoding="utf-8").strip()
    if not key:
        options.error(f"--key-file: {given.key_file} is empty")
    web.run_app(
        application(given.upstream, key),
        host=given.host,
        port=given.port,
        access_log=None,
        handle_signals=True,
    )


if __name__ == "__main__":
    main()
