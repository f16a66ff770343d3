"""How N engines become producers and consumers."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.config.spec import StackSpec
from deploy.config.vendors import VENDORS
from deploy.errors import ConfigError
from deploy.planning.topology import Topology, resolve_topology, split


def resolve(**fields: Any) -> str:
    vendor = VENDORS[fields.get("vendor", "cpu")]
    return str(resolve_topology(StackSpec.model_validate(fields), vendor))


@pytest.mark.parametrize(
    ("engines", "form"),
    [(1, "1p1d"), (2, "1p1d"), (3, "1p2d"), (4, "2p2d"), (5, "2p3d"), (6, "3p3d"), (7, "3p4d"),
     (8, "4p4d")],
)  # fmt: skip
def test_an_odd_engine_is_a_consumer(engines: int, form: str) -> None:
    assert str(split(engines)) == form
    assert resolve(gpus=engines) == form


def test_split_uses_every_engine() -> None:
    for engines in range(2, 65):
        topology = split(engines)
        assert topology.engines == engines
        assert topology.consumers - topology.producers in (0, 1)


def test_the_default_is_1p1d() -> None:
    assert resolve() == "1p1d"


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"topology": "1p3d"}, "1p3d"),
        ({"topology": "12p34d"}, "12p34d"),
        ({"producers": 1, "consumers": 3}, "1p3d"),
        ({"producers": 2}, "2p1d"),
        ({"consumers": 3}, "1p3d"),
        ({"topology": "1p3d", "gpus": 4}, "1p3d"),
        ({"topology": "1p3d", "producers": 1, "consumers": 3, "gpus": 4}, "1p3d"),
        ({"topology": "1p1d", "gpus": 1}, "1p1d"),  # one is shared by both
        ({"topology": "3a"}, "3a"),
        ({"topology": "3a+redis", "gpus": 3}, "3a+redis"),
        ({"topology": "1a", "gpus": 1}, "1a"),
        ({"topology": "1a", "gpus": 2, "tp": 2, "vendor": "cuda"}, "1a"),
    ],
)
def test_settings_that_agree_give_a_topology(fields: dict[str, Any], form: str) -> None:
    assert resolve(**fields) == form


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"topology": "2p2d", "gpus": 3}, ["--gpus 3", "--topology 2p2d", "4 engines"]),
        ({"topology": "1p1d", "gpus": 3}, ["--gpus 3", "--topology 1p1d", "2 engines"]),
        ({"topology": "1p2d", "gpus": 1}, ["--gpus 1", "3 engines"]),
        ({"producers": 1, "consumers": 1, "gpus": 8}, ["--gpus 8", "2 engines"]),
        ({"topology": "2p2d", "producers": 1}, ["--topology 2p2d", "--producers"]),
        (
            {"topology": "2p2d", "producers": 2, "consumers": 3},
            ["--topology 2p2d", "--consumers 3"],
        ),
    ],
)
def test_settings_that_contradict_are_refused(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(**fields)
    assert all(word in caught.value.message for word in words), caught.value.message
    assert "deploy plan --" in caught.value.hint


@pytest.mark.parametrize(
    "fields",
    [
        {"topology": "2p2d", "gpus": 3},
        {"topology": "1p3d", "gpus": 4, "tp": 2},
        {"topology": "1p1d", "gpus": 7, "tp": 2},
        {"topology": "2p2d", "producers": 1},
        {"gpus": 5, "tp": 2},
    ],
)
def test_every_suggested_command_works(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(vendor="cuda", **fields)
    assert caught.value.retry
    for changes in caught.value.retry:
        changed = {option.removeprefix("--"): value for option, value in changes.items()}
        merged = {"vendor": "cuda", **fields, **changed}
        resolve(**{name: value for name, value in merged.items() if value})


def test_one_count_that_agrees_with_the_topology_is_enough() -> None:
    """`topology: 2p2d` with `producers: 2` says nothing wrong; consumers were not named."""
    assert resolve(topology="2p2d", producers=2) == "2p2d"


def test_a_topology_reads_as_it_is_written() -> None:
    assert str(Topology(1, 3)) == "1p3d"
    assert Topology(1, 3).engines == 4
