"""Values that whoever can write to Redis may plant: what no engine would store is a miss."""

from __future__ import annotations

import math

import pytest
import torch
from lmcache.v1.memory_management import MemoryFormat
from pdkit_connector.counters import COUNTERS
from pdkit_connector.redis_path import protocol
from pdkit_connector.redis_path.settings import failures
from pdkit_connector.redis_path.value import HEADER_BYTES, Codec, Header, digest
from redis_backend import PAYLOAD, loaded, made, stored
from redis_chunks import another_batch

from lmcache_objects import CHUNK, HEAD_SIZE, HEADS, LAYERS, key, redis_path_config  # isort: skip


@pytest.fixture
def backend(server):
    backend = made(redis_path_config(server.url))
    yield backend
    backend.close()


SHAPE = (2, LAYERS, CHUNK, HEADS * HEAD_SIZE)


def forge(server, backend, number: int, size: int = PAYLOAD, **said) -> None:
    """Plant a value whose checksums hold, as who can write to Redis can."""
    name = backend._names.one(key(number))
    payload = bytes(size)
    facts = {
        "dtype": "bfloat16",
        "shape": SHAPE,
        "memory_format": MemoryFormat.KV_2LTD.value,
        "payload_bytes": size,
        "layout": backend._codec.layout,
        "key": digest(name),
    }
    server.admin.set(name, backend._codec.header(Header(**{**facts, **said}), payload) + payload)


