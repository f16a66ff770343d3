"""B4e: a request preempted while it decodes goes on as vLLM's second model runner is told of it."""

from __future__ import annotations

from adapter_steps import Vllm


def cell() -> None:
    for prompt in (13, 17):
        vllm = Vllm(resumed_as_new=True, save_decode_cache=True)
        request = vllm.add("a", list(range(prompt)))
        for _ in range(14):
            vllm.step({"a": 100})
        stored = dict(vllm.store.chunks)
        for end in (8, 16, 24):
            tokens = tuple(request.all_token_ids[:end])
            stored[tokens] = [vllm.kv(request, i) for i in range(end - 8, end)]
        vllm.preempt("a")
        vllm.store.chunks = stored
        vllm.step({"a": 100})
        for _ in range(10):
            vllm.step({"a": 100})
        vllm.check_attended(request)
        vllm.check_stored()
