"""B4f: a producer prefills and stores for whoever asks."""

from __future__ import annotations

from adapter_steps import CHUNK, Vllm


def cell() -> None:
    vllm = Vllm(kv_role="kv_producer")
    request = vllm.add("a", list(range(2 * CHUNK + 1)))
    for _ in range(3):
        vllm.step({"a": CHUNK + 2})
    vllm.check_attended(request)
    vllm.check_stored()
    assert sorted(map(len, vllm.store.chunks)) == [CHUNK, 2 * CHUNK]
