"""What becomes of LMCache's mask and memory objects when a load has a hole (B7)."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lmcache.v1.cache_engine import LMCacheEngine
from pdkit_connector.in_engine import partial_loads
from pdkit_connector.in_engine.layer_steps import idle_engine, retrieve_steps


def chunks(*spans):
    return [(None, object(), start, end) for start, end in spans]


@pytest.mark.parametrize(
    ("spans", "kept"),
    [
        ([(4, 8), (8, 12)], [(4, 8), (8, 12)]),
        ([(8, 12), (4, 8)], [(4, 8), (8, 12)]),
        ([(4, 8), (12, 16)], [(4, 8)]),
        ([(8, 12)], []),
        ([], []),
    ],
)
def test_chunks_count_up_to_the_first_gap(spans, kept):
    mask = torch.zeros(16, dtype=torch.bool)
    mask[4:] = True
    assert [chunk[2:] for chunk in partial_loads.contiguous(chunks(*spans), mask)] == kept
    assert partial_loads.contiguous(chunks(*spans), torch.zeros(16, dtype=torch.bool)) == []


def test_a_plain_load_frees_the_chunks_that_it_does_not_return():
    released = []

    def memory_obj(name):
        return SimpleNamespace(get_size=lambda: 10, ref_count_down=lambda: released.append(name))

    objects = [memory_obj("a"), memory_obj("b"), None, memory_obj("d")]

    class Engine:
        # As LMCache up to 0.4.3: the chunk before the hole is in the mask and not in the list.
        def process(self, _tokens, _mask, ret_mask):
            partial_loads.collected(lambda _self: objects, None)
            ret_mask[:8] = True
            return [("a", objects[0], 0, 4)], 20

    mask = torch.zeros(16, dtype=torch.bool)
    kept, size = partial_loads.plain(Engine.process, Engine(), [1] * 16, None, mask)
    assert [chunk[0] for chunk in kept] == ["a"]
    assert size == 10
    assert mask.tolist() == [True] * 4 + [False] * 12
    assert released == ["b", "d"]


@pytest.mark.parametrize("healthy", [True, False])
def test_the_layerwise_wrapper_keeps_the_number_of_steps(healthy):
    plain = idle_engine(healthy=healthy)
    expected = steps_of(LMCacheEngine.retrieve_layer, plain)
    assert (
        steps_of(partial(partial_loads.layerwise, LMCacheEngine.retrieve_layer), plain) == expected
    )


def steps_of(method, engine):
    taken = 0
    try:
        for _ in method(engine, [1] * 8, sync=True, req_id="a"):
            taken += 1
    except UnboundLocalError:
        return taken, "UnboundLocalError"
    return taken, None


def test_interleaved_layerwise_loads_do_not_mix():
    engine = SimpleNamespace(num_layers=2, gpu_connector=SimpleNamespace(batched_to_gpu=take))
    load = partial(partial_loads.layerwise, retrieve)
    whole, short = load(engine, [2, 2, 2]), load(engine, [2, 1, 2])
    for _ in range(retrieve_steps(2) - 1):
        next(whole)
        next(short)
    assert next(short).tolist() == [True, False]
    assert next(whole).tolist() == [True, True]


def test_a_mover_that_refuses_a_short_list_does_not_end_the_load():
    engine = SimpleNamespace(num_layers=2, gpu_connector=SimpleNamespace(batched_to_gpu=refuse))
    *_, mask = partial_loads.layerwise(retrieve, engine, [1, 2])
    assert mask.tolist() == [False, False]


def test_any_other_error_of_a_mover_ends_the_load():
    engine = SimpleNamespace(num_layers=2, gpu_connector=SimpleNamespace(batched_to_gpu=refuse))
    with pytest.raises(ValueError, match="objects"):
        list(partial_loads.layerwise(retrieve, engine, [3, 2]))


def refuse(starts, ends, **_kwargs):
    for _ in range(2):
        objects = yield
        if len(objects) != len(starts):
            raise ValueError(f"{len(objects)} objects")
    yield
    yield


def take(starts, ends, **_kwargs):
    yield
    yield
    yield
    yield


def retrieve(self, tokens, mask=None, **_kwargs):
    """Stand for an engine's retrieve of two one-token chunks; `tokens` are objects a layer."""
    mover = self.gpu_connector.batched_to_gpu([0, 1], [1, 2])
    next(mover)
    for layer in range(2):
        yield
        mover.send([object()] * tokens[layer])
    yield
    next(mover)
    yield torch.ones(2, dtype=torch.bool)
