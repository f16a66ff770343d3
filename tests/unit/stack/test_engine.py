"""Arguments, environment and LMCache file of one engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import yaml

from deploy.config.engine_inputs import refused_variable
from deploy.config.kinds import Kind
from deploy.config.model import Model
from deploy.config.shape import ModelShape, OtherLayers
from deploy.config.vendors import VENDORS
from deploy.connector.pdkit_connector.identity.model_files import DIGEST_VARIABLE, files_digest
from deploy.errors import ConfigError
from deploy.planning.engines import ENGINE_ROLES
from deploy.workflows.prepare import Prepared
from tests.unit.stack.cases import FOLDER_MODEL
from tests.unit.stack.conftest import Case

# Users may give these another value; the page on configuration says so.
THEIRS = {
    "OMP_NUM_THREADS", "PYTHONPATH", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN_PATH",
    "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_SERVICE_NAME",
    "OTEL_RESOURCE_ATTRIBUTES", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE",
}  # fmt: skip
Make = Callable[..., Prepared]
MakeCase = Callable[..., Case]


def test_further_arguments_come_last_so_that_they_win(prepared: Make) -> None:
    argv = prepared(engine={"args": ["--seed", "1"]}).stack.service("producer-0").argv
    assert argv[-2:] == ("--seed", "1")


def planned_rows(made: Prepared) -> dict[str, str]:
    argv = made.stack.service("producer-0").argv
    transfer = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    rows: dict[str, str] = transfer["kv_connector_extra_config"]["pdkit.planned"]
    return rows


@pytest.mark.parametrize(
    ("versions", "rows"),
    [
        (("0.32.0", "0.5.6"), {"vllm": "0.32.0", "lmcache": "0.5.6"}),
        # As engines report it.
        (("0.32.0+cpu", "0.5.6"), {"vllm": "0.32.0", "lmcache": "0.5.6"}),
        ((None, "0.5.6"), {"lmcache": "0.5.6"}),
        (None, {}),
    ],
)
def test_engines_know_which_versions_were_planned(
    prepared: Make, versions: tuple[str, str] | None, rows: dict[str, str]
) -> None:
    found = planned_rows(prepared(versions=versions))
    assert {name: found[name] for name in ("vllm", "lmcache") if name in found} == rows


def test_of_an_image_no_versions_are_planned(contained: MakeCase) -> None:
    """Its content is in the identity; what its name says of versions may be wrong."""
    assert not planned_rows(contained().prepared).keys() & {"vllm", "lmcache"}


def test_further_environment_reaches_engines_only(prepared: Make) -> None:
    stack = prepared(engine={"env": {"VLLM_LOGGING_LEVEL": "DEBUG"}}).stack
    assert stack.service("consumer-0").env["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert "VLLM_LOGGING_LEVEL" not in stack.service("router").env
    assert "VLLM_LOGGING_LEVEL" not in stack.service("redis").env


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"env": {"PYTHONHASHSEED": "random"}}, "engine.env: PYTHONHASHSEED"),
        ({"args": ["--port", "9"]}, "engine.args: '--port'"),
        ({"args": ["--max_model_len=9"]}, "engine.args: '--max-model-len'"),
        ({"args": ["--seed", "1", "--kv-transfer-config", "{}"]}, "--kv-transfer-config"),
    ],
)
def test_settings_of_the_plan_cannot_be_overridden(
    prepared: Make, engine: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(engine=engine)
    assert words in caught.value.message
    assert caught.value.hint


def test_the_connector_cannot_be_lost_by_accident(prepared: Make) -> None:
    usual = prepared().stack.service("producer-0").env["PYTHONPATH"]
    stack = prepared(engine={"env": {"PYTHONPATH": "/mine"}}).stack
    assert stack.service("producer-0").env["PYTHONPATH"] == f"{usual}:/mine"


def test_every_variable_that_the_kit_sets_is_refused_or_the_users(
    cases: list[Case], prepared: Make
) -> None:
    """A variable that is added to engines is decided here: refused, or in the page's list."""
    stacks = [case.prepared.stack for case in cases if "engine" not in case.fields]
    traced = {"tracing": {"otlp_endpoint": "http://192.0.2.1:4318"}}
    more = [{"vendor": vendor, "machine": None, "model": "owner/name"} for vendor in VENDORS]
    stacks += [prepared(**one, **traced, hub_cache="/h", hf_token_file="/t").stack for one in more]
    stacks.append(prepared(connector="lmcache-mp").stack)
    engines = [
        service for stack in stacks for service in stack.services if service.role in ENGINE_ROLES
    ]
    names = {name for engine in engines for name in engine.env}
    assert len(names) > 25
    assert {name for name in names if not refused_variable(name)} == THEIRS


def test_the_context_is_said_only_where_it_is_known(prepared: Make) -> None:
    known = prepared().stack.service("producer-0").argv
    unknown = prepared(model="owner/name").stack.service("producer-0").argv
    assert "--max-model-len" in known
    assert "--max-model-len" not in unknown


