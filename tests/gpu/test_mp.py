"""Every golden with LMCache's server: arguments, configuration and connector, by its own pair."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.config.compat import image_for
from deploy.config.fields import MP
from tests.gpu.conftest import told
from tests.gpu.goldens import VENDORS, mp_engines, server_argv
from tests.gpu.pairs import MP_PAIR, pinned

Facts = dict[str, Any]


@pytest.fixture(scope="module", params=VENDORS)
def facts(request: pytest.FixtureRequest) -> Facts:
    return told(MP_PAIR, request.param, "tests.gpu.mp_facts")


def test_it_is_the_pair_of_the_image(facts: Facts) -> None:
    assert facts["releases"] == pinned(MP_PAIR)
    image = image_for("cuda", MP)
    assert {"vllm": image.vllm, "lmcache": image.lmcache} == pinned(MP_PAIR)


def test_every_golden_with_the_server_is_looked_at(facts: Facts) -> None:
    found = {f"{one.golden} {one.name}" for one in mp_engines(facts["vendor"])}
    assert {"process/{vendor}-lmcache-mp producer-0".format(**facts)} <= found
    assert facts["engines"].keys() == facts["connectors"].keys() == found
    assert facts["servers"].keys() == server_argv(facts["vendor"]).keys()
    if facts["vendor"] == "cuda":
        assert "compose/cuda-lmcache-mp" in facts["servers"]


def test_engines_take_the_paths_that_are_proved(facts: Facts) -> None:
    for name, engine in facts["engines"].items():
        assert engine["second_runner"] is False, name
        assert engine["asynchronous"] is False, name
        assert engine["prefix_caching"] is True, name
        assert engine["transfer"] == {
            "connector": "PatchedLMCacheMPConnector",
            "module": "pdkit_connector.server_connector",
            "role": "kv_producer" if " producer-" in name else "kv_consumer",
            "failures": "recompute",
        }, name


def test_lmcache_takes_the_servers_arguments(facts: Facts) -> None:
    for name, server in facts["servers"].items():
        assert server["scripts"] is False, name
        assert server["transfer"] == "lmcache_driven", "nothing is moved by pickle"
        assert server["isolated"] is False, "events go by /dev/shm"
        assert server["host"] == "unix-socket-only", "it listens on no port"
        assert server["lazy"] is False, "its memory is taken, and pinned, at the start"
        assert server["chunk"] == 256, name
        assert server["mib"] >= 1024, name
        assert server["adapters"] == ["PluginL2AdapterConfig"], "Redis is its second tier"


def test_connectors_load_and_ask_the_server(facts: Facts) -> None:
    for name, made in facts["connectors"].items():
        assert made == {
            "class": "pdkit_connector.server_connector.PatchedLMCacheMPConnector",
            "guarded": ["GuardedSchedulerAdapter", "GuardedAdapter"],
            "shares": ["CudaIPCWrapper", "DefaultEventIPCBackend"],
            "found": 0,
        }, name
