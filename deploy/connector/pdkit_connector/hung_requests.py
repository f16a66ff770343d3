"""LMCache's server says of itself that it is healthy while its requests hang.

The page for health answers as long as the process does, even if every thread that serves engines
waits for a lock. Here it answers 503 once a request has been under way for too long, so that the
supervisor or Docker replaces the server.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

PAGE = "/healthcheck"
# A request copies KV from memory to memory, which takes seconds at most, or waits for Redis, which
# has deadlines of its own.
HUNG_AFTER_S = 60.0


class UnderWay:
    """The requests that a server has not answered yet, those that wait for a thread, too."""

    def __init__(self) -> None:
        self._begun: dict[object, float] = {}

    def longest_s(self) -> float:
        """Return for how long the oldest has been under way; 0 if there is none."""
        begun = list(self._begun.values())
        return time.monotonic() - min(begun) if begun else 0.0

    def noted(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        """Return a handler that notes what it handles; it may return a future."""

        def noting(*args: Any, **named: Any) -> Any:
            one = object()
            self._begun[one] = time.monotonic()
            answer = None
            try:
                answer = handle(*args, **named)
                return answer
            finally:
                if isinstance(answer, Future):
                    answer.add_done_callback(lambda _: self._begun.pop(one))
                else:
                    del self._begun[one]

        return noting


def tell_of_hung_requests() -> None:
    """Have the page for health of this process's server tell, before it starts.

    Raises:
        ImportError, AttributeError: this LMCache has no such server.
    """
    from lmcache.v1.multiprocess.http_server import app
    from lmcache.v1.multiprocess.transport.zmq_impl import mq
    from starlette.responses import JSONResponse

    under_way = UnderWay()
    for handler in (mq.SyncRequestHandler, mq.BlockingRequestHandler):
        handler.__call__ = under_way.noted(handler.__call__)

    async def tell(request: Any, answer: Callable[[Any], Awaitable[Any]]) -> Any:
        longest_s = under_way.longest_s()
        if request.url.path != PAGE or longest_s < HUNG_AFTER_S:
            return await answer(request)
        reason = f"a request has been under way for {longest_s:.0f} s"
        return JSONResponse({"status": "unhealthy", "reason": reason}, 503)

    app.middleware("http")(tell)
