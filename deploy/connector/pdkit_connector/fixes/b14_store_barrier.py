"""B14: a producer answers before its KV can be read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pdkit_connector.in_engine.layer_steps import replace_method, was_replaced
from pdkit_connector.metrics import open_socket
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting
from pdkit_connector.store_barrier import begin, end

_PUTS = ("put", "batched_put")


def probe(_setting: Setting) -> ProbeResult:
    """See whether the end of a running store can be observed."""
    if all(was_replaced(getattr(_connector(), name), _counted) for name in _PUTS):
        return ProbeResult(Need.NOT_NEEDED, "answers wait for the stores that they began")
    return ProbeResult(Need.NEEDED, "stores continue after the answer")


def apply(_setting: Setting) -> str:
    """Count the stores that are under way, and tell the store barrier."""
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

    for name in _PUTS:
        replace_method(_connector(), name, _counted)
    replace_method(RemoteBackend, "__init__", _with_barrier)
    return "answers are held until their KV is stored, where the kit asks for it"


def _connector() -> Any:
    from lmcache.v1.storage_backend.connector.instrumented_connector import (
        InstrumentedRemoteConnector,
    )

    return InstrumentedRemoteConnector


def _counted(put: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Awaitable[Any]:
    """Count a store from the moment that its coroutine is made; LMCache runs it later."""
    token = begin()
    store = put(*args, **kwargs)

    async def run() -> Any:
        try:
            return await store
        finally:
            end(token)

    return run()


def _with_barrier(
    init: Callable[..., None], self: Any, config: Any, metadata: Any, *args: Any, **kwargs: Any
) -> None:
    init(self, config, metadata, *args, **kwargs)
    open_socket(metadata.worker_id)


FIX = Fix(
    id="B14",
    title="a producer answers before its KV can be read",
    link="https://github.com/LMCache/LMCache/issues/1350",
    reason=(
        "Stores continue after the step that began them, so a decode sent right after its prefill "
        "finds some of the KV missing and computes it again. The fix holds back a producer's "
        "answer, not its next step, until its KV is in Redis or a deadline has passed."
    ),
    probe=probe,
    apply=apply,
)
