"""Pods, as far as they are the same for all vendors: code, secrets, rights and probes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from deploy.stack.cluster.code import CodeMap, code_of
from deploy.stack.cluster.layout import FILLED, is_engine, workload
from deploy.stack.layout import CONNECTOR, HUB_TOKEN, MODELS, ROUTER, ROUTER_CONTROL, SECRETS
from deploy.stack.service import ConfigFile, Service, ServiceRole, container_of

SECRET = "pdkit"  # noqa: S105 - the name of the Secret
CONFIG = "/config"
TMP_SIZE = "4Gi"
_USER = 10001
_GROUP = "app.kubernetes.io"
NAME_LABEL, STACK_LABEL, ROLE_LABEL = (
    f"{_GROUP}/{name}" for name in ("name", "instance", "component")
)
# Time for a pod that ends to finish its requests, after it gets no new ones.
LEAVES_S = 300
_EVERY_S = 5
_PLACEHOLDER = re.compile(r"@\{(\w+)\}")
# The password is no argument; whether its Secret ends with a line break does not matter.
_PING = f"printf 'AUTH %s\\nPING\\n' \"$(cat {SECRETS}/redis_password)\" | redis-cli | grep -q PONG"
# Fills in the secrets that configuration files name, where only the pod reads them.
_FILL_IN = f"""\
import re
from pathlib import Path

def secret(found):
    return Path("{SECRETS}", found[1]).read_text().strip()

for file in Path("{CONFIG}").glob("[!.]*"):
    text = re.sub(r"@\\{{(\\w+)\\}}", secret, file.read_text())
    Path("{FILLED}", file.name).write_text(text)
"""


def labels(stack: str, role: str) -> dict[str, str]:
    """Return the labels by which a role's pods are found."""
    return {NAME_LABEL: "pdkit", STACK_LABEL: stack, ROLE_LABEL: role}


def pod_template(service: Service, stack: str, program: Sequence[str]) -> dict[str, Any]:
    """Return the template of a service's pods.

    Args:
        program: image and interpreter with which secrets are filled into configuration files.
    """
    own = {
        **restricted_pod(),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels(stack, service.role)},
            }
        ],
        "initContainers": [_fill_in(*program)] if service.files else [],
        "containers": [_container(service)],
        "volumes": _volumes(service),
    }
    return {
        "metadata": {"labels": labels(stack, service.role)},
        "spec": {key: value for key, value in own.items() if value != []},
    }


