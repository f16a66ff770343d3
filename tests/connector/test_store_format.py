"""What goes into the remote store and what is refused: B1, B20, and LMCache's own client."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest
import torch
from lmcache.v1 import protocol
from lmcache.v1.memory_allocators.buffer_allocator import BufferAllocator
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat
from pdkit_connector.connector import require_plain_redis
from pdkit_connector.errors import UnsupportedSetting
from pdkit_connector.fixes import (
    b01_metadata_packing,
    b20_kv_groups,
)
from pdkit_connector.registry import FixState, Setting, apply_fix

NO_ENGINE = Setting()
LAYER = torch.Size((4, 2, 16))
CHUNK = torch.Size((2, 3, 4, 16))
OTHER = torch.Size((2, 1, 4, 8))
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture
def groups(restored, monkeypatch):
    """Return a function that sets the number of groups; what fixes replace is put back after."""
    restored(protocol.RemoteMetadata, "serialize", "serialize_into")
    monkeypatch.setattr(
        protocol.RemoteMetadata, "deserialize", staticmethod(protocol.RemoteMetadata.deserialize)
    )
    restored(protocol, "REMOTE_METADATA_FMT", "REMOTE_METADATA_BYTES")
    return protocol.init_remote_metadata_info


def chunk(shapes: list[torch.Size], dtypes: list, fmt=MemoryFormat.KV_2LTD):
    return protocol.RemoteMetadata(99, shapes, dtypes, fmt)


def compressed(length: int = 99):
    obj = BytesBufferMemoryObj(bytes(length))
    return chunk([obj.get_shape()], [], obj.get_memory_format())


def packed_both_ways(metadata) -> bytes:
    into = bytearray(protocol.get_remote_metadata_bytes())
    metadata.serialize_into(into)
    assert bytes(into) == metadata.serialize()
    return bytes(into)


# B1


def test_b1_is_needed_once_and_leaves_the_groups_alone(groups):
    groups(3)
    before = protocol.REMOTE_METADATA_FMT
    assert apply_fix(b01_metadata_packing.FIX, NO_ENGINE).state is FixState.APPLIED
    assert apply_fix(b01_metadata_packing.FIX, NO_ENGINE).state is FixState.NOT_NEEDED
    assert before == protocol.REMOTE_METADATA_FMT


@pytest.mark.parametrize(
    ("count", "metadata"),
    [
        (1, chunk([CHUNK], [BF16])),
        (1, chunk([LAYER], [BF16], MemoryFormat.KV_T2D)),
        (2, chunk([CHUNK, OTHER], [BF16, FP8])),
    ],
)
def test_b1_changes_no_byte_that_was_right(groups, count, metadata):
    groups(count)
    before = packed_both_ways(metadata)
    b01_metadata_packing.apply(NO_ENGINE)
    assert packed_both_ways(metadata) == before
    assert protocol.RemoteMetadata.deserialize(before) == metadata


@pytest.mark.parametrize("count", [1, 2, 5])
def test_b1_never_invents_a_dtype(groups, count):
    groups(count)
    b01_metadata_packing.apply(NO_ENGINE)
    packed = packed_both_ways(compressed())
    length, fmt, *records = struct.unpack("i" * (2 + 5 * count), packed)
    assert (length, fmt) == (99, MemoryFormat.BINARY_BUFFER.value)
    assert records == [0, 99, 0, 0, 0, *[0] * 5 * (count - 1)]
    read = protocol.RemoteMetadata.deserialize(packed)
    assert (read.shapes, read.dtypes) == ([torch.Size((99, 0, 0, 0))], [None])


def test_an_engine_without_b1_reads_compressed_bytes_of_one_with_it(groups):
    groups(2)
    unfixed = protocol.RemoteMetadata.deserialize
    b01_metadata_packing.apply(NO_ENGINE)
    read = unfixed(compressed().serialize())
    obj = BufferAllocator().allocate(read.shapes, read.dtypes, read.fmt)
    assert len(obj.byte_array) == 99


def test_b1_reads_what_an_engine_wrote_that_filled_in_a_dtype(groups):
    groups(1)
    guessed = chunk([torch.Size((99, 0, 0, 0))], [BF16], MemoryFormat.BINARY_BUFFER).serialize()
    b01_metadata_packing.apply(NO_ENGINE)
    read = protocol.RemoteMetadata.deserialize(guessed)
    assert (read.length, read.fmt) == (99, MemoryFormat.BINARY_BUFFER)
    obj = BufferAllocator().allocate(read.shapes, read.dtypes, read.fmt)
    assert len(obj.byte_array) == 99


def test_b1_replaces_a_dtype_that_the_installed_code_fills_in(groups, monkeypatch):
    """The pair of images that ran with such a patch gets the same bytes as every other pair."""
    prepare = protocol.RemoteMetadata._prepare_params

    def filling(self):
        dtypes = self.dtypes + [BF16] * (len(self.shapes) - len(self.dtypes))
        return prepare(chunk(self.shapes, dtypes, self.fmt))

    monkeypatch.setattr(protocol.RemoteMetadata, "_prepare_params", filling)
    monkeypatch.setattr(BytesBufferMemoryObj, "get_dtypes", lambda _self: [])
    outcome = apply_fix(b01_metadata_packing.FIX, NO_ENGINE)
    assert outcome.state is FixState.APPLIED
    assert "bfloat16" in outcome.evidence
    groups(1)
    assert protocol.RemoteMetadata.deserialize(compressed().serialize()).dtypes == [None]


def test_b1_drops_only_empty_records_at_the_end(groups):
    groups(3)
    b01_metadata_packing.apply(NO_ENGINE)
    empty = torch.Size((0, 0, 0, 0))
    raw = struct.pack("i" * 17, 99, 1, 3, *CHUNK, 0, *empty, 7, *OTHER)
    assert len(protocol.RemoteMetadata.deserialize(raw).shapes) == 3
    raw = struct.pack("i" * 17, 99, 1, 3, *CHUNK, 0, *empty, 0, *OTHER)
    assert len(protocol.RemoteMetadata.deserialize(raw).shapes) == 3
    raw = struct.pack("i" * 17, 99, 1, *[0] * 15)
    assert len(protocol.RemoteMetadata.deserialize(raw).shapes) == 1
    raw = struct.pack("i" * 17, 99, 1, 3, *CHUNK, 3, *empty, 0, *empty)
    assert protocol.RemoteMetadata.deserialize(raw).dtypes == [BF16, BF16]


def test_b1_still_refuses_invalid_metadata(groups):
    groups(1)
    b01_metadata_packing.apply(NO_ENGINE)
    with pytest.raises(ValueError, match="zip"):
        chunk([CHUNK], [BF16, BF16]).serialize()
    with pytest.raises(struct.error):
        chunk([CHUNK, CHUNK], [BF16, BF16]).serialize()
    with pytest.raises(struct.error):
        protocol.RemoteMetadata.deserialize(b"short")


# LMCache's own client: one plain Redis


def engine(**settings) -> Setting:
    facts = {
        "remote_url": "redis://:secret@h:1/0", "remote_serde": "naive",
        "enable_async_loading": False, "use_layerwise": "false",
    }  # fmt: skip
    values = {f"lmcache.{name}": value for name, value in {**facts, **settings}.items()}
    return Setting(engine=True, extra_config=values)


def test_one_plain_redis_is_supported():
    require_plain_redis(engine())
    require_plain_redis(engine(remote_url=None, use_layerwise=True))
    require_plain_redis(NO_ENGINE)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("remote_url", "redis-sentinel://:secret@h:1/m", "redis-sentinel://"),
        ("remote_url", "redis-cluster://:secret@h:1", "redis-cluster://"),
        ("remote_url", "rediss://:secret@h:1", "rediss://"),
        ("remote_url", "unix://:secret@/run/redis.sock", "unix://"),
        ("remote_url", "lm://h:1", "lm://"),
        ("remote_url", ":secret@h", "no scheme"),
        ("use_layerwise", True, "true"),
        ("use_layerwise", "True", "true"),
        ("enable_async_loading", "true", "true"),
        ("remote_serde", "cachegen", "cachegen"),
        ("remote_serde", "kivi", "kivi"),
    ],
)
def test_anything_else_of_lmcaches_client_is_refused_by_name(name, value, shown):
    with pytest.raises(UnsupportedSetting, match=f"{name}: {shown}") as caught:
        require_plain_redis(engine(**{name: value}))
    assert "leave redis.client out of deploy.yaml" in str(caught.value)
    assert "secret" not in str(caught.value)


# B20


def full(heads: int = 2):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=8, dtype=BF16)


def sliding():
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=BF16, sliding_window=32
    )


def references():
    from vllm.v1.kv_cache_interface import RSWASpec

    return RSWASpec(block_size=16, num_kv_heads=2, head_size=8, dtype=BF16, rswa_window=32)


def mamba():
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(BF16,))


def planned(**layers):
    """Return the groups that vLLM makes for a connector that it gives one block table."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    plan = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        kv_transfer_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        cache_config=SimpleNamespace(hisparse_config=None),
    )
    return get_kv_cache_groups(plan, dict(layers))


