"""What a vendor decides: images, command lines, GPUs, memory, claims, and how many pods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.planning.plan import Plan
from deploy.stack.cluster.code import TINY_MODEL, tiny_model_code
from deploy.stack.cluster.layout import is_engine, workload
from deploy.stack.cluster.objects import Object
from deploy.stack.cluster.pods import (
    LEAVES_S,
    code_source,
    container_name,
    locked_down,
    ports,
    small_resources,
)
from deploy.stack.layout import ENGINE_CACHE, HUB_CACHE, MODELS
from deploy.stack.service import Service, container_of, escaped

HUB, CACHE = "hub", "cache"
_ROUTERS = 2
_CACHE_GIB = 20
_UNKNOWN_WEIGHTS_GIB = 200
_GIB = 2**30
# Until all routers have noticed that an engine ends.
_NOTICED_S = 40
# Below it kubelets look for profiles; files of nodes, not of the cluster.
SECCOMP = "pdkit"
_MAKE_MODEL = f"""\
from pathlib import Path
from deploy.tiny_model.model_folder import model_files, model_folder_name

folder = Path("{MODELS}", model_folder_name())
folder.mkdir(exist_ok=True)
for name, content in model_files().items():
    (folder / name).write_bytes(content)
"""


@dataclass(frozen=True)
class VendorStack:
    """A vendor's stack of a spec.

    Attributes:
        plan: with all engines.
        services: one engine of each role, one Redis at most, and the router, which knows them all.
        document: what its check in the cluster knows of it.
    """

    plan: Plan
    services: tuple[Service, ...]
    document: str

    @property
    def router(self) -> Service:
        """The service that clients connect to."""
        return next(service for service in self.services if service.role == "router")

    @property
    def program(self) -> tuple[str, str]:
        """Image and interpreter of what runs before the containers of a pod."""
        return container_of(self.router).image, self.router.argv[0]

    @property
    def tolerations(self) -> list[Object]:
        """The taints of nodes with GPUs that pods of engines and of Redis do not mind.

        The memory of Redis is planned on these nodes; others may have too little.
        """
        if not self.plan.vendor.has_gpus:
            return []
        key = self.plan.vendor.container.cdi_kind
        return [{"key": key, "operator": "Exists", "effect": "NoSchedule"}]


def replicas(stack: VendorStack) -> dict[str, int]:
    """Return workload → number of pods."""
    roles = [engine.role for engine in stack.plan.engines]
    found = {workload(role): roles.count(role) for role in dict.fromkeys(roles)}
    return {
        **({"redis": len(stack.plan.redis)} if stack.plan.redis else {}),
        **found,
        "router": _ROUTERS,
    }


def patch(service: Service, stack: VendorStack) -> Object:
    """Return the strategic merge patch that completes a workload of the base."""
    container = container_of(service)
    # Streams may take minutes; where a router is started again on its machine, clients wait for it.
    leave = ("--leave-s", str(LEAVES_S)) if service.role == "router" else ()
    own: Object = {
        "name": container_name(service.role),
        "image": container.image,
        "command": [service.argv[0]],
        "args": [escaped(argument) for argument in (*service.argv[1:], *leave)],
        "env": [
            {"name": name, "value": escaped(text)} for name, text in sorted(service.env.items())
        ],
        "resources": _resources(service, stack.plan),
    }
    pod: Object = {"containers": [{key: value for key, value in own.items() if value != []}]}
    spec: Object = {"template": {"spec": pod}}
    if is_engine(service.role):
        _complete_engine(service, stack, pod)
        spec |= _claims(stack.plan)
    if stack.tolerations and service.role != "router":
        pod["tolerations"] = stack.tolerations
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment" if service.role == "router" else "StatefulSet",
        "metadata": {"name": workload(service.role)},
        "spec": spec,
    }


def _resources(service: Service, plan: Plan) -> Object:
    container = container_of(service)
    limit = _quantity(container.limit_mib)
    if not is_engine(service.role):
        return {"requests": {"cpu": "1", "memory": limit}, "limits": {"memory": limit}}
    (engine,) = (one for one in plan.engines if one.name == service.name)
    # Both plug-ins call their resource as they call their kind of device.
    gpus = {plan.vendor.container.cdi_kind: str(plan.tp)} if plan.vendor.has_gpus else {}
    return {
        "requests": {
            "cpu": str(engine.cpu_threads * plan.tp),
            "memory": _quantity(service.memory_mib),
            **gpus,
        },
        "limits": {"memory": limit, **gpus},
    }


def _quantity(mib: int) -> str:
    """Return memory as Kubernetes writes it; otherwise each apply would look like a change."""
    return f"{mib}Mi" if mib % 1024 else f"{mib // 1024}Gi"


def _complete_engine(service: Service, stack: VendorStack, pod: Object) -> None:
    plan, container = stack.plan, container_of(service)
    shm = {"medium": "Memory", "sizeLimit": _quantity(container.shm_mib)}
    mounts = [("shm", "/dev/shm"), (CACHE, ENGINE_CACHE)]  # noqa: S108 - the pod's own
    volumes: list[Object] = [{"name": "shm", "emptyDir": shm}]
    if not plan.vendor.has_gpus:
        volumes.append({"name": CACHE, "emptyDir": {"sizeLimit": f"{_CACHE_GIB}Gi"}})
    if plan.model.source == "hub":
        mounts.append((HUB, HUB_CACHE))
    elif plan.model.source == "tiny":
        mounts.append(("model", str(MODELS)))
        volumes += _tiny_volumes()
        pod["initContainers"] = [_tiny_model(stack.router)]
    pod["containers"][0]["volumeMounts"] = [
        {"name": name, "mountPath": path} for name, path in mounts
    ]
    pod["volumes"] = volumes
    program, port = service.argv[0], str(ports(service)["http"])
    leave = [program, "-m", "pdkit_connector.drain", port, str(LEAVES_S)]
    pod["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": leave}}}
    pod["terminationGracePeriodSeconds"] = engine_ends_s(plan)
    if devices := _device_rights(container.devices.groups, container.devices.seccomp):
        pod["securityContext"] = devices


def engine_ends_s(plan: Plan) -> int:
    """Return the seconds that an engine may take to end, its last requests included."""
    return _NOTICED_S + LEAVES_S + math.ceil(plan.spec.timeouts.stop_s)


def _device_rights(groups: Sequence[int], seccomp: str) -> Object:
    """Return the rights that AMD's device nodes need: groups, and calls that place memory."""
    profile = {"type": "Localhost", "localhostProfile": f"{SECCOMP}/{seccomp}"}
    return {
        **({"supplementalGroups": list(groups)} if groups else {}),
        **({"seccompProfile": profile} if seccomp else {}),
    }


