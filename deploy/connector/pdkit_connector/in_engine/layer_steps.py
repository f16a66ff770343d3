"""The step counts that the vLLM adapter takes from LMCache's layerwise generators.

With N layers the adapter calls next() N + 1 times on a storer and N + 2 times on a retriever, whose
last value is the mask of retrieved tokens. One step short is a StopIteration in the engine's core.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any

Steps = Generator[Any, None, None]
# What replaces a method, kept on it: all that came one after the other.
_AROUND = "_pdkit_around"
_PROBE_LAYERS = 3
_PROBE_TOKENS = 8
PROBE_BLOCK = 4
ADAPTER = "lmcache.integration.vllm.vllm_v1_adapter"


def store_steps(num_layers: int) -> int:
    """Count the steps that the adapter takes of a storer."""
    return num_layers + 1


def retrieve_steps(num_layers: int) -> int:
    """Count the steps that the adapter takes of a retriever."""
    return num_layers + 2


def replace_method(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by `around`, which gets the method before its arguments."""
    method = getattr(owner, name)

    @wraps(method)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    vars(replaced)[_AROUND] = (*getattr(method, _AROUND, ()), around)
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(replaced) if is_static else replaced)


def was_replaced(method: Callable[..., Any], around: Callable[..., Any] | None = None) -> bool:
    """Tell whether `replace_method` has put `around`, or anything, in a method's place."""
    done = getattr(method, _AROUND, ())
    return bool(done) if around is None else around in done


def what_runs(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the last replacement of a method; the method itself without one."""
    put: tuple[Callable[..., Any], ...] = getattr(method, _AROUND, ())
    return put[-1] if put else method


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
def silent(*names: str) -> Iterator[None]:
    """Keep loggers quiet: a probe's warnings would read like the engine's own."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


class Inert:
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
    engine.storage_manager = engine.gpu_connector = engine.stats_monitor = Inert()
    engine.config = engine.metadata = Inert()
    engine.retrieve_locations = engine.store_location = None
    engine.kv_events_enabled = False
    engine.lookup_pins, engine.async_loading, engine.post_inited = {}, None, True
    engine.token_database = SimpleNamespace(process_tokens=lambda **_kwargs: iter(()))
    return engine


def bind(adapter: Any, *requests: Any) -> None:
    """Give the adapter one step's metadata, as vLLM does before the forward pass."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorMetadata

    metadata = LMCacheConnectorMetadata(requests=list(requests))
    adapter._parent = SimpleNamespace(
        _connector_metadata=metadata, _get_connector_metadata=lambda: metadata
    )


def probe_request(*, load: bool = False, configs: dict[str, Any] | None = None) -> Any:
    """Return a request of two blocks, 1 and 2: all its tokens to be loaded, or else saved.

    `configs` is what its sender wants of LMCache, such as tags.
    """
    import torch

    tokens = 2 * PROBE_BLOCK
    load_spec = SimpleNamespace(can_load=True, vllm_cached_tokens=0, lmcache_cached_tokens=tokens)
    return SimpleNamespace(
        req_id="probe",
        token_ids=[1] * tokens,
        slot_mapping=on_cpu(torch.arange(PROBE_BLOCK, PROBE_BLOCK + tokens)),
        load_spec=load_spec if load else None,
        save_spec=None if load else SimpleNamespace(can_save=True, skip_leading_tokens=0),
        request_configs=configs,
    )


def on_cpu(slots: Any) -> Any:
    """Return slots that stay on the CPU: up to 0.3.9 the adapter moves them to a GPU."""
    import torch

    class Slots(torch.Tensor):  # type: ignore[misc, unused-ignore]
        def cuda(self, *_args: Any, **_kwargs: Any) -> Slots:
            return self

    return slots.as_subclass(Slots)


def run_layers(adapter: Any) -> None:
    """Call the adapter as vLLM does within one step: load, each layer, all but the end."""
    adapter.start_load_kv(SimpleNamespace(attn_metadata=object()))
    for name in adapter.kv_caches:
        adapter.wait_for_layer_load(name)
        adapter.save_kv_layer(name, None, None)
