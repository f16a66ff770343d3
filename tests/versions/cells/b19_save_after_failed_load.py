"""B19: of a prompt two chunks are to be loaded and are gone; the third is computed on nothing."""

from __future__ import annotations

from adapter_steps import CHUNK, Vllm


def cell() -> None:
    prompt = list(range(3 * CHUNK + 2))
    vllm = Vllm()
    vllm.add("first", prompt[: 2 * CHUNK])
    vllm.step({"first": 100})
    request = vllm.add("again", prompt)
    sound = vllm.add("sound", list(range(500, 500 + CHUNK + 1)))
    vllm.store.lost = True
    vllm.step({"again": 100, "sound": 100})
    vllm.check_stored()
    assert tuple(sound.prompt_token_ids[:CHUNK]) in vllm.store.chunks, "the sound one is stored"
    vllm.store.lost = False
    for _ in range(10):
        vllm.step({"again": 7})
    vllm.check_attended(request)
    vllm.check_stored()
