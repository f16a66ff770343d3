"""B20: LMCache takes one block table, with a block for every token, for the KV of all layers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from pdkit_connector.registry import Fix, Need, ProbeResult, Setting

_TOKENS = 8
# A block table of each of two groups, the first with vLLM's null block where a window has passed.
_TABLES = ([0, 6], [8, 9])

# Kinds of full attention that keep no block for some tokens, or blocks that are not tokens' KV.
_NOT_WHOLE = frozenset({"HiddenStateCacheSpec", "RSWASpec"})


def probe(setting: Setting) -> ProbeResult:
    """Look at the engine's groups; without one, show a request of two groups to the adapter."""
    if setting.kv_cache_specs is not None and _trouble(setting) is None:
        return ProbeResult(Need.NOT_APPLICABLE, f"vLLM has one KV cache group: {_named(setting)}")
    kept = _kept_blocks()
    if set(kept) == {6, 8, 9}:
        return ProbeResult(Need.NOT_NEEDED, "the adapter keeps the blocks of every group")
    return ProbeResult(Need.NEEDED, f"of the block tables {_TABLES} the adapter keeps {kept}")


def guard(setting: Setting) -> str | None:
    """Return the reason LMCache cannot take the engine's KV; None if it can, or no engine runs."""
    return None if setting.kv_cache_specs is None else _trouble(setting)


def _trouble(setting: Setting) -> str | None:
    groups = setting.kv_cache_specs or ()
    if len(groups) != 1:
        return f"vLLM has {len(groups)} KV cache groups: {_named(setting)}"
    if partial := sorted({name for name, whole in _layer_specs(setting) if not whole}):
        return f"vLLM's KV cache group holds {', '.join(partial)}, without KV of every token"
    return None


def _named(setting: Setting) -> str:
    return ", ".join(setting.kv_cache_specs or ()) or "none"


def _layer_specs(setting: Setting) -> Iterator[tuple[str, bool]]:
    """Yield each kind of KV cache with whether it holds the KV of every token in its blocks."""
    groups = getattr(setting.kv_cache_config, "kv_cache_groups", None)
    if groups is None:
        for name in setting.kv_cache_specs or ():
            yield name, name in ("FullAttentionSpec", "MLAAttentionSpec")
        return
    for group in groups:
        layers = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for spec in [group.kv_cache_spec] if layers is None else layers.values():
            lineage = {kind.__name__ for kind in type(spec).__mro__}
            yield type(spec).__name__, "FullAttentionSpec" in lineage and not lineage & _NOT_WHOLE


def _kept_blocks() -> list[int]:
    """Return the blocks that the adapter notes of a request with two block tables."""
    from lmcache.integration.vllm.vllm_v1_adapter import RequestTracker

    request = SimpleNamespace(
        req_id="probe",
        prompt_token_ids=list(range(_TOKENS)),
        block_ids=tuple(list(table) for table in _TABLES),
        sampling_params=SimpleNamespace(extra_args=None),
        mm_features=[],
    )
    config: Any = SimpleNamespace(priority_limit=None)
    tracker = RequestTracker.from_new_request(config, request, _TOKENS, 0, False)
    return list(tracker.allocated_block_ids)


FIX = Fix(
    id="B20",
    title="KV of several cache groups, or behind a window, is mistaken for other KV",
    link="https://github.com/LMCache/LMCache/issues/2845",
    reason=(
        "The adapter copies the KV of all layers by the block table of vLLM's first KV cache "
        "group, and treats every entry as a token's block. Layers of a second group (sliding "
        "window beside full attention, Mamba) have other blocks. In a group of sliding windows "
        "vLLM puts its null block where the window has passed, and LMCache stores that block as "
        "KV. For such a connector vLLM merges groups if it can; other models must not run."
    ),
    probe=probe,
    guard=guard,
)
