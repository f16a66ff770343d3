"""B17: a CPU engine's KV, stored in Redis and loaded into other blocks, arrives whole.

All is LMCache's own from the making of the mover to the answer of `retrieve`. vLLM's tensors have
the shape that its CPU attention gives them, and every 4 bytes of them differ from all others.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import torch
from lmcache_objects import CHUNK, HEAD_SIZE, HEADS, LAYERS, config, metadata
from pdkit_connector.registry import Setting
from trial import NotHere

BLOCKS, CHUNKS, BLOCK_SIZE = 8, 3, CHUNK
TOKENS = CHUNKS * CHUNK
SETTING = Setting(device_type="cpu", block_size=BLOCK_SIZE)
PATIENCE_S = 60


def cell() -> None:
    try:
        import lmcache
        from lmcache import torch_device_type
    except ImportError as exc:
        raise NotHere("this release starts on cards only, long before it asks for a mover") from exc
    assert torch_device_type == "cpu", lmcache
    engine = make_engine()
    producer, consumer = kv_tensors(1), kv_tensors(0)
    there, here = [5, 2, 7], [1, 6, 3]
    tokens = list(range(TOKENS))
    engine.store(tokens, kvcaches=producer, slot_mapping=slots_of(there), offset=0, req_id="a")
    deadline = time.monotonic() + PATIENCE_S
    while engine.lookup(tokens) < TOKENS:
        assert time.monotonic() < deadline, f"{engine.lookup(tokens)} of {TOKENS} tokens are stored"
        time.sleep(0.05)
    got = engine.retrieve(tokens, kvcaches=consumer, slot_mapping=slots_of(here), req_id="b")
    assert int(got.sum()) == TOKENS, f"{int(got.sum())} of {TOKENS} tokens came back"
    others = [block for block in range(BLOCKS) if block not in here]
    for layer, (sent, received) in enumerate(zip(producer, consumer, strict=True)):
        assert torch.equal(bits(received)[here], bits(sent)[there]), f"layer {layer} is wrong"
        assert not bits(received)[others].any(), f"bytes of layer {layer} landed elsewhere"


def make_engine() -> Any:
    """Return an LMCache engine as its vLLM adapter makes one."""
    from lmcache.utils import EngineType
    from lmcache.v1 import gpu_connector
    from lmcache.v1.cache_engine import LMCacheEngineBuilder

    settings, facts = config(), metadata(model_name=f"cpu-{uuid.uuid4()}")
    mover = gpu_connector.CreateGPUConnector(settings, facts, EngineType.VLLM)
    engine = LMCacheEngineBuilder.get_or_create(
        "trial", settings, facts, mover, lambda tensor, _src: tensor, lambda thing, _src: thing
    )
    engine.post_init()
    return engine


def kv_tensors(first: int) -> list[torch.Tensor]:
    """Return bfloat16 `[blocks, heads, block_size, 2 x head_size]` a layer: distinct, or all 0."""
    words = BLOCKS * HEADS * BLOCK_SIZE * HEAD_SIZE
    numbers = torch.arange(LAYERS * words, dtype=torch.int32) + 1
    return [
        (part * first).view(torch.bfloat16).view(BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
        for part in numbers.split(words)
    ]


def bits(layer: torch.Tensor) -> torch.Tensor:
    return layer.view(torch.int16)


def slots_of(blocks: list[int]) -> torch.Tensor:
    starts = torch.tensor(blocks).unsqueeze(1) * BLOCK_SIZE
    return (starts + torch.arange(BLOCK_SIZE)).flatten()
