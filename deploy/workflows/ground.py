"""What a spec is judged on: vendor, runtime, programs, images and model, as far as they are here.

What is missing becomes an outcome, and is assumed in the plan, so that the rest can be judged.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from deploy.config.model import Model, with_config
from deploy.config.spec import StackSpec
from deploy.config.vendors import vendor_named
from deploy.doctor.seen import DockerSeen, HubSeen, StepOutcome
from deploy.errors import ConfigError, MachineError, PdkitError, UsageError
from deploy.planning.gpus import gpu_need, with_assumed_gpus
from deploy.planning.inventory import Inventory
from deploy.runtime.compose.docker import docker_info, is_rootless, require_compose
from deploy.runtime.detect import detect_inventory, detected_vendor
from deploy.runtime.home import Home
from deploy.runtime.host import engine_versions
from deploy.runtime.hub import HubError
from deploy.workflows.facts import (
    containers_here,
    found_programs,
    named_programs,
    require_gpus,
    stated_facts,
    without_held_gpus,
)
from deploy.workflows.hub import ask_hub, hub_of, may_ask
from deploy.workflows.images import looked_into, refuse_bad_pair, stack_images
from deploy.workflows.prepare import Facts, Report, find_model

_DETAIL_LINES = 6
_Result = TypeVar("_Result")


@dataclass
class Steps:
    """Steps that `up` takes too, and how each went here."""

    outcomes: dict[str, StepOutcome] = field(default_factory=dict)

    def take(
        self, step: str, do: Callable[[], _Result], says: Callable[[_Result], str]
    ) -> _Result | None:
        """Do it; whatever goes wrong is its outcome."""
        try:
            result = do()
            self.outcomes[step] = StepOutcome(says=says(result))
        except PdkitError as exc:
            self.outcomes[step] = StepOutcome(
                trouble=exc.message,
                fix=exc.hint_for("up"),
                details=exc.details[:_DETAIL_LINES],
                usage=isinstance(exc, UsageError),
            )
        except Exception as exc:  # noqa: BLE001 - a look that fails is a finding, not the end
            self.outcomes[step] = StepOutcome(unknown=f"this could not be looked at: {exc!r}")
        else:
            return result
        return None

    def well(self, step: str) -> bool:
        outcome = self.outcomes.get(step)
        return outcome is not None and not outcome.trouble and not outcome.unknown


@dataclass(frozen=True)
class Survey:
    """What a plan is made from here, as far as it could be found; the rest is assumed."""

    facts: Facts
    model: Model | None
    hub: HubSeen | None
    docker: DockerSeen | None
    info: Mapping[str, Any] | None


def survey_for(spec: StackSpec, home: Home, steps: Steps, report: Report) -> Survey:
    docker, info = _see_docker(spec)
    runtime = "compose" if docker and docker.chosen else "process"
    there = detect_inventory(info) if info is not None else detect_inventory()
    vendor = spec.vendor if spec.vendor != "auto" else detected_vendor(there)
    machine = _machine(spec, vendor, without_held_gpus(there, home, spec.name), steps)
    named = spec.model_copy(update={"vendor": vendor, "runtime": runtime})
    facts = stated_facts(named, machine, runtime=runtime)
    if runtime == "process":
        facts = _with_programs(spec, facts, steps, report)
    elif info is not None:
        facts = _with_images(spec, facts, info, steps, report)
    model, hub = _ask_about_model(spec, home, vendor)
    return Survey(facts, model, hub, docker, info)


def _see_docker(spec: StackSpec) -> tuple[DockerSeen | None, Mapping[str, Any] | None]:
    """Return what is known of Docker, and what it says of itself; None where it is not wanted."""
    if spec.runtime == "process":
        return None, None
    asked = spec.runtime == "compose"
    chosen = asked
    try:
        version = require_compose()
        chosen = True  # by `up`, whatever else the engine says
        info = docker_info()
    except MachineError as exc:
        there = shutil.which("docker") is not None
        return DockerSeen(
            chosen=chosen, asked=asked, trouble=exc.message, fix=exc.hint, installed=there
        ), None
    return DockerSeen(
        chosen=True,
        asked=asked,
        version=str(info.get("ServerVersion", "")),
        compose=".".join(map(str, version)),
        rootless=is_rootless(info),
        installed=True,
    ), info


def _machine(spec: StackSpec, vendor: str, there: Inventory, steps: Steps) -> Inventory:
    """Return the machine, with assumed GPUs in the place of those that it lacks.

    Raises:
        ConfigError: the spec contradicts itself.
    """
    row = vendor_named(vendor)
    need = gpu_need(spec, row, there)
    if not row.has_gpus:
        return there
    names = ", ".join(sorted({gpu.name for gpu in there.gpus_of(vendor)}))
    steps.take(
        "gpus",
        lambda: require_gpus(spec, vendor, there),
        lambda _: f"{need.seen} seen ({names}), {need.needed} taken",
    )
    return with_assumed_gpus(there, row, need.needed)


def _with_programs(spec: StackSpec, facts: Facts, steps: Steps, report: Report) -> Facts:
    programs = steps.take(
        "programs",
        lambda: found_programs(spec, facts.vendor),
        lambda found: f"{found.engine_python}, {found.redis_server or 'your own Redis'}",
    )
    if programs is None:
        return replace(facts, software=named_programs(spec))
    vllm, lmcache = engine_versions(programs.engine_python)
    steps.take(
        "versions",
        lambda: refuse_bad_pair(spec, facts.vendor, vllm, lmcache, report),
        lambda _: f"vLLM {vllm} with LMCache {lmcache}",
    )
    return replace(facts, software=programs)


def _with_images(
    spec: StackSpec, facts: Facts, info: Mapping[str, Any], steps: Steps, report: Report
) -> Facts:
    """Return the facts with the images' contents; those that are missing stay names."""
    wanted = stack_images(spec, facts.vendor)
    software = containers_here(spec, wanted, facts.vendor, info)
    if software.images.engine_id:
        images = steps.take(
            "versions",
            lambda: looked_into(wanted, spec, facts.vendor, report),
            lambda _: f"{wanted.engine.pair} in {wanted.engine.image}",
        )
        software = replace(software, images=images or software.images)
    return replace(facts, software=software)


def _ask_about_model(
    spec: StackSpec, home: Home, vendor: str
) -> tuple[Model | None, HubSeen | None]:
    """Return a hub's model by what the hub says, if it is not here, and what came of asking.

    A hub that is not to be asked (HF_HUB_OFFLINE) is not.

    Raises:
        ConfigError: the model can be none.
    """
    model = find_model(spec, home, vendor)
    if model.source != "hub":
        return None, None
    asked = HubSeen(cached=False, offline=False, cache="", address=hub_of(spec), asked=True)
    if model.version or not may_ask(spec):
        return None, replace(asked, asked=False)
    try:
        answer = ask_hub(spec, model)
        return with_config(model, answer.config, answer.commit), asked
    except HubError as exc:
        return None, replace(asked, trouble=str(exc), refused=exc.refused)
    except ConfigError as exc:
        return None, replace(asked, trouble=exc.message)
