"""The Job that checks an exported stack from inside its cluster, and what it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from deploy.planning.plan import Plan
from deploy.stack.cluster.code import CodeMap, check_code
from deploy.stack.cluster.kustomize import (
    KUSTOMIZATION,
    code_entry,
    code_files,
    generator,
    objects_yaml,
)
from deploy.stack.cluster.layout import is_engine
from deploy.stack.cluster.objects import DNS_PORTS, Object, from_pods, pods_of, policy, tcp
from deploy.stack.cluster.overlay import VendorStack
from deploy.stack.cluster.pods import (
    TMP_SIZE,
    code_source,
    labels,
    locked_down,
    of_secret,
    ports,
    restricted_pod,
    secret_keys,
    tls_files,
    tls_mounts,
)
from deploy.stack.layout import HUB_TOKEN, KV_KEY, SECRETS
from deploy.stack.service import Service, container_of

NAME = "check"
# The program, as Python finds it, and where it finds what it may import.
PROGRAM = "deploy.cli.cluster_check"
_KIT = "/opt/pdkit/kit"
_DOCUMENT = PurePosixPath("/opt/pdkit/check/stack.json")
# Beside the time in which engines become ready. A pair takes seconds, or more with a large model.
_A_PAIR_S, _REST_S = 30, 600
_HEAD = """\
# Written by `deploy export kubernetes`: a Job that checks the stack of this vendor's overlay.
# Kubernetes does not let a Job change: delete this folder's objects before you apply them again.
"""


def check_files(stacks: Mapping[str, VendorStack], name: str, space: str) -> dict[str, str]:
    """Return path → text of the folder `check`, which has a Job for each vendor."""
    code = check_code(PROGRAM)
    head = {**KUSTOMIZATION, "namespace": space}
    first = next(iter(stacks.values()))
    files = {f"base/{path}": text for path, text in _base(first, name, head, code).items()}
    for vendor, stack in stacks.items():
        own = _overlay(stack, name, head, code)
        files |= {f"{vendor}/{path}": text for path, text in own.items()}
    return files


def _base(stack: VendorStack, name: str, head: Object, code: Sequence[CodeMap]) -> dict[str, str]:
    """Return the objects that all vendors share: the program, and its network policies."""
    kustomization = {
        **head,
        "resources": ["network-policies.yaml"],
        **generator(map(code_entry, code)),
    }
    return {
        "kustomization.yaml": objects_yaml([kustomization]),
        "network-policies.yaml": objects_yaml(_policies(stack, name)),
        **code_files(code),
    }


def _overlay(
    stack: VendorStack, name: str, head: Object, code: Sequence[CodeMap]
) -> dict[str, str]:
    kustomization = {
        **head,
        "resources": ["../base", "job.yaml"],
        **generator([{"name": f"{NAME}-stack", "files": [_DOCUMENT.name]}]),
    }
    return {
        "kustomization.yaml": _HEAD + objects_yaml([kustomization]),
        "job.yaml": objects_yaml([_job(stack, name, code)]),
        _DOCUMENT.name: stack.document,
    }


def _policies(stack: VendorStack, name: str) -> list[Object]:
    """Return that the Job reaches engines, Redis and the router, and they let it in."""
    own = {"matchLabels": labels(name, NAME)}
    # Anybody may reach the router.
    closed = [one for one in stack.services if one.role != "router"]
    reached = tcp(sorted({port for one in closed for port in ports(one).values()}))
    egress: list[Object] = [
        {"to": [from_pods(closed, name)], "ports": reached},
        {"to": [from_pods([stack.router], name)], "ports": tcp([ports(stack.router)["http"]])},
        {"ports": DNS_PORTS},
    ]
    if stack.plan.user_redis:
        egress = [{}]  # it may be anywhere
    let_in = {"from": [{"podSelector": own}], "ports": reached}
    return [
        policy("check", own, ["Egress"], {"egress": egress}),
        policy("from-check", pods_of(closed, name), ["Ingress"], {"ingress": [let_in]}),
    ]


def _job(stack: VendorStack, name: str, code: Sequence[CodeMap]) -> Object:
    own = labels(name, NAME)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": NAME, "labels": own},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": _limit_s(stack.plan),
            "template": {"metadata": {"labels": own}, "spec": _pod(stack, name, code)},
        },
    }


def _limit_s(plan: Plan) -> int:
    """Return the seconds after which Kubernetes ends the Job."""
    return math.ceil(plan.ready_s) + _REST_S + _A_PAIR_S * len(plan.pairs)


def _pod(stack: VendorStack, name: str, code: Sequence[CodeMap]) -> Object:
    engines = [service for service in stack.services if is_engine(service.role)]
    image_there = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": pods_of(engines, name),
    }
    files = tls_files(engines[0])
    volumes: list[Object] = [
        {"name": "tmp", "emptyDir": {"sizeLimit": TMP_SIZE}},
        {"name": "secrets", "secret": of_secret(_secrets(stack.services))},
        {"name": "kit", "projected": {"sources": [code_source(one) for one in code]}},
        {"name": "stack", "configMap": {"name": f"{NAME}-stack"}},
        *([{"name": "tls", "secret": of_secret([one.name for one in files])}] if files else []),
    ]
    preferred = [{"weight": 100, "podAffinityTerm": image_there}]
    return {
        **restricted_pod(),
        "restartPolicy": "Never",
        "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}},
        **({"tolerations": stack.tolerations} if stack.tolerations else {}),
        "containers": [_container(engines[0])],
        "volumes": volumes,
    }


def _container(engine: Service) -> Object:
    """Return the container: an engine's image has all that the check imports."""
    env: Mapping[str, str] = {
        "HOME": "/tmp",  # noqa: S108 - the container's own
        # Images for CUDA ask for all GPUs of the node, and a node may give them.
        "NVIDIA_VISIBLE_DEVICES": "void",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": _KIT,
    }
    mounts: list[dict[str, Any]] = [
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own
        {"name": "secrets", "mountPath": str(SECRETS), "readOnly": True},
        {"name": "kit", "mountPath": _KIT, "readOnly": True},
        {"name": "stack", "mountPath": str(_DOCUMENT.parent), "readOnly": True},
        *tls_mounts(engine),
    ]
    return locked_down(
        {
            "name": NAME,
            "image": container_of(engine).image,
            "command": [engine.argv[0], "-m", PROGRAM, str(_DOCUMENT), str(SECRETS)],
            "env": [{"name": key, "value": text} for key, text in env.items()],
            "resources": {
                "requests": {"cpu": "500m", "memory": "256Mi"},
                "limits": {"memory": "1Gi"},
            },
            "volumeMounts": mounts,
        }
    )


def _secrets(services: Sequence[Service]) -> list[str]:
    """Return the names of the secrets by which the stack is reached."""
    files = {file.name for service in services for file in tls_files(service)}
    keys = {key for service in services for key in secret_keys(service)}
    return sorted(keys - files - {KV_KEY, HUB_TOKEN})
