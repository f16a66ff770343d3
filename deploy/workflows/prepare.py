"""From a spec to a stack, on this machine or without looking at it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.assets import Kit, connector_path, monitoring_path, router_path
from deploy.config.compat import connector_of
from deploy.config.engine_args import options
from deploy.config.fields import IN_ENGINES, Connector
from deploy.config.model import Model, resolve_model
from deploy.config.runtimes import RUNTIMES
from deploy.config.spec import StackSpec, settle
from deploy.config.vendors import vendor_named
from deploy.connector.pdkit_connector.identity.model_files import (
    ModelFile,
    cached_snapshot,
    is_offline,
    model_files,
    named_files,
)
from deploy.home_folder import default_hub_cache
from deploy.planning.inventory import Inventory
from deploy.planning.plan import Plan, make_plan, plan_as_asked
from deploy.planning.ways_out import least_that_holds
from deploy.runtime.home import Home
from deploy.runtime.last_measured import last_measured
from deploy.tiny_model import config_json, model_folder_name
from deploy.workflows.software import Containers, Programs

if TYPE_CHECKING:
    from deploy.planning.break_even import LastBenchmark
    from deploy.planning.connector import ConnectorChoice
    from deploy.stack.layout import Layout
    from deploy.stack.service import Stack

Report = Callable[[str], None]

# Variables by which users send engines to another cache of the hub, such as in their container.
OTHER_CACHES = frozenset({"HF_HUB_CACHE", "HF_HOME", "HUGGINGFACE_HUB_CACHE"})


@dataclass(frozen=True)
class Facts:
    """What was found on the machine when a stack was planned, or is assumed of one.

    Attributes:
        vendor, runtime: what 'auto' selects there.
        software: what its runtime runs services with.
        versions: of vLLM and LMCache, as far as they are known.
    """

    inventory: Inventory
    vendor: str
    runtime: str
    software: Programs | Containers
    versions: tuple[str | None, str | None] = (None, None)


@dataclass(frozen=True)
class Prepared:
    """A stack and all it was made from.

    Attributes:
        spec: as requested, 'auto' included.
        measured: what the last benchmark of this model on this machine says.
    """

    spec: StackSpec
    facts: Facts
    model: Model
    plan: Plan
    layout: Layout
    measured: LastBenchmark | None = None

    @cached_property
    def stack(self) -> Stack:
        """The services. Built on first use: showing a plan needs none of them."""
        from deploy.stack.build import build_stack

        return build_stack(self.plan, self.layout)

    @cached_property
    def connector_choice(self) -> ConnectorChoice | None:
        """How engines share KV, and how else they could; None if they share none.

        Plans a second time to find out; `chosen_connector` does not.
        """
        from deploy.planning.connector import connector_choice

        asked = self.spec.connector is not None
        return connector_choice(
            self.plan, self.inventory, asked=asked, versions=self.facts.versions
        )

    @property
    def chosen_connector(self) -> str:
        """How engines share KV and why, in words; "" if they share none."""
        from deploy.planning.connector import chosen_connector

        asked = self.spec.connector is not None
        return chosen_connector(self.plan.connector, asked=asked) if self.plan.shares_kv else ""

    def with_facts(self, facts: Facts, home: Home) -> Prepared:
        """Return the same plan with other contents of its images, on which no number depends."""
        layout = facts.software.layout(
            self.plan.spec, home, self.model, installed_kit(), versions=facts.versions
        )
        return replace(self, facts=facts, layout=layout)

    @property
    def inventory(self) -> Inventory:
        """The machine that the plan is for."""
        return self.facts.inventory

    @property
    def hub_cache(self) -> Path:
        """The folder of this machine that holds models of the hub, or will."""
        return self.facts.software.hub_folder(self.spec) or Path(default_hub_cache())

    @cached_property
    def smallest_machines(self) -> list[str]:
        """The smallest machines that hold the model: "1 GPU of 24 GiB"; empty if unknown."""
        return least_that_holds(
            self.plan,
            self.inventory,
            lambda spec, on: plan_as_asked(spec, self.model, on, restored=True),
        )

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What to know beside the plan's numbers, one line each."""
        from deploy.planning.notes import NO_GPU_FOUND, plan_notes

        notes = plan_notes(self.plan, self.inventory)
        if self.spec.vendor == "auto" and not self.plan.vendor.has_gpus:
            notes = (NO_GPU_FOUND, *notes)
        return (*notes, str(self.measured)) if self.measured else notes


