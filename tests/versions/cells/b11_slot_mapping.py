"""B11: a step has a request with fewer slots than tokens, to be loaded and stored, and a sound one.

Also, what leads there: vLLM sets a request back after a load failed, and computes it again.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from adapter_steps import BLOCK, CHUNK, Vllm
from lmcache.integration.vllm.vllm_v1_adapter import (
    LMCacheConnectorMetadata,
    LoadSpec,
    ReqMeta,
    SaveSpec,
)

TOKENS = list(range(2 * CHUNK))


def cell() -> None:
    plain()
    layerwise()
    set_back()


def request(req_id: str, missing: int) -> ReqMeta:
    return ReqMeta(
        req_id=req_id,
        token_ids=TOKENS,
        slot_mapping=torch.arange(BLOCK, BLOCK + len(TOKENS) - missing),
        save_spec=SaveSpec(0, True),
        load_spec=LoadSpec(0, CHUNK, True) if missing else None,
    )


def plain() -> None:
    vllm = Vllm()
    vllm.store.chunks[tuple(TOKENS[:CHUNK])] = ["from the store"] * CHUNK
    vllm.load(LMCacheConnectorMetadata(requests=[request("short", 1)]))
    assert not vllm.slots, "something was loaded"
    assert vllm.worker.get_block_ids_with_load_errors() >= {1}
    vllm.load(LMCacheConnectorMetadata(requests=[request("short", 1), request("sound", 0)]))
    vllm.store.chunks.clear()
    vllm.worker.wait_for_save()
    assert sorted(map(len, vllm.store.chunks)) == [CHUNK, 2 * CHUNK], "the sound one is stored"
    assert set(vllm.store.unpinned) == {"short", "sound"}
    vllm.store.chunks.clear()
    vllm.load(LMCacheConnectorMetadata(requests=[request("short", 1)]))
    vllm.worker.wait_for_save()
    assert not vllm.store.chunks, "something was stored"


def layerwise() -> None:
    vllm = Vllm(use_layerwise=True)
    stored: list[str] = []

    def store_layer(_tokens: object, req_id: str = "sound", **_more: object):
        for _ in range(vllm.worker.num_layers):
            yield
        stored.append(req_id)
        yield

    vllm.store.store_layer = store_layer
    metadata = LMCacheConnectorMetadata(requests=[request("short", 1), request("sound", 0)])
    vllm.load(metadata)
    for layer in range(vllm.worker.num_layers):
        vllm.worker.wait_for_layer_load(f"layer {layer}")
        vllm.worker.save_kv_layer(f"layer {layer}", None, SimpleNamespace())
    vllm.worker.wait_for_save()
    assert stored == ["sound"]
    assert set(vllm.store.unpinned) == {"short", "sound"}


def set_back() -> None:
    vllm = Vllm()
    vllm.add("first", TOKENS)
    vllm.step({"first": len(TOKENS)})
    again = vllm.add("again", TOKENS + [90] * 5)
    vllm.store.lost = True
    vllm.step({"again": 100})
    assert again.num_computed_tokens == 0
    vllm.store.lost = False
    vllm.step({"again": 10})
    for _ in range(8):
        vllm.step({"again": 10})
    vllm.check_attended(again)
    vllm.check_stored()
    assert all(
        tokens in (tuple(again.all_token_ids[: len(tokens)]),) for tokens in vllm.store.chunks
    )
