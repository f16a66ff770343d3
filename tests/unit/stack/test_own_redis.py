"""A stack whose Redis the user brings: what is not in it, and what its engines are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from deploy.errors import ConfigError
from deploy.output.plan_view import plan_data, plan_view
from deploy.stack.document import document_yaml, stack_document
from deploy.stack.layout import ENGINE_KEY, REDIS_URL
from deploy.workflows.prepare import Prepared
from tests.unit.stack.conftest import Case

Make = Callable[..., Prepared]
OWN: dict[str, Any] = {"redis": {"url_file": "/home/user/redis-url"}}


@pytest.fixture
def own(prepared: Make) -> Prepared:
    return prepared(topology="2p1d", **OWN)


def test_a_user_supplied_redis_has_no_service_port_memory_or_password(
    own: Prepared, prepared: Make
) -> None:
    assert [s.name for s in own.stack.services] == [
        "producer-0", "producer-1", "consumer-0", "router",
    ]  # fmt: skip
    assert (own.stack.secrets, own.stack.user_secrets) == ((ENGINE_KEY,), (REDIS_URL,))
    ours = prepared(topology="2p1d").plan
    assert (own.plan.redis_memory_mib, own.plan.redis) == (0, ())
    assert own.plan.memory_mib == ours.memory_mib - ours.redis_memory_mib
    by_port = prepared(topology="2p1d", redis={"client": "lmcache"}).plan
    assert by_port.ports.keys() - own.plan.ports.keys() == {by_port.redis[0].port}
    assert own.plan.store_tokens is None


def test_engines_depend_on_nothing_and_get_the_url_by_name(own: Prepared) -> None:
    for service in own.stack.services[:3]:
        assert service.depends_on == ()
        (file,) = service.files
        config = yaml.safe_load(file.text)
        assert config["extra_config"]["pdkit.url"] == "@{redis_url}"
    assert own.stack.front.depends_on == ("producer-0", "producer-1", "consumer-0")


def test_lmcaches_client_gets_the_users_url(prepared: Make) -> None:
    made = prepared(redis={**OWN["redis"], "client": "lmcache"})
    (file,) = made.stack.service("consumer-0").files
    assert yaml.safe_load(file.text)["remote_url"] == "@{redis_url}"


def test_engines_that_measure_a_gpu_start_one_by_one(contained: Callable[..., Case]) -> None:
    case = contained("", gpus=1, model="owner/new", **OWN)
    assert "depends_on" not in case.services["producer-0"]
    assert list(case.services["consumer-0"]["depends_on"]) == ["producer-0"]


def test_keys_are_the_same_as_with_the_kits_redis(own: Prepared, prepared: Make) -> None:
    """Which Redis holds the KV says nothing of what it means."""
    ours = prepared(topology="2p1d").stack.service("producer-0")
    assert own.stack.service("producer-0").env["PYTHONHASHSEED"] == ours.env["PYTHONHASHSEED"]
    assert own.stack.fingerprint() != prepared(topology="2p1d").stack.fingerprint()


def test_plan_and_render_show_the_file_and_no_redis(own: Prepared) -> None:
    text = plan_view(own)
    assert "store    your own Redis, from /home/user/redis-url\n" in text
    assert "\nredis " not in text
    assert plan_data(own)["redis"] == {
        "user_supplied": True, "shards": 0, "port": 0, "memory_mib": 0, "tokens": None,
    }  # fmt: skip
    shown = document_yaml(stack_document(own.stack))
    assert yaml.safe_load(shown)["secrets"] == [ENGINE_KEY, REDIS_URL]
    assert "redis-url" not in shown, "where the file lies is nobody's business but the spec's"


def test_containers_get_the_users_url_as_a_secret(contained: Callable[..., Case]) -> None:
    case = contained("", topology="1p1d", **OWN)
    assert "redis" not in case.services
    assert set(case.document["networks"]) == {"front"}
    for engine in case.engines.values():
        assert engine["networks"] == ["front"]
        assert "depends_on" not in engine
    assert "password" not in json.dumps(case.document)


def test_files_of_tls_are_mounted_where_the_url_names_them(contained: Callable[..., Case]) -> None:
    files = ["/etc/redis/ca.pem", "/etc/redis/key.pem"]
    case = contained("", topology="1p1d", redis={**OWN["redis"], "tls_files": files})
    for name, service in case.services.items():
        mounts = [v for v in service.get("volumes", ()) if v["source"].startswith("/etc/redis")]
        expected = [
            {"type": "bind", "source": file, "target": file, "read_only": True} for file in files
        ]
        assert mounts == (expected if name in case.engines else [])


@pytest.mark.parametrize(
    ("setting", "value"),
    [("memory_gib", 2), ("server", "/usr/bin/redis-server"), ("image", "redis-local")],
)
def test_settings_of_the_kits_redis_are_refused(
    prepared: Make, setting: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(redis={**OWN["redis"], setting: value})
    for word in (f"redis.{setting}: {value}", "redis.url_file", "/home/user/redis-url"):
        assert word in caught.value.message
    assert f"leave redis.{setting} out" in caught.value.hint


def test_files_of_tls_without_a_url_are_refused(prepared: Make) -> None:
    with pytest.raises(ConfigError, match=r"redis\.tls_files: .* redis\.url_file"):
        prepared(redis={"tls_files": ["/ca.pem"]})


def test_a_model_that_is_not_known_takes_no_memory_for_redis(
    contained: Callable[..., Case],
) -> None:
    case = contained("", model="owner/name", **OWN)
    assert case.prepared.notes
    assert not [note for note in case.prepared.notes if "Redis" in note or "redis." in note]