def engine_image(prepared: Prepared) -> str:
    """Return the engines' image as it was named; "" if they are processes."""
    return prepared.facts.software.engine_image


def installed_kit() -> Kit:
    """Return the files of the pdkit that runs."""
    return Kit(connector_path(), router_path(), monitoring_path())


def prepare(
    spec: StackSpec,
    home: Home,
    facts: Facts,
    *,
    model: Model | None = None,
    connector: Connector | None = None,
    kit: Kit | None = None,
) -> Prepared:
    """Plan a spec and its stack. Changes nothing.

    Without `model` the spec's is looked up, and its config.json read. `connector` is that
    of a stack that runs already, whose settings were accepted when it was started; without it the
    versions decide, unless the spec does. The stack is given the files of the pdkit that runs, or
    of `kit`.

    Raises:
        ConfigError: the spec contradicts itself, the model or the machine.
        MachineError: the machine of the facts has too few GPUs, or too little memory on them.
    """
    chosen = connector or _connector(spec, facts)
    settled = settle(spec, vendor=facts.vendor, runtime=facts.runtime, connector=chosen)
    if model is None:
        model = find_model(spec, home, facts.vendor, runtime=facts.runtime)
        facts.software.require_visible(model)
        if model.source == "folder":
            spec = spec.model_copy(
                update={"model": model.ref}
            )  # an absolute path, valid from any folder
    plan = make_plan(settled, model, facts.inventory, restored=connector is not None)
    layout = facts.software.layout(
        settled, home, model, kit or installed_kit(), versions=facts.versions
    )
    return Prepared(spec, facts, model, plan, layout, last_measured(home, plan))


def _connector(spec: StackSpec, facts: Facts) -> Connector:
    """Return the connector; the default of engines that share no KV says nothing."""
    if (spec.topology or "").endswith("a"):
        return spec.connector or IN_ENGINES
    return connector_of(spec, facts.vendor, *facts.versions)


def find_model(spec: StackSpec, home: Home, vendor: str, *, runtime: str = "") -> Model:
    """Return the model of a spec; a relative path is resolved from the current folder.

    Args:
        runtime: of the engines; "" if none are started. Of processes, the files that their
            arguments name are read.

    Raises:
        ConfigError: a folder that does not hold a model.
    """
    given, env = options(spec.engine.args), spec.engine.env
    model = resolve_model(
        spec.model or vendor_named(vendor).default_model,
        tiny_path=home.models / model_folder_name(),
        tiny_config=config_json(),
        hub_cache=spec.hub_cache,
        load_format=given.get("--load-format") or "auto",
        revision=given.get("--revision") or "main",
        overrides=given.get("--hf-overrides", ""),
    )
    if not runtime:
        return model
    # In containers the same paths are others; their image is in the identity.
    as_user = RUNTIMES[runtime].as_user
    named = named_files(spec.engine.args) if as_user else ()
    return replace(
        model,
        named=named,
        files=model.files or _cached_files(model, spec, {**(os.environ if as_user else {}), **env}),
    )


def _cached_files(
    model: Model, spec: StackSpec, environ: Mapping[str, str]
) -> tuple[ModelFile, ...]:
    """Return the files of a hub's model that engines take from the cache without asking the hub.

    Somebody may have changed them by hand, so its commit does not say what is in them. An online
    engine may add files.
    """
    elsewhere = not OTHER_CACHES.isdisjoint(spec.engine.env)
    if elsewhere or "--download-dir" in options(spec.engine.args) or not is_offline(environ):
        return ()
    if model.source != "hub" or not (model.version and model.weight_bytes):
        return ()
    cache = spec.hub_cache or default_hub_cache()
    return model_files(cached_snapshot(cache, model.ref, model.version))
