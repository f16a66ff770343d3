"""The exported folder: a kustomize base, an overlay a vendor, and components to add to those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deploy.planning.address import collector_port
from deploy.stack.cluster.autoscaling import autoscaling, without_replicas
from deploy.stack.cluster.check import check_files
from deploy.stack.cluster.code import code_of, tiny_model_code
from deploy.stack.cluster.components import NODE_FOLDER, ClaimHolder, monitoring, node_folder
from deploy.stack.cluster.disaggregated_set import (
    KIND,
    NAME,
    disaggregated_set,
    name_references,
    template_paths,
)
from deploy.stack.cluster.kustomize import (
    COMPONENT,
    KUSTOMIZATION,
    code_entry,
    code_files,
    generator,
    objects_yaml,
)
from deploy.stack.cluster.layout import is_engine, workload
from deploy.stack.cluster.objects import Object, namespace, network_policies, workload_objects
from deploy.stack.cluster.overlay import SECCOMP, VendorStack, patch, replicas
from deploy.stack.cluster.pods import config_map
from deploy.stack.containers import call_filters
from deploy.stack.service import Stack

_BASE_HEAD = """\
# Written by `deploy export kubernetes`. Do not apply it alone: an overlay completes it.
"""
_OVERLAY_HEAD = """\
# Written by `deploy export kubernetes`. To change it, or to add a folder of components, write a
# kustomization of your own with this folder as its resource: an export replaces no edited file.
"""
_MONITORING_HEAD = """\
# For clusters with the Prometheus Operator. Prometheus is expected in the namespace `monitoring`.
"""
_SCALING_HEAD = """\
# For clusters with KEDA, beside the component `monitoring`. Add it before you apply the stack for
# the first time: a StatefulSet without a number of pods begins with 1.
"""
_NODE_HEAD = f"""\
# Models in a folder of each node instead of a claim of each engine. Pod Security must then admit
# host paths, as only its level `privileged` does.
# On every node: install -d -o 10001 -g 10001 {NODE_FOLDER}
"""


@dataclass(frozen=True)
class Form:
    """What is exported of a spec.

    Attributes:
        name: of the stack.
        space: the namespace.
        as_set: the engines are one DisaggregatedSet, not a StatefulSet for each role.
    """

    name: str
    space: str
    as_set: bool = False


def exported(stacks: Mapping[str, VendorStack], form: Form) -> dict[str, str]:
    """Return path → text of all files; equal input gives equal bytes.

    Args:
        stacks: by vendor, of one spec.
    """
    first = next(iter(stacks.values()))
    files = {f"base/{path}": text for path, text in _base(first, form).items()}
    for vendor, stack in stacks.items():
        own = _overlay(stack, form)
        files |= {f"overlays/{vendor}/{path}": text for path, text in own.items()}
    check = check_files(stacks, form.name, form.space)
    files |= {f"check/{path}": text for path, text in check.items()}
    files |= {f"components/{path}": text for path, text in _components(first, form).items()}
    return files


def _components(stack: VendorStack, form: Form) -> dict[str, str]:
    objects = {"resources": ["objects.yaml"]}
    files = {
        "monitoring/kustomization.yaml": _MONITORING_HEAD
        + objects_yaml([{**COMPONENT, **objects}]),
        "monitoring/objects.yaml": objects_yaml(monitoring(stack.services, stack.plan, form.space)),
    }
    # The roles of a DisaggregatedSet are scaled by other objects.
    if not form.as_set:
        own = {**COMPONENT, **objects, "patches": without_replicas(stack)}
        files["autoscaling/kustomization.yaml"] = _SCALING_HEAD + objects_yaml([own])
        files["autoscaling/objects.yaml"] = objects_yaml(autoscaling(stack, form.space))
    if stack.plan.model.source == "hub":
        own = {**COMPONENT, "patches": node_folder(form.space, _claim_holders(stack, form))}
        files["node-cache/kustomization.yaml"] = _NODE_HEAD + objects_yaml([own])
    return files


def _claim_holders(stack: VendorStack, form: Form) -> list[ClaimHolder]:
    engines = [service for service in stack.services if is_engine(service.role)]
    if form.as_set:
        paths = template_paths(len(engines))
        return [ClaimHolder(KIND, NAME, claims, volumes) for claims, volumes in paths]
    return [ClaimHolder("StatefulSet", workload(service.role)) for service in engines]


def _base(stack: VendorStack, form: Form) -> dict[str, str]:
    objects = {"namespace.yaml": [namespace(form.space)]}
    for service in stack.services:
        own = workload_objects(service, form.name, stack.program)
        in_set = form.as_set and is_engine(service.role)
        objects[f"{workload(service.role)}.yaml"] = own[1:] if in_set else own
    collector = collector_port(stack.plan.spec)
    objects["network-policies.yaml"] = network_policies(stack.services, form.name, collector)
    maps = {code.name: code for service in stack.services for code in code_of(service.role)}
    kustomization = {
        **KUSTOMIZATION,
        "namespace": form.space,
        "resources": list(objects),
        **generator(code_entry(code) for code in maps.values()),
    }
    return {
        "kustomization.yaml": _BASE_HEAD + objects_yaml([kustomization]),
        **{path: objects_yaml(ones) for path, ones in objects.items()},
        **code_files(maps.values()),
    }


def _overlay(stack: VendorStack, form: Form) -> dict[str, str]:
    patched = [one for one in stack.services if not (form.as_set and is_engine(one.role))]
    patches = {f"{workload(service.role)}.yaml": patch(service, stack) for service in patched}
    own: dict[str, Object] = {}
    if form.as_set:
        own["engines.yaml"] = disaggregated_set(stack, form.name)
        own["names.yaml"] = name_references()
    counts = {workload(one.role): replicas(stack)[workload(one.role)] for one in patched}
    tiny = [tiny_model_code()] if stack.plan.model.source == "tiny" else []
    configs = {
        f"config/{workload(service.role)}/{file.path.rpartition('/')[2]}": (service, file.text)
        for service in stack.services
        for file in service.files
    }
    maps = [
        {"name": config_map(service.role), "files": [path]}
        for path, (service, _) in configs.items()
    ]
    kustomization = {
        **KUSTOMIZATION,
        "namespace": form.space,
        "resources": ["../../base", *(["engines.yaml"] if own else [])],
        **({"configurations": ["names.yaml"]} if own else {}),
        "replicas": [{"name": key, "count": count} for key, count in counts.items()],
        "patches": [{"path": path} for path in patches],
        **generator([*maps, *(code_entry(code) for code in tiny)]),
    }
    filters = call_filters(Stack(form.name, "compose", stack.services, ()))
    return {
        "kustomization.yaml": _OVERLAY_HEAD + objects_yaml([kustomization]),
        **{path: objects_yaml([one]) for path, one in {**own, **patches}.items()},
        **{path: text for path, (_, text) in configs.items()},
        **code_files(tiny),
        **{f"nodes/seccomp/{SECCOMP}/{path}": text for path, text in filters.items()},
    }
