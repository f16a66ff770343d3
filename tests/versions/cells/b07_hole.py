"""B7: with the second of three chunks gone, no token behind it may count as loaded."""

from __future__ import annotations

from typing import Any

import torch
from lmcache_objects import CHUNK, chunk, config, key, metadata, remote_backend
from redis_path import client, engine, fill_of, on_loop, store

KEYS = 3
TOKENS = [1] * KEYS * CHUNK

# More loads than the pool's 128 chunks: each must give back all that it does not return.
POOL_GIB = 2**-12
LOADS = 150


def cell() -> None:
    pool_settings = config(max_local_cpu_size=POOL_GIB, blocking_timeout_secs=5)
    backend = remote_backend(pool_settings, metadata())
    keys = [key(number) for number in range(1, KEYS + 1)]
    tell_the_truth(backend, keys)
    tell_the_truth_by_layer(backend, keys)


def tell_the_truth(backend: Any, keys: list[Any]) -> None:
    """Read as a plain load does; the mask must be that of the chunks that came."""
    redis = client()
    store(backend, keys)
    for _ in range(LOADS):
        redis.delete(keys[1].to_string() + "kv_bytes")
        mask = torch.zeros(len(TOKENS), dtype=torch.bool)
        chunks, _ = engine(backend, keys)._process_tokens_internal(TOKENS, None, mask, req_id="a")
        loaded = torch.zeros_like(mask)
        for _, memory_obj, start, end in chunks:
            assert fill_of(memory_obj) == start // CHUNK + 1
            loaded[start:end] = True
            memory_obj.ref_count_down()
        assert torch.equal(mask, loaded), "the mask has tokens that were not loaded"
        redis.set(keys[1].to_string() + "metadata", redis.get(keys[0].to_string() + "metadata"))


def tell_the_truth_by_layer(backend: Any, keys: list[Any]) -> None:
    """Read as a layerwise load does, with only one layer of the second chunk gone."""
    redis = client()
    loader = engine(backend, keys)
    by_layer = [one.split_layers(loader.num_layers) for one in keys]
    for fill, layers in enumerate(by_layer, 1):
        for layer_key in layers:
            on_loop(backend, backend.connection.put(layer_key, chunk(backend, fill)))
    redis.delete(by_layer[1][1].to_string() + "kv_bytes")

    async def read(_lookup: str, asked: list[Any], *_more: Any) -> list[Any]:
        """Answer as the kit's own store does: up to the first chunk that is gone."""
        found: list[Any] = []
        for one in asked:
            if (memory_obj := await backend.connection.get(one)) is None:
                break
            found.append(memory_obj)
        return found

    backend.batched_get_non_blocking = read
    # What vLLM's slots hold, one row a layer.
    slots = torch.zeros(loader.num_layers, len(TOKENS))
    loader.gpu_connector = mover(slots)
    slot_mapping = torch.arange(len(TOKENS))
    *_, mask = loader.retrieve_layer(TOKENS, req_id="a", slot_mapping=slot_mapping)
    expected = torch.arange(len(TOKENS)) // CHUNK + 1
    assert (slots[:, mask] == expected[mask]).all(), "tokens in the mask have other tokens' KV"


def mover(slots: torch.Tensor) -> Any:
    """Return a mover that pairs chunks and objects as LMCache's movers on GPUs do."""
    from lmcache.v1 import gpu_connector

    module = getattr(gpu_connector, "gpu_connectors", gpu_connector)

    class Mover(module.VLLMPagedMemLayerwiseGPUConnector):
        def __init__(self) -> None:
            pass

        def batched_to_gpu(self, starts, ends, **_kwargs):
            for row in slots:
                for start, end, obj in zip(starts, ends, (yield), strict=False):
                    row[start:end] = fill_of(obj)
            yield
            yield

    return Mover()
