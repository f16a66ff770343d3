"""B23: what does not fit into staging memory at once is not stored, and not loaded."""

from __future__ import annotations

from pdkit_connector.in_engine import staging
from pdkit_connector.in_engine.layer_steps import replace_method, was_replaced
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting


def probe(_setting: Setting) -> ProbeResult:
    """See whether a prompt larger than staging memory is moved in staging."""
    from lmcache.v1.cache_engine import LMCacheEngine

    if was_replaced(LMCacheEngine.store, staging.storing):
        return ProbeResult(Need.NOT_NEEDED, "KV crosses staging memory in pieces")
    return ProbeResult(Need.NEEDED, "all KV of a call is staged at once, or dropped")


def apply(_setting: Setting) -> str:
    """Store and load in pieces that fit, and let a store wait for room."""
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.storage_backend.storage_manager import StorageManager

    replace_method(LMCacheEngine, "store", staging.storing)
    replace_method(LMCacheEngine, "retrieve", staging.loading)
    replace_method(StorageManager, "allocate", staging.waiting)
    replace_method(StorageManager, "batched_allocate", staging.waiting_layerwise)
    return "KV crosses staging memory in pieces, and a store waits for room"


FIX = Fix(
    id="B23",
    title="a prompt larger than free staging memory is stored and loaded in part",
    link="none",
    reason=(
        "LMCache takes staging memory for all chunks of a step before it moves the first, and "
        "drops those that find none: if Redis is still storing the last step, or the prompt is "
        "larger than staging memory. Loads fall short in the same way. The fix moves pieces that "
        "fit, and a store waits until earlier ones free memory."
    ),
    probe=probe,
    apply=apply,
    # Around B21, whose probe stores without slots.
    rank=400,
)