def _tiny_volumes() -> list[Object]:
    return [
        {"name": "model", "emptyDir": {"sizeLimit": "100Mi"}},
        {"name": TINY_MODEL, "projected": {"sources": [code_source(tiny_model_code())]}},
    ]


def _tiny_model(router: Service) -> Object:
    """Return the container that makes the tiny model, with the Python of the router's image."""
    return locked_down(
        {
            "name": TINY_MODEL,
            "image": container_of(router).image,
            "command": [router.argv[0], "-c", _MAKE_MODEL],
            "env": [{"name": "PYTHONPATH", "value": "/code"}],
            "resources": small_resources(),
            "volumeMounts": [
                {"name": TINY_MODEL, "mountPath": "/code", "readOnly": True},
                {"name": "model", "mountPath": str(MODELS)},
            ],
        }
    )


def _claims(plan: Plan) -> Object:
    """Return the claims of each engine: its models first, which a component replaces."""
    sizes: dict[str, int] = {}
    if plan.model.source == "hub":
        weights = plan.model.weight_bytes
        sizes[HUB] = 10 + 3 * weights // 2 // _GIB if weights else _UNKNOWN_WEIGHTS_GIB
    if plan.vendor.has_gpus:
        sizes[CACHE] = _CACHE_GIB
    claims: list[dict[str, Any]] = [
        {
            "metadata": {"name": name},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": {"requests": {"storage": f"{size}Gi"}},
            },
        }
        for name, size in sizes.items()
    ]
    return {"volumeClaimTemplates": claims} if claims else {}
