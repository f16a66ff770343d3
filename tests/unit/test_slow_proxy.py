"""The proxy of the end-to-end tests gives again every answer, up to its end."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator

import pytest

from tests.e2e.one_stack.slow_proxy import SlowProxy, slow_proxy

REQUEST = b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\n\r\ndata: 1\n\ndata: [DONE]\n\n"


@pytest.fixture
def router() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def asked(proxy: SlowProxy) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", proxy.port), timeout=60)
    client.sendall(REQUEST)
    return client


def answering(router: socket.socket) -> socket.socket:
    engine, _ = router.accept()
    assert engine.recv(len(REQUEST), socket.MSG_WAITALL) == REQUEST
    engine.sendall(ANSWER)
    return engine


def test_a_client_leaves_before_the_router_closes(router: socket.socket) -> None:
    with slow_proxy(router.getsockname()[1]) as proxy:
        with asked(proxy) as client:
            engine = answering(router)
            assert client.recv(len(ANSWER), socket.MSG_WAITALL) == ANSWER
        with asked(proxy) as client, client.makefile("rb") as answer:
            answering(router).close()
            assert answer.read() == ANSWER
        # What asyncio alone holds of the first one, which it has seen leave, is garbage by now.
        gc.collect()
        engine.sendall(b"more")
        engine.close()
        proxy.again(1)
        for whole in (ANSWER + b"more", ANSWER):
            with asked(proxy) as client, client.makefile("rb") as answer:
                assert answer.read() == whole
