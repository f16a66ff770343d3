"""The step counts that the vLLM adapter takes from LMCache's layerwise generators.

With N layers the adapter calls next() N + 1 times on a storer and N + 2 times on a retriever, whose
last value is the mask of retrieved tokens. One step short is a StopIteration in the engine's core.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

Steps = Generator[Any, None, None]
_PROBE_LAYERS = 3
_PROBE_TOKENS = 8


def store_steps(num_layers: int) -> int:
    """Return how often the adapter steps a storer."""
    return num_layers + 1


def retrieve_steps(num_layers: int) -> int:
    """Return how often the adapter steps a retriever."""
    return num_layers + 2


def replace_method(owner: type, name: str, wrap: Callable[[Callable[..., Any]], Any]) -> None:
    """Replace a method by `wrap(method)`."""
    setattr(owner, name, wrap(getattr(owner, name)))


def probe_steps(method: str, *, healthy: bool = True, frozen: bool = False) -> tuple[int, str]:
    """Run a layerwise method of LMCacheEngine where nothing is cached.

    Returns its steps less those that the adapter takes, and how it ended.
    """
    engine = idle_engine(healthy=healthy, frozen=frozen)
    steps: Iterator[Any] = getattr(engine, method)([1] * _PROBE_TOKENS, sync=True, req_id="probe")
    expected = (store_steps if method == "store_layer" else retrieve_steps)(_PROBE_LAYERS)
    taken = 0
    try:
        with silent("lmcache.v1.cache_engine"):
            for _ in steps:
                taken += 1
    except UnboundLocalError as exc:
        return taken - expected, f"{method} ends in {type(exc).__name__} after {taken} steps"
    return taken - expected, f"{method} of {_PROBE_LAYERS} layers steps {taken} of {expected} times"


@contextmanager
def silent(logger_name: str) -> Iterator[None]:
    """Keep a logger quiet: a probe's warnings would read like the engine's own."""
    logger = logging.getLogger(logger_name)
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


class _Inert:
    """An object whose every method does nothing."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_kwargs: None


def idle_engine(*, healthy: bool = True, frozen: bool = False) -> Any:
    """Return an LMCacheEngine without storage, enough for the paths that move nothing."""
    from lmcache.v1.cache_engine import LMCacheEngine

    engine: Any = object.__new__(LMCacheEngine)
    engine.num_layers = _PROBE_LAYERS
    engine.is_healthy = lambda: healthy
    engine.is_frozen = lambda: frozen
    engine._is_passive = lambda: True
    engine._log_kvcache_for_check = lambda **_kwargs: None
    engine.storage_manager = engine.gpu_connector = engine.stats_monitor = _Inert()
    engine.config = engine.metadata = _Inert()
    engine.retrieve_locations = engine.store_location = None
    engine.kv_events_enabled = False
    engine.token_database = SimpleNamespace(process_tokens=lambda **_kwargs: iter(()))
    return engine
