"""What goes wrong in a Redis while a stack uses it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import redis

T = TypeVar("T")


@contextmanager
def meanwhile(action: Callable[[], T]) -> Iterator[list[T]]:
    """Repeat an action in the background as fast as it goes; what it returns is collected."""
    stop = threading.Event()
    returned: list[T] = []

    def work() -> None:
        while not stop.is_set():
            if (said := action()) is not None:
                returned.append(said)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield returned
    finally:
        stop.set()
        thread.join()


def spoiling(store: redis.Redis) -> Callable[[], bytes | None]:
    """Return what spoils a chunk that was not spoiled before, and returns its key.

    The second half of its bytes becomes bfloat16 numbers of ordinary size, so that nothing looks
    broken.
    """
    spoiled: set[bytes] = set()

    def spoil() -> bytes | None:
        for key in store.scan_iter(count=1000):
            if key not in spoiled and (size := store.strlen(key)) > 4096:
                noise = bytearray(os.urandom(size // 4 * 2))
                noise[1::2] = bytes(0x3F | (byte & 0x80) for byte in noise[1::2])
                store.setrange(key, size - len(noise), bytes(noise))
                spoiled.add(key)
                return key
        return None

    return spoil
