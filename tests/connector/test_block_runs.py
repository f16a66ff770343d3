"""Runs of blocks between engines and LMCache's server: the same bytes as LMCache's own copies."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from lmcache.v1.platform.torch_ops import mp_mem_kernels
from pdkit_connector.block_runs import Run, copy_by_runs, runs, transfer_blocks

BLOCKS, LAYERS, HEADS, SIZE, HEAD = 40, 3, 2, 4, 6
PER_CHUNK = 4
THEIRS = mp_mem_kernels._transfer_per_layer_fused


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    monkeypatch.setattr(mp_mem_kernels, "_transfer_per_layer_fused", THEIRS)


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


def test_it_takes_the_place_of_lmcaches():
    assert copy_by_runs()
    layers, objects = layers_of(1, hnd=True, split=False), objects_of(2, 1)
    form = SimpleNamespace(is_hnd=True)
    mp_mem_kernels._transfer_per_layer_fused(
        layers, objects, [3, 4], 2, PER_CHUNK, SIZE, form, True, 0
    )
    wanted = layers[0][3:5].transpose(1, 2).reshape(2 * SIZE, HEADS * HEAD)
    assert torch.equal(objects[0][0, : 2 * SIZE], wanted)


@pytest.mark.parametrize("other", [None, Run])
def test_another_lmcache_stays_as_it_is(monkeypatch, other):
    monkeypatch.setattr(mp_mem_kernels, "_transfer_per_layer_fused", other)
    assert not copy_by_runs()
    assert mp_mem_kernels._transfer_per_layer_fused is other
