"""The exported folder: a kustomize base, an overlay a vendor, and components to add to those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deploy.stack.cluster.code import FOLDER, CodeMap, code_of, tiny_model_code
from deploy.stack.cluster.components import NODE_FOLDER, monitoring, node_folder
from deploy.stack.cluster.layout import workload
from deploy.stack.cluster.objects import Object, namespace, network_policies, workload_objects
from deploy.stack.cluster.overlay import SECCOMP, VendorStack, patch, replicas
from deploy.stack.cluster.pods import config_map, container_of
from deploy.stack.containers import call_filters
from deploy.stack.document import document_yaml
from deploy.stack.service import Stack

_KUSTOMIZATION = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
_COMPONENT = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
_BASE_HEAD = """\
# Written by `deploy export kubernetes`. Not to be applied by itself: an overlay completes it.
"""
_OVERLAY_HEAD = """\
# Written by `deploy export kubernetes`. To change it, or to add a folder of components, write a
# kustomization of your own with this folder as its resource: an export replaces no edited file.
"""
_MONITORING_HEAD = """\
# For clusters with the Prometheus Operator. Prometheus is expected in the namespace `monitoring`.
"""
_NODE_HEAD = f"""\
# Models in a folder of each node instead of a claim of each engine. Pod Security must let in host
# paths then, which only its level `privileged` does.
# On every node: install -d -o 10001 -g 10001 {NODE_FOLDER}
"""


def exported(stacks: Mapping[str, VendorStack], name: str, space: str) -> dict[str, str]:
    """Return path → text of all files; equal input gives equal bytes.

    Args:
        stacks: by vendor, of one spec.
        name: of the stack.
        space: the namespace.
    """
    first = next(iter(stacks.values()))
    files = {f"base/{path}": text for path, text in _base(first, name, space).items()}
    for vendor, stack in stacks.items():
        own = _overlay(stack, name, space)
        files |= {f"overlays/{vendor}/{path}": text for path, text in own.items()}
    component = {"resources": ["objects.yaml"]}
    files["components/monitoring/kustomization.yaml"] = _MONITORING_HEAD + _yaml(
        [{**_COMPONENT, **component}]
    )
    files["components/monitoring/objects.yaml"] = _yaml(monitoring(first.services, name))
    if first.plan.model.source == "hub":
        patches = {"patches": node_folder(first.services, space)}
        files["components/node-cache/kustomization.yaml"] = _NODE_HEAD + _yaml(
            [{**_COMPONENT, **patches}]
        )
    return files


def _base(stack: VendorStack, name: str, space: str) -> dict[str, str]:
    program = (container_of(stack.router).image, stack.router.argv[0])
    objects = {
        "namespace.yaml": [namespace(space)],
        **{
            f"{workload(service.role)}.yaml": workload_objects(service, name, program)
            for service in stack.services
        },
        "network-policies.yaml": network_policies(stack.services, name),
    }
    maps = {code.name: code for service in stack.services for code in code_of(service.role)}
    kustomization = {
        **_KUSTOMIZATION,
        "namespace": space,
        "resources": list(objects),
        **_generator(_code_map(code) for code in maps.values()),
    }
    return {
        "kustomization.yaml": _BASE_HEAD + _yaml([kustomization]),
        **{path: _yaml(ones) for path, ones in objects.items()},
        **_code_files(maps.values()),
    }


def _overlay(stack: VendorStack, name: str, space: str) -> dict[str, str]:
    patches = {
        f"{workload(service.role)}.yaml": patch(service, stack) for service in stack.services
    }
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
        **_KUSTOMIZATION,
        "namespace": space,
        "resources": ["../../base"],
        "replicas": [{"name": key, "count": count} for key, count in replicas(stack).items()],
        "patches": [{"path": path} for path in patches],
        **_generator([*maps, *(_code_map(code) for code in tiny)]),
    }
    filters = call_filters(Stack(name, "compose", stack.services, ()))
    return {
        "kustomization.yaml": _OVERLAY_HEAD + _yaml([kustomization]),
        **{path: _yaml([one]) for path, one in patches.items()},
        **{path: text for path, (_, text) in configs.items()},
        **_code_files(tiny),
        **{f"nodes/seccomp/{SECCOMP}/{path}": text for path, text in filters.items()},
    }


def _generator(maps: Iterable[Object]) -> dict[str, Any]:
    """Return ConfigMaps that kustomize names by their contents: a change starts pods again."""
    return {"configMapGenerator": [{**one, "options": {"immutable": True}} for one in maps]}


def _code_map(code: CodeMap) -> Object:
    return {
        "name": code.name,
        "files": [f"{key}={FOLDER}/{path}" for path, key in code.keys.items()],
    }


def _code_files(maps: Iterable[CodeMap]) -> dict[str, str]:
    return {f"{FOLDER}/{path}": text for code in maps for path, text in code.files.items()}


def _yaml(objects: Sequence[Object]) -> str:
    return "---\n".join(document_yaml(one) for one in objects)
