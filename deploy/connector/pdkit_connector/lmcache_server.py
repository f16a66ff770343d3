"""Run LMCache's server on Unix sockets: `python -m pdkit_connector.lmcache_server REQUESTS PAGES`.

`lmcache server` binds two TCP ports, for engines and for its admin API, and neither asks for a key.
Here both are sockets, in a folder that only the stack's user may enter. Further arguments are those
of `lmcache server`. Where PDKIT_METRICS_ADDRESS names HOST:PORT, its metrics are there, too.

LMCache 0.5.6 is changed in this process, before it starts:

- It never frees two things: the memory of every CPU engine that it has known, which is all of an
  engine's KV space at each of its restarts, and lookups whose engine did not ask for the result.
  Both are released here; `python -m bench.lmcache_server_kills` counts what is left.
- Its health check passes as long as the process answers, even if every thread that serves engines
  waits for a lock, or has died. Here it fails then, so that the supervisor replaces the server.
- One page is added, which drops one prompt's KV from the server's memory. `deploy check` asks for
  it, to see that the same prompt then comes from Redis alone. KV of other prompts is not touched,
  and none is dropped that Redis lacks.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import os
import runpy
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from pdkit_connector import metrics_port
from pdkit_connector.metrics import ServerCollector
from pdkit_connector.process_numbers import require_own_number
from pdkit_connector.server_copies import copy_once
from pdkit_connector.server_sockets import hold_connections

# Neither is a name of a host: a release that does not bind the sockets below binds nothing.
NO_HOST = "unix-socket-only"


def main() -> None:
    """Serve until SIGTERM."""
    requests, pages, *rest = sys.argv[1:]
    require_own_number()
    from pdkit_connector.server_stores import answer_engines  # with LMCache's server

    hold_connections(requests)
    release_ended()
    copy_once()
    answer_engines(requests)
    listen_on_sockets(requests, pages)
    import_one_store()
    add_pages()
    fail_health_check_on_hang()
    if address := os.environ.get(metrics_port.ADDRESS_ENV):
        metrics_port.serve(address, pages)
    sys.argv = ["lmcache", *server_argv(rest)]
    runpy.run_module("lmcache.cli.main", run_name="__main__")


def server_argv(rest: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of the `lmcache` command."""
    return ("server", "--host", NO_HOST, "--http-host", NO_HOST, *rest)


def listen_on_sockets(requests: str, pages: str) -> None:
    """Have LMCache bind a socket each for engines' requests and for its pages.

    Raises:
        ImportError, AttributeError: this LMCache has no such server.
    """
    import uvicorn
    from lmcache.v1.multiprocess import http_server
    from lmcache.v1.multiprocess.transport.zmq_impl import server

    queue = server.MessageQueueServer

    def on_socket(bind_url: str, context: Any) -> Any:  # noqa: ARG001 - a TCP address
        return queue(bind_url=f"ipc://{requests}", context=context)

    server.MessageQueueServer = on_socket
    http_server.uvicorn.Config = partial(uvicorn.Config, uds=pages)


def import_one_store() -> None:
    """Have LMCache import the adapter of the kit's second tier alone, which is a plug-in.

    It imports every adapter that it has, to name them in its help. They bring clients of clouds and
    Transformers: about half of the CPU time that the server took to start.
    """
    from lmcache.v1.distributed.l2_adapters import factory

    factory._PENDING_MODULES[:] = ["lmcache.v1.distributed.l2_adapters.plugin_l2_adapter"]


def add_pages() -> None:
    """Add what the second tier counts to the server's metrics, and the page that `check` asks."""
    from lmcache.v1.multiprocess import http_server
    from prometheus_client import REGISTRY

    REGISTRY.register(ServerCollector())
    add_page(http_server.app)


def release_ended() -> None:
    """Have the server of this process do so, before it starts.

    Raises:
        ImportError, AttributeError: this LMCache has no such server.
    """
    from lmcache.v1.multiprocess.modules.lookup import LookupModule
    from lmcache.v1.platform.devices.cpu import shm

    shm._CPU_SHM_KEEP_ALIVE = Forgetful()
    made = LookupModule.__init__

    def make(self: Any, ctx: Any) -> None:
        made(self, ctx)
        ctx.session_manager.destroy_listeners.append(EndedLookups(self))

    LookupModule.__init__ = make


