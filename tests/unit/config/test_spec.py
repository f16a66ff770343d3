"""The spec: what a stack is when nothing is said, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from deploy.config.spec import StackSpec

Make = Callable[..., StackSpec]


def test_a_spec_has_the_documented_defaults(spec: Make) -> None:
    asked = spec()
    assert asked.name == "pdkit"
    assert (asked.vendor, asked.runtime, asked.connector) == ("auto", "auto", None)
    assert (asked.gpus, asked.topology, asked.producers, asked.consumers) == (None,) * 4
    assert asked.model is None, "each vendor has its own default"
    assert (asked.tp, asked.layerwise, asked.save_decode_cache) == (1, False, False)
    assert (asked.port, asked.bind) == (8000, "127.0.0.1"), "not reachable from elsewhere"
    assert asked.lmcache.chunk_size == 256
    by_vendor = (asked.engine.block_size, asked.lmcache.staging_gib, asked.redis.memory_gib)
    assert by_vendor == (None,) * 3, "settled by the plan"
    assert (asked.image, asked.router.image, asked.redis.image) == (None,) * 3
    assert (asked.allow_untested, asked.gpu_access) == (False, "auto")
    assert asked.engine.gpu_memory == 0.9
    assert asked.engine.dtype is None, "settled by the plan"
    assert (asked.timeouts.ready_s, asked.timeouts.stop_s) == (None, 15.0)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:4318",
        "http://[::1]:4318",
        "http://collector.example:80/base",
        "http://c.:4318",
    ],
)
def test_a_collector_url_is_accepted(spec: Make, url: str) -> None:
    assert spec(tracing={"otlp_endpoint": f"{url}/"}).tracing.otlp_endpoint == url


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:4318", "https://collector.example:4318", "http://collector.example",
        "http://user:secret@collector.example:4318", "http://collector.example:4318?key=secret",
        "http://collector.example:99999", "http://:4318", "http://c\u00f6llector:4318",
        "http://a..b:4318", "http://.:4318", f"http://{'a' * 64}.example:4318",
        "http://a b:4318", "http://a:4318/x y", "http://a\tb:4318", "http://a:4318/\x7f",
    ],
)  # fmt: skip
def test_invalid_collector_urls_are_refused(spec: Make, url: str) -> None:
    with pytest.raises(ValidationError, match="expected http://HOST:PORT"):
        spec(tracing={"otlp_endpoint": url})


@pytest.mark.parametrize("path", ["/v1/traces", "/base/v1/traces/"])
def test_otlp_s_own_path_is_not_doubled(spec: Make, path: str) -> None:
    with pytest.raises(ValidationError, match="without /v1/traces"):
        spec(tracing={"otlp_endpoint": f"http://collector.example:4318{path}"})


def test_a_spec_is_immutable(spec: Make) -> None:
    asked = spec()
    with pytest.raises(ValidationError):
        asked.name = "other"  # type: ignore[misc]


def test_a_spec_survives_its_state_file(spec: Make) -> None:
    asked = spec(
        name="demo",
        topology="2p3d",
        engine={"python": "/opt/python", "args": ["--seed", "1"], "env": {"A": "b"}},
        redis={"server": "/opt/redis-server", "memory_gib": 2.5, "image": "redis:8"},
        router={"image": "mine/router:1"},
        image="mine/vllm:1",
        gpu_access="cdi",
        hub_cache="/data/hub",
        hf_token_file="~/token",
        allow_untested=True,
    )
    stored = json.loads(json.dumps(asked.model_dump(mode="json")))
    assert StackSpec.model_validate(stored) == asked


@pytest.mark.parametrize("name", ["a", "0", "demo", "two-words", "a_b", "x" * 40])
def test_valid_stack_names_are_accepted(spec: Make, name: str) -> None:
    assert spec(name=name).name == name


@pytest.mark.parametrize(
    "name", ["", "a/b", "..", "../up", "-x", "_x", "Demo", "a b", "a.b", "ä", "x" * 41, "a\nb"]
)
def test_invalid_stack_names_are_refused(spec: Make, name: str) -> None:
    with pytest.raises(ValidationError):
        spec(name=name)


@pytest.mark.parametrize("form", ["1p1d", "1p3d", "12p34d", "4p0d", "0p4d"])
def test_topologies_are_accepted(spec: Make, form: str) -> None:
    assert spec(topology=form).topology == form


@pytest.mark.parametrize(
    "form", ["1x2", "p1d", "0p0d", "00p1d", "1p00d", "1d1p", "1p1d2", "-1p1d", "100p1d"]
)
def test_invalid_topologies_are_refused(spec: Make, form: str) -> None:
    with pytest.raises(ValidationError):
        spec(topology=form)


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"gpus": 0}, ("gpus",)),
        ({"gpus": 65}, ("gpus",)),
        ({"gpus": -1}, ("gpus",)),
        ({"gpus": "four"}, ("gpus",)),
        ({"gpus": 1.5}, ("gpus",)),
        ({"gpus": True}, ("gpus",)),  # YAML reads `gpus: yes` so
        ({"tp": 0}, ("tp",)),
        ({"port": 80}, ("port",)),
        ({"port": 65536}, ("port",)),
        ({"bind": ""}, ("bind",)),
        ({"model": ""}, ("model",)),
        ({"vendor": "nvidia"}, ("vendor",)),
        ({"runtime": "podman"}, ("runtime",)),
        ({"connector": "nixl"}, ("connector",)),
        ({"layerwise": "perhaps"}, ("layerwise",)),
        ({"engine": 5}, ("engine",)),
        ({"engine": {"block_size": 0}}, ("engine", "block_size")),
        ({"engine": {"dtype": "int8"}}, ("engine", "dtype")),
        ({"engine": {"max_model_len": 63}}, ("engine", "max_model_len")),
        ({"engine": {"kv_cache_gib": 0}}, ("engine", "kv_cache_gib")),
        ({"engine": {"args": "--seed 1"}}, ("engine", "args")),
        ({"engine": {"env": {"A": 1}}}, ("engine", "env", "A")),
        ({"lmcache": {"chunk_size": 8193}}, ("lmcache", "chunk_size")),
        ({"lmcache": {"staging_gib": -1}}, ("lmcache", "staging_gib")),
        ({"redis": {"memory_gib": float("nan")}}, ("redis", "memory_gib")),
        ({"timeouts": {"ready_s": float("inf")}}, ("timeouts", "ready_s")),
        ({"timeouts": {"stop_s": 0}}, ("timeouts", "stop_s")),
        ({"gpu": 4}, ("gpu",)),
        ({"redis": {"memory": 1}}, ("redis", "memory")),
        ({"image": ""}, ("image",)),
        ({"image": "x" * 513}, ("image",)),
        ({"router": {"image": ""}}, ("router", "image")),
        ({"redis": {"image": 5}}, ("redis", "image")),
        ({"gpu_access": "nvidia"}, ("gpu_access",)),
        ({"allow_untested": "perhaps"}, ("allow_untested",)),
        ({"engine": {"gpu_memory": 0}}, ("engine", "gpu_memory")),
        ({"engine": {"gpu_memory": 0.99}}, ("engine", "gpu_memory")),
        ({"engine": {"memory_gib": 0}}, ("engine", "memory_gib")),
        ({"producer_tp": 1}, ("producer_tp",)),
    ],
)
def test_invalid_values_are_refused(
    spec: Make, fields: dict[str, Any], where: tuple[str, ...]
) -> None:
    with pytest.raises(ValidationError) as caught:
        spec(**fields)
    assert caught.value.errors()[0]["loc"] == where