def serving(groups) -> Setting:
    specs = tuple(type(group.kv_cache_spec).__name__ for group in groups)
    return Setting(
        engine=True,
        kv_cache_specs=specs,
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
    )


def state(groups) -> FixState:
    return apply_fix(b20_kv_groups.FIX, serving(groups)).state


def test_vllm_counts_the_connector_among_those_with_one_block_table():
    from pdkit_connector.connector import PatchedLMCacheConnector
    from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma

    assert not supports_hma(PatchedLMCacheConnector)


def test_b20_lets_full_attention_run_and_windows_that_vllm_merged_with_it():
    assert state(planned(a=full(), b=full())) is FixState.NOT_APPLICABLE
    assert state(planned(a=full(), b=sliding())) is FixState.NOT_APPLICABLE
    assert state(planned(a=full(), b=full(heads=4))) is FixState.NOT_APPLICABLE


def test_vllm_refuses_mamba_beside_attention_itself():
    with pytest.raises(ValueError, match="one unified type"):
        planned(a=full(), b=mamba())


def test_b20_refuses_a_group_with_blocks_that_are_not_tokens():
    for spec in (sliding(), references(), mamba()):
        with pytest.raises(UnsupportedSetting, match=f"holds {type(spec).__name__}"):
            state(planned(a=spec, b=spec))


