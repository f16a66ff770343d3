"""Show a stack as one Compose document: what `docker compose` runs."""

from __future__ import annotations

from typing import Any

from deploy.stack.containers import FRONT_NETWORK, STORE_NETWORK
from deploy.stack.layout import SECRETS
from deploy.stack.service import (
    ConfigFile,
    Container,
    DeviceAccess,
    Mount,
    Service,
    Stack,
    container_of,
    escaped,
)

LABEL = "dev.pdkit"
_LOG_ROTATION = {"driver": "json-file", "options": {"max-size": "20m", "max-file": "5"}}
_HEALTH_INTERVAL = "5s"
_MAX_PIDS = 8192
_TMP_MIB = 4096
_NETWORKS: dict[str, dict[str, Any]] = {
    # Reachable only for its containers: this machine has no IPv4 address on the bridge.
    STORE_NETWORK: {
        "internal": True,
        "driver_opts": {"com.docker.network.bridge.inhibit_ipv4": "true"},
    },
    FRONT_NETWORK: {},
}


def project_name(stack: str) -> str:
    """Return the Compose project of a stack; with a prefix, so that it collides with no other."""
    return stack if stack == "pdkit" else f"pdkit-{stack}"


def compose_document(stack: Stack, *, root: str, secrets_dir: str, stop_s: float) -> dict[str, Any]:
    """Return the document as plain values, in a stable order.

    `root` is the stack's folder; it marks the containers, so that a stack of the same name from
    another folder is told from this one. `secrets_dir` holds one file a secret.
    """
    used = _secret_files(stack, secrets_dir)
    return {
        "name": project_name(stack.name),
        "services": {
            service.name: _service(service, stack, root, stop_s) for service in stack.services
        },
        "networks": {name: _NETWORKS[name] for name in _NETWORKS if name in _networks_used(stack)},
        **_shared_memory(stack),
        "secrets": {name: {"file": escaped(file)} for name, file in sorted(used.items())},
        # What those files hold, with secrets by name only.
        "x-pdkit": {
            "files": {file.path: file.text for service in stack.services for file in service.files}
        },
    }


def secrets_used(stack: Stack) -> tuple[str, ...]:
    """Return the names of the secrets that containers get as separate files."""
    names = {
        n for service in stack.services if service.container for n in service.container.secrets
    }
    return tuple(sorted(names))


def _networks_used(stack: Stack) -> set[str]:
    return {
        n for service in stack.services if service.container for n in service.container.networks
    }


def _secret_files(stack: Stack, secrets_dir: str) -> dict[str, str]:
    """Return secret → file on this machine: configuration that holds a password is one, too."""
    own = {
        _secret_name(service, file): file.path
        for service in stack.services
        for file in service.files
    }
    return {**own, **{name: f"{secrets_dir}/{name}" for name in secrets_used(stack)}}


def _secret_name(service: Service, file: ConfigFile) -> str:
    return f"{service.name}-{file.path.rpartition('/')[2].partition('.')[0]}"


def _service(service: Service, stack: Stack, root: str, stop_s: float) -> dict[str, Any]:
    container = container_of(service)
    conditions = {name: {"condition": "service_healthy"} for name in service.depends_on}
    shown: dict[str, Any] = {
        "image": escaped(container.image),
        "pull_policy": "never",
        "user": container.user,
        "entrypoint": [service.argv[0]],
        "command": [escaped(argument) for argument in service.argv[1:]],
        "environment": {name: escaped(text) for name, text in sorted(service.env.items())},
        "secrets": [
            *(
                {"source": _secret_name(service, file), "target": file.target}
                for file in service.files
            ),
            *({"source": name, "target": str(SECRETS / name)} for name in container.secrets),
        ],
        "volumes": [_mounted(mount, container) for mount in container.mounts],
        "networks": list(container.networks),
        "ports": [
            {
                "host_ip": port.address,
                "published": str(port.port),
                "target": port.container_port,
                "protocol": "tcp",
            }
            for port in container.published
        ],
        "depends_on": conditions,
        "healthcheck": {
            "test": ["CMD", *(escaped(part) for part in container.health_argv)],
            "interval": _HEALTH_INTERVAL,
            "timeout": "5s",
            "retries": 3,
            "start_period": f"{service.ready_s:g}s",
        },
        **_rights(container, root),
        **_limits(container),
        "restart": "unless-stopped",
        "stop_grace_period": f"{stop_s:g}s",
        "logging": _LOG_ROTATION,
        "labels": {
            f"{LABEL}.stack": stack.name,
            f"{LABEL}.role": service.role,
            f"{LABEL}.root": escaped(root),
            f"{LABEL}.service": service.fingerprint(),
        },
    }
    return {key: value for key, value in shown.items() if value not in ([], {}, None)}


def _mounted(mount: Mount, container: Container) -> dict[str, Any]:
    if not mount.source:
        name = _memory_name(container)
        # Nothing of the image's own folder is copied into it.
        return {
            "type": "volume", "source": name, "target": mount.target, "volume": {"nocopy": True},
        }  # fmt: skip
    return {
        "type": "bind",
        "source": escaped(mount.source),
        "target": escaped(mount.target),
        "read_only": mount.read_only,
    }


def _memory_name(container: Container) -> str:
    """Name shared memory by its size: Docker does not change an existing volume."""
    return f"shm-{container.shm_mib}m"


def _shares_memory(container: Container) -> bool:
    return not all(mount.source for mount in container.mounts)


def _shared_memory(stack: Stack) -> dict[str, Any]:
    """Return the memory that containers share.

    Not the IPC namespace of one of them, which ends with it: the others could not join the next.
    """
    containers = [one.container for one in stack.services if one.container]
    volumes = {_memory_name(one): _memory(one) for one in containers if _shares_memory(one)}
    return {"volumes": volumes} if volumes else {}


def _memory(container: Container) -> dict[str, Any]:
    uid, _, gid = container.user.partition(":")
    options = f"size={container.shm_mib}m,mode=0700,uid={uid},gid={gid},nosuid,nodev,noexec"
    return {"driver_opts": {"type": "tmpfs", "device": "tmpfs", "o": options}}


def _rights(container: Container, root: str) -> dict[str, Any]:
    """Return the container's rights: only those that it needs."""
    devices = container.devices
    filtered = [f"seccomp={escaped(root)}/{devices.seccomp}"] if devices.seccomp else []
    return {
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true", *filtered],
        # The users of containers may write nothing else in any case; with Docker without root,
        # where they are root, they could.
        "read_only": True,
        # Programs that engines compile for themselves are run from there.
        "tmpfs": [f"/tmp:exec,mode=1777,size={_TMP_MIB}m"],  # noqa: S108 - the container's own
        "devices": list(devices.names),
        "group_add": [str(group) for group in devices.groups],
    }


def _limits(container: Container) -> dict[str, Any]:
    # The number of open files is left as the engine's own service has it: no container may exceed
    # that, and Docker's units set none.
    locked = {"memlock": {"soft": -1, "hard": -1}} if container.big_locks else {}
    own = {} if _shares_memory(container) else {"shm_size": f"{container.shm_mib}m"}
    return {
        "init": True,
        **own,
        "ulimits": locked,
        "deploy": {
            "resources": {
                "limits": {"memory": f"{container.limit_mib}m", "pids": _MAX_PIDS},
                **_reservation(container.devices),
            }
        },
    }


def _reservation(devices: DeviceAccess) -> dict[str, Any]:
    if not devices.driver:
        return {}
    wanted = {"driver": devices.driver, "device_ids": list(devices.ids), "capabilities": ["gpu"]}
    return {"reservations": {"devices": [wanted]}}
