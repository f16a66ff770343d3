"""Packed KV moves into the planes of ordinary memory objects, and what is untested is refused."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from lmcache.v1.memory_management import MemoryFormat
from pdkit_connector.errors import TransferRefused, UnsupportedSetting
from pdkit_connector.fixes import b06_packed_kv as b06
from pdkit_connector.in_engine.packed_kv import PackedLayout, PackedMover, common_layout
from pdkit_connector.registry import FixState, Need, Setting, apply_fix

LAYERS, BLOCKS, HEADS, SIZE, HEAD = 2, 5, 3, 4, 8
CARD = Setting(device_type="cuda", block_size=SIZE, head_size=HEAD)


def layer(layout: str, fill: bool = True) -> torch.Tensor:
    """Return `[blocks, heads, block_size, 2 x head_size]` with memory in the order of `layout`."""
    orders = {
        "NHD": (0, 2, 1, 3),
        "HND": (0, 1, 2, 3),
        "LHBNC": (1, 0, 2, 3),
        "tokens outermost": (2, 0, 1, 3),
    }
    shape = (BLOCKS, HEADS, SIZE, 2 * HEAD)
    order = orders[layout]
    tensor = (
        torch.rand([shape[axis] for axis in order]) + 1
        if fill
        else torch.zeros([shape[axis] for axis in order])
    )
    return tensor.permute([order.index(axis) for axis in range(4)])


class Rows:
    """A mover of rows: slot s of a layer is the s-th row of its memory."""

    store_stream = load_stream = gpu_buffer = kvcaches = None
    use_mla = False

    def __init__(self, hidden_dim_size, num_layers, use_mla=False):
        self.hidden_dim_size, self.num_layers, self.use_mla = hidden_dim_size, num_layers, use_mla

    def to_gpu(self, memory_obj, start, end, slot_mapping, vllm_cached_tokens=0):
        for number, memory in enumerate(self.kvcaches):
            rows = memory.view(-1, self.hidden_dim_size)
            kept = slice(max(vllm_cached_tokens - start, 0), end)
            rows[slot_mapping[kept]] = memory_obj.tensor[0, number, kept]

    def from_gpu(self, memory_obj, start, end, slot_mapping):
        for number, memory in enumerate(self.kvcaches):
            rows = memory.view(-1, self.hidden_dim_size)
            memory_obj.tensor[0, number, start:end] = rows[slot_mapping]


@pytest.fixture(autouse=True)
def no_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(b06, "_applied_for", [])


def mover(layers):
    return PackedMover(Rows(HEADS * HEAD, LAYERS), layers)


def memory_object(tokens, fmt=MemoryFormat.KV_2LTD, **more):
    tensor = torch.zeros(2, LAYERS, tokens, HEADS * HEAD, **more)
    return SimpleNamespace(tensor=tensor, metadata=SimpleNamespace(fmt=fmt))


SLOTS = torch.tensor([9, 10, 11, 4, 5, 6, 7, 17])


def by_slot(tensor):
    """Return `[slots, heads, 2 x head_size]`."""
    return tensor.transpose(1, 2).reshape(BLOCKS * SIZE, HEADS, 2 * HEAD)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_objects_hold_k_and_v_apart_as_for_every_layout(layout):
    kv = [layer(layout) for _ in range(LAYERS)]
    stored = memory_object(5)
    mover(kv).store(stored, 2, 7, {"slot_mapping": SLOTS})
    for number, tensor in enumerate(kv):
        wanted = by_slot(tensor)[SLOTS[2:7]]
        assert torch.equal(stored.tensor[0, number], wanted[..., :HEAD].reshape(5, -1))
        assert torch.equal(stored.tensor[1, number], wanted[..., HEAD:].reshape(5, -1))


@pytest.mark.parametrize("there", ["NHD", "HND"])
@pytest.mark.parametrize("here", ["NHD", "HND"])
@pytest.mark.parametrize("held", [0, 3, 8])
def test_kv_stored_from_one_layout_loads_into_another_without_overwriting_held_tokens(
    there, here, held
):
    sent = [layer(there) for _ in range(LAYERS)]
    got = [layer(here, fill=False) for _ in range(LAYERS)]
    stored = memory_object(8)
    mover(sent).store(stored, 0, 8, {"slot_mapping": SLOTS})
    target = SLOTS.flip(0)
    mover(got).load(stored, 0, 8, {"slot_mapping": target, "vllm_cached_tokens": held})
    for left, right in zip(sent, got, strict=True):
        assert torch.equal(by_slot(right)[target[held:]], by_slot(left)[SLOTS[held:]])
        rest = torch.ones(BLOCKS * SIZE, dtype=torch.bool)
        rest[target[held:]] = False
        assert not by_slot(right)[rest].any()


def test_a_token_without_a_slot_has_no_row():
    rows = PackedLayout.of(layer("NHD")).key_rows(torch.tensor([-1, 0]))
    assert (rows[:HEADS] + 1 < 0).all()
    assert rows[HEADS:].tolist() == [0, 2, 4]


@pytest.mark.parametrize("layout", ["LHBNC", "tokens outermost"])
def test_untested_layouts_are_refused(layout):
    with pytest.raises(UnsupportedSetting, match="VLLM_KV_CACHE_LAYOUT"):
        PackedLayout.of(layer(layout))


def test_blocks_with_other_layers_between_them_are_refused():
    pool = torch.zeros(BLOCKS, LAYERS, HEADS, SIZE, 2 * HEAD)
    with pytest.raises(UnsupportedSetting, match="whole layers apart"):
        PackedLayout.of(pool[:, 0])


def test_layers_beyond_32_bit_addresses_are_refused():
    shape = (2**14, 8, 256, 256)
    PackedLayout.of(torch.empty(shape, dtype=torch.uint8, device="meta"))
    with pytest.raises(UnsupportedSetting, match="32-bit"):
        PackedLayout.of(torch.empty(shape, dtype=torch.float16, device="meta"))


def test_layers_that_differ_are_refused():
    with pytest.raises(UnsupportedSetting, match="from layer to layer"):
        common_layout([layer("NHD"), layer("HND")])


@pytest.mark.parametrize(
    ("hidden", "layers", "message"),
    [(HEADS * HEAD * 2, LAYERS, "elements of K"), (HEADS * HEAD, 3, "KV of 2 layers")],
)
def test_kv_of_another_size_than_lmcaches_is_refused(hidden, layers, message):
    with pytest.raises(UnsupportedSetting, match=message):
        PackedMover(Rows(hidden, layers), [layer("HND")] * LAYERS)


def test_objects_that_do_not_fit_are_refused_and_nothing_moves():
    kv = [layer("HND", fill=False) for _ in range(LAYERS)]
    for wrong, message in [
        (memory_object(7), "memory object"),
        (memory_object(8, dtype=torch.float16), "memory object"),
        (memory_object(8, fmt=MemoryFormat.KV_MLA_FMT), "expected"),
    ]:
        wrong.tensor.fill_(1)
        with pytest.raises(TransferRefused, match=message):
            mover(kv).load(wrong, 0, 8, {"slot_mapping": SLOTS})
    with pytest.raises(TransferRefused, match="mapping of 8 slots"):
        mover(kv).load(memory_object(9), 0, 9, {"slot_mapping": SLOTS})
    assert not any(tensor.any() for tensor in kv)


class Fake(torch.Tensor):
    """A tensor that says it is on a card."""

    device = SimpleNamespace(type="cuda", index=0)


def on_card(layout="HND"):
    return {f"layers.{i}": layer(layout).as_subclass(Fake) for i in range(LAYERS)}


def checked(setting=CARD, kv=None):
    b06._applied_for[:] = [setting]
    b06.check_kv_caches(kv or on_card())


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_packed_kv_that_the_fix_serves_is_announced_as_untested(monkeypatch, layout):
    said = []
    logger = SimpleNamespace(warning=lambda text, *args: said.append(text % args))
    monkeypatch.setattr(b06, "get_logger", lambda: logger)
    checked(kv=on_card(layout))
    assert layout in said[0]
    assert "untested on hardware" in said[0]


@pytest.mark.parametrize("name", ["use_layerwise", "use_gpu_connector_v3", "enable_blending"])
def test_movers_that_the_fix_does_not_cover_are_refused_with_the_link(monkeypatch, name):
    monkeypatch.setattr(Setting, "lmcache_value", lambda _self, asked: asked == name)
    with pytest.raises(UnsupportedSetting, match=f"{name}.*issues/4463"):
        checked()


def test_blocks_arranged_by_the_attention_backend_are_refused():
    spec = SimpleNamespace(num_head_slots=2, state_content_bytes=None)
    config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    with pytest.raises(UnsupportedSetting, match="num_head_slots 2"):
        checked(Setting(device_type="cuda", kv_cache_config=config))


@pytest.mark.parametrize("change", [{"block_size": 2 * SIZE}, {"head_size": 2 * HEAD}])
def test_kv_of_another_shape_than_vllm_says_is_refused(change):
    with pytest.raises(UnsupportedSetting, match=r"in a vLLM|of a model"):
        checked(Setting(device_type="cuda", **change))


def test_other_kv_is_accepted():
    b06.check_kv_caches({"cpu": layer("LHBNC")})
    b06.check_kv_caches({"split": torch.zeros(2, 4, 4, 2, 8).as_subclass(Fake)})
    b06.check_kv_caches({"mla": torch.zeros(4, 4, 8).as_subclass(Fake)})


def test_kv_that_is_not_packed_takes_the_usual_path(monkeypatch):
    seen = []

    class Plain(Rows):
        def to_gpu(self, memory_obj, start, end, **_kwargs):
            seen.append(("load", memory_obj, start, end))

        def from_gpu(self, memory_obj, start, end, **_kwargs):
            seen.append(("store", memory_obj, start, end))

    monkeypatch.setattr(b06, "_mover_class", lambda: Plain)
    assert apply_fix(b06.FIX, CARD).state is FixState.APPLIED
    assert apply_fix(b06.FIX, CARD).state is FixState.NOT_NEEDED
    plain = Plain(HEADS * HEAD, LAYERS)
    plain.to_gpu("a", 0, 4, kvcaches=[torch.zeros(2, 4, 4, 2, 8)])
    plain.from_gpu("b", 4, 8, kvcaches=[torch.zeros(4, 4, 8)])
    assert seen == [("load", "a", 0, 4), ("store", "b", 4, 8)]


def test_the_fix_applies_to_gpus_only(monkeypatch):
    assert b06.probe(Setting(device_type="cpu")).need is Need.NOT_APPLICABLE
    monkeypatch.setattr(b06, "_mover_class", lambda: None)
    assert b06.probe(CARD).need is Need.NOT_APPLICABLE


def test_a_mover_that_supports_packed_kv_is_not_changed(monkeypatch):
    class Aware(Rows):
        def from_gpu(self, *_args, **_kwargs):
            return self.spec.is_fused_packed

    monkeypatch.setattr(b06, "_mover_class", lambda: Aware)
    assert b06.probe(CARD).need is Need.NOT_NEEDED
