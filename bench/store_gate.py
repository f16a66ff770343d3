"""Redis as a gate: it holds back writes until it is told to let them through.

So what must happen between a store and its load happens there on any machine, however slow.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import redis

Command = tuple[str | bytes | int, ...]

NOTHING: Command = ("DEL", "nothing")  # a write that changes nothing
_LONG_MS = 3_600_000
_PAUSE: Command = ("CLIENT", "PAUSE", _LONG_MS, "WRITE")
_POLL_S, _PATIENCE_S = 0.001, 60.0


@contextmanager
def writes_held(store: redis.Redis) -> Iterator[None]:
    """Have Redis hold back all writes until the end; it goes on answering reads."""
    store.execute_command(*_PAUSE)
    try:
        yield
    finally:
        with suppress(redis.ConnectionError):
            store.client_unpause()


def held(store: redis.Redis) -> list[str]:
    """Return the commands that are held back, one a client."""
    return [client["cmd"] for client in store.client_list() if "b" in client["flags"]]


@contextmanager
def at_each_store(store: redis.Redis, act: Callable[[], object]) -> Iterator[None]:
    """Hold back writes, and act each time some wait; `act` lets them through."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(_POLL_S):
            if held(store):
                act()

    with writes_held(store), ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield
        finally:
            stop.set()
        watching.result()


def let_through(store: redis.Redis, *commands: Command) -> list[Any]:
    """Let the writes through that wait, and right behind them these; hold back what follows.

    One of them must be a write itself, so that they wait in Redis' own queue behind the others.
    """
    # A transaction, in which nothing blocks: FLUSHALL of Redis 8 lets its client wait, and would
    # leave the gate open meanwhile.
    sent: list[Command] = [("MULTI",), *commands, _PAUSE, ("EXEC",)]
    connection = store.connection_pool.get_connection()
    try:
        connection.send_command("CLIENT", "ID")
        me = connection.read_response()
        connection.send_packed_command(connection.pack_commands(sent))
        until = time.monotonic() + _PATIENCE_S
        while "b" not in store.client_list(client_id=[me])[0]["flags"]:
            if time.monotonic() > until:
                raise TimeoutError(f"Redis does not hold back {commands[0][0]!r}")
            time.sleep(_POLL_S)
        store.client_unpause()
        *_, answers = [connection.read_response() for _ in sent]
    finally:
        connection.disconnect()  # where anything failed, answers are still to come
        store.connection_pool.release(connection)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return list(answers[:-1])
