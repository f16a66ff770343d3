"""A load that a mover refuses is a miss: vLLM computes the prompt, and the engine goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from pdkit_connector.errors import TransferRefused
from pdkit_connector.log import get_logger
from pdkit_connector.registry import describe


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