@pytest.mark.parametrize("runtime", ["process", "compose"])
def test_engines_are_held_to_the_files_of_a_model_folder(prepared: Make, runtime: str) -> None:
    files = (("config.json", 600, 1), ("model.safetensors", 6000, 2))
    model = replace(FOLDER_MODEL, files=files, version=files_digest(files))
    held = prepared(given=model, runtime=runtime).stack
    for name in ("producer-0", "consumer-0"):
        assert held.service(name).env[DIGEST_VARIABLE] == model.version
        assert DIGEST_VARIABLE not in prepared().stack.service(name).env
    assert DIGEST_VARIABLE not in held.service("router").env


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_gpu_engines_are_held_to_the_proved_paths(contained: MakeCase, vendor: str) -> None:
    stack = contained(vendor=vendor).prepared.stack
    for engine in (stack.service("producer-0"), stack.service("consumer-0")):
        assert engine.env["VLLM_USE_V2_MODEL_RUNNER"] == "0"
        assert "--no-async-scheduling" in engine.argv


def test_a_setting_that_lifts_a_pin_wins(contained: MakeCase) -> None:
    first, second = VENDORS["cuda"].pins
    other_runner = contained(vendor="cuda", **yaml.safe_load(first.lift)).prepared.stack
    assert other_runner.service("consumer-0").env["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    asynchronous = contained(vendor="cuda", **yaml.safe_load(second.lift)).prepared.stack
    assert asynchronous.service("consumer-0").argv[-2:] == (
        "--no-async-scheduling", "--async-scheduling",
    )  # fmt: skip


@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_the_lmcache_file_has_the_settings_of_the_plan(prepared: Make, role: str) -> None:
    stack = prepared(lmcache={"staging_gib": 2}, save_decode_cache=True, port=9000).stack
    settings = yaml.safe_load(stack.service(f"{role}-0").files[0].text)
    assert settings["storage_plugins"] == ["pdkit"]
    url = settings["extra_config"]["pdkit.url"]
    socket = url.removeprefix("unix://:@{redis_password}@")
    assert socket.endswith("/redis.sock")
    assert f'unixsocket "{socket}"\nunixsocketperm 600\n' in stack.service("redis").files[0].text
    assert "remote_url" not in settings, "KV would be stored twice"
    assert settings["max_local_cpu_size"] == 2
    assert settings["save_decode_cache"] is True
    assert settings["local_cpu"] is False, "a hit must be a hit in the shared store"
    assert settings["save_unfull_chunk"] is False


def test_a_mac_is_by_the_stacks_own_secret(prepared: Make) -> None:
    plain, signed = prepared().stack, prepared(redis={"integrity": "mac"}).stack
    assert "kv_key" not in plain.secrets and "kv_key" in signed.secrets
    for name in ("producer-0", "consumer-0"):
        assert "mac_key_file" not in plain.service(name).files[0].text
        settings = yaml.safe_load(signed.service(name).files[0].text)
        assert settings["extra_config"]["pdkit.mac_key_file"].endswith("/secrets/kv_key")


def test_lmcaches_own_connector_can_be_chosen(prepared: Make) -> None:
    stack = prepared(redis={"client": "lmcache"}, port=9000).stack
    settings = yaml.safe_load(stack.service("consumer-0").files[0].text)
    assert settings["remote_url"] == "redis://:@{redis_password}@127.0.0.1:9001"
    assert not settings.keys() & {"storage_plugins", "extra_config"}


def test_keys_of_other_stacks_and_of_other_kinds_of_kv_have_another_namespace(
    prepared: Make,
) -> None:
    def namespace(**more: object) -> str:
        stack = prepared(**more).stack
        found = {
            yaml.safe_load(service.files[0].text)["extra_config"]["pdkit.namespace"]
            for service in stack.services
            if service.role in ("producer", "consumer")
        }
        assert len(found) == 1, "a consumer reads what a producer stores"
        return str(found.pop())

    kinds = [{}, {"name": "other"}, {"layerwise": True}, {"lmcache": {"chunk_size": 512}}]
    assert len({namespace(**kind) for kind in kinds}) == len(kinds)


def argv_of(prepared: Make, model: Model, **fields: object) -> tuple[str, ...]:
    return prepared(given=model, machine=None, **fields).stack.service("producer-0").argv


MLA = replace(
    FOLDER_MODEL,
    kind=Kind(mla=True),
    shape=ModelShape(61, 128, 128, 576, 163840, 576),
)
INDEXER = OtherLayers(61, 1, 132, item_bytes=1)
SPARSE_MLA = replace(MLA, shape=ModelShape(61, 128, 128, 576, 163840, 576, (INDEXER,)))


def test_vllm_chooses_the_blocks_of_latent_attention_on_cuda(prepared: Make) -> None:
    """Sparse MLA has no back end for blocks of 16 there, and dense MLA loses the fast ones."""
    assert "--block-size" not in argv_of(prepared, MLA, vendor="cuda")
    through = {"vendor": "cuda", "connector": "lmcache-mp"}
    assert "--block-size" not in argv_of(prepared, SPARSE_MLA, **through)
    asked = argv_of(prepared, MLA, vendor="cuda", engine={"block_size": 64})
    assert asked[asked.index("--block-size") + 1] == "64"
    for vendor, model in (("rocm", MLA), ("cuda", FOLDER_MODEL)):
        assert "--block-size" in argv_of(prepared, model, vendor=vendor)


def test_a_window_longer_than_the_context_is_switched_off(prepared: Make) -> None:
    """Else vLLM counts its layers as windows, whose KV the connector refuses."""
    for window, off in ((262144, True), (131072, True), (None, False)):
        model = replace(FOLDER_MODEL, kind=Kind(window=window))
        assert ("--disable-sliding-window" in argv_of(prepared, model, vendor="cuda")) is off
