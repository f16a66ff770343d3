"""Bytes stored from one block table and loaded into another arrive whole, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from kv_samples import (
    load_layered,
    load_plain,
    make_case,
    same_bytes,
    store_layered,
    store_plain,
)
from lmcache.v1.memory_management import MemoryFormat
from pdkit_connector.errors import TransferRefused, UnsupportedSetting
from pdkit_connector.in_engine.cpu_blocks import PagedKV
from pdkit_connector.in_engine.cpu_mover import BlockMover, LayerwiseBlockMover
from pdkit_connector.in_engine.partial_loads import as_miss

MODES = {"plain": (store_plain, load_plain), "layerwise": (store_layered, load_layered)}
SHAPES = [
    (torch.bfloat16, {}),
    (torch.float16, {"layers": 1, "heads": 1, "block": 16, "head": 80, "chunk": 16}),
    (torch.float32, {"layers": 2, "heads": 4, "block": 128, "head": 64, "chunk": 256}),
    (torch.uint8, {"layers": 4, "heads": 1, "block": 1, "head": 3, "chunk": 4}),
]


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


@pytest.mark.parametrize(("dtype", "shape"), SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_round_trip_keeps_every_byte_and_touches_nothing_else(mode, dtype, shape, seed):
    store, load = mode
    case = make_case(dtype, **shape)
    per_chunk = case.chunk // case.geometry.block_size
    there, here = case.table(2 * per_chunk, seed), case.table(2 * per_chunk, seed + 100)
    producer, consumer = case.kv(seed), case.kv(seed + 1)
    before = [layer.clone() for layer in consumer]

    load(case, consumer, here, store(case, producer, there))

    others = [block for block in range(case.num_blocks) if block not in here]
    for sent, got, old in zip(producer, consumer, before, strict=True):
        assert same_bytes(got[here], sent[there])
        assert same_bytes(got[others], old[others])
        assert not same_bytes(got[here], old[here])


def test_a_byte_changed_in_transit_is_detected(mode):
    store, load = mode
    case = make_case()
    table = case.table(4, 0)
    producer, consumer = case.kv(0), case.kv(1)
    objects = store(case, producer, table)
    first = objects[0][0] if isinstance(objects[0], list) else objects[0]
    first.raw_data[7] ^= 1
    load(case, consumer, table, objects)
    assert not all(same_bytes(a[table], b[table]) for a, b in zip(producer, consumer, strict=True))


@pytest.mark.parametrize("held_blocks", [1, 2, 3, 4])
def test_blocks_that_vllm_holds_are_not_overwritten(mode, held_blocks):
    store, load = mode
    case = make_case()
    table = case.table(6, 3)
    producer, consumer = case.kv(0), case.kv(1)
    before = [layer.clone() for layer in consumer]
    load(case, consumer, table, store(case, producer, table), held_blocks * 32)
    held, loaded = table[:held_blocks], table[held_blocks:]
    for sent, got, old in zip(producer, consumer, before, strict=True):
        assert same_bytes(got[held], old[held])
        assert same_bytes(got[loaded], sent[loaded])


def test_held_tokens_inside_a_block_are_refused(mode):
    store, load = mode
    case = make_case()
    table = case.table(2, 0)
    objects = store(case, case.kv(0), table)
    with pytest.raises(TransferRefused, match="cuts a 32-token block"):
        load(case, case.kv(1), table, objects, 40)


def test_only_the_wanted_chunks_are_stored_each_at_its_offset():
    case = make_case()
    table, kv = case.table(6, 1), case.kv(0)
    objects = case.plain(1)
    BlockMover(case.geometry).batched_from_gpu(
        objects, [64], [128], kvcaches=kv, slot_mapping=case.slots(table)
    )
    stored = objects[0].raw_data[: objects[0].get_size()].view(3, 2, -1)
    for layer in range(3):
        assert same_bytes(stored[layer], kv[layer][table[2:4]])


def test_blocks_with_gaps_between_them_are_copied():
    case = make_case()
    gapped = [torch.zeros(48, 2, 32, 64, dtype=case.dtype)[::2] for _ in range(3)]
    kv, table = case.kv(0), case.table(4, 0)
    load_plain(case, gapped, table, store_plain(case, kv, table))
    assert all(same_bytes(g[table], k[table]) for g, k in zip(gapped, kv, strict=True))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s[:-1], "mapping of 127 slots"),
        (lambda s: s + 1, "whole 32-token blocks"),
        (lambda s: s.flip(0), "whole 32-token blocks"),
        (lambda s: torch.cat([s[1:2], s[:1], s[2:]]), "whole 32-token blocks"),
        (lambda s: torch.cat([s[:32], s[:32], s[64:]]), "one block twice"),
        (lambda s: s - s.min() // 32 * 32, "names blocks 0"),
        (lambda s: s + 24 * 32, "a request owns"),
        (lambda s: torch.full_like(s, -1), "whole 32-token blocks"),
        (lambda s: s.to(torch.int32), "not int64"),
    ],
)
def test_a_slot_mapping_outside_the_blocks_is_refused_and_copies_nothing(damage, message):
    case = make_case()
    table = case.table(4, 0)
    objects, kv = store_plain(case, case.kv(0), table), case.kv(1)
    before = [layer.clone() for layer in kv]
    with pytest.raises(TransferRefused, match=message):
        BlockMover(case.geometry).batched_to_gpu(
            objects, [0, 64], [64, 128], kvcaches=kv, slot_mapping=damage(case.slots(table))
        )
    assert all(same_bytes(a, b) for a, b in zip(kv, before, strict=True))


def test_missing_objects_are_refused_not_shifted(mode):
    store, load = mode
    case = make_case()
    table = case.table(4, 0)
    objects, kv = store(case, case.kv(0), table), case.kv(1)
    before = [layer.clone() for layer in kv]
    layered = isinstance(objects[0], list)
    for drop in (lambda chunks: chunks[1:], lambda chunks: [None, *chunks[1:]]):
        damaged = [drop(layer) for layer in objects] if layered else drop(objects)
        with pytest.raises(TransferRefused, match="1 of 2 memory objects are missing"):
            load(case, kv, table, damaged)
    assert all(same_bytes(a, b) for a, b in zip(kv, before, strict=True))


def test_objects_of_another_size_or_format_are_refused():
    case = make_case()
    table, kv = case.table(2, 0), case.kv(0)
    for chunk in (32, 128):
        with pytest.raises(TransferRefused, match="bytes for"):
            load_plain(case, kv, table, make_case(chunk=chunk).plain(1))
    with pytest.raises(TransferRefused, match="expected"):
        load_plain(case, kv, table, case.layered(1)[0])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda kv: kv[:2], "2 layers"),
        (lambda kv: [kv[0][:, :, :16], *kv[1:]], "is \\(24, 2, 16, 64\\)"),
        (lambda kv: [kv[0], kv[1][:20], kv[2]], "layer 1 is \\(20"),
        (lambda kv: [kv[0].to(torch.float32), *kv[1:]], "float32"),
        (lambda kv: [kv[0].transpose(1, 2).contiguous().transpose(1, 2), *kv[1:]], "strides"),
        (lambda kv: [torch.stack([kv[0], kv[0]]), *kv[1:]], "layer 0 is \\(2, 24"),
    ],
)
def test_kv_tensors_of_an_unknown_shape_are_refused(tensors, message):
    case = make_case()
    with pytest.raises(UnsupportedSetting, match=message):
        PagedKV(tensors(case.kv(0)), case.geometry)


def test_layerwise_generators_stop_after_their_contract():
    case = make_case()
    mover = LayerwiseBlockMover(case.geometry)
    common = {"kvcaches": case.kv(0), "slot_mapping": case.slots(case.table(2, 0))}
    assert len(list(mover.batched_from_gpu(case.layered(1), [0], [64], **common))) == 3 + 1
    with pytest.raises(TransferRefused, match="no memory objects were sent"):
        list(mover.batched_to_gpu([0], [64], **common))


def test_a_refused_load_is_a_miss_and_frees_its_memory():
    """The engine goes on: LMCache ends the load as ever, and nothing of it counts."""
    case = make_case()
    table = case.table(4, seed=1)
    objects = store_plain(case, case.kv(seed=1), table)
    objects[1].metadata.fmt = MemoryFormat.KV_T2D
    given_back = []

    def retrieve(_engine, tokens, mask=None):
        load_plain(case, case.kv(seed=2), table, objects)
        given_back.extend(objects)
        return torch.ones(len(tokens), dtype=torch.bool)

    tokens = list(range(128))
    assert not as_miss(retrieve, None, tokens, mask=None).any()
    assert given_back == objects
    with pytest.raises(TransferRefused):
        retrieve(None, tokens)
    objects[1].metadata.fmt = MemoryFormat.KV_2LTD
    assert as_miss(retrieve, None, tokens).all()
