"""Run LMCache's server on Unix sockets: `python -m pdkit_connector.kv_server REQUESTS PAGES …`.

`lmcache server` binds two TCP ports, for engines and for its admin API, and neither asks for a key.
Here both are sockets, in a folder that only the stack's user may enter. Further arguments are those
of `lmcache server`. Where PDKIT_METRICS_ADDRESS names HOST:PORT, its metrics are there, too.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from pdkit_connector import metrics_port
from pdkit_connector.ended_engines import release_ended
from pdkit_connector.first_tier import add_page
from pdkit_connector.hung_requests import fail_health_check_on_hang
from pdkit_connector.metrics import ServerCollector
from pdkit_connector.process_numbers import require_own_number
from pdkit_connector.server_life import hold_connections
from pdkit_connector.tier_copies import copy_once

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


if __name__ == "__main__":
    main()