def restricted_pod() -> dict[str, Any]:
    """Return the settings of every pod: those of the standard `restricted`, and the stack's."""
    return {
        # A pod of this stack never speaks to Kubernetes.
        "automountServiceAccountToken": False,
        # Else a Service named `redis` sets REDIS_PORT in every pod.
        "enableServiceLinks": False,
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def locked_down(container: Mapping[str, Any]) -> dict[str, Any]:
    """Return a container with the rights that the Pod Security Standard `restricted` leaves."""
    rights = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    return {**container, "securityContext": rights}


def _fill_in(image: str, interpreter: str) -> dict[str, Any]:
    return locked_down(
        {
            "name": "fill-in-secrets",
            "image": image,
            "command": [interpreter, "-c", _FILL_IN],
            "resources": small_resources(),
            "volumeMounts": [
                {"name": "config", "mountPath": CONFIG, "readOnly": True},
                {"name": "passwords", "mountPath": str(SECRETS), "readOnly": True},
                {"name": "filled", "mountPath": FILLED},
            ],
        }
    )


def small_resources() -> dict[str, Any]:
    """Return the resources of a program that writes a few files."""
    return {
        "requests": {"cpu": "100m", "memory": "64Mi"},
        "limits": {"cpu": "1", "memory": "256Mi"},
    }


def _container(service: Service) -> dict[str, Any]:
    mounts = [
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own
        {"name": "secrets", "mountPath": str(SECRETS), "readOnly": True},
    ]
    if service.files:
        mounts.append({"name": "filled", "mountPath": FILLED, "readOnly": True})
    if code_of(service.role):
        target = CONNECTOR if is_engine(service.role) else ROUTER
        mounts.append({"name": "code", "mountPath": target, "readOnly": True})
    if service.role == "router":
        mounts.append({"name": "control", "mountPath": ROUTER_CONTROL})
    mounts += tls_mounts(service)
    return locked_down(
        {
            "name": container_name(service.role),
            # What an engine that refuses to start has logged is shown with its exit code.
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "ports": [
                {"name": name, "containerPort": port, "protocol": "TCP"}
                for name, port in ports(service).items()
            ],
            **_probes(service),
            "volumeMounts": mounts,
        }
    )


def container_name(role: ServiceRole) -> str:
    """Return the name of a pod's one lasting container."""
    return "engine" if is_engine(role) else workload(role)


def ports(service: Service) -> dict[str, int]:
    """Return name → port of what a service's pods listen on."""
    if service.role == "redis":
        return {"redis": 6379}
    http, *metrics = (port.container_port for port in container_of(service).published)
    return {"http": http, **({"metrics": metrics[0]} if metrics else {})}


def tls_files(service: Service) -> tuple[PurePosixPath, ...]:
    """Return the files of the user's that a URL of Redis names: mounted as what they are here."""
    same = (one.target for one in container_of(service).mounts if one.source == one.target)
    return tuple(file for file in map(PurePosixPath, same) if MODELS not in file.parents)


def tls_mounts(service: Service) -> list[dict[str, Any]]:
    """Return the mounts of those files."""
    return [
        {"name": "tls", "mountPath": str(file), "subPath": file.name, "readOnly": True}
        for file in tls_files(service)
    ]


def _probes(service: Service) -> dict[str, Any]:
    """Return the probes of a service; one that exits when it fails needs none for that."""
    if service.role == "redis":
        ready: dict[str, Any] = {"exec": {"command": ["sh", "-c", _PING]}}
        alive = ready
    else:
        ready = {"httpGet": {"path": service.health.path, "port": "http"}}
        alive = ready
    if service.role == "router":
        # It serves without producers, too, unless it is told to refuse that.
        ready = {"httpGet": {"path": "/health", "port": "http"}}
        alive = {"httpGet": {"path": "/liveness", "port": "http"}}
    patience = {"periodSeconds": _EVERY_S, "timeoutSeconds": 5}
    return {
        # An engine may load its model for as long as this allows; nothing else is asked meanwhile.
        "startupProbe": {
            **alive,
            **patience,
            "failureThreshold": math.ceil(service.ready_s / _EVERY_S),
        },
        "readinessProbe": {**ready, **patience, "failureThreshold": 2},
        # A minute without an answer: a step that computes for long is no reason to start again.
        "livenessProbe": {
            **alive,
            "periodSeconds": 10,
            "timeoutSeconds": 10,
            "failureThreshold": 6,
        },
    }


def _volumes(service: Service) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "tmp", "emptyDir": {"sizeLimit": TMP_SIZE}},
        {"name": "secrets", "projected": {"defaultMode": 0o440, "sources": _secrets(service)}},
    ]
    if service.files:
        volumes += [
            {"name": "config", "configMap": {"name": config_map(service.role)}},
            {"name": "passwords", "secret": of_secret(passwords(service.files))},
            {"name": "filled", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        ]
    if maps := code_of(service.role):
        volumes.append({"name": "code", "projected": {"sources": [code_source(m) for m in maps]}})
    if service.role == "router":
        volumes.append({"name": "control", "emptyDir": {"sizeLimit": "1Mi"}})
    if files := tls_files(service):
        volumes.append({"name": "tls", "secret": of_secret([file.name for file in files])})
    return volumes


def config_map(role: ServiceRole) -> str:
    """Return the name of the ConfigMap with a role's configuration files."""
    return f"{workload(role)}-config"


def secret_keys(service: Service) -> set[str]:
    """Return the keys of the Secret that a service's pods mount."""
    own = {*container_of(service).secrets, *passwords(service.files)}
    return own | {file.name for file in tls_files(service)}


def passwords(files: Sequence[ConfigFile]) -> list[str]:
    """Return the names of the secrets that configuration files hold."""
    return sorted({name for file in files for name in _PLACEHOLDER.findall(file.text)})


def of_secret(names: Sequence[str]) -> dict[str, Any]:
    """Return the source of a volume with keys of the stack's Secret."""
    return {
        "secretName": SECRET,
        "defaultMode": 0o440,
        "items": [{"key": name, "path": name} for name in names],
    }


def _secrets(service: Service) -> list[dict[str, Any]]:
    """Return the sources of a pod's secrets; only a token of the hub may be missing.

    Engines look for one whatever their model is, so that the base is the same for all vendors.
    """

    def source(name: str) -> dict[str, Any]:
        own: dict[str, Any] = {"name": SECRET, "items": [{"key": name, "path": name}]}
        return {"secret": {**own, "optional": True} if name == HUB_TOKEN else own}

    needed = [name for name in container_of(service).secrets if name != HUB_TOKEN]
    return [source(name) for name in (*needed, *((HUB_TOKEN,) if is_engine(service.role) else ()))]


def code_source(code: CodeMap) -> dict[str, Any]:
    """Return a ConfigMap of code as a source of a projected volume."""
    items = [{"key": key, "path": path} for path, key in code.keys.items()]
    return {"configMap": {"name": code.name, "items": items}}
