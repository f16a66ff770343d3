"""What an engine reports of its KV, from LMCache's own objects."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pdkit_connector.kv_report import kv_facts, public_address

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "versions"))
from lmcache_objects import (
    CHUNK,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    metadata,
    redis_path_config,
    running_loop,
)

SECRET = "not-to-be-seen"


def adapter(settings, facts, backends=()):
    """Return what LMCache's adapter holds, as far as the report looks."""
    manager = SimpleNamespace(storage_backends=dict(backends))
    engine = SimpleNamespace(config=settings, metadata=facts, storage_manager=manager)
    return SimpleNamespace(lmcache_engine=engine)


@pytest.fixture
def told(server):
    """Report of an engine whose chunks go to a real Redis by the kit's own client."""
    from lmcache.v1.storage_backend import CreateStorageBackends

    settings, facts = redis_path_config(f"redis://:{SECRET}@127.0.0.1:{server.port}/3"), metadata()
    server.admin.execute_command("ACL", "SETUSER", "default", "on", f">{SECRET}", "+@all", "~*")
    backends = CreateStorageBackends(settings, facts, running_loop(), "cpu")
    yield kv_facts(adapter(settings, facts, backends)), server
    backends["pdkit"].close()


def test_report_of_the_kits_own_client(told):
    found, server = told
    assert SECRET not in json.dumps(found)
    assert found["redis"] == f"127.0.0.1:{server.port}/3"
    assert (found["client"], found["namespace"]) == ("pdkit", "pdkit:test:0")
    assert found["chunk_size"] == CHUNK
    assert (found["model"], found["world_size"]) == ("m", 1)
    assert (found["dtype"], found["layers"], found["planes"]) == ("bfloat16", LAYERS, 2)
    assert (found["heads"], found["head_size"]) == (HEADS, HEAD_SIZE)
    assert len(found["layout"]) == 8 and found["lmcache"]


def test_report_of_lmcaches_own_client():
    from lmcache.v1.config import LMCacheEngineConfig

    settings = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK, remote_url=f"redis://u:{SECRET}@10.0.0.9:6379"
    )
    found = kv_facts(adapter(settings, metadata(world_size=2, kv_dtype=None)))
    assert SECRET not in json.dumps(found)
    assert (found["client"], found["redis"], found["world_size"]) == (
        "lmcache",
        "10.0.0.9:6379/0",
        2,
    )


def test_a_changed_setting_changes_only_its_own_fact():
    """Each fact is LMCache's own, and none of the kit's plan."""
    from lmcache.v1.config import LMCacheEngineConfig

    def facts(settings, **of_worker):
        made = LMCacheEngineConfig.from_defaults(**{"chunk_size": CHUNK, **settings})
        return kv_facts(adapter(made, metadata(**of_worker)))

    plain = facts({})
    changed = {
        "model": facts({}, model_name="other"),
        "world_size": facts({}, world_size=4),
        "chunk_size": facts({"chunk_size": 2 * CHUNK}),
        "layerwise": facts({"use_layerwise": True}),
        "heads": facts({}, kv_shape=(LAYERS, 2, CHUNK, HEADS + 1, HEAD_SIZE)),
    }
    for name, other in changed.items():
        assert {key for key in plain if plain[key] != other[key]} == {name}


def test_an_engine_that_did_not_start_reports_little_and_nothing_wrong():
    found = kv_facts(SimpleNamespace(lmcache_engine=None))
    known = {name for name, value in found.items() if value not in (None, False)}
    assert known <= {"lmcache", "vllm"}


def test_a_report_never_ends_an_engine():
    """Whatever another release makes of these objects."""

    class Strange:
        @property
        def lmcache_engine(self):
            raise RuntimeError("moved")

    assert kv_facts(Strange()) == {"unknown": "RuntimeError: moved"}


@pytest.mark.parametrize(
    ("url", "address"),
    [
        (f"redis://:{SECRET}@127.0.0.1:6379", "127.0.0.1:6379/0"),
        (f"redis://u:{SECRET}@h:1/2", "h:1/2"),
        (f"rediss://u:{SECRET}@h:1?db=5&password={SECRET}", "h:1/5"),
        (f"unix:///run/r.sock?db=1&password={SECRET}", "/run/r.sock/1"),
        (f"redis-sentinel://:{SECRET}@a:1,b:2/main?db=3", "redis-sentinel:a:1,b:2/main/3"),
        (f"redis-cluster://:{SECRET}@a:1,b:2", "a:1,b:2/0"),
    ],
)
def test_addresses_are_reported_without_secrets(url, address):
    assert public_address(url) == address
