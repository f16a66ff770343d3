"""B2g: an error in a layerwise store, or a step past the end, ends the engine's core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pdkit_connector.in_engine.layer_steps import (
    Steps,
    idle_engine,
    replace_method,
    retrieve_steps,
    silent,
    store_steps,
)
from pdkit_connector.log import NAME, get_logger
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting, describe


def probe(setting: Setting) -> ProbeResult:
    """Step a storer that fails, and a storer and a retriever past their ends."""
    if setting.lmcache_value("use_layerwise") is False:
        return ProbeResult(Need.NOT_APPLICABLE, "use_layerwise is off")
    with silent("lmcache.v1.cache_engine", NAME):
        for told, harmless in (
            ("an error in a store is raised to vLLM", _error_is_kept),
            ("a storer stepped past its end raises StopIteration", _storer_may_be_overstepped),
            ("a retriever stepped past its end raises", _retriever_may_be_overstepped),
        ):
            if not harmless():
                return ProbeResult(Need.NEEDED, told)
    return ProbeResult(Need.NOT_NEEDED, "an error in a store stays in it, as does a step too many")


def apply(_setting: Setting) -> str:
    """Hide failures and ends of storers and retrievers from code that steps them itself."""
    from lmcache.v1.cache_engine import LMCacheEngine

    replace_method(LMCacheEngine, "store_layer", _storing)
    replace_method(LMCacheEngine, "retrieve_layer", _retrieving)
    return "a store that fails is dropped, and steps past the end do nothing"


def _storing(
    store_layer: Callable[..., Steps], self: Any, *args: Any, **kwargs: Any
) -> Iterator[Any]:
    return _Storer(store_layer(self, *args, **kwargs), kwargs.get("req_id"))


def _retrieving(
    retrieve_layer: Callable[..., Steps], self: Any, *args: Any, **kwargs: Any
) -> Iterator[Any]:
    steps = retrieve_layer(self, *args, **kwargs)
    return _Retriever(steps, retrieve_steps(self.num_layers))


class _Storer:
    """A store that its caller steps; a loop over it still ends, and still sees its errors."""

    def __init__(self, steps: Steps, req_id: str | None) -> None:
        self._steps, self._req_id = steps, req_id

    def __iter__(self) -> Iterator[Any]:
        return self._steps

    def __next__(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            return
        except Exception as exc:  # noqa: BLE001 - KV that is not stored is computed again
            # The generator is over: what it had not stored yet is not stored at all.
            get_logger().error(
                "pdkit-connector ERROR layerwise store of request %s dropped: %s",
                self._req_id,
                describe(exc),
            )


class _Retriever:
    """A load that its caller steps; once complete it keeps giving its mask."""

    def __init__(self, steps: Steps, total: int) -> None:
        self._steps, self._left, self._mask = steps, total, None

    def __iter__(self) -> Iterator[Any]:
        return self._steps

    def __next__(self) -> Any:
        if self._left == 0:
            return self._mask
        self._mask = next(self._steps)
        self._left -= 1
        return self._mask


def _error_is_kept() -> bool:
    engine = idle_engine()

    def fail(**_kwargs: Any) -> Any:
        raise MemoryError("probe")

    engine.token_database.process_tokens = fail
    try:
        next(engine.store_layer([1], req_id="probe"))
    except MemoryError:
        return False
    return True


def _storer_may_be_overstepped() -> bool:
    engine = idle_engine()
    return _goes_on(engine.store_layer([1], req_id="probe"), store_steps(engine.num_layers) + 1)


def _retriever_may_be_overstepped() -> bool:
    engine = idle_engine()
    return _goes_on(
        engine.retrieve_layer([1], req_id="probe"), retrieve_steps(engine.num_layers) + 1
    )


def _goes_on(steps: Iterator[Any], count: int) -> bool:
    """Step `count` times; errors of the steps themselves are not what this fix is about."""
    try:
        for _ in range(count):
            next(steps)
    except StopIteration:
        return False
    except Exception:  # noqa: BLE001 - B2d, turned off
        return True
    return True


FIX = Fix(
    id="B2g",
    title="an error in a layerwise store ends the engine's core",
    link="none",
    reason=(
        "The vLLM adapter steps LMCache's generators inside the model's forward pass: an error "
        "while a layer is stored, though the request needs no store, and a step more than there "
        "are layers (a draft model has more) both end the engine's core."
    ),
    probe=probe,
    apply=apply,
    # The outermost: every other fix of the generators wraps what this one steps.
    rank=300,
)
