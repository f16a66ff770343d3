"""LMCache's server in the plan: what it gets, what it does not go with, and how engines use it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from deploy.errors import ConfigError
from deploy.output.plan_view import plan_data, plan_view
from deploy.planning.engines import ENGINE_ROLES
from deploy.workflows.prepare import Prepared
from tests.unit.conftest import TINY
from tests.unit.stack.cases import FOLDER_MODEL, machine_with

Make = Callable[..., Prepared]
MP = {"connector": "lmcache-mp"}


def second_tier(found: Prepared) -> dict[str, Any]:
    """Return the settings of the server's second tier, by the file that its arguments name."""
    server = found.stack.service("kv-server")
    plugin = json.loads(server.argv[server.argv.index("--l2-adapter") + 1])
    assert plugin["module_path"] == "pdkit_connector.redis_path.second_tier"
    (file,) = server.files
    assert plugin["adapter_params"] == {"settings_file": file.path}
    settings: dict[str, Any] = yaml.safe_load(file.text)
    return settings


def test_engines_use_the_server_and_the_server_redis(prepared: Make) -> None:
    stack = prepared(**MP).stack
    server = stack.service("kv-server")
    assert [one.name for one in stack.stores] == ["redis", "kv-server"]
    assert server.depends_on == ("redis",)
    for name in ("producer-0", "consumer-0"):
        assert stack.service(name).depends_on == ("redis",), "the server starts beside it"
        assert stack.service(name).files == (), "LMCache inside the engine is not configured"


def test_the_second_tier_is_the_kits_own_redis_path(prepared: Make) -> None:
    found, usual = prepared(**MP), prepared()
    settings = second_tier(found)
    assert re.fullmatch(r"unix://:@\{redis_password\}@/\S+/redis\.sock", settings["pdkit.url"])
    (file,) = usual.stack.service("producer-0").files
    theirs = yaml.safe_load(file.text)["extra_config"]
    assert set(settings) == {name for name in theirs if name.startswith("pdkit.")}
    assert settings["pdkit.namespace"].startswith("pdkit:pdkit:")
    assert settings["pdkit.namespace"] != theirs["pdkit.namespace"], "KV of another connector"
    argv = found.stack.service("kv-server").argv
    assert not [word for word in argv if "redis_password" in word], "others can read arguments"
    assert argv[argv.index("--l2-prefetch-policy") + 1] == "retain"


def test_values_can_have_a_mac(prepared: Make) -> None:
    found = prepared(**MP, redis={"integrity": "mac"})
    assert second_tier(found)["pdkit.mac_key_file"].endswith("/kv_key")
    assert "kv_key" in found.stack.secrets


def test_several_redis_or_the_users_own_can_be_the_second_tier(prepared: Make) -> None:
    shards = prepared(**MP, redis={"shards": 2})
    assert len(second_tier(shards)["pdkit.url"]) == 2
    assert shards.stack.service("kv-server").depends_on == ("redis-0", "redis-1")
    own = prepared(**MP, redis={"url_file": "/home/user/redis-url"})
    assert second_tier(own)["pdkit.url"] == "@{redis_url}"
    assert own.stack.redis == ()
    assert own.plan.kv_server is not None
    assert own.plan.kv_server.kv_mib > 0


def test_a_prompt_that_is_loaded_whole_has_longer_and_less_than_a_lock(prepared: Make) -> None:
    """LMCache gives memory to others after five minutes, whoever writes to it."""
    usual = prepared().plan.limits
    settings = second_tier(prepared(**MP))
    assert settings["pdkit.load_s"] == usual.load_s, "half a prompt is in staging memory at once"
    long = prepared(**MP, engine={"max_model_len": 32768}, lmcache={"chunk_size": 64})
    assert usual.load_s <= second_tier(long)["pdkit.load_s"] <= 240
    assert second_tier(long)["pdkit.store_s"] <= 240


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


def test_the_servers_metrics_have_a_loopback_port_only_with_prometheus(prepared: Make) -> None:
    found, usual = prepared(**MP, monitoring=True), prepared(**MP)
    service, plain = found.stack.service("kv-server"), usual.stack.service("kv-server")
    assert service.env == {**plain.env, "PDKIT_METRICS_ADDRESS": "127.0.0.1:8005"}
    assert (service.extra_ports, plain.extra_ports) == ((8005,), ()), "looked at before it starts"
    assert found.plan.ports[8005] == "kv-server metrics"
    assert 8005 not in usual.plan.ports
    assert 8005 not in prepared(monitoring=True).plan.ports, "there is no server"


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
    assert config["kv_connector_module_path"] == "pdkit_connector.server_connector"
    extra = config["kv_connector_extra_config"]
    assert extra["lmcache.mp.server_urls"] == [f"ipc://{requests}"]
    assert extra["lmcache.mp.mp_transfer_mode"] == "lmcache_driven"
    assert env["PDKIT_KV_SERVER_SOCKET"] == requests
    assert env["PDKIT_SHARED_MEMORY"].endswith(f"-{engine}")


def test_consumers_store_what_they_decode_if_asked_to(prepared: Make) -> None:
    for asked, role in ((False, "kv_consumer"), (True, "kv_both")):
        stack = prepared(**MP, save_decode_cache=asked).stack
        argv = stack.service("consumer-0").argv
        config = json.loads(argv[argv.index("--kv-transfer-config") + 1])
        assert config["kv_role"] == role
        assert config["kv_connector_extra_config"]["lmcache.mp.save_decode_cache"] is asked


