"""What 'auto' selects and what exists: detected on this machine, or assumed for a plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deploy.config.compat import connector_of
from deploy.config.spec import StackSpec
from deploy.config.vendors import vendor_named
from deploy.errors import PdkitError
from deploy.home_folder import default_hub_cache
from deploy.planning.gpus import gpu_need, require_cpus_meant, with_assumed_gpus
from deploy.planning.inventory import Inventory
from deploy.runtime.compose.docker import docker_answers, docker_info, engine_answers, is_rootless
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
from deploy.workflows.user_files import hub_token

if TYPE_CHECKING:
    from deploy.stack.containers import ContainerImages
    from deploy.workflows.stack_images import StackImages

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
        installed = _installed(spec) if not inventory and here.gpus_of(vendor) else _UNKNOWN
        return Facts(machine, vendor, chosen, named_programs(spec), installed)
    from deploy.workflows.stack_images import refuse_bad_pair, stack_images

    images = stack_images(spec, vendor)
    if images.engine.vllm is not None:
        refuse_bad_pair(spec, vendor, images.engine.vllm, images.engine.lmcache, lambda _: None)
    versions = (images.engine.vllm, images.engine.lmcache)
    return Facts(machine, vendor, chosen, _containers(spec, images.by_name, info), versions)


def _installed(spec: StackSpec) -> tuple[str | None, str | None]:
    """Return this machine's versions of vLLM and LMCache, by which a connector is chosen."""
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
    from deploy.workflows.stack_images import stack_images

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
