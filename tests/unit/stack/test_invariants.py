"""What holds of every stack, whatever was asked for."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from deploy.config.spec import StackSpec
from deploy.planning.engines import ENGINE_ROLES
from deploy.stack.document import document_yaml, stack_document
from deploy.stack.layout import ENGINE_KEY, REDIS_PASSWORD
from deploy.stack.service import Service, Stack
from deploy.workflows.prepare import Prepared
from tests.golden_documents import read

Make = Callable[..., Prepared]


SPLITS: tuple[dict[str, Any], ...] = (
    *({"gpus": gpus} for gpus in range(1, 9)),
    *({"topology": form} for form in ("1p3d", "3p1d", "2p2d", "16p16d")),
    {"producers": 2, "consumers": 5},
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {"layerwise": True},
    {"save_decode_cache": True},
    {"layerwise": True, "save_decode_cache": True, "tp": 2},
    {"redis": {"shards": 3}},
    {"bind": "192.0.2.1", "allow_keyless": True, "port": 30000, "name": "other"},
    {"engine": {"block_size": 16, "args": ["--seed", "1"], "env": {"OMP_NUM_THREADS": "7"}}},
    {"lmcache": {"chunk_size": 512}, "model": "owner/name", "redis": {"memory_gib": 4}},
)
AGGREGATED: tuple[dict[str, Any], ...] = (
    {"topology": "2a+redis"},
    {"topology": "3a+redis", "layerwise": True, "save_decode_cache": True, "tp": 2},
)
COMBINATIONS = (
    *SPLITS,
    *AGGREGATED,
    *({**split, **option} for split in ({}, {"topology": "2p3d"}) for option in OPTIONS),
)


@pytest.fixture(scope="module", params=COMBINATIONS, ids=json.dumps)
def made(request: pytest.FixtureRequest, prepared: Make) -> Prepared:
    return prepared(**request.param)


def engines_of(stack: Stack) -> tuple[Service, ...]:
    return tuple(s for s in stack.services if s.role in ENGINE_ROLES)


def argument(service: Service, option: str) -> str:
    """Return the value of an option that occurs exactly once."""
    assert service.argv.count(option) == 1
    return service.argv[service.argv.index(option) + 1]


def lmcache(service: Service) -> dict[str, Any]:
    (file,) = service.files
    assert service.env["LMCACHE_CONFIG_FILE"] == file.path
    return dict(read(file.text))


def test_settings_that_keys_depend_on_are_equal_in_all_engines(made: Prepared) -> None:
    engines = engines_of(made.stack)
    assert len({engine.env["PYTHONHASHSEED"] for engine in engines}) == 1
    assert {argument(engine, "--block-size") for engine in engines} == {str(made.plan.block_size)}
    for option in ("--model", "--served-model-name", "--dtype", "--tensor-parallel-size"):
        assert len({argument(engine, option) for engine in engines}) == 1
    files = [lmcache(engine) for engine in engines]
    assert {file["chunk_size"] for file in files} == {made.plan.chunk_size}
    for setting in (
        "extra_config",
        "pre_caching_hash_algorithm",
        "use_layerwise",
        "storage_plugins",
    ):
        assert len({json.dumps(file[setting]) for file in files}) == 1


def test_engines_have_the_connector_of_their_role(made: Prepared) -> None:
    for engine in engines_of(made.stack):
        config = json.loads(argument(engine, "--kv-transfer-config"))
        assert config["kv_connector"] == "PatchedLMCacheConnector"
        assert config["kv_connector_module_path"] == "pdkit_connector.connector"
        if engine.role == "producer":
            assert config["kv_role"] == "kv_producer"
        else:
            both = made.spec.save_decode_cache or engine.role == "aggregated"
            assert config["kv_role"] == ("kv_both" if both else "kv_consumer")
        extra = config.get("kv_connector_extra_config", {})
        assert bool(extra.get("use_layerwise")) is made.spec.layerwise
        assert lmcache(engine)["use_layerwise"] is made.spec.layerwise


def test_no_secret_in_arguments_or_environment(made: Prepared) -> None:
    for service in made.stack.services:
        shown = " ".join((*service.argv, *service.env, *service.env.values()))
        assert "@{" not in shown
        assert REDIS_PASSWORD not in shown
        assert "redis://" not in shown


def test_every_placeholder_is_a_secret_of_the_stack(made: Prepared) -> None:
    texts = "".join(file.text for service in made.stack.services for file in service.files)
    assert set(re.findall(r"@\{(\w+)\}", texts)) == {REDIS_PASSWORD}
    assert set(made.stack.secrets) == {REDIS_PASSWORD, ENGINE_KEY}


def test_every_engine_asks_for_the_key_before_anything_else(made: Prepared) -> None:
    for engine in engines_of(made.stack):
        named = [b for a, b in itertools.pairwise(engine.argv) if a == "--middleware"]
        # Starlette runs the last one first.
        assert named[-1] == "pdkit_connector.engine_key.RequireKey"
        file = engine.env["PDKIT_ENGINE_KEY_FILE"]
        assert ("--engine-key-file", file) in itertools.pairwise(made.stack.front.argv)


def test_redis_asks_for_a_password_and_listens_on_loopback_only(made: Prepared) -> None:
    for shard, redis in zip(made.plan.redis, made.stack.redis, strict=True):
        (file,) = redis.files
        settings = [line for line in file.text.splitlines() if line and not line.startswith("#")]
        assert [line for line in settings if line.startswith("bind ")] == ["bind 127.0.0.1"]
        assert "requirepass @{redis_password}" in settings
        assert f"port {shard.port}" in settings
        assert f"maxmemory {shard.memory_mib}mb" in settings
        assert "protected-mode yes" in settings
        assert redis.host == "127.0.0.1"


def test_engines_have_all_shards_in_one_order(made: Prepared) -> None:
    sockets = []
    for redis in made.stack.redis:
        (line,) = [
            line
            for line in redis.files[0].text.splitlines()
            if "unixsocket /" in line or 'unixsocket "' in line
        ]
        sockets.append(line.split('"')[1])
    assert len(set(sockets)) == (made.spec.redis.shards or 1)
    wanted = [f"unix://:@{{redis_password}}@{path}" for path in sockets]
    for engine in engines_of(made.stack):
        config = read(engine.files[0].text)
        urls = config["extra_config"]["pdkit.url"]
        assert urls == (wanted if len(wanted) > 1 else wanted[0])


def test_only_the_router_may_listen_elsewhere(made: Prepared) -> None:
    for service in made.stack.services:
        expected = made.spec.bind if service.name == "router" else "127.0.0.1"
        assert service.host == expected
        if service.role != "redis":
            assert argument(service, "--host") == expected
            assert argument(service, "--port") == str(service.port)


def test_ports_are_unique_and_those_of_the_plan(made: Prepared) -> None:
    ports = [
        port
        for service in made.stack.services
        for port in (service.port, *service.extra_ports)
        if service.role != "redis"
    ]
    assert len(ports) == len(set(ports))
    assert set(ports) == set(made.plan.ports)
    assert all(1024 <= port <= 65535 for port in ports)


def test_services_follow_what_they_depend_on(made: Prepared) -> None:
    seen: set[str] = set()
    for service in made.stack.services:
        assert set(service.depends_on) <= seen
        assert service.name not in seen
        seen.add(service.name)
    router = made.stack.service("router")
    assert set(router.depends_on) == {engine.name for engine in made.plan.engines}


def test_the_router_knows_every_engine_by_its_role(made: Prepared) -> None:
    argv = made.stack.service("router").argv
    if made.plan.aggregated:
        roles = (("--engine", made.plan.engines), ("--producer", ()), ("--consumer", ()))
    else:
        roles = (
            ("--engine", ()),
            ("--producer", made.plan.producers),
            ("--consumer", made.plan.consumers),
        )
    for option, engines in roles:
        named = [argv[at + 1] for at, word in enumerate(argv) if word == option]
        assert named == [f"{engine.name}=127.0.0.1:{engine.port}" for engine in engines]


def test_telemetry_is_off(made: Prepared) -> None:
    for engine in engines_of(made.stack):
        assert engine.env["VLLM_NO_USAGE_STATS"] == "1"
        assert engine.env["LMCACHE_TRACK_USAGE"] == "false"


def test_only_a_hub_model_needs_the_network(made: Prepared) -> None:
    offline = {engine.env.get("HF_HUB_OFFLINE") for engine in engines_of(made.stack)}
    assert offline == ({None} if made.spec.model else {"1"})


def test_files_lie_in_the_services_own_folder(made: Prepared) -> None:
    for service in made.stack.services:
        for file in service.files:
            assert f"/stacks/{made.spec.name}/run/{service.name}/" in file.path


def test_rendering_twice_gives_the_same_bytes(made: Prepared, prepared: Make) -> None:
    again = prepared(**made.spec.model_dump(exclude_unset=True))
    first, second = (document_yaml(stack_document(p.stack)) for p in (made, again))
    assert first.encode() == second.encode()


def test_the_document_is_yaml_that_reads_back(made: Prepared) -> None:
    document = stack_document(made.stack)
    assert read(document_yaml(document)) == document
    assert list(document["services"]) == [service.name for service in made.stack.services]


class TestNothingShared:
    """Aggregated engines without Redis are plain vLLM behind the router."""

    @pytest.mark.parametrize(
        "fields", [{"topology": "1a"}, {"topology": "3a"}, {"topology": "2a", "tp": 2}]
    )
    def test_there_is_no_redis_and_no_connector(
        self, prepared: Make, fields: dict[str, Any]
    ) -> None:
        made = prepared(**fields)
        assert [service.role for service in made.stack.services] == [
            *["aggregated"] * made.plan.topology.aggregated, "router",
        ]  # fmt: skip
        assert made.stack.secrets == (ENGINE_KEY,)
        for engine in engines_of(made.stack):
            assert not engine.files
            assert "--kv-transfer-config" not in engine.argv
            assert engine.argv.count("--middleware") == 1
            assert not set(made.plan.vendor.pinned_args) & set(engine.argv)
            assert not made.plan.vendor.pinned_env.keys() & engine.env.keys()
            assert not {"LMCACHE_CONFIG_FILE", "PDKIT_ENGINE_SOCKET"} & engine.env.keys()

    def test_engines_without_redis_have_no_staging_memory(self, prepared: Make) -> None:
        alone, shared = (prepared(topology=form).plan for form in ("2a", "2a+redis"))
        assert alone.engines[0].memory_mib < shared.engines[0].memory_mib
        assert alone.memory_mib == sum(engine.memory_mib for engine in alone.engines)
        assert alone.storing_ranks == 0
        assert alone.pairs == ()
        assert shared.pairs == (("engine-0", "engine-1"), ("engine-1", "engine-0"))

    def test_conversations_stay_where_their_kv_is(self, prepared: Make) -> None:
        for form, follows in (("2a", True), ("2a+redis", False), ("1p1d", False)):
            argv = prepared(topology=form).stack.service("router").argv
            assert ("--follow-prefixes" in argv) is follows

    def test_the_router_takes_bodies_as_large_as_the_spec_says(self, prepared: Make) -> None:
        argv = prepared(router={"max_body_mib": 90}).stack.service("router").argv
        assert argv[argv.index("--max-body-mib") + 1] == "90"


class TestFingerprint:
    """It tells whether a running stack is the one that is asked for."""

    CHANGES: tuple[dict[str, Any], ...] = (
        {"name": "other"},
        {"gpus": 3},
        {"topology": "1p2d"},
        {"topology": "2a"},
        {"topology": "2a+redis"},
        {"producers": 2},
        {"consumers": 2},
        {"tp": 2},
        {"model": "owner/name"},
        {"layerwise": True},
        {"save_decode_cache": True},
        {"port": 9000},
        {"bind": "127.0.0.2"},
        {"router": {"degrade": "refuse"}},
        {"router": {"max_body_mib": 90}},
        {"engine": {"dtype": "float32"}},
        {"engine": {"block_size": 16}},
        {"engine": {"max_model_len": 4096}},
        {"engine": {"kv_cache_gib": 2}},
        {"engine": {"args": ["--seed", "1"]}},
        {"engine": {"env": {"VLLM_LOGGING_LEVEL": "DEBUG"}}},
        {"lmcache": {"chunk_size": 512}},
        {"lmcache": {"staging_gib": 1}},
        {"redis": {"memory_gib": 2}},
        {"monitoring": True},
        {"tracing": {"otlp_endpoint": "http://192.0.2.1:4318"}},
        {"hub_cache": "/data/hub"},
        {"hf_token_file": "/data/token"},
    )

    @pytest.mark.parametrize("fields", CHANGES, ids=str)
    def test_changes_with_every_field_that_matters(
        self, prepared: Make, fields: dict[str, Any]
    ) -> None:
        assert prepared(**fields).stack.fingerprint() != prepared().stack.fingerprint()

    def test_different_specs_have_different_fingerprints(self, prepared: Make) -> None:
        by_meaning = {
            prepared(**fields).stack.fingerprint()
            for fields in self.CHANGES
            if fields not in ({"gpus": 3}, {"consumers": 2})  # both mean 1p2d
        }
        assert len(by_meaning) == len(self.CHANGES) - 2

    @pytest.mark.parametrize(
        "fields",
        [{"gpus": 2}, {"topology": "1p1d"}, {"vendor": "cpu"}, {"runtime": "process"}, {"tp": 1}],
        ids=str,
    )
    def test_is_the_same_for_the_same_stack_in_other_words(
        self, prepared: Make, fields: dict[str, Any]
    ) -> None:
        assert prepared(**fields).stack.fingerprint() == prepared().stack.fingerprint()

    @pytest.mark.parametrize(
        "fields", [{"timeouts": {"ready_s": 900}}, {"timeouts": {"stop_s": 1}}]
    )
    def test_does_not_change_with_our_own_patience(
        self, prepared: Make, fields: dict[str, Any]
    ) -> None:
        """No service runs differently for it, so `up` need not ask for `down` first."""
        assert prepared(**fields).stack.fingerprint() == prepared().stack.fingerprint()

    def test_every_field_of_the_spec_was_considered(self) -> None:
        considered = {field for fields in self.CHANGES for field in fields}
        considered |= {"vendor", "runtime", "connector", "timeouts"}
        considered |= {"image", "gpu_access"}  # of containers: test_compose.py
        considered |= {"allow_untested", "allow_keyless"}  # decides whether, not how
        considered |= {"supervise"}  # of who watches them
        considered |= {"slo"}  # of alerts: monitoring/test_rules.py
        considered |= {"api_key_file"}
        assert considered == set(StackSpec.model_fields)
