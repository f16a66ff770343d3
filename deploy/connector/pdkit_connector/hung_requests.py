"""Fail the health check of LMCache's server while its requests hang.

LMCache's check passes as long as the process answers, even if every thread that serves engines
waits for a lock, or has died. The supervisor replaces a server whose check fails for long.
"""

from __future__ import annotations

import faulthandler
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

PAGE = "/healthcheck"
# A request copies KV from memory to memory, which takes seconds at most.
HUNG_AFTER_S = 60.0


class RunningRequests:
    """The requests that a server's threads are at work on; those that wait for one do not count."""

    def __init__(self) -> None:
        self._running: dict[object, tuple[float, str]] = {}
        self._told: object = None

    def watched(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        """Return the handler of a request, which is watched while it runs."""

        @functools.wraps(handle)
        def run(*args: Any) -> Any:
            request = object()
            self._running[request] = time.monotonic(), run.__name__
            try:
                return handle(*args)
            finally:
                del self._running[request]

        return run

    def hung(self) -> str:
        """Return what hangs, "" if nothing does; log once what all threads do then."""
        for request, (begun, name) in list(self._running.items()):
            if (for_s := time.monotonic() - begun) > HUNG_AFTER_S:
                if self._told is not request:
                    self._told = request
                    faulthandler.dump_traceback()
                return f"{name} has been running for {for_s:.0f} s"
        return ""


def fail_health_check_on_hang() -> None:
    """Change LMCache's server in this process, before it starts.

    Raises:
        ImportError, AttributeError: this LMCache has no such server.
    """
    from lmcache.v1.multiprocess.http_server import app
    from lmcache.v1.multiprocess.transport.zmq_impl import mq
    from starlette.responses import JSONResponse

    requests = RunningRequests()
    for kind in (mq.SyncRequestHandler, mq.BlockingRequestHandler):
        _watch(kind, requests)

    async def check(request: Any, answer: Callable[[Any], Awaitable[Any]]) -> Any:
        if request.url.path != PAGE:
            return await answer(request)
        server = getattr(request.app.state, "request_server", None)
        dead = server is not None and not server.worker_thread.is_alive()
        reason = "the thread that takes requests has died" if dead else requests.hung()
        if not reason:
            return await answer(request)
        return JSONResponse({"status": "unhealthy", "reason": reason}, 503)

    app.middleware("http")(check)


def _watch(kind: Any, requests: RunningRequests) -> None:
    made = kind.__init__

    def make(self: Any, payloads: Any, response: Any, handler: Callable[..., Any]) -> None:
        made(self, payloads, response, requests.watched(handler))

    kind.__init__ = make
