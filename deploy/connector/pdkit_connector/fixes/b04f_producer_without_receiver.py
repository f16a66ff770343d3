"""B4f: a producer without a receiver, which only stores, ends at its first store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdkit_connector.adapter_miniature import CHUNK, IdleEngine, bind_request, miniature, quiet
from pdkit_connector.layer_steps import replace_method
from pdkit_connector.registry import Fix, Need, ProbeResult
from pdkit_connector.setting import Setting
from pdkit_connector.step_requests import of_step


class _Stored(Exception):
    """Raised by a probe's store, to look no further."""


class _Engine(IdleEngine):
    def store(self, *_args: Any, **_kwargs: Any) -> None:
        """Signal that something is stored."""
        raise _Stored


def probe(_setting: Setting) -> ProbeResult:
    """Let a producer store a request that names no receiver."""
    impl = miniature(engine=_Engine(), kv_role="kv_producer")
    bind_request(impl, slots=2 * CHUNK, save=0, load=0)
    try:
        with quiet():
            impl.wait_for_save()
    except AttributeError as exc:
        return ProbeResult(Need.NEEDED, f"a producer's store raises AttributeError: {exc}")
    except _Stored:
        return ProbeResult(Need.NOT_NEEDED, "a producer needs no receiver to store")
    return ProbeResult(Need.NEEDED, "a producer without a receiver stores nothing")


def apply(_setting: Setting) -> str:
    """Let a producer store as an engine of both roles does, where no receiver is named."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    replace_method(LMCacheConnectorV1Impl, "wait_for_save", _as_both)
    return "a producer without a receiver stores as kv_both does"


def _as_both(wait: Callable[[Any], None], self: Any) -> None:
    role = self.kv_role
    if role == "kv_producer" and all(r.disagg_spec is None for r in of_step(self)):
        self.kv_role = "kv_both"
    try:
        wait(self)
    finally:
        self.kv_role = role


FIX = Fix(
    id="B4f",
    title="a producer without a receiver ends its engine's core at the first store",
    link="none",
    reason=(
        "Up to 0.3.9 the adapter asks each request of a producer how much its receiver got. Where "
        "KV is shared through a store there is no receiver, and the AttributeError ends the "
        "engine's core at the first prefill."
    ),
    probe=probe,
    apply=apply,
)
