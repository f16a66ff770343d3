"""Each fix against the installed LMCache: needed before, gone after, and harmless elsewhere."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from lmcache.utils import CacheEngineKey, EngineType
from lmcache.v1 import cache_engine, gpu_connector
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase, TokenDatabase
from own_process import run_python
from pdkit_connector import __main__ as command
from pdkit_connector.errors import ConnectorError, UnsupportedSetting
from pdkit_connector.fixes import b17_cpu_mover as b17
from pdkit_connector.in_engine.cpu_mover import BlockMover, LayerwiseBlockMover
from pdkit_connector.in_engine.layer_steps import idle_engine
from pdkit_connector.registry import FixState, Registry, Setting, apply_fix, discover

FIXES = {fix.id: fix for fix in discover()}
NO_ENGINE = Setting()
BLOCKS_OF_32 = Setting(block_size=32)
LAYERWISE = ("B2b", "B2c", "B2d", "B2e")


@pytest.fixture
def patched(restored):
    """Return apply_fix by id, with everything it replaces put back after the test."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    restored(LMCacheEngine, "store_layer", "retrieve_layer")
    restored(LMCacheConnectorV1Impl, "get_block_ids_with_load_errors")
    restored(LMCacheConnectorV1Impl, "start_load_kv", "save_kv_layer")
    restored(gpu_connector, "CreateGPUConnector")
    restored(cache_engine, "assert_layerwise_gpu_connector")
    restored(TokenDatabase, "_make_key_by_hash")
    return lambda fix_id, setting=NO_ENGINE: apply_fix(FIXES[fix_id], setting)


@pytest.mark.parametrize("fix_id", [*LAYERWISE, "B16c", "B17", "B18"])
def test_a_fix_is_needed_before_it_is_applied_and_not_after(patched, fix_id):
    assert patched(fix_id).state is FixState.APPLIED
    assert patched(fix_id).state is FixState.NOT_NEEDED


@pytest.mark.parametrize("fix_id", [*LAYERWISE, "B16c", "B18"])
def test_layerwise_bugs_do_not_apply_to_plain_mode(patched, monkeypatch, fix_id):
    monkeypatch.setattr(Setting, "lmcache_value", lambda *_: False)
    assert patched(fix_id).state is FixState.NOT_APPLICABLE


