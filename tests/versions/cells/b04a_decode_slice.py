"""B4a: with asynchronous scheduling, decoding two chunks further stores those chunks."""

from __future__ import annotations

from adapter_steps import Vllm

CHUNK = 8


def cell() -> None:
    vllm = Vllm(ahead=True, save_decode_cache=True)
    request = vllm.add("a", list(range(10)))
    vllm.step({"a": 6})
    for _ in range(30):
        vllm.step({"a": 4})
    vllm.check_attended(request)
    vllm.check_stored()
    stored = sorted(len(tokens) for tokens in vllm.store.chunks)
    assert stored[:4] == [8, 16, 24, 32], f"of {request.num_tokens} tokens stored: {stored}"
