"""Sequences of worker steps under which layerwise mode has to live, and to store only true KV.

The model here writes a layer's KV as that layer runs, so that a copy taken too early is wrong KV.
A token's KV follows from its id and layer: whatever a load brings can be told right from wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from layerwise_engine import CHUNK, LAYERS, SLOTS, WIDTH, Worker, make_engine, request

SPARE = SLOTS - 64


def kv_of(token_ids: list[int], layer: int) -> torch.Tensor:
    """Return the KV of tokens: [tokens, 2 x width]."""
    values = torch.tensor(token_ids, dtype=torch.float32) + 1 + layer / 8
    return values.unsqueeze(1).expand(-1, 2 * WIDTH)


class Model(Worker):
    """A worker whose model computes what it was not given."""

    def begin(self, *requests: Any, attention: bool = True) -> None:
        self.requests = requests
        super().begin(*requests, attention=attention)

    def layer(self, index: int) -> None:
        self.adapter.wait_for_layer_load(f"layer{index}")
        if index < LAYERS:
            for each in self.requests:
                loaded = each.load_spec.lmcache_cached_tokens if each.load_spec else 0
                slots = each.slot_mapping.as_subclass(torch.Tensor)[loaded:]
                self.engine.gpu_connector.kv[index, slots] = kv_of(each.token_ids[loaded:], index)
        self.adapter.save_kv_layer(f"layer{index}", torch.empty(0), object())


def found(engine: Any, seed: int, tokens: int) -> int:
    """Return how much of a request a lookup finds, after loading that much and checking it."""
    ids = [seed * 1000 + i for i in range(tokens)]
    count = int(engine.lookup(tokens=ids, lookup_id="look"))
    if count:
        kv = engine.gpu_connector.kv
        kv[:, SPARE:] = 0
        load = request("look", count, first_slot=SPARE, saved=None, load=(0, count), seed=seed)
        failed = Model(engine).step(load)
        assert not failed, f"blocks {sorted(failed)} of request {seed} failed"
        for layer in range(LAYERS):
            right = kv_of(ids[:count], layer)
            assert kv[layer, SPARE : SPARE + count].equal(right), f"wrong KV in layer {layer}"
    return count


def nothing_to_save_after_a_save(engine: Any) -> None:
    model = Model(engine)
    model.step(request("a", 16))
    for _ in range(2):
        model.step()
    model.step(request("a", 16, saved=None))
    assert found(engine, 0, 16) == 16


def ended_twice(engine: Any) -> None:
    model = Model(engine)
    for seed in range(2):
        model.step(request("a", 16, seed=seed))
        model.adapter.wait_for_save()
    assert (found(engine, 0, 16), found(engine, 1, 16)) == (16, 16)


def all_tokens_skipped(engine: Any) -> None:
    model = Model(engine)
    model.step(request("a", 16))
    model.step(request("a", 16, saved=16), request("b", 16, first_slot=32, seed=1))
    model.step(request("a", 16, saved=16))
    assert (found(engine, 0, 16), found(engine, 1, 16)) == (16, 16)


def hooks_not_called(engine: Any) -> None:
    """Attention in a captured graph, or a step without attention."""
    model = Model(engine)
    for attention in (True, False):
        model.begin(request("a", 16), attention=attention)
        model.end()
    assert found(engine, 0, 16) == 0
    model.step(request("a", 16))
    assert found(engine, 0, 16) == 16


def hooks_called_without_a_step(engine: Any) -> None:
    """A dummy step of data parallelism runs the layers with no metadata bound."""
    model = Model(engine)
    model.step(request("a", 16))
    model.step(request("b", 16, first_slot=32, saved=None, load=(0, 16)))
    model.requests = ()
    model.adapter._parent = SimpleNamespace(_connector_metadata=None)
    for index in range(LAYERS):
        model.layer(index)
    model.step(request("c", 16, first_slot=32, seed=1))
    assert found(engine, 1, 16) == 16


def aborted_between_layers(engine: Any) -> None:
    for layer in range(LAYERS + 1):
        model = Model(engine)
        seeds = 2 * layer, 2 * layer + 1
        model.begin(request("a", 16, seed=seeds[0]), request("b", 16, first_slot=32, seed=seeds[1]))
        for index in range(LAYERS):
            if index == layer:
                # What the adapter does about a finished request, where it keeps storers by id.
                getattr(model.adapter, "_layerwise_save_storers", {}).pop("a", None)
            model.layer(index)
        model.end({"a"})
        assert found(engine, seeds[0], 16) in (0, 16)
        assert found(engine, seeds[1], 16) == 16


def prefilled_in_chunks(engine: Any) -> None:
    model = Model(engine)
    for step in range(3):
        tokens, saved = (step + 1) * CHUNK, step * CHUNK
        model.step(request("a", tokens, saved=saved), request("b", 8, first_slot=64, seed=step + 1))
    assert found(engine, 0, 24) == 24


def loaded_then_saved(engine: Any) -> None:
    """A prompt whose first chunk is loaded and whose second is computed and saved, in one step."""
    model = Model(engine)
    model.step(request("a", 8))
    assert not model.step(request("b", 16, first_slot=32, saved=8, load=(0, 8)))
    assert found(engine, 0, 16) == 16


def load_started_after_the_layers(engine: Any) -> None:
    """vLLM may start loads after the forward pass where none has to come before it."""
    model = Model(engine)
    for seed in range(2):
        each = request("a", 16, seed=seed)
        model.begin(each)
        model.adapter.current_layer, model.adapter.layerwise_retrievers = 0, []
        model.adapter.layerwise_storers = []
        for index in range(LAYERS):
            model.layer(index)
        model.adapter.start_load_kv(SimpleNamespace(attn_metadata=object()))
        model.end()
    assert (found(engine, 0, 16), found(engine, 1, 16)) == (16, 16)


SEQUENCES: tuple[Callable[[Any], None], ...] = (
    nothing_to_save_after_a_save,
    ended_twice,
    all_tokens_skipped,
    hooks_not_called,
    hooks_called_without_a_step,
    aborted_between_layers,
    prefilled_in_chunks,
    loaded_then_saved,
    load_started_after_the_layers,
)


def run_sequences() -> None:
    """Run every sequence on an engine of its own; raise RuntimeError naming those that failed."""
    errors: list[Exception] = []
    for sequence in SEQUENCES:
        try:
            sequence(make_engine())
        except Exception as exc:  # noqa: BLE001 - an error ends the core, whatever it is
            exc.args = (f"{sequence.__name__}: {type(exc).__name__}: {exc}",)
            errors.append(exc)
    if errors:
        raise RuntimeError("; ".join(str(exc) for exc in errors))
