"""A stack that several hosts share: what each of them must say, and what it may not."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from deploy.config.spec import StackSpec
from deploy.config.vendors import VENDORS
from deploy.errors import ConfigError
from deploy.planning.hosts import check_hosts
from deploy.planning.topology import Topology, resolve_topology

PRODUCER = {"role": "producer", "url": "http://10.0.0.5:8010"}
CONSUMER = {"role": "consumer", "url": "http://gpu-7.lan:8010/"}
WORKER = {
    "runtime": "process",
    "producers": 2,
    "consumers": 0,
    "engine": {"bind": "10.0.0.5", "key_file": "/keys/engine"},
    "redis": {"url_file": "/keys/redis"},
}
FRONT = {
    "runtime": "process",
    "producers": 0,
    "consumers": 1,
    "engine": {"key_file": "/keys/engine"},
    "redis": {"url_file": "/keys/redis"},
    "router": {"engines": [PRODUCER]},
}


def check(*layers: dict[str, Any]) -> Topology:
    fields: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            merged = {**fields.get(name, {}), **value} if isinstance(value, dict) else value
            fields[name] = merged
    spec = StackSpec.model_validate(fields)
    topology = resolve_topology(spec, VENDORS["cpu"])
    check_hosts(spec, topology)
    return topology


@pytest.mark.parametrize(
    ("layers", "form"),
    [
        ([{}], "1p1d"),
        ([WORKER], "2p0d"),
        ([{**WORKER, "producers": 0, "consumers": 3}], "0p3d"),
        ([{**WORKER, "producers": None, "consumers": None, "topology": "4p0d"}], "4p0d"),
        ([{**WORKER, "consumers": 2}], "2p2d"),
        ([FRONT], "0p1d"),
        ([FRONT, {"engine": {"bind": "10.0.0.6"}}], "0p1d"),
        ([FRONT, {"router": {"engines": [PRODUCER, CONSUMER]}}], "0p1d"),
        ([{**WORKER, "gpus": 2}], "2p0d"),
        ([FRONT, {"connector": "lmcache-mp"}], "0p1d"),
        ([FRONT, {"router": {"engines": [{**PRODUCER, "url": "http://127.0.0.1:8011"}]}}], "0p1d"),
    ],
)
def test_valid_parts_of_a_stack_are_planned(layers: list[dict[str, Any]], form: str) -> None:
    assert str(check(*layers)) == form


@pytest.mark.parametrize(
    ("layers", "setting", "said"),
    [
        ([WORKER, {"producers": 0}], "producers", "a host runs at least one engine"),
        ([WORKER, {"engine": {"bind": "127.0.0.1"}}], "consumers", "no router of another host"),
        ([WORKER, {"engine": {"bind": "127.0.0.2"}}], "consumers", "no router of another host"),
        ([FRONT, {"router": {"engines": []}}], "producers", "no router of another host"),
        ([FRONT, {"router": {"engines": [CONSUMER]}}], "producers", "lists no producer"),
        ([WORKER, {"engine": {"key_file": None}}], "engine.key_file", "ask for the same key"),
        ([FRONT, {"engine": {"key_file": None}}], "engine.key_file", "ask for the same key"),
        ([{"runtime": "process", "engine": {"bind": "10.0.0.5"}}], "redis.url_file", "missing"),
        ([FRONT, {"redis": {"url_file": None}}], "redis.url_file", "a Redis that all of them"),
        ([FRONT, {"redis": {"integrity": "mac"}}], "redis.integrity", "each host has its own key"),
        ([FRONT, {"redis": {"client": "lmcache"}}], "redis.client", "do not report"),
        *(
            (
                [FRONT, *more, {"router": {"engines": [{**PRODUCER, "url": url}]}}],
                "router.engines",
                "is an engine of this host",
            )
            for url, more in (
                ("http://127.0.0.1:8010", []),
                ("http://localhost:8010", []),
                ("http://[::1]:8010", []),
                ("http://10.0.0.6:8011", [{"consumers": 2, "engine": {"bind": "10.0.0.6"}}]),
            )
        ),
        (
            [
                FRONT,
                {
                    "router": {
                        "engines": [
                            PRODUCER,
                            {**CONSUMER, "url": "http://GPU.lan:1"},
                            {**CONSUMER, "url": "http://gpu.lan:1/"},
                        ]
                    }
                },
            ],
            "router.engines",
            "listed twice",
        ),
        ([FRONT, {"runtime": "compose"}], "runtime", "runs as processes so far"),
        ([WORKER, {"monitoring": True}], "monitoring", "no router"),
        ([FRONT, {"router": {"engines": [PRODUCER, PRODUCER]}}], "router.engines", "listed twice"),
        (
            [FRONT, {"producers": None, "consumers": None, "topology": "2a+redis"}],
            "topology",
            "has producers and consumers",
        ),
    ],
)
def test_invalid_parts_of_a_stack_are_refused(
    layers: list[dict[str, Any]], setting: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check(*layers)
    assert str(caught.value).removeprefix("--").startswith(f"{setting}: ")
    assert caught.value.hint


@pytest.mark.parametrize(
    "url",
    ["10.0.0.5:8010", "https://10.0.0.5:8010", "http://10.0.0.5", "http://10.0.0.5:8010/v1",
     "http://user:word@10.0.0.5:8010", "http://10.0.0.5:99999", "http://a b:1", "http://:8010",
     "http://10.0.0.5:8010?x=1", "http://::1:8010", "http://0.0.0.0:8010", "http://[::]:8010",
     "http://0:8010", "http://[::ffff:0.0.0.0]:8010", "http://a..b:8010", "http://.a:8010",
     f"http://{'a' * 64}.lan:8010", f"http://{'a.' * 127}a:8010", "http://[:::]:8010"],
)  # fmt: skip
def test_invalid_engine_addresses_are_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="http://HOST:PORT"):
        StackSpec.model_validate({"router": {"engines": [{"role": "producer", "url": url}]}})


def test_an_engine_address_is_split_into_parts() -> None:
    one = {"role": "producer", "url": "http://[fd00::5]:8010"}
    (engine,) = StackSpec.model_validate({"router": {"engines": [one]}}).router.engines
    assert (engine.host, engine.port) == ("fd00::5", 8010)


@pytest.mark.parametrize(
    ("url", "same"),
    [
        ("http://GPU-7.Lan:8010/", "http://gpu-7.lan:8010"),
        ("http://[FD00::0:5]:08010", "http://[fd00::5]:8010"),
        (f"http://{'a' * 63}.lan:8010", f"http://{'a' * 63}.lan:8010"),
    ],
)
def test_an_engine_has_one_url(url: str, same: str) -> None:
    one = {"role": "producer", "url": url}
    (engine,) = StackSpec.model_validate({"router": {"engines": [one]}}).router.engines
    assert engine.url == same
