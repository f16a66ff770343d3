"""Values that unit tests are built from, and an environment in which this machine does not show."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deploy.assets import Kit
from deploy.config.model import Model, resolve_model
from deploy.config.shape import ModelShape
from deploy.config.sources import load_spec
from deploy.config.spec import StackSpec
from deploy.config.vendors import vendor_named
from deploy.doctor.observed import HostSeen
from deploy.planning.inventory import Inventory
from deploy.planning.plan import Plan, make_plan
from deploy.runtime.home import Home
from deploy.tiny_model import config_json
from deploy.workflows.facts import stated_facts, with_needed_gpus
from deploy.workflows.prepare import Prepared, prepare
from deploy.workflows.software import Containers, Programs
from tests.conftest import NO_DOCKER, NO_HOME

MACHINE = Inventory(cpus=16, memory_mib=65536)
# A host of which no rule warns.
SOUND_HOST = HostSeen(
    open_files=1 << 20,
    huge_pages="madvise",
    overcommit=0,
    shm_free_mib=8192,
    architecture="x86_64",
    cpu_flags=frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16"}),
    numa={0: "0-15"},
    cpus=16,
    now=1_800_000_000.0,
)
HOME = Home(Path("/home/user/.local/state/pdkit"), Path("/home/user/.cache/pdkit"))
_LIB = Path("/opt/pdkit/lib/deploy")
KIT = Kit(_LIB / "connector", _LIB / "router", _LIB / "_data/compose/monitoring", version="1.2.3")
PROMETHEUS = {"prometheus": "/usr/bin/prometheus", "grafana": "/usr/sbin/grafana"}
TINY_SHAPE = ModelShape(layers=4, attention_heads=4, kv_heads=2, head_dim=64, max_positions=32768)
TINY = Model("/models/tiny", "pdkit-tiny", "tiny", TINY_SHAPE)

NO_ENVIRONMENT: Mapping[str, str] = {}
_LEAKING = ("PDKIT_", "XDG_", "HF_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """Show an environment without settings, and leave what was there.

    Not by monkeypatch: it undoes later than a test's other fixtures, and would bring back what they
    had set.
    """
    kept = {n: v for n, v in os.environ.items() if not n.upper().startswith(_LEAKING)}
    shown = {"HOME": NO_HOME, "PDKIT_HOME": "/nonexistent/pdkit-home", "DOCKER_HOST": NO_DOCKER}
    with mock.patch.dict(os.environ, {**kept, **shown}, clear=True):
        yield


@pytest.fixture
def spec() -> Callable[..., StackSpec]:
    """Make a spec from fields, by the way that deploy.yaml takes."""
    return lambda **fields: StackSpec.model_validate(fields)


@pytest.fixture
def plan() -> Callable[..., Plan]:
    """Plan a spec, given by its fields, for one model and one machine."""

    def make(*, model: Model = TINY, machine: Inventory = MACHINE, **fields: Any) -> Plan:
        settled = {"vendor": "cpu", "runtime": "process", **fields}
        return make_plan(StackSpec.model_validate(settled), model, machine)

    return make


@pytest.fixture(scope="session")
def prepared() -> Callable[..., Prepared]:
    """Prepare the stack of a spec, given by its fields, for a made-up machine.

    `machine=None` is one without GPUs, for which those that are asked for are assumed. `given` is
    the model, which then need not be anywhere. `versions` are those of vLLM and LMCache.
    """
    programs = Programs("/opt/engines/bin/python", "/usr/bin/redis-server")

    def make(
        *,
        machine: Inventory | None = MACHINE,
        given: Model | None = None,
        environ: Mapping[str, str] = NO_ENVIRONMENT,
        versions: tuple[str, str] | None = None,
        **fields: Any,
    ) -> Prepared:
        values = {"vendor": "cpu", "runtime": "process", **fields}
        asked = load_spec(values, {}, Path(os.devnull)).spec
        with mock.patch.dict(os.environ, {"HOME": "/home/user", **environ}, clear=True):
            there = machine or with_needed_gpus(asked, MACHINE)
            facts = stated_facts(asked, there, runtime="process")
            facts = replace(facts, versions=versions or facts.versions)
            if isinstance(facts.software, Containers):
                facts = replace(facts, software=replace(facts.software, user="1000:1000"))
            else:
                watching = PROMETHEUS if asked.monitoring else {}
                facts = replace(facts, software=replace(programs, **watching))
            model = given or resolve_model(
                asked.model or vendor_named(facts.vendor).default_model,
                tiny_path=HOME.models / "tiny-llama",
                tiny_config=config_json(),
                hub_cache=asked.hub_cache,
            )
            return prepare(asked, HOME, facts, model=model, kit=KIT)

    return make
