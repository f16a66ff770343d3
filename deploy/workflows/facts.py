"""What 'auto' selects and what exists: found on this machine, or assumed for a plan.

One survey of the machine with two policies: `up` and `swap` stop at the first thing that is
missing; `doctor` notes it and goes on with what a plan would assume, so that it can judge the rest.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from deploy.config.compat import connector_of
from deploy.config.spec import StackSpec
from deploy.config.vendors import vendor_named
from deploy.doctor.observed import DockerSeen, StepOutcome
from deploy.errors import DockerUnavailable, MachineError, MissingTool, PdkitError, UsageError
from deploy.home_folder import default_hub_cache
from deploy.planning.gpus import allot, gpu_need, require_cpus_meant, with_assumed_gpus
from deploy.planning.inventory import Inventory
from deploy.planning.notes import NO_GPU_FOUND
from deploy.runtime.compose.docker import (
    docker_answers,
    docker_info,
    engine_answers,
    is_rootless,
    require_compose,
)
from deploy.runtime.detect import detect_host, detect_inventory, detected_vendor
from deploy.runtime.home import Home
from deploy.runtime.host import (
    engine_versions,
    find_engine_python,
    find_grafana,
    find_prometheus,
    find_redis_server,
    require_libraries,
)
from deploy.workflows.prepare import Facts, Report
from deploy.workflows.software import Containers, Programs
from deploy.workflows.stack_images import StackImages, refuse_bad_pair, stack_images
from deploy.workflows.user_files import hub_token

if TYPE_CHECKING:
    from deploy.stack.containers import ContainerImages

_UNKNOWN = (None, None)
# Containers that root starts run as this user, for whom the kit's files are made readable.
_UNPRIVILEGED = "10001:10001"


def stated_facts(
    spec: StackSpec, inventory: Inventory | None, *, runtime: str, probe: bool = True
) -> Facts:
    """Return facts for a plan that is only shown, so that nothing needs to exist.

    Without an `inventory`, this machine's is used, and missing GPUs are assumed. Without `probe`,
    GPUs are not even looked for if the vendor is named. `runtime` is what 'auto' selects.

    Raises:
        ConfigError: the spec contradicts itself, or names an image that cannot be.
    """
    looks = probe or spec.vendor == "auto"
    asks = inventory is None and probe and runtime != "process"
    info = docker_info() if asks and engine_answers() else None
    here = inventory or (detect_inventory(info) if looks else detect_host())
    machine = inventory or with_needed_gpus(spec, here)
    vendor = chosen_vendor(spec, machine)
    chosen = spec.runtime if spec.runtime != "auto" else runtime
    if chosen == "process":
        # What is installed beside assumed GPUs is not what would run there.
        real = not inventory and (vendor == "cpu" or here.gpus_of(vendor))
        installed = _installed(spec) if real else _UNKNOWN
        return Facts(machine, vendor, chosen, named_programs(spec), installed)
    images = stack_images(spec, vendor)
    if images.engine.vllm is not None:
        refuse_bad_pair(spec, vendor, images.engine.vllm, images.engine.lmcache, lambda _: None)
    versions = (images.engine.vllm, images.engine.lmcache)
    return Facts(machine, vendor, chosen, _containers(spec, images.by_name, info), versions)


def _installed(spec: StackSpec) -> tuple[str | None, str | None]:
    """Return this machine's versions of vLLM and LMCache."""
    with suppress(PdkitError):
        return engine_versions(named_programs(spec).engine_python)
    return _UNKNOWN


def chosen_vendor(spec: StackSpec, machine: Inventory) -> str:
    """Return the vendor: the one that is named, else that of the GPUs, else 'cpu'.

    Raises:
        MissingGpus: no vendor is named, and GPUs are asked for or are there, but cannot be used.
    """
    if spec.vendor != "auto":
        return spec.vendor
    if not machine.gpus:
        require_cpus_meant(spec, machine)
    return detected_vendor(machine)


def with_needed_gpus(spec: StackSpec, machine: Inventory) -> Inventory:
    """Return a machine with the GPUs that a spec needs; missing ones are assumed."""
    row = vendor_named(chosen_vendor(spec, machine))
    return with_assumed_gpus(machine, row, gpu_need(spec, row, machine).needed)


def runtime_here(spec: StackSpec, home: Home) -> str:
    """Return the runtime of this machine: Docker Compose if it answers, else processes."""
    if spec.runtime != "auto":
        return spec.runtime
    return "compose" if docker_answers(home.cache / "compose-plugin") else "process"


def containers_here(spec: StackSpec, images: StackImages, info: Mapping[str, Any]) -> Containers:
    """Return the images of containers here; of missing ones, only the names."""
    from deploy.workflows.images import found_images

    return _containers(spec, found_images(images), info)


def _containers(
    spec: StackSpec, images: ContainerImages, info: Mapping[str, Any] | None
) -> Containers:
    return Containers(
        images=images,
        user=container_user(rootless=is_rootless(info or {})),
        hub_cache=str(spec.hub_cache or default_hub_cache()),
        hub_token=hub_token(spec) is not None,
    )


def with_images(facts: Facts, spec: StackSpec, report: Report) -> Facts:
    """Pull or build the images that are missing, and return the facts with their contents' ids.

    Raises:
        ConfigError: the engine image holds versions that do not belong together.
        MissingImage: one cannot be had.
    """
    if not isinstance(facts.software, Containers):
        return facts
    from deploy.workflows.images import obtain_images

    # What is in them is judged for the connector that was planned for.
    spec = spec.model_copy(update={"connector": connector_of(spec, facts.vendor, *facts.versions)})
    images = obtain_images(stack_images(spec, facts.vendor), spec, facts.vendor, report)
    return replace(facts, software=replace(facts.software, images=images))


def named_programs(spec: StackSpec) -> Programs:
    """Return the programs by name only, so that a plan can be shown where they are missing."""
    return Programs(
        str(spec.engine.python or sys.executable),
        str(spec.redis.server or "redis-server"),
        prometheus="prometheus" if spec.monitoring else "",
    )


def found_programs(spec: StackSpec, vendor: str) -> Programs:
    """Return the programs as they are on this machine.

    Raises:
        MissingTool: one is not there.
    """
    python = find_engine_python(spec.engine.python)
    require_libraries(python, vendor_named(vendor).libraries)
    own = spec.redis.url_file is None
    redis = find_redis_server(spec.redis.server, python) if own else ""
    if not spec.monitoring:
        return Programs(python, redis)
    return Programs(python, redis, find_prometheus(), find_grafana())


def container_user(*, rootless: bool) -> str:
    """Return 'uid:gid' of containers: the user's own, whose files they read, and never root.

    Where Docker itself runs without root, a container's root is the user.
    """
    if rootless:
        from deploy.stack.containers import ROOTLESS

        return ROOTLESS
    return f"{os.getuid()}:{os.getgid()}" if os.getuid() else _UNPRIVILEGED


def without_held_gpus(inventory: Inventory, home: Home, name: str) -> Inventory:
    """Return the inventory without GPUs that other running stacks hold."""
    from deploy.workflows.running import plans_of_others

    held: dict[tuple[str, int], str] = {}
    for other, plan in plans_of_others(home, name) if inventory.gpus else ():
        for engine in plan.engines:
            held |= {(plan.vendor.name, index): other for index in engine.devices}
    left = tuple(gpu for gpu in inventory.gpus if (gpu.vendor, gpu.index) not in held)
    lines = [f"GPU {index}: in use by the stack '{other}'" for (_, index), other in held.items()]
    return replace(inventory, gpus=left, seen=(*inventory.seen, *lines))


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