FORGERIES = {
    "another type of the same size": {"dtype": "float16"},
    "a type of no tensor": {"dtype": "Tensor"},
    "half the tokens": {"shape": (2, LAYERS, CHUNK // 2, HEADS * HEAD_SIZE), "size": PAYLOAD // 2},
    "twice the tokens": {"shape": (2, LAYERS, CHUNK * 2, HEADS * HEAD_SIZE), "size": PAYLOAD * 2},
    "other dimensions of the same size": {"shape": (1, 2 * LAYERS, CHUNK, HEADS * HEAD_SIZE)},
    "another format": {"memory_format": MemoryFormat.KV_T2D.value},
    "a format that there is not": {"memory_format": 250},
    "a product that wraps to nothing": {"shape": (2**31, 2**31, 4), "size": 0},
    "nothing": {"shape": (0,), "size": 0},
    "bytes": {"dtype": "uint8", "shape": (PAYLOAD,)},
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_value_is_a_miss(server, backend, name):
    """Only what the engine itself would store gets as far as a mover."""
    forge(server, backend, 1)
    assert loaded([backend.get_blocking(key(1))]) == [0], "the forger knows the format"
    forge(server, backend, 1, **FORGERIES[name])
    before = COUNTERS.value("chunks", operation="load", result="foreign")
    assert loaded([backend.get_blocking(key(1))]) == [None]
    assert COUNTERS.value("chunks", operation="load", result="foreign") == before + 1


@pytest.fixture
def signed(server, tmp_path):
    (tmp_path / "kv_key").write_text("the stack's own\n")
    extra = {"pdkit.mac_key_file": str(tmp_path / "kv_key")}
    backend = made(redis_path_config(server.url, extra=extra))
    yield backend
    backend.close()


def test_a_perfect_forgery_is_a_miss_with_a_mac(server, backend, signed):
    """All but the secret is right: it is what the engine without one takes."""
    stored(signed, 1)
    assert loaded([signed.get_blocking(key(1))]) == [1], "its own"
    for codec, result in ((backend._codec, "foreign"), (Codec("", secret=b"guessed"), "corrupt")):
        codec.layout = signed._codec.layout
        own, signed._codec = signed._codec, codec
        forge(server, signed, 1)
        signed._codec = own
        before = COUNTERS.value("chunks", operation="load", result=result)
        assert loaded([signed.get_blocking(key(1))]) == [None]
        assert COUNTERS.value("chunks", operation="load", result=result) == before + 1


@pytest.mark.parametrize("forged", [False, True])
def test_a_value_replaced_while_it_is_read(server, backend, signed, forged, monkeypatch):
    """One of the stack's own is loaded, one that a writer without the secret planted is not."""
    stored(signed, 1)
    name = signed._names.one(key(1))
    other = another_batch(server.admin.get(name), name, signed._codec)
    if forged:
        other = other[:-8] + bytes(8)
    allocate = signed._allocate

    def allocate_and_replace(header, deadline):
        server.admin.set(name, other)
        return allocate(header, deadline)

    for size in ("_FIRST_BYTES", "_RANGE_BYTES"):
        monkeypatch.setattr(protocol, size, PAYLOAD // 5)
    monkeypatch.setattr(signed, "_allocate", allocate_and_replace)
    corrupt = COUNTERS.value("chunks", operation="load", result="corrupt")
    replaced = COUNTERS.value("replaced")
    (obj,) = signed.batched_get_blocking([key(1)])
    assert (obj is None) == forged
    if obj is not None:
        assert bytes(obj.byte_array) == other[HEADER_BYTES:]
        obj.ref_count_down()
    corrupt = COUNTERS.value("chunks", operation="load", result="corrupt") - corrupt
    assert (corrupt, COUNTERS.value("replaced") - replaced) == ((1, 0) if forged else (0, 1))


def test_a_forged_value_does_not_hide_good_ones(server, backend):
    """The length that lookups require is the engine's own, whatever comes by."""
    stored(backend, *range(1, 8))
    keys = [key(number) for number in range(1, 8)]
    reader = made(redis_path_config(server.url))
    forge(server, reader, 9, size=PAYLOAD // 2, shape=(PAYLOAD // 4,))
    assert loaded([reader.get_blocking(key(9))]) == [None]
    assert reader.batched_contains(keys) == 7
    reader.close()


LAYOUTS = {
    "layer by layer": ((CHUNK, 2, HEADS * HEAD_SIZE), "KV_T2D", {"use_layerwise": True}, {}),
    "with one KV for all heads": (
        (1, LAYERS, CHUNK, 8),
        "KV_MLA_FMT",
        {},
        {"use_mla": True, "kv_shape": (LAYERS, 1, CHUNK, 1, 8)},
    ),
    "layer by layer, one KV for all heads": (
        (CHUNK, 8),
        "KV_MLA_FMT",
        {"use_layerwise": True},
        {"use_mla": True, "kv_shape": (LAYERS, 1, CHUNK, 1, 8)},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_has_its_own_tensor(server, name):
    shape, memory_format, settings, facts = LAYOUTS[name]
    one = made(redis_path_config(server.url, **settings), **facts)
    said = {"shape": shape, "memory_format": MemoryFormat[memory_format].value}
    size = 2 * math.prod(shape)
    forge(server, one, 1, size=size, **said)
    assert loaded([one.get_blocking(key(1))]) == [0]
    forge(server, one, 1)
    assert loaded([one.get_blocking(key(1))]) == [None]
    one.close()


def test_the_tensor_that_lmcache_reads_from_vllm_is_part_of_the_layout(server, backend):
    """LMCache looks at vLLM's tensors at its first transfer, and may find another shape."""
    facts = backend._tensors._metadata
    shape, dtype = torch.Size((1, LAYERS, CHUNK, 2 * HEADS * HEAD_SIZE)), torch.float16
    forge(server, backend, 1, shape=tuple(shape), dtype="float16")
    assert loaded([backend.get_blocking(key(1))]) == [None]
    facts.get_shapes, facts.get_dtypes = lambda _: [shape], lambda: [dtype]
    assert loaded([backend.get_blocking(key(1))]) == [0]


def test_chunks_of_any_length_are_refused(server):
    """Of those only the value itself would say how long it is."""
    failures.clear()
    assert made(redis_path_config(server.url, save_unfull_chunk=True)) is None
    assert "save_unfull_chunk: false" in failures[0]
