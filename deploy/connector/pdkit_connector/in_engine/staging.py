"""A prompt's KV crosses staging memory in pieces that fit, and a store waits for room.

LMCache takes staging memory for all chunks of a call before it moves the first one, and drops what
finds none.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pdkit_connector import store_barrier
from pdkit_connector.counters import COUNTERS
from pdkit_connector.log import get_logger

# What LMCache's allocator rounds a chunk's memory up to.
_ALIGNED_BYTES = 4096
_TICK_S = 0.002

# Stores that were waited for in vain: they are not waited for again.
_given_up: set[Any] = set()


class _Call(threading.local):
    """What the store that runs in this thread was given."""

    chunks = 0
    refused = False


_call = _Call()


def piece_tokens(engine: Any) -> int:
    """Return the tokens that move at once: whole chunks, in half of staging memory.

    While one piece is on its way, the next one finds room. Every rank returns the same number, for
    ranks of an MLA model load together.
    """
    config, facts = engine.config, engine.metadata
    size = config.chunk_size
    if hasattr(facts, "get_shapes"):
        tensors = zip(facts.get_shapes(size), facts.get_dtypes(), strict=True)
        chunk = sum(shape.numel() * dtype.itemsize for shape, dtype in tensors)
    else:
        chunk = math.prod(facts.kv_shape) * facts.kv_dtype.itemsize
    aligned = math.ceil(chunk / _ALIGNED_BYTES) * _ALIGNED_BYTES
    chunks = int(config.max_local_cpu_size * 2**30) // (2 * aligned)
    return int(max(1, chunks) * size)


def storing(
    store: Callable[..., None], self: Any, tokens: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Do an engine's plain store: it stores piece by piece, and counts what finds no room."""
    if tokens is None or args:
        store(self, tokens, *args, **kwargs)
        return
    mask = kwargs.pop("mask", None)
    _call.chunks, _call.refused = 0, False
    first, size = _masked(mask), self.config.chunk_size
    for start, end in _pieces(first, len(tokens), piece_tokens(self)):
        store(self, tokens[:end], mask=_only(start, end), **_cut(kwargs, end))
        if _call.refused:
            _count_refused(math.ceil((len(tokens) - first) / size) - _call.chunks)
            return


def loading(
    retrieve: Callable[..., Any], self: Any, tokens: Any, mask: Any = None, **kwargs: Any
) -> Any:
    """Do an engine's plain load: it loads piece by piece, up to the first that falls short."""
    pieces = list(_pieces(_masked(mask), len(tokens), piece_tokens(self)))
    if self.async_loading or len(pieces) < 2:
        return retrieve(self, tokens, mask, **kwargs)
    found = _only(0, 0, len(tokens))
    for start, end in pieces:
        got = retrieve(self, tokens[:end], _only(start, end), **_cut(kwargs, end))
        found[:end] |= got
        if int(got.sum()) < end - start:
            break
    return found


def waiting(allocate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Take staging memory for a store: it waits for that of stores that are under way.

    These end by themselves: each has a deadline, and threads of its own.
    """
    until = time.monotonic() + store_barrier.deadline_s()
    while True:
        # Asked for first: one that ends in between has made room.
        awaited = store_barrier.under_way() - _given_up
        if (memory := allocate(*args, **kwargs)) is not None:
            _call.chunks += 1
            return memory
        if not awaited or time.monotonic() >= until:
            break
        time.sleep(_TICK_S)
    _given_up.intersection_update(store_barrier.under_way())
    _given_up.update(awaited)
    _call.refused = True
    return None


def waiting_layerwise(batched_allocate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do what `waiting` does for all layers of a chunk, and count it where there is no room."""
    if (memory := waiting(batched_allocate, *args, **kwargs)) is None:
        _count_refused(1)
    return memory


def _count_refused(chunks: int) -> None:
    COUNTERS.add("chunks", chunks, operation="store", result="no_room")
    get_logger().warning(
        "pdkit-connector WARNING staging memory is full: %d chunks of a prompt are not stored",
        chunks,
    )


def _masked(mask: Any) -> int:
    """Count the tokens at the beginning that stay where they are."""
    return 0 if mask is None else len(mask) - int(mask.sum())


def _pieces(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(first, last, step):
        yield start, min(start + step, last)


def _only(start: int, end: int, length: int | None = None) -> Any:
    """Return a mask of the tokens from `start` to `end`."""
    import torch

    mask = torch.zeros(end if length is None else length, dtype=torch.bool)
    mask[start:end] = True
    return mask


def _cut(kwargs: dict[str, Any], end: int) -> dict[str, Any]:
    return {**kwargs, "slot_mapping": kwargs["slot_mapping"][:end]}
