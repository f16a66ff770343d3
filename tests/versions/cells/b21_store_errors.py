"""B21: the mover refuses a copy; the step goes on, and what can be stored later is stored."""

from __future__ import annotations

from typing import Any

import torch
from layerwise_engine import CHUNK, LAYERS, WIDTH, make_engine

TOKENS = list(range(2 * CHUNK))


class Mover:
    """A plain mover of a device without bytes."""

    refuses = True

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, LAYERS, num_tokens, WIDTH])

    def batched_from_gpu(self, *_args: Any, **_kwargs: Any) -> None:
        if self.refuses:
            raise RuntimeError("refused")


def cell() -> None:
    engine = make_engine(use_layerwise=False)
    engine.gpu_connector = Mover()
    slots = torch.arange(len(TOKENS))
    engine.store(TOKENS, slot_mapping=slots, offset=0, req_id="a")
    assert engine.lookup(tokens=TOKENS, lookup_id="look") == 0
    engine.gpu_connector.refuses = False
    engine.store(TOKENS, slot_mapping=slots, offset=0, req_id="b")
    assert engine.lookup(tokens=TOKENS, lookup_id="look") == len(TOKENS)
