"""B6: KV that LMCache's own mover takes to memory objects and back arrives whole.

No card is at hand: the kernels' addresses are played on a CPU. vLLM's tensors are packed as vLLM
does since 0.26, in both of its usual layouts, and every element differs from every other.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryFormat
from paged_kernels import CARD, Kernels, OnCard, play
from pdkit_connector.registry import Setting

LAYERS, BLOCKS, HEADS, BLOCK_SIZE, HEAD_SIZE = 2, 6, 4, 16, 8
CHUNK = 32
SETTING = Setting(device_type="cuda", block_size=BLOCK_SIZE, head_size=HEAD_SIZE)


def cell() -> None:
    kernels = Kernels()
    mover_class = play(kernels)
    for layout in ("NHD", "HND"):
        for tokens in (CHUNK, CHUNK - 10):
            round_trip(mover_class, kernels, layout, tokens)


def round_trip(mover_class: Any, kernels: Kernels, layout: str, tokens: int) -> None:
    first = 1
    producer, consumer = packed(layout, first), packed(layout, 0)
    kernels.know(producer + consumer)
    there, here = slots_of([4, 1]), slots_of([2, 5])
    objects = [memory_object(tokens)]
    span = {"starts": [0], "ends": [tokens]}
    make_mover(mover_class, layout).batched_from_gpu(
        objects, **span, kvcaches=producer, slot_mapping=there
    )
    make_mover(mover_class, layout).batched_to_gpu(
        objects, **span, kvcaches=consumer, slot_mapping=here
    )
    for number, (sent, got) in enumerate(zip(producer, consumer, strict=True)):
        arrived = torch.equal(by_slot(got)[here[:tokens]], by_slot(sent)[there[:tokens]])
        part = (by_slot(got)[here[:tokens]] == by_slot(sent)[there[:tokens]]).float().mean()
        assert arrived, f"{part:.0%} of layer {number} arrived, {layout}, {tokens} tokens"
        elsewhere = torch.ones(BLOCKS * BLOCK_SIZE, dtype=torch.bool)
        elsewhere[here[:tokens]] = False
        assert not by_slot(got)[elsewhere].any(), f"bytes of layer {number} landed elsewhere"


def packed(layout: str, first: int) -> list[torch.Tensor]:
    """Return vLLM's tensors `[blocks, heads, block_size, 2 x head_size]`: distinct, or all 0."""
    middle = (BLOCK_SIZE, HEADS) if layout == "NHD" else (HEADS, BLOCK_SIZE)
    size = BLOCKS * HEADS * BLOCK_SIZE * 2 * HEAD_SIZE
    layers = []
    for layer in range(LAYERS):
        numbers = torch.arange(layer * size, (layer + 1) * size, dtype=torch.int32) + 1
        tensor = (numbers * first).view(torch.float32).view(BLOCKS, *middle, 2 * HEAD_SIZE)
        layers.append((tensor.transpose(1, 2) if layout == "NHD" else tensor).as_subclass(OnCard))
    return layers


def by_slot(layer: torch.Tensor) -> torch.Tensor:
    """Return a layer's bits as int32 `[slots, heads, 2 x head_size]`."""
    plain = layer.as_subclass(torch.Tensor).transpose(1, 2)
    return plain.reshape(BLOCKS * BLOCK_SIZE, HEADS, 2 * HEAD_SIZE).view(torch.int32)


def slots_of(blocks: list[int]) -> torch.Tensor:
    starts = torch.tensor(blocks).unsqueeze(1) * BLOCK_SIZE
    return (starts + torch.arange(BLOCK_SIZE)).flatten()


def memory_object(tokens: int) -> Any:
    shape = (2, LAYERS, tokens, HEADS * HEAD_SIZE)
    return SimpleNamespace(
        tensor=torch.zeros(shape), metadata=SimpleNamespace(fmt=MemoryFormat.KV_2LTD)
    )


def make_mover(mover_class: Any, layout: str) -> Any:
    return mover_class(
        HEADS * HEAD_SIZE,
        LAYERS,
        use_gpu=True,
        chunk_size=CHUNK,
        dtype=torch.float32,
        device=CARD,
        layout_hints={"kv_layout": layout},
    )
