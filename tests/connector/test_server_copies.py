"""KV between CPU engines and LMCache's server: the same bytes as by LMCache's own copies."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from lmcache.v1.multiprocess import object_group_transfer
from lmcache.v1.multiprocess.modules import lmcache_driven_transfer
from lmcache.v1.platform.devices.cpu.cache_context import CPUCacheContext
from lmcache.v1.platform.torch_ops import mp_mem_kernels
from pdkit_connector.server_copies import InPlace, Run, copy_once, runs, transfer_blocks

BLOCKS, LAYERS, HEADS, SIZE, HEAD = 40, 3, 2, 4, 6
PER_CHUNK = 4
THEIRS = mp_mem_kernels._transfer_per_layer_fused


def layers_of(seed, *, hnd, split, dtype=torch.bfloat16):
    """Return an engine's memory; the last axis is two, K and V, where it is split."""
    torch.manual_seed(seed)
    inner = (HEADS, SIZE) if hnd else (SIZE, HEADS)
    last = (2, HEAD // 2) if split else (HEAD,)
    return [torch.randn(BLOCKS, *inner, *last).to(dtype) for _ in range(LAYERS)]


def objects_of(seed, chunks, dtype=torch.bfloat16):
    """Return the server's memory of some chunks."""
    torch.manual_seed(seed)
    shape = (LAYERS, PER_CHUNK * SIZE, HEADS * HEAD)
    return [torch.randn(shape).to(dtype) for _ in range(chunks)]


def table(kind, count, seed):
    """Return an engine's blocks of a prompt."""
    rng = random.Random(seed)
    if kind == "in a row":
        first = rng.randrange(BLOCKS - count)
        return list(range(first, first + count))
    found = rng.sample(range(BLOCKS), count)
    return sorted(found) if kind == "ascending" else found


@pytest.mark.parametrize("to_server", [True, False])
@pytest.mark.parametrize("kind", ["in a row", "ascending", "anywhere"])
@pytest.mark.parametrize("hnd", [True, False])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("blocks", "skipped"), [(12, 0), (12, 5), (10, 0), (10, 4), (3, 3)])
def test_the_bytes_are_those_of_lmcache(to_server, kind, hnd, split, blocks, skipped):
    ids = table(kind, blocks, seed=blocks + skipped)
    chunks = -(-blocks // PER_CHUNK)
    found = []
    for move in (THEIRS, transfer_blocks):
        layers, objects = layers_of(1, hnd=hnd, split=split), objects_of(2, chunks)
        form = SimpleNamespace(is_hnd=hnd)
        move(layers, objects, torch.tensor(ids), blocks, PER_CHUNK, SIZE, form, to_server, skipped)
        found.append((layers, objects))
    for theirs, ours in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    layers, objects = found[1]
    moved = skipped < blocks
    kept = zip(layers, layers_of(1, hnd=hnd, split=split), strict=True)
    assert all(torch.equal(a, b) for a, b in kept) is (to_server or not moved)
    kept = zip(objects, objects_of(2, chunks), strict=True)
    assert all(torch.equal(a, b) for a, b in kept) is (not to_server or not moved)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.uint8])
def test_a_round_trip_into_other_blocks(dtype):
    form = SimpleNamespace(is_hnd=True)
    there, here = table("anywhere", 8, 1), table("ascending", 8, 2)
    sent, got = (layers_of(seed, hnd=True, split=False, dtype=dtype) for seed in (1, 2))
    before, objects = [layer.clone() for layer in got], objects_of(3, 2, dtype)
    transfer_blocks(sent, objects, there, 8, PER_CHUNK, SIZE, form, True, 0)
    transfer_blocks(got, objects, here, 8, PER_CHUNK, SIZE, form, False, 0)
    others = [block for block in range(BLOCKS) if block not in here]
    for one, other, old in zip(sent, got, before, strict=True):
        assert torch.equal(other[here], one[there])
        assert torch.equal(other[others], old[others])


def test_only_blocks_that_count_are_moved():
    """The server gives a table that may be longer than the prompt."""
    form, ids = SimpleNamespace(is_hnd=True), table("in a row", 8, 1)
    layers = layers_of(1, hnd=True, split=False)
    transfer_blocks(layers, objects_of(2, 2), ids, 5, PER_CHUNK, SIZE, form, False, 0)
    changed = [
        block
        for block, (new, old) in enumerate(
            zip(layers[0], layers_of(1, hnd=True, split=False)[0], strict=True)
        )
        if not torch.equal(new, old)
    ]
    assert changed == ids[:5]