class Forgetful(dict[int, Any]):
    """Takes everything and keeps nothing.

    A mapping is released when the last tensor that uses it is gone. LMCache keeps one of them here
    until then, which is never. The tensors themselves keep the buffer that they were made of.
    """

    def __setitem__(self, key: int, value: Any) -> None:
        """Keep nothing."""


class EndedLookups:
    """Drops the lookups of requests that have ended, with their results."""

    def __init__(self, lookups: Any) -> None:
        self._lookups = lookups
        self._running: list[Any] = []
        self._lock = threading.Lock()

    def __call__(self, session: Any) -> None:
        """Clean up after an ended session; those before it may still have had to wait."""
        lookups = self._lookups
        with lookups._prefetch_job_lock:
            job = lookups._prefetch_jobs.pop(session.request_id, None)
        storage = lookups.context.storage_manager
        with self._lock:
            ended = self._running if job is None else [*self._running, job]
            # A result is handed out once, and then forgotten.
            self._running = [
                one for one in ended if storage.query_prefetch_status(one.handle) is None
            ]


HEALTH_PAGE = "/healthcheck"
# A request copies KV from memory to memory, which takes seconds at most.
HUNG_AFTER_S = 60.0


class RunningRequests:
    """The requests that a server's threads are at work on; those that wait for one do not count."""

    def __init__(self) -> None:
        self._running: dict[object, tuple[float, str]] = {}
        self._reported: object = None

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
        """Name the request that hangs, "" without one; log the stacks of all threads once."""
        for request, (begun, name) in list(self._running.items()):
            if (for_s := time.monotonic() - begun) > HUNG_AFTER_S:
                if self._reported is not request:
                    self._reported = request
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
        if request.url.path != HEALTH_PAGE:
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


FORGET_PAGE = "/pdkit/forget"


def add_page(app: Any) -> None:
    """Add the page to LMCache's: POST `{"model", "ranks", "tokens"}`, as `forget` takes them."""
    from starlette.responses import JSONResponse

    async def page(request: Any) -> Any:
        asked = await request.json()
        try:
            model, ranks = str(asked["model"]), int(asked["ranks"])
            tokens = [int(token) for token in asked["tokens"]]
        except (KeyError, TypeError, ValueError) as exc:
            return JSONResponse({"error": f"{type(exc).__name__}: {exc}"}, 400)
        found = await asyncio.to_thread(forget, request.app.state.engine, model, ranks, tokens)
        return JSONResponse(found)

    app.add_route(FORGET_PAGE, page, methods=["POST"])


def forget(engine: Any, model: str, ranks: int, tokens: Sequence[int]) -> dict[str, int]:
    """Drop a prompt's KV from the server's memory, if Redis has all of it.

    Returns:
        How many objects it has (`objects`), how many of them Redis has (`in_redis`), and how many
        the server still has (`left`), because they are in use.
    """
    from lmcache.v1.multiprocess.cache_control.key_resolver import resolve_grouped_object_keys

    context, storage = engine.context, engine.storage_manager
    layouts = context.layout_desc_registry.find_group_layout_descs(model, ranks)
    if not layouts:
        return {"objects": 0, "in_redis": 0, "left": 0}
    windows = context.layout_desc_registry.find_attn_desc(model, ranks)
    rows, _ = resolve_grouped_object_keys(
        context.token_hasher, model, ranks, list(tokens), "", layouts, windows
    )
    keys = [key for row in rows for key in row.keys]
    ((_, second), *_) = storage.l2_adapters()
    in_redis = len(second.held(keys, layouts))
    left = len(keys) if in_redis < len(keys) else storage.delete_l1_keys(keys)[1]
    return {"objects": len(keys), "in_redis": in_redis, "left": left}


if __name__ == "__main__":
    main()