@pytest.mark.parametrize("healthy", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_layerwise_generators_keep_the_adapters_steps(patched, healthy, frozen):
    for fix_id in (*LAYERWISE, "B18"):
        patched(fix_id)
    engine = idle_engine(healthy=healthy, frozen=frozen)
    mapping = {"slot_mapping": torch.arange(8)}
    assert len(list(engine.store_layer([1] * 8, **mapping))) == engine.num_layers + 1
    steps = list(engine.retrieve_layer([1] * 8, torch.ones(8, dtype=torch.bool), **mapping))
    assert len(steps) == engine.num_layers + 2
    assert steps[-1].tolist() == [False] * 8


def test_a_miss_raises_without_the_fixes():
    with pytest.raises(UnboundLocalError):
        list(idle_engine().retrieve_layer([1] * 8))


def test_other_errors_of_a_retrieve_are_not_taken_for_a_miss(patched, monkeypatch):
    def raising(self, tokens, mask=None, **kwargs):
        yield
        raise UnboundLocalError("something else")

    monkeypatch.setattr(LMCacheEngine, "retrieve_layer", raising)
    FIXES["B2d"].apply(Setting())
    with pytest.raises(UnboundLocalError, match="something else"):
        list(idle_engine().retrieve_layer([1] * 8))


def retriever(values):
    """Return a retrieve_layer that yields `values`, raising those that are exceptions."""

    def retrieve_layer(self, tokens, mask=None, **kwargs):
        for value in values:
            if isinstance(value, Exception):
                raise value
            yield value

    return retrieve_layer


@pytest.mark.parametrize(
    ("values", "unfilled"),
    [
        ([None] * 4 + [torch.ones(8, dtype=torch.bool)], []),
        ([None] * 4 + [torch.arange(8) < 4], [14, 15, 16, 17]),
        ([None, RuntimeError("lost")], [12, 13, 14, 15, 16, 17]),
        ([None, None], [12, 13, 14, 15, 16, 17]),
    ],
)
def test_slots_that_a_layerwise_load_leaves_unfilled_are_reported(
    patched, monkeypatch, values, unfilled
):
    monkeypatch.setattr(LMCacheEngine, "retrieve_layer", retriever(values))
    FIXES["B18"].apply(Setting())
    engine = idle_engine()
    steps = list(
        engine.retrieve_layer(
            [1] * 8,
            torch.ones(8, dtype=torch.bool),
            slot_mapping=torch.arange(10, 18),
            vllm_cached_tokens=2,
        )
    )
    assert len(steps) == engine.num_layers + 2
    assert engine.__dict__.get("_pdkit_unfilled_slots", []) == unfilled


def metadata(**more):
    facts = {
        "model_name": "m",
        "world_size": 1,
        "local_world_size": 1,
        "worker_id": 0,
        "local_worker_id": 0,
        "kv_dtype": torch.bfloat16,
        "kv_shape": (3, 2, 256, 2, 32),
    }
    return LMCacheMetadata(**{**facts, **more})


def make_mover(setting=BLOCKS_OF_32, facts=None, **config):
    return b17.make_mover(LMCacheEngineConfig.from_defaults(**config), facts or metadata(), setting)


@pytest.mark.parametrize(("layerwise", "kind"), [(False, BlockMover), (True, LayerwiseBlockMover)])
def test_lmcache_gets_the_mover_it_asks_for(patched, layerwise, kind):
    assert patched("B17", Setting(block_size=32)).state is FixState.APPLIED
    config = LMCacheEngineConfig.from_defaults(use_layerwise=layerwise)
    mover = gpu_connector.CreateGPUConnector(config, metadata(), EngineType.VLLM)
    assert type(mover) is kind
    assert mover.geometry.block_bytes == 2 * 32 * 2 * 32 * 2


def test_the_layerwise_check_still_refuses_strangers(patched):
    patched("B17")
    cache_engine.assert_layerwise_gpu_connector(make_mover(use_layerwise=True))
    with pytest.raises(AssertionError):
        cache_engine.assert_layerwise_gpu_connector(make_mover())


def test_a_chunk_that_cuts_blocks_is_refused_with_both_numbers():
    with pytest.raises(UnsupportedSetting, match=r"chunk_size 256 .* block size 96"):
        make_mover(Setting(block_size=96))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"facts": metadata(use_mla=True)}, "MLA"),
        ({"save_unfull_chunk": True}, "partial chunk"),
        ({"remote_serde": "cachegen"}, "cachegen"),
        ({"setting": Setting(block_size=32, kv_cache_specs=("MambaSpec",))}, "MambaSpec"),
        ({"setting": Setting(block_size=32, kv_cache_specs=("FullAttentionSpec",) * 2)}, "groups"),
    ],
)
def test_settings_that_need_partial_blocks_are_refused(change, message):
    with pytest.raises(UnsupportedSetting, match=message):
        make_mover(**change)
    make_mover(Setting(block_size=32, kv_cache_specs=("FullAttentionSpec",)))


@pytest.mark.parametrize("block_size", [32, 96, 512])
def test_the_fix_applies_at_any_block_size(patched, block_size):
    assert patched("B17", Setting(block_size=block_size)).state is FixState.APPLIED


def test_the_mover_is_for_cpus_only(patched):
    assert patched("B17", Setting(device_type="cuda")).state is FixState.NOT_APPLICABLE
    assert patched("B17", Setting(device_type="cpu")).state is FixState.APPLIED


def test_an_unsupported_configuration_is_not_blamed_on_the_fix(patched):
    with pytest.raises(UnsupportedSetting, match="MambaSpec"):
        patched("B17", Setting(block_size=32, kv_cache_specs=("MambaSpec",)))


