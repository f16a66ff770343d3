"""`deploy export kubernetes`: the spec's stack as a folder that `kubectl apply -k` takes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy.assets import Kit
from deploy.config.fields import IN_ENGINES
from deploy.config.spec import SettledSpec, StackSpec, settle
from deploy.config.vendors import VENDORS, vendor_named
from deploy.errors import ConfigError, NamedSetting
from deploy.planning.gpus import gpu_need, with_assumed_gpus
from deploy.planning.inventory import Inventory
from deploy.planning.machines import across, network_note
from deploy.planning.plan import Plan, make_plan
from deploy.planning.rates import rate_note
from deploy.runtime.home import Home
from deploy.stack.build import build_stack
from deploy.stack.cluster.folder import Form, exported
from deploy.stack.cluster.layout import is_engine
from deploy.stack.cluster.overlay import VendorStack, replicas
from deploy.stack.cluster.pods import secret_keys
from deploy.stack.compose import project_name
from deploy.stack.document import refuse_visible_secrets
from deploy.stack.layout import HUB_TOKEN, MODELS
from deploy.stack.service import container_of
from deploy.workflows.cluster_document import cluster_document, cluster_layout
from deploy.workflows.facts import chosen_vendor
from deploy.workflows.prepare import find_model, installed_kit
from deploy.workflows.stack_images import refuse_bad_pair, stack_images
from deploy.workflows.user_redis import require_url_for_pods

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
# What a machine is assumed to have for each GPU, or for each engine on CPUs.
_GPU_CPUS, _GPU_MIB = 12, 96 * 1024
_ENGINE_CPUS, _ENGINE_MIB = 8, 16 * 1024
PLAIN, SET = FLAVOURS = ("plain", "disaggregatedset")


@dataclass(frozen=True)
class ExportRequest:
    """What is requested beside the spec.

    Attributes:
        namespace: by default, the Compose project's name.
        flavour: which objects hold the engines.
        machines: number of machines, each with the engines of the spec and Redis for them.
        link_gbit: bandwidth of a machine's network link each way, in Gbit/s.
    """

    namespace: str | None = None
    flavour: str = PLAIN
    machines: int = 1
    link_gbit: float | None = None


_DEFAULT = ExportRequest()


@dataclass(frozen=True)
class Export:
    """What was made of a spec.

    Attributes:
        files: path → text.
        flavour: which objects hold the engines.
        pods: vendor → workload → number of pods.
        secrets: names of the keys that the Secret must have.
        images: images that nodes must be able to pull.
        notes: what was assumed.
        ready_s: how long the engines may take to become ready.
    """

    namespace: str
    flavour: str
    files: dict[str, str]
    pods: dict[str, dict[str, int]]
    secrets: tuple[str, ...]
    images: tuple[str, ...]
    notes: tuple[str, ...]
    ready_s: float


def export(
    spec: StackSpec,
    home: Home,
    inventory: Inventory | None = None,
    wanted: ExportRequest = _DEFAULT,
    *,
    kit: Kit | None = None,
) -> Export:
    """Return the folder's files. Looks at no machine but this one's copy of the model's config.

    Args:
        inventory: what a machine has; without one it is assumed.

    Raises:
        ConfigError: the spec contradicts itself, or holds what pods cannot have.
        MissingGpus, NotEnoughMemory: the machine of the inventory has too little.
    """
    space = wanted.namespace or project_name(spec.name)
    _require_names(spec.name, space)
    _require_flavour(wanted.flavour)
    refuse_visible_secrets(spec, otherwise="patch in a valueFrom of the Secret")
    require_url_for_pods(spec.redis)
    # What watches a stack is a component here.
    spec = spec.model_copy(update={"monitoring": False})
    machines = {vendor: _machine(spec, vendor, inventory) for vendor in _vendors(spec, inventory)}
    plans = {
        vendor: _plan(
            settle(spec, vendor=vendor, runtime="compose", connector=IN_ENGINES), home, machine
        )
        for vendor, machine in machines.items()
    }
    form = {"namespace": space, "machines": wanted.machines}
    stacks = {
        vendor: _vendor_stack(spec, plan, machines[vendor], form, kit or installed_kit())
        for vendor, plan in plans.items()
    }
    if wanted.flavour == SET:
        _require_roles(next(iter(plans.values())))
    containers = [container_of(one) for stack in stacks.values() for one in stack.services]
    return Export(
        space,
        wanted.flavour,
        exported(stacks, Form(spec.name, space, as_set=wanted.flavour == SET)),
        {vendor: replicas(stack) for vendor, stack in stacks.items()},
        _secrets(next(iter(stacks.values()))),
        tuple(sorted({container.image for container in containers})),
        tuple(
            f"{vendor}: {note}"
            for vendor, plan in plans.items()
            for note in _notes(plan, machines[vendor], inventory is None, wanted)
        ),
        max(plan.ready_s for plan in plans.values()),
    )


def _require_names(stack: str, space: str) -> None:
    if not _NAME.fullmatch(space):
        raise ConfigError(
            f"'{space}' is not a valid namespace: use lower-case letters, digits and inner hyphens",
            retry=({"--namespace": "NAME"},),
        )
    if space == "default" or space.startswith("kube-"):
        raise ConfigError(
            f"the namespace '{space}' is not the stack's own: other pods in it would be "
            "restricted, and deleted with the stack",
            retry=({"--namespace": "NAME"},),
        )
    if not stack[-1].isalnum():
        raise ConfigError(
            f"'{stack}' is not a valid Kubernetes label: it must end with a letter or a digit",
            setting="name",
            hint="choose another name",
        )


def _require_flavour(flavour: str) -> None:
    if flavour not in FLAVOURS:
        raise ConfigError(
            f"--flavour: '{flavour}' is not one of {', '.join(FLAVOURS)}",
            retry=({"--flavour": PLAIN},),
        )


def _require_roles(plan: Plan) -> None:
    if plan.aggregated:
        raise ConfigError(
            (
                NamedSetting("topology"),
                f" {plan.topology} has one role, but a DisaggregatedSet needs two",
            ),
            retry=({"--flavour": PLAIN},),
        )


def _secrets(stack: VendorStack) -> tuple[str, ...]:
    """Return the keys of the Secret without which pods do not start."""
    names = {name for service in stack.services for name in secret_keys(service)}
    return tuple(sorted(names - {HUB_TOKEN}))


def _notes(plan: Plan, machine: Inventory, assumed: bool, wanted: ExportRequest) -> list[str]:
    how = "assumed; describe yours with --inventory FILE" if assumed else "--inventory"
    memory_gib = machine.memory_mib // 1024
    return [
        f"planned for {machine.cpus} CPUs and {memory_gib} GiB of memory ({how})",
        *rate_note(across(plan, wanted.machines), wanted.machines),
        *network_note(plan, wanted.machines, wanted.link_gbit),
    ]


def _vendors(spec: StackSpec, inventory: Inventory | None) -> tuple[str, ...]:
    if spec.vendor != "auto":
        return (spec.vendor,)
    if inventory:
        return (chosen_vendor(spec, inventory),)
    if spec.image:
        raise ConfigError(
            f"'{spec.image}' is an image for one vendor",
            setting="image",
            retry=tuple({"--vendor": vendor} for vendor in VENDORS),
        )
    return tuple(VENDORS)


def _machine(spec: StackSpec, vendor: str, inventory: Inventory | None) -> Inventory:
    """Return the machine that the spec is planned for: if none is named, as large as it takes."""
    if inventory:
        return inventory
    row = vendor_named(vendor)
    need = gpu_need(spec, row, Inventory(cpus=1, memory_mib=1))
    if not row.has_gpus:
        count = need.topology.engines
        return Inventory(cpus=count * _ENGINE_CPUS, memory_mib=count * _ENGINE_MIB)
    machine = Inventory(cpus=need.needed * _GPU_CPUS, memory_mib=need.needed * _GPU_MIB)
    return with_assumed_gpus(machine, row, need.needed)


def _vendor_stack(
    spec: StackSpec, of_machine: Plan, machine: Inventory, form: dict[str, Any], kit: Kit
) -> VendorStack:
    plan, vendor = across(of_machine, form["machines"]), of_machine.vendor.name
    images = stack_images(spec, vendor)
    if images.engine.vllm is not None:
        pair = (images.engine.vllm, images.engine.lmcache)
        refuse_bad_pair(of_machine.spec, vendor, *pair, lambda _: None)
    layout = cluster_layout(images.by_name, kit)
    first = {engine.role: engine for engine in reversed(plan.engines)}
    # Pods of a role are alike: one of each is built, however many there are.
    one_each = replace(plan, engines=tuple(reversed(first.values())))
    stack = build_stack(one_each, layout)
    engines = (service for service in stack.services if is_engine(service.role))
    document = cluster_document(spec, of_machine, machine, images.by_name, form)
    return VendorStack(plan, (*stack.redis[:1], *engines, stack.front), document)


def _plan(spec: SettledSpec, home: Home, machine: Inventory) -> Plan:
    model = find_model(spec, home, spec.vendor)
    if model.source == "folder":
        raise ConfigError(
            f"{model.ref} is a folder of this machine, which pods cannot see",
            setting="model",
            retry=({"--model": "OWNER/NAME"},),
        )
    if model.source == "tiny":
        model = replace(model, ref=str(MODELS / Path(model.ref).name))
    if spec.connector != IN_ENGINES:
        raise ConfigError(
            f"{spec.connector} is not exported yet",
            setting="connector",
            retry=({"--connector": IN_ENGINES},),
        )
    plan = make_plan(spec, model, machine)
    if plan.shares_gpus:
        raise ConfigError(
            "1 is too few: in Kubernetes, each engine has GPUs of its own",
            setting="gpus",
            retry=({"--gpus": str(plan.topology.engines)},),
        )
    # The router is reached over a network: it asks for a key, unless the user waives it.
    return replace(plan, keyed=not spec.allow_keyless)
