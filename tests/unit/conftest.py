"""Values that unit tests are built from, and an environment in which this machine does not show."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deploy.config.model import Model, ModelShape
from deploy.config.sources import load_spec
from deploy.config.spec import StackSpec
from deploy.planning.inventory import Inventory
from deploy.planning.plan import Plan, make_plan
from deploy.runtime.home import Home
from deploy.workflows.prepare import Prepared, Programs, prepare

MACHINE = Inventory(cpus=16, memory_mib=65536)
TINY_SHAPE = ModelShape(layers=4, attention_heads=4, kv_heads=2, head_dim=64, max_positions=32768)
TINY = Model("/models/tiny", "pdkit-tiny", "tiny", TINY_SHAPE)

_LEAKING = ("PDKIT_", "XDG_", "HF_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.upper().startswith(_LEAKING):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", "/nonexistent/home")
    monkeypatch.setenv("PDKIT_HOME", "/nonexistent/pdkit-home")


@pytest.fixture
def spec() -> Callable[..., StackSpec]:
    """Make a spec from fields, by the way that deploy.yaml takes."""
    return lambda **fields: StackSpec.model_validate(fields)


@pytest.fixture
def plan() -> Callable[..., Plan]:
    """Plan a spec, given by its fields, for one model and one machine."""

    def make(*, model: Model = TINY, machine: Inventory = MACHINE, **fields: Any) -> Plan:
        return make_plan(StackSpec.model_validate(fields), model, machine)

    return make


@pytest.fixture(scope="session")
def prepared() -> Callable[..., Prepared]:
    """Prepare the stack of a spec, given by its fields, for a machine that is none of ours."""
    home = Home(Path("/home/user/.local/state/pdkit"), Path("/home/user/.cache/pdkit"))
    programs = Programs("/opt/engines/bin/python", "/usr/bin/redis-server")

    def make(*, machine: Inventory = MACHINE, **fields: Any) -> Prepared:
        asked = load_spec(fields, {}, Path(os.devnull)).spec
        with mock.patch.object(tempfile, "tempdir", "/tmp"):
            return prepare(asked, home, machine, programs)

    return make