def test_kv_tensors_must_come_in_layer_order(patched):
    patched("B17", BLOCKS_OF_32)
    mover = gpu_connector.CreateGPUConnector(
        LMCacheEngineConfig.from_defaults(), metadata(), EngineType.VLLM
    )
    kv = {
        f"model.layers.{i}.attn": torch.zeros(4, 2, 32, 64, dtype=torch.bfloat16)
        for i in (0, 1, 10)
    }
    b17.check_kv_caches(kv)
    assert mover.kvcaches is not None
    with pytest.raises(UnsupportedSetting, match="layer order"):
        b17.check_kv_caches(dict(reversed(kv.items())))
    with pytest.raises(UnsupportedSetting, match="2 layers"):
        b17.check_kv_caches(dict(list(kv.items())[:2]))


def keys_of(database) -> list[str]:
    found = database.process_tokens(list(range(512)))
    return [key.to_string() for _, _, key in found]


def test_keys_contain_the_layout_so_another_layout_misses(patched):
    database = ChunkedTokenDatabase(LMCacheEngineConfig.from_defaults(), metadata())
    plain = keys_of(database)
    setting = Setting(
        block_size=32, cache_dtype="auto", model_dtype=torch.bfloat16, head_size=32, engine=True
    )
    apply_fix(FIXES["B17"], setting)
    tag = b17.layout_tag(setting)
    tagged = keys_of(database)
    assert tagged == [f"{key}@kv_layout%{tag}" for key in plain]
    assert CacheEngineKey.from_string(tagged[0]).to_string() == tagged[0]
    other = Setting(
        block_size=64, cache_dtype="auto", model_dtype=torch.bfloat16, head_size=32, engine=True
    )
    assert b17.layout_tag(other) != tag


@pytest.mark.parametrize("changed", ["_get_attn_isa", "__version__"])
def test_the_layout_follows_the_instruction_set_and_the_release(monkeypatch, changed):
    import vllm
    from vllm.v1.attention.backends import cpu_attn

    setting = Setting(
        block_size=32, cache_dtype="auto", model_dtype=torch.bfloat16, head_size=32, engine=True
    )
    before = b17.layout_tag(setting)
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda *_: "other", raising=True)
    if changed == "__version__":
        monkeypatch.undo()
        monkeypatch.setattr(vllm, "__version__", "99.0+cpu")
    assert b17.layout_tag(setting) != before


def test_fixes_are_listed_without_lmcache():
    # -S leaves out site-packages, and LMCache with it.
    done = run_python("-S", "-m", "pdkit_connector", "--list")
    assert [item["id"] for item in json.loads(done.stdout)] == list(FIXES)


def test_the_command_names_lmcache_if_it_is_not_installed():
    # -S leaves out site-packages, and LMCache with it.
    done = run_python("-S", "-m", "pdkit_connector", code=3)
    assert "lmcache and torch not installed" in done.stderr
    assert not done.stdout


def test_the_command_fails_where_a_fix_fails(monkeypatch, capsys):
    broken = next(iter(FIXES.values()))
    monkeypatch.setattr(
        command, "discover", lambda: (SimpleNamespace(**{**vars(broken), "probe": None}),)
    )
    assert command.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fixes"][0]["state"] == "failed"


def connector_with(failed: bool, disabled: bool):
    from pdkit_connector.connector import PatchedLMCacheConnector

    connector = object.__new__(PatchedLMCacheConnector)
    manager = SimpleNamespace(_init_failed=failed, _init_failed_reason="Traceback\nOSError: x")
    connector._lmcache_engine = SimpleNamespace(_manager=manager)
    connector._registry = Registry((FIXES["B17"],))
    if disabled:
        connector._registry.apply(Setting(), {"B17"})
    return connector


def test_an_engine_that_can_never_share_kv_is_stopped(capfd):
    connector_with(failed=False, disabled=False)._require_lmcache("start")
    with pytest.raises(ConnectorError, match="never share KV: OSError: x"):
        connector_with(failed=True, disabled=False)._require_lmcache("start")
    connector_with(failed=True, disabled=True)._require_lmcache("start")


def test_the_native_adapter_is_refused():
    from pdkit_connector.connector import PatchedLMCacheConnector

    transfer = SimpleNamespace(get_from_extra_config=lambda name, _default: name == "use_native")
    with pytest.raises(UnsupportedSetting, match="use_native"):
        PatchedLMCacheConnector(SimpleNamespace(kv_transfer_config=transfer), None, None)
