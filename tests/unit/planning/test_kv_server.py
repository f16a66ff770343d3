"""LMCache's server in the plan: what it gets, what it does not go with, and how engines use it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deploy.errors import ConfigError
from deploy.output.plan_view import plan_data, plan_view
from deploy.planning.plan import ENGINE_ROLES
from deploy.workflows.prepare import Prepared
from tests.unit.conftest import TINY
from tests.unit.stack.cases import machine_with

Make = Callable[..., Prepared]
MP = {"connector": "lmcache-mp"}


def test_the_server_takes_the_place_of_redis(prepared: Make) -> None:
    stack = prepared(**MP).stack
    server = stack.service("kv-server")
    assert stack.redis == ()
    assert stack.stores == (server,)
    assert not [name for name in stack.secrets if "redis" in name]
    for name in ("producer-0", "consumer-0"):
        assert server.name in stack.service(name).depends_on
        assert stack.service(name).files == (), "LMCache inside the engine is not configured"


def test_the_server_opens_no_port_and_runs_no_scripts(prepared: Make) -> None:
    found = prepared(**MP)
    server = found.stack.service("kv-server")
    requests, pages = server.argv[3:5]
    assert server.port == 0
    assert server.url == f"unix://{pages}"
    assert server.name not in found.plan.ports.values()
    assert "--no-run-script-api-enabled" in server.argv
    assert server.env["LMCACHE_TRACK_USAGE"] == "false"
    # What moves KV by pickle runs what a client sends.
    at = server.argv.index("--supported-transfer-mode")
    assert server.argv[at + 1] == "lmcache_driven"
    folder = server.env["TMPDIR"]
    assert {requests.rpartition("/")[0], pages.rpartition("/")[0]} == {folder}


@pytest.mark.parametrize(
    ("engine", "role"), [("producer-0", "kv_producer"), ("consumer-0", "kv_consumer")]
)
def test_engines_are_told_of_the_server(prepared: Make, engine: str, role: str) -> None:
    stack = prepared(**MP).stack
    argv, env = stack.service(engine).argv, stack.service(engine).env
    config = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    requests = stack.service("kv-server").argv[3]
    assert config["kv_role"] == role
    assert config["kv_load_failure_policy"] == "recompute"
    # Not vLLM's own copy, which ignores settings (LMCache issue 5230).
    assert config["kv_connector_module_path"] == "pdkit_connector.mp_connector"
    extra = config["kv_connector_extra_config"]
    assert extra["lmcache.mp.server_urls"] == [f"ipc://{requests}"]
    assert extra["lmcache.mp.mp_transfer_mode"] == "lmcache_driven"
    assert env["PDKIT_KV_SERVER_SOCKET"] == requests
    assert env["PDKIT_SHARED_MEMORY"].endswith(f"-{engine}")


def test_memory_counts_the_server_and_no_staging(prepared: Make) -> None:
    plan = prepared(**MP, lmcache={"server_gib": 3}).plan
    assert plan.kv_server is not None
    assert plan.kv_server.kv_mib == 3072
    engines = sum(engine.memory_mib for engine in plan.engines)
    assert plan.memory_mib == engines + plan.kv_server.memory_mib
    assert plan.storing_ranks == 0
    usual = prepared().plan
    assert plan.engines[0].memory_mib < usual.engines[0].memory_mib
    at = prepared(**MP, lmcache={"server_gib": 3}).stack.service("kv-server").argv
    assert at[at.index("--l1-size-gb") + 1] == "3"


def test_the_engines_kv_is_shared_memory(prepared: Make) -> None:
    plan = prepared(**MP, topology="2p2d", engine={"kv_cache_gib": 1}).plan
    assert 4096 <= plan.shared_memory_mib < 4100
    assert prepared().plan.shared_memory_mib == 0


def test_plan_shows_the_server(prepared: Make) -> None:
    found = prepared(**MP)
    assert "1.0 GiB of LMCache's server" in plan_view(found)
    assert "in /dev/shm" in plan_view(found)
    assert plan_data(found)["kv_server"]["kv_mib"] == 1024
    assert plan_data(prepared())["kv_server"] is None


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"layerwise": True}, "--layerwise"),
        ({"save_decode_cache": True}, "--save-decode-cache"),
        ({"tp": 2}, "--tp"),
        ({"given": replace(TINY, ref="/models/tiny@2")}, "--model"),
        ({"topology": "2a"}, "--connector"),
        ({"runtime": "compose"}, "--connector"),
        ({"vendor": "cuda", "machine": machine_with("cuda", 0, 1)}, "--connector"),
        ({"lmcache": {"staging_gib": 1}}, "lmcache.staging_gib"),
        ({"redis": {"client": "lmcache"}}, "redis.client"),
        ({"redis": {"memory_gib": 1}}, "redis.memory_gib"),
        ({"redis": {"shards": 1}}, "redis.shards"),
        ({"redis": {"url_file": "/home/user/redis-url"}}, "redis.url_file"),
        ({"redis": {"integrity": "mac"}}, "redis.integrity"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(
    prepared: Make, fields: dict[str, Any], setting: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(**{**MP, **fields})
    assert caught.value.message.startswith(f"{setting}: ")
    assert caught.value.hint_for("plan")


def test_its_memory_is_refused_where_there_is_none(prepared: Make) -> None:
    with pytest.raises(ConfigError, match=r"lmcache\.server_gib"):
        prepared(lmcache={"server_gib": 1})


def test_aggregated_engines_can_use_it(prepared: Make) -> None:
    stack = prepared(**MP, topology="2a+redis").stack
    engines = [service for service in stack.services if service.role in ENGINE_ROLES]
    for engine in engines:
        at = engine.argv.index("--kv-transfer-config")
        assert json.loads(engine.argv[at + 1])["kv_role"] == "kv_both"
