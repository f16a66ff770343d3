"""B16: requests of one text and another LoRA adapter, cache salt or embedded prompt."""

from __future__ import annotations

from typing import Any

import torch
from adapter_steps import Vllm
from vllm.lora.request import LoRARequest

TEXT = list(range(24))


def cell() -> None:
    lora = LoRARequest("adapter", 1, "/nowhere")
    for more in ({"lora_request": lora}, {"cache_salt": "tenant"}):
        apart(**more)
    embedded()


def apart(**more: Any) -> None:
    vllm = Vllm(save_decode_cache=True)
    vllm.add("plain", TEXT)
    run(vllm, "plain", 4)
    other = vllm.add("other", TEXT, **more)
    run(vllm, "other", 4)
    vllm.check_attended(other)
    vllm = Vllm(save_decode_cache=True)
    vllm.add("other", TEXT, **more)
    run(vllm, "other", 12)
    vllm.preempt("other")
    run(vllm, "other", 4)
    plain = vllm.add("plain", TEXT)
    run(vllm, "plain", 4)
    vllm.check_attended(plain)
    vllm.check_stored()


def embedded() -> None:
    """An embedded prompt has zeros for tokens."""
    vllm = Vllm()
    vllm.add("zeros", [0] * len(TEXT))
    run(vllm, "zeros", 2)
    request = vllm.add("embedded", [0] * len(TEXT), prompt_embeds=torch.ones(len(TEXT), 2))
    assert not vllm.scheduler.get_num_new_matched_tokens(request, 0)


def run(vllm: Vllm, req_id: str, steps: int) -> None:
    for _ in range(steps):
        vllm.step({req_id: len(TEXT) + 40})
