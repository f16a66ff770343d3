"""B4c: a request is preempted, others take its blocks, and it goes on and grows."""

from __future__ import annotations

from adapter_steps import Vllm


def cell() -> None:
    """Once with a hit in LMCache when it resumes, once without."""
    for lost in (False, True):
        vllm = Vllm(save_decode_cache=True)
        request = vllm.add("a", list(range(21)))
        vllm.step({"a": 12})
        vllm.preempt("a")
        if lost:
            vllm.store.chunks.clear()
        for _ in range(20):
            vllm.step({"a": 16})
        vllm.check_attended(request)
        vllm.check_stored()
