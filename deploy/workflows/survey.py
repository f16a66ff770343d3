"""What this machine has for a stack: GPUs, Docker, programs or images, and their versions.

One survey with two policies: `up` and `swap` stop at the first thing that is missing; `doctor`
notes it and goes on with what a plan would assume, so that it can judge the rest.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from deploy.config.spec import StackSpec
from deploy.config.vendors import vendor_named
from deploy.doctor.observed import DockerSeen, StepOutcome
from deploy.errors import DockerUnavailable, MachineError, MissingTool, PdkitError, UsageError
from deploy.planning.gpus import allot, gpu_need, with_assumed_gpus
from deploy.planning.inventory import Inventory
from deploy.planning.notes import NO_GPU_FOUND
from deploy.runtime.compose.docker import docker_info, is_rootless, require_compose
from deploy.runtime.detect import detect_inventory
from deploy.runtime.home import Home
from deploy.runtime.host import engine_versions
from deploy.workflows.facts import (
    chosen_vendor,
    containers_here,
    found_programs,
    named_programs,
    stated_facts,
    without_held_gpus,
)
from deploy.workflows.prepare import Facts, Report
from deploy.workflows.software import Programs
from deploy.workflows.stack_images import refuse_bad_pair, stack_images

_DETAIL_LINES = 6
_Result = TypeVar("_Result")


class Policy:
    """What to do about a step that fails; here that of `up`: it ends the survey."""

    def take(
        self,
        step: str,  # noqa: ARG002 - `NotedSteps` needs it
        do: Callable[[], _Result],
        says: Callable[[_Result], str],  # noqa: ARG002 - `NotedSteps` needs it
    ) -> _Result | None:
        """Return the result of a step, or None if it failed and the survey goes on.

        Args:
            says: the message of a step that succeeded.
        """
        return do()

    def without_docker(self, error: MachineError) -> None:
        """Handle a Docker engine that cannot be used though the stack needs it."""
        raise error


@dataclass
class NotedSteps(Policy):
    """The policy of `doctor`: failures are noted."""

    outcomes: dict[str, StepOutcome] = field(default_factory=dict)

    def take(
        self, step: str, do: Callable[[], _Result], says: Callable[[_Result], str]
    ) -> _Result | None:
        """Take a step; a failure becomes its outcome."""
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
        except Exception as exc:  # noqa: BLE001 - a failed step is a finding, not the end
            self.outcomes[step] = StepOutcome(unknown=f"this could not be checked: {exc!r}")
        else:
            return result
        return None

    def without_docker(self, error: MachineError) -> None:
        """Do nothing: `DockerSeen` has it."""

    def well(self, step: str) -> bool:
        """Tell whether a step was taken and succeeded."""
        outcome = self.outcomes.get(step)
        return outcome is not None and not outcome.trouble and not outcome.unknown


@dataclass(frozen=True)
class Survey:
    """What was found on this machine; `facts` assumes what is missing.

    Attributes:
        docker, info: what is known of Docker, and `docker info`; None if it is not wanted.
    """

    facts: Facts
    docker: DockerSeen | None
    info: Mapping[str, Any] | None


def facts_here(spec: StackSpec, home: Home, report: Report) -> Facts:
    """Survey this machine for a stack. Images may be missing: `with_images` gets them.

    Raises:
        ConfigError: versions that do not belong together, or an image that cannot be.
        MissingGpus, MissingTool, DockerUnavailable: something is missing.
    """
    return survey(spec, home, Policy(), report).facts


def survey(spec: StackSpec, home: Home, policy: Policy, report: Report) -> Survey:
    """Survey this machine: first GPUs, then the software for them.

    Raises:
        ConfigError: the spec contradicts itself, or names an image that cannot be.
        PdkitError: something is missing, and the policy does not go on without it.
    """
    docker, info, no_docker = _see_docker(spec, policy)
    there = detect_inventory(info)
    vendor: str | None = spec.vendor
    if vendor == "auto":
        vendor = policy.take("gpus", lambda: chosen_vendor(spec, there), _says_vendor)
        if vendor == "cpu":
            report(NO_GPU_FOUND)
    if vendor is None:  # go on as if its GPUs could be used
        vendor = next(iter(there.unusable), "cuda")
        row = vendor_named(vendor)
        machine = with_assumed_gpus(there, row, gpu_need(spec, row, there).needed)
    else:
        machine = _machine(spec, vendor, without_held_gpus(there, home, spec.name), policy)
    if not (docker and docker.chosen):
        programs = _programs(spec, vendor, policy, report, no_docker)
        facts = Facts(machine, vendor, "process", *programs)
        return Survey(facts, docker, info)
    # As in a plan for another machine.
    named = spec.model_copy(update={"vendor": vendor, "runtime": "compose"})
    facts = stated_facts(named, machine, runtime="compose")
    if info is not None:
        images = containers_here(spec, stack_images(spec, vendor), info)
        facts = replace(facts, software=images)
    return Survey(facts, docker, info)


def _says_vendor(vendor: str) -> str:
    return NO_GPU_FOUND if vendor == "cpu" else f"vendor {vendor}"


def _see_docker(
    spec: StackSpec, policy: Policy
) -> tuple[DockerSeen | None, Mapping[str, Any] | None, MachineError | None]:
    if spec.runtime == "process":
        return None, None, None
    chosen = spec.runtime == "compose"
    try:
        version = require_compose()
        chosen = True  # Docker is usable from here on
        info = docker_info()
    except MachineError as exc:
        if chosen:
            policy.without_docker(exc)
        there = shutil.which("docker") is not None
        seen = DockerSeen(chosen=chosen, trouble=exc.message, fix=exc.hint, installed=there)
        return seen, None, exc
    seen = DockerSeen(
        chosen=True,
        version=str(info.get("ServerVersion", "")),
        compose=".".join(map(str, version)),
        rootless=is_rootless(info),
        installed=True,
    )
    return seen, info, None


def _machine(spec: StackSpec, vendor: str, there: Inventory, policy: Policy) -> Inventory:
    """Return the machine, with assumed GPUs where it lacks some.

    Raises:
        ConfigError: the spec contradicts itself.
    """
    row = vendor_named(vendor)
    need = gpu_need(spec, row, there)
    if not row.has_gpus:
        return there
    engines = need.topology.engines
    names = ", ".join(sorted({gpu.name for gpu in there.gpus_of(vendor)}))
    policy.take(
        "gpus",
        lambda: allot(there, row, engines=engines, ranks=spec.tp, needed=need.needed),
        lambda _: f"{need.seen} seen ({names}), {need.needed} taken",
    )
    return with_assumed_gpus(there, row, need.needed)


def _programs(
    spec: StackSpec,
    vendor: str,
    policy: Policy,
    report: Report,
    no_docker: MachineError | None,
) -> tuple[Programs, tuple[str | None, str | None]]:
    programs = policy.take(
        "programs",
        lambda: _found_programs(spec, vendor, no_docker),
        lambda found: f"{found.engine_python}, {found.redis_server or 'no redis-server needed'}",
    )
    if programs is None:
        return named_programs(spec), (None, None)
    vllm, lmcache = engine_versions(programs.engine_python)
    policy.take(
        "versions",
        lambda: refuse_bad_pair(spec, vendor, vllm, lmcache, report),
        lambda _: f"vLLM {vllm} with LMCache {lmcache}",
    )
    return programs, (vllm, lmcache)


def _found_programs(spec: StackSpec, vendor: str, no_docker: MachineError | None) -> Programs:
    """Return the programs of this machine.

    Raises:
        MissingTool: one is not there.
        DockerUnavailable: the same, where the runtime is 'auto' and would rather be Docker's.
    """
    try:
        return found_programs(spec, vendor)
    except MissingTool as exc:
        if not isinstance(no_docker, DockerUnavailable):
            raise
        raise DockerUnavailable(
            f"{no_docker.message}; for processes, {exc.message}",
            hint=f"{no_docker.fix}; or, for processes: {exc.hint}",
        ) from exc
