"""Loads that fall short: only what came before the first hole counts as loaded.

The engine's mask of retrieved tokens goes to vLLM, so it must be true of every token. A load that a
mover refuses is a miss: vLLM computes the prompt, and the engine goes on.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from pdkit_connector.errors import TransferRefused
from pdkit_connector.in_engine.layer_steps import Steps, retrieve_steps
from pdkit_connector.log import get_logger
from pdkit_connector.registry import describe

Chunk = tuple[Any, Any, int, int]

_WATCHED = "_pdkit_counts_objects"
_of_thread = threading.local()


def plain(
    process: Callable[..., Any], self: Any, tokens: Any, mask: Any, ret_mask: Any, **kwargs: Any
) -> Any:
    """Do an engine's plain load: the mask is that of the chunks, the rest is given back."""
    with _collecting("fetched") as fetched:
        chunks, size = process(self, tokens, mask, ret_mask, **kwargs)
    if all(memory_obj is not None for memory_obj in fetched):
        return chunks, size
    kept = contiguous(chunks, ret_mask)
    ret_mask[:] = False
    for _, _, start, end in kept:
        ret_mask[start:end] = True
    used = {id(memory_obj) for _, memory_obj, _, _ in kept}
    for memory_obj in fetched:
        if memory_obj is not None and id(memory_obj) not in used:
            memory_obj.ref_count_down()
    return kept, sum(memory_obj.get_size() for _, memory_obj, _, _ in kept)


def collected(batched_get: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Do a storage manager's read so that `plain` sees what it returned."""
    memory_objs = batched_get(self, *args, **kwargs)
    fetched = getattr(_of_thread, "fetched", None)
    if fetched is not None:
        fetched.extend(memory_objs)
    return memory_objs


def contiguous(chunks: Sequence[Chunk], ret_mask: Any) -> list[Chunk]:
    """Return the chunks from the mask's first token on, up to the first gap."""
    kept: list[Chunk] = []
    masked = ret_mask.nonzero()
    until = int(masked[0]) if len(masked) else None
    for chunk in sorted(chunks, key=lambda chunk: chunk[2]):
        if chunk[2] != until:
            break
        kept.append(chunk)
        until = chunk[3]
    return kept


def layerwise(
    retrieve_layer: Callable[..., Steps], self: Any, tokens: Any, mask: Any = None, **kwargs: Any
) -> Steps:
    """Do a layerwise load: a chunk that lacks any layer, and all behind it, is not retrieved."""
    _count_objects(self.gpu_connector)
    steps = retrieve_layer(self, tokens, mask, **kwargs)
    cuts: list[int] = []
    for taken in itertools.count(1):
        # Requests' loads are interleaved: what this step starts is this load's own.
        with _collecting("cuts", cuts):
            try:
                step = next(steps)
            except StopIteration:
                return
        if cuts and taken == retrieve_steps(self.num_layers):
            # A copy: the engine's own may be an inference tensor, which must not be changed.
            step = step.clone()
            step[min(cuts) :] = False
        yield step


def _count_objects(mover: Any) -> None:
    if mover is not None and not hasattr(mover.batched_to_gpu, _WATCHED):
        mover.batched_to_gpu = _counted(mover.batched_to_gpu)


def _counted(batched_to_gpu: Callable[..., Steps]) -> Callable[..., Steps]:
    """Note where the first missing chunk begins in any layer sent to a mover."""

    @wraps(batched_to_gpu)
    def move(starts: Sequence[int], ends: Sequence[int], **kwargs: Any) -> Steps:
        steps = batched_to_gpu(starts, ends, **kwargs)
        cuts: list[int] | None = getattr(_of_thread, "cuts", None)
        return steps if cuts is None else _noting(steps, starts, cuts)

    setattr(move, _WATCHED, True)
    return move


def _noting(steps: Steps, starts: Sequence[int], cuts: list[int]) -> Steps:
    step = next(steps)
    while True:
        sent: Any = yield step
        short = sent is not None and len(sent) < len(starts)
        if short:
            cuts.append(starts[len(sent)])
        try:
            step = steps.send(sent)
        except StopIteration:
            return
        except Exception as exc:
            if not short:
                raise
            # A mover may refuse a short list. Nothing is loaded then, and the engine goes on, to
            # give back what it has read.
            get_logger().warning("pdkit-connector WARNING nothing loaded: %s", describe(exc))
            cuts.append(starts[0])
            break
    while True:
        yield


@contextmanager
def _collecting(name: str, into: list[Any] | None = None) -> Iterator[list[Any]]:
    """Let what runs inside, in this thread, append to the list of that name."""
    into = [] if into is None else into
    outer = getattr(_of_thread, name, None)
    setattr(_of_thread, name, into)
    try:
        yield into
    finally:
        setattr(_of_thread, name, outer)


class _Load(threading.local):
    """The load that runs in this thread."""

    under_way = False
    refusal: TransferRefused | None = None


_load = _Load()


def noted(move: Callable[..., None]) -> Callable[..., None]:
    """Wrap a mover's load: inside `as_miss` a refusal is noted, so that memory is given back."""

    @wraps(move)
    def moved(*args: Any, **kwargs: Any) -> None:
        try:
            move(*args, **kwargs)
        except TransferRefused as refusal:
            if not _load.under_way:
                raise
            _load.refusal = refusal

    return moved


def as_miss(retrieve: Callable[..., Any], self: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
    """Do an engine's plain load: nothing counts as loaded where the mover refused."""
    import torch

    _load.under_way, _load.refusal = True, None
    try:
        found = retrieve(self, tokens, *args, **kwargs)
    finally:
        _load.under_way = False
    if _load.refusal is None:
        return found
    get_logger().error("pdkit-connector ERROR nothing loaded: %s", describe(_load.refusal))
    return torch.zeros(len(tokens), dtype=torch.bool)
