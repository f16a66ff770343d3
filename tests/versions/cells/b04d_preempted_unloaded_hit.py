"""B4d: a request that reads no caches is preempted, and goes on, with its KV in LMCache."""

from __future__ import annotations

from adapter_steps import Vllm


def cell() -> None:
    for most in (3, 100):
        vllm = Vllm(save_decode_cache=True)
        request = vllm.add("a", list(range(21)))
        vllm.step({"a": 21}, external=False)
        vllm.preempt("a")
        vllm.step({"a": most}, external=False)
        for _ in range(20):
            vllm.step({"a": most})
        vllm.check_attended(request)
        vllm.check_stored()
        assert max(map(len, vllm.store.chunks)) > 24
