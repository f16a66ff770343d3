"""B22: a prompt's last token is computed in a CUDA graph; what is before it has to be loaded."""

from __future__ import annotations

from adapter_steps import CHUNK, Vllm
from layerwise_engine import Worker, filled, make_engine, request


def cell() -> None:
    for tokens in (2 * CHUNK, 2 * CHUNK + 1):
        whole_chunks(tokens)
    layerwise()


def whole_chunks(tokens: int) -> None:
    prompt = list(range(tokens))
    vllm = Vllm()
    vllm.attn_metadata = None
    vllm.add("first", prompt)
    vllm.step({"first": 100})
    again = vllm.add("again", prompt)
    vllm.step({"again": 100})
    vllm.check_attended(again)
    # A step that has nothing to load, and one of a request that LMCache has nothing of.
    vllm.step({"again": 1})
    other = vllm.add("other", list(range(500, 500 + tokens)))
    vllm.step({"again": 1, "other": 100})
    vllm.check_attended(again)
    vllm.check_attended(other)
    vllm.check_stored()


def layerwise() -> None:
    """A replayed graph calls no hook of a layer, so all layers are loaded before it."""
    engine = make_engine()
    worker = Worker(engine)
    stored = filled(engine, 0, 16)
    worker.step(request("a", 16))
    load = request("b", 16, first_slot=32, saved=None, load=(0, 16))
    worker.begin(load, attention=False)
    assert not worker.end()
    assert engine.gpu_connector.kv[:, 32:48].equal(stored)