def test_b20_refuses_several_groups_and_none():
    two = [*planned(a=full()), *planned(b=full(heads=4))]
    with pytest.raises(UnsupportedSetting, match="2 KV cache groups"):
        state(two)
    with pytest.raises(UnsupportedSetting, match="0 KV cache groups"):
        state([])


def test_b20_checks_every_layer_of_a_group():
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs

    def group(**layers):
        return [KVCacheGroupSpec(list(layers), UniformTypeKVCacheSpecs(16, layers))]

    assert state(group(a=full(), b=full(heads=4))) is FixState.NOT_APPLICABLE
    with pytest.raises(UnsupportedSetting, match="SlidingWindowSpec"):
        state(group(a=full(), b=sliding()))


def test_b20_only_reports_without_an_engine():
    assert apply_fix(b20_kv_groups.FIX, NO_ENGINE).state is FixState.GUARDED


def test_vllm_holds_its_null_block_where_a_window_has_passed():
    """The table that the adapter would take for KV: B20's reason, seen in vLLM's own manager."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    null, last = SimpleNamespace(block_id=0), SimpleNamespace(block_id=7)
    pool = SimpleNamespace(
        null_block=null, hash_block_size=16, get_cached_block=lambda _hash, _groups: [last]
    )
    found = SlidingWindowManager.find_longest_cache_hit(
        block_hashes=[b"1", b"2", b"3", b"4"],
        max_length=64,
        kv_cache_group_ids=[0],
        block_pool=pool,
        kv_cache_spec=sliding(),
        drop_eagle_block=False,
        alignment_tokens=16,
    )
    tables = found[0]
    assert [block.block_id for block in tables[0]] == [0, 0, 7, 7]
