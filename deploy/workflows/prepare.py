"""From a spec to a stack, on this machine or without looking at it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from deploy.assets import connector_path
from deploy.config.model import Model, resolve_model
from deploy.config.spec import StackSpec
from deploy.config.vendors import vendor_named
from deploy.planning.inventory import Inventory
from deploy.planning.plan import Plan, make_plan
from deploy.runtime.home import Home
from deploy.runtime.host import find_engine_python, find_redis_server, require_libraries
from deploy.stack.build import ProcessLayout, build_stack
from deploy.stack.service import Stack
from deploy.tiny_model import model_folder_name
from deploy.tiny_model.recipe import config_json

Report = Callable[[str], None]


@dataclass(frozen=True)
class Programs:
    """The programs that services are run with."""

    engine_python: str
    redis_server: str


@dataclass(frozen=True)
class Prepared:
    """A stack and all it was made from."""

    spec: StackSpec
    inventory: Inventory
    programs: Programs
    model: Model
    plan: Plan
    stack: Stack


def named_programs(spec: StackSpec) -> Programs:
    """Return the programs by name only, so that a plan can be shown where they are missing."""
    return Programs(
        str(spec.engine.python or sys.executable), str(spec.redis.server or "redis-server")
    )


def found_programs(spec: StackSpec) -> Programs:
    """Return the programs as they are on this machine.

    Raises:
        MissingTool: one is not there.
    """
    python = find_engine_python(spec.engine.python)
    require_libraries(python, vendor_named(spec.vendor).libraries)
    return Programs(python, find_redis_server(spec.redis.server, python))


def prepare(
    spec: StackSpec,
    home: Home,
    inventory: Inventory,
    programs: Programs,
    *,
    model: Model | None = None,
) -> Prepared:
    """Plan a spec and build its stack. Changes nothing.

    Without `model` the spec's is looked up, and its config.json read.

    Raises:
        ConfigError: the spec contradicts itself, the model or the machine.
    """
    model = model or find_model(spec, home)
    plan = make_plan(spec, model, inventory)
    layout = ProcessLayout(
        run_dir=home.stack(spec.name).run_dir,
        temp_dir=home.stack(spec.name).temp_dir,
        engine_python=programs.engine_python,
        redis_server=programs.redis_server,
        connector_dir=connector_path(),
    )
    return Prepared(spec, inventory, programs, model, plan, build_stack(plan, spec, layout))


def find_model(spec: StackSpec, home: Home) -> Model:
    """Return the model that a spec means, seen from the current folder.

    Raises:
        ConfigError: a folder that is none of a model.
    """
    return resolve_model(
        spec.model or vendor_named(spec.vendor).default_model,
        tiny_path=home.models / model_folder_name(),
        tiny_config=config_json(),
    )