def test_the_ranks_of_an_engine_wait_for_no_other_rank(prepared: Make) -> None:
    made = prepared(**MP, topology="1p2d", tp=2, engine={"kv_cache_gib": 1})
    at = made.stack.service("kv-server").argv
    assert at[at.index("--max-gpu-workers") + 1] == "6"
    assert 6144 <= made.plan.shared_memory_mib < 6150, "each has its own part of the KV"


def test_a_token_takes_more_where_several_ranks_have_the_same_kv_heads(prepared: Make) -> None:
    """The tiny model has two KV heads, so that two ranks have room for twice the tokens."""
    plans = [prepared(**MP, tp=tp).plan for tp in (1, 2, 4)]
    one, two, four = (plan.store_tokens or 0 for plan in plans)
    assert 2 * one == two == 2 * four > 0


def test_the_time_for_a_load_follows_from_what_each_rank_loads(prepared: Make) -> None:
    def pieces(tp: int) -> float:
        """Return how much longer a whole prompt may take than full staging memory."""
        machine = machine_with("cuda", 0, 1, 2, 3)
        made = prepared(
            vendor="cuda", machine=machine, connector="lmcache-mp", topology="1p1d", tp=tp,
            given=FOLDER_MODEL,
        )  # fmt: skip
        own = yaml.safe_load(made.stack.service("kv-server").files[0].text)
        return float(own["pdkit.load_s"]) / made.plan.limits.load_s

    assert pieces(1) > 1.5
    assert pieces(2) == pytest.approx(pieces(1), rel=0.02)


def test_memory_counts_the_server_and_no_staging(prepared: Make) -> None:
    plan = prepared(**MP, lmcache={"server_gib": 3}, redis={"memory_gib": 2}).plan
    assert plan.kv_server is not None
    assert plan.kv_server.kv_mib == 3072
    engines = sum(engine.memory_mib for engine in plan.engines)
    assert plan.memory_mib == engines + plan.kv_server.memory_mib + 2048
    alone = prepared(**MP, redis={"memory_gib": 2}).plan.kv_server
    assert alone is not None
    assert alone.kv_mib == 1024, "its own default"
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
    assert "KV; then 1.0 GiB of Redis, about" in plan_view(found)
    assert "in /dev/shm" in plan_view(found)
    assert plan_data(found)["kv_server"]["kv_mib"] == 1024
    assert plan_data(prepared())["kv_server"] is None


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"layerwise": True}, "--layerwise"),
        ({"given": replace(TINY, ref="/models/tiny@2")}, "--model"),
        ({"topology": "2a"}, "--connector"),
        (
            {
                "vendor": "rocm",
                "runtime": "compose",
                "machine": machine_with("rocm", 0, 1),
                "allow_untested": True,
            },
            "--connector",
        ),
        ({"lmcache": {"staging_gib": 1}}, "lmcache.staging_gib"),
        ({"redis": {"client": "lmcache"}}, "redis.client"),
    ],
)
def test_unsupported_settings_of_the_server_are_refused_by_name(
    prepared: Make, fields: dict[str, Any], setting: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(**{**MP, **fields})
    assert caught.value.message.startswith(f"{setting}: ")
    assert caught.value.hint_for("plan")


def test_the_servers_memory_is_refused_without_the_server(prepared: Make) -> None:
    with pytest.raises(ConfigError, match=r"lmcache\.server_gib"):
        prepared(lmcache={"server_gib": 1})


def test_aggregated_engines_can_use_it(prepared: Make) -> None:
    stack = prepared(**MP, topology="2a+redis").stack
    engines = [service for service in stack.services if service.role in ENGINE_ROLES]
    for engine in engines:
        at = engine.argv.index("--kv-transfer-config")
        assert json.loads(engine.argv[at + 1])["kv_role"] == "kv_both"


VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_the_server_sees_the_gpus_of_all_engines_and_no_others(prepared: Make, vendor: Any) -> None:
    found = prepared(**MP, vendor=vendor, machine=machine_with(vendor, 2, 3, 5), gpus=2)
    stack, variable = found.stack, VISIBLE[vendor]
    seen = {name: stack.service(name).env[variable] for name in ("producer-0", "consumer-0")}
    assert seen == {"producer-0": "2", "consumer-0": "3"}
    assert stack.service("kv-server").env[variable] == "2,3"
    assert stack.service("kv-server").env.get("CUDA_DEVICE_ORDER") == (
        "PCI_BUS_ID" if vendor == "cuda" else None
    )
    assert "GPU 2, 3" in plan_view(found)
    shared = prepared(**MP, vendor=vendor, machine=machine_with(vendor, 1), gpus=1).stack
    assert shared.service("kv-server").env[variable] == "1"


def test_kv_on_gpus_is_in_no_shared_memory_of_the_host(prepared: Make) -> None:
    on_gpus = prepared(**MP, vendor="cuda", machine=machine_with("cuda", 0, 1))
    assert on_gpus.plan.shared_memory_mib == 0
    assert "/dev/shm" not in plan_view(on_gpus)
    server, plain = on_gpus.plan.kv_server, prepared(**MP).plan.kv_server
    assert server is not None
    assert plain is not None
    assert server.memory_mib - server.kv_mib > plain.memory_mib - plain.kv_mib
    engine = on_gpus.stack.service("producer-0")
    assert not [name for name in engine.env if name.startswith("PDKIT_PROCESS")]
