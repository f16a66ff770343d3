"""How many Redis share the keys, and where they are."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.config.model import Model
from deploy.config.spec import StackSpec
from deploy.errors import ConfigError, NamedSetting
from deploy.planning.inventory import Gpu, Inventory
from deploy.planning.plan import Plan, make_plan
from deploy.planning.redis import RedisPlan

MODEL = Model(ref="/m", served_name="m", source="folder", shape=None, weight_bytes=None)


def planned(gpus: int = 0, cpus: int = 16, **fields: Any) -> Plan:
    there = tuple(Gpu(index, "cuda", "H100", 81559, uuid=f"GPU-{index}") for index in range(gpus))
    machine = Inventory(cpus=cpus, memory_mib=1 << 20, gpus=there)
    vendor = "cuda" if gpus else "cpu"
    asked = {"vendor": vendor, "runtime": "process", **({"gpus": gpus} if gpus else {}), **fields}
    return make_plan(StackSpec.model_validate(asked), MODEL, machine)


@pytest.mark.parametrize(
    ("gpus", "cpus", "shards"),
    [
        (0, 256, 1),
        (1, 3, 1),
        (1, 7, 1),
        (1, 8, 2),
        (1, 16, 4),
        (1, 256, 4),
        (5, 256, 5),
        (16, 256, 8),
    ],
)
def test_there_is_one_shard_for_every_four_processors(gpus: int, cpus: int, shards: int) -> None:
    assert len(planned(gpus, cpus).redis) == shards


def test_shards_divide_the_memory_and_have_no_ports() -> None:
    plan = planned(topology="2p1d", redis={"shards": 3, "memory_gib": 1.5})
    assert plan.redis == (
        RedisPlan("redis-0", 0, 512),
        RedisPlan("redis-1", 0, 512),
        RedisPlan("redis-2", 0, 512),
    )
    assert plan.redis_memory_mib == 1536
    assert len(plan.ports) == 1 + 1 + 3  # router, its metrics, engines


def test_only_lmcaches_own_client_needs_a_port() -> None:
    """Other users could take up all connections of a port; of a private socket none."""
    assert planned(redis={"memory_gib": 1}).redis == (RedisPlan("redis", 0, 1024),)
    by_port = planned(redis={"memory_gib": 1, "client": "lmcache"})
    assert by_port.redis == (RedisPlan("redis", 8001, 1024),)
    assert by_port.ports[8001] == "redis"


@pytest.mark.parametrize("shards", [0, 17, True, "many"])
def test_an_invalid_number_of_shards_is_refused(shards: object) -> None:
    with pytest.raises(ValueError, match="shards"):
        StackSpec.model_validate({"redis": {"shards": shards}})


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("layerwise", {"layerwise": True}),
        ("save_decode_cache", {"save_decode_cache": True}),
        ("redis.url_file", {"redis": {"url_file": "/home/user/redis-url"}}),
    ],
)
def test_settings_of_shared_kv_are_refused_without_redis(
    field: str, fields: dict[str, Any]
) -> None:
    named = NamedSetting(field).called({})
    with pytest.raises(ConfigError, match=f"^{named}: --topology 2a has no Redis") as caught:
        planned(topology="2a", **fields)
    assert caught.value.hint == f"leave {field} out, or --topology 2a+redis"
    assert planned(topology="2a").redis == ()
    assert len(planned(topology="2a+redis", layerwise=True).redis) == 1


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        (r"--layerwise: true", {"layerwise": True}),
        (r"redis\.shards: 2", {"redis": {"shards": 2}}),
        (r"redis\.integrity: mac", {"redis": {"integrity": "mac"}}),
        (r"redis\.tls_files: \['/ca\.pem'\]", {"redis": {"tls_files": ["/ca.pem"]}}),
    ],
)
def test_lmcaches_client_has_one_plain_redis_and_the_rest_is_refused(
    words: str, fields: dict[str, Any]
) -> None:
    lmcache = {"client": "lmcache", "url_file": "/url"}
    if "shards" in fields.get("redis", {}):
        del lmcache["url_file"]
    redis = {**fields.get("redis", {}), **lmcache}
    with pytest.raises(ConfigError, match=f"^{words} does not work with redis.client") as caught:
        planned(4, 256, **{**fields, "redis": redis})
    assert caught.value.hint.endswith("the default client supports it")
    assert "leave redis.client out of deploy.yaml" in caught.value.hint
    allowed = {"client": "lmcache", "shards": 1, "integrity": "checksum"}
    assert len(planned(4, 256, redis=allowed, save_decode_cache=True).redis) == 1
    assert len(planned(4, 256, redis={"client": "lmcache"}).redis) == 1


def test_a_user_supplied_redis_is_not_divided() -> None:
    assert planned(4, 256, redis={"url_file": "/url"}).redis == ()
    with pytest.raises(ConfigError, match=r"redis.shards: 2 is for the Redis that the kit starts"):
        planned(redis={"url_file": "/url", "shards": 2})
