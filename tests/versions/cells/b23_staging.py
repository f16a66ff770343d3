"""B23: a prompt of ten chunks crosses staging memory that holds four."""

from __future__ import annotations

import time
from typing import Any

import torch
from layerwise_engine import CHUNK, LAYERS, SLOTS, WIDTH, make_engine
from pdkit_connector import store_barrier

TOKENS = list(range(10 * CHUNK))
ALIGNED = 4096  # what the allocator makes of a chunk
STAGING_GIB = 4 * ALIGNED / 2**30


class Mover:
    """A plain mover between a tensor of slots and memory objects."""

    def __init__(self) -> None:
        self.kv = torch.rand(2, LAYERS, SLOTS, WIDTH)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, LAYERS, num_tokens, WIDTH])

    def batched_from_gpu(self, objects: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for memory, start, end in zip(objects, starts, ends, strict=True):
            memory.tensor.copy_(self.kv[:, :, kwargs["slot_mapping"][start:end]])

    def batched_to_gpu(self, objects: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for memory, start, end in zip(objects, starts, ends, strict=True):
            self.kv[:, :, kwargs["slot_mapping"][start:end]] = memory.tensor


def engine() -> Any:
    made = make_engine(
        use_layerwise=False, remote=True, local_cpu=False, max_local_cpu_size=STAGING_GIB
    )
    made.gpu_connector = Mover()
    return made


def cell() -> None:
    producer, consumer = engine(), engine()
    here, there = torch.arange(len(TOKENS)), torch.arange(len(TOKENS)) + SLOTS // 2
    producer.store(TOKENS, slot_mapping=here, offset=0, req_id="a")
    while store_barrier.under_way():
        time.sleep(0.001)
    found = consumer.lookup(tokens=TOKENS, lookup_id="b")
    assert found == len(TOKENS), f"{found} of {len(TOKENS)} tokens were stored"
    got = consumer.retrieve(TOKENS, slot_mapping=there, req_id="b")
    assert int(got.sum()) == len(TOKENS), f"{int(got.sum())} of {len(TOKENS)} tokens were loaded"
    assert torch.equal(
        consumer.gpu_connector.kv[:, :, there], producer.gpu_connector.kv[:, :, here]
    )