@pytest.mark.parametrize(
    ("blocks", "found"),
    [
        ([], []),
        ([7], [Run(0, 7, 1)]),
        ([3, 4, 5], [Run(0, 3, 3)]),
        ([3, 4, 9, 8, 9], [Run(0, 3, 2), Run(2, 9, 1), Run(3, 8, 2)]),
        ([5, 5], [Run(0, 5, 1), Run(1, 5, 1)]),
    ],
)
def test_runs(blocks, found):
    assert list(runs(blocks)) == found


# Two objects of two groups of layers each, and what lies before them in a buffer for staging.
OFFSETS, OBJECTS = [0, 64, 160, 192], 2


def engine(*, full=True):
    """Return what LMCache's server knows of a CPU engine: its buffer, and where its layers lie."""
    context = object.__new__(CPUCacheContext)
    context.tmp_chunk_group_offsets_, context.tmp_chunk_bytes_ = OFFSETS, OFFSETS[-1]
    context.tmp_cpu_buffer_ = torch.zeros(OBJECTS * OFFSETS[-1], dtype=torch.uint8)
    context._max_batch_size = OBJECTS
    sizes = [end - start for start, end in itertools.pairwise(OFFSETS)]
    context.kv_layer_groups_manager_ = SimpleNamespace(
        kernel_groups=[SimpleNamespace(dtype=torch.uint8, size=size) for size in sizes],
        object_groups=[
            SimpleNamespace(kernel_group_indices=[0]), SimpleNamespace(kernel_group_indices=[1, 2])
        ],
        get_attn_desc=lambda: SimpleNamespace(is_full_attention=lambda _: full),
    )  # fmt: skip
    context.lmcache_tokens_per_chunk = 16
    context.get_kv_buffer_shape = lambda _, group: (sizes[group],)
    return context


def chunk(size=128):
    raw = torch.randint(0, 256, (size + 32,)).byte()  # its memory may be larger
    return SimpleNamespace(
        raw_tensor=raw, data_ptr=raw.data_ptr(), get_size=lambda: size, parent=lambda: None
    )


def test_layers_lie_in_an_object_as_in_the_buffer_for_staging():
    context, chunks = engine(), [chunk() for _ in range(OBJECTS)]
    ours = InPlace(context, chunks, 1)
    for number, one in enumerate(chunks):
        object_group_transfer.lmcache_memcpy_async_h2d(
            one, context.get_temp_object_group_buffer(number, 1)
        )
        for kernel_group in (1, 2):
            theirs = context.get_temp_kernel_group_buffer(number, kernel_group)
            part = ours.get_temp_kernel_group_buffer(number, kernel_group)
            assert torch.equal(part, theirs)
            assert 0 <= part.data_ptr() - one.data_ptr < 128


@pytest.mark.parametrize(
    ("chunks", "full", "fits"),
    [
        ([chunk(), chunk()], True, True),
        ([chunk(), None], True, False),
        ([chunk(), SimpleNamespace(raw_tensor=None)], True, False),
        ([chunk(), chunk(96)], True, False),
        ([chunk(), chunk()], False, False),
    ],
)
def test_other_objects_are_staged_as_before(chunks, full, fits):
    """Those that are absent, elsewhere or of another size, and those of a sliding window."""
    assert InPlace.fits(engine(full=full), chunks, 1) is fits


def test_an_object_is_not_copied_to_itself(restored):
    restored(mp_mem_kernels, "_transfer_per_layer_fused")
    restored(lmcache_driven_transfer, "transfer_kv_per_object_group")
    restored(object_group_transfer, "lmcache_memcpy_async_h2d", "lmcache_memcpy_async_d2h")
    copy_once()
    context, one = engine(), chunk()
    buffer = context.get_temp_object_group_buffer(0, 1)
    object_group_transfer.lmcache_memcpy_async_h2d(one, buffer)
    assert torch.equal(buffer, one.raw_tensor[:128])
    own = InPlace(context, [one], 1).get_temp_object_group_buffer(0, 1)
    one.get_size = None  # a copy would look at it
    object_group_transfer.lmcache_memcpy_async_h2d(one, own)
    object_group_transfer.lmcache_memcpy_async_d2h(own, one)
