"""B4b: a request is preempted when LMCache holds every token of it, and goes on."""

from __future__ import annotations

from adapter_steps import Vllm


def cell() -> None:
    vllm = Vllm(save_decode_cache=True)
    request = vllm.add("a", list(range(15)))
    vllm.step({"a": 15})
    vllm.preempt("a")
    vllm.store.chunks.update(_chunk(vllm, request, end) for end in (8, 16))
    meta = vllm.step({"a": 16})
    assert meta.requests[0].load_spec.lmcache_cached_tokens == 16
    vllm.check_attended(request)
    for _ in range(10):
        vllm.step({"a": 1})
    vllm.check_attended(request)
    vllm.check_stored()
    assert max(map(len, vllm.store.chunks)) == 24


def _chunk(vllm: Vllm, request: object, end: int) -> tuple:
    tokens = tuple(vllm.token(request, i) for i in range(end))
    return tokens, [vllm.kv(request, i) for i in range(end - 8, end)]
