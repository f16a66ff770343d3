"""The intermediate form: a stack is its services, and every runtime is a function of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from deploy.errors import StateError
from deploy.planning.address import host_port

ServiceRole = Literal[
    "redis", "kv-server", "producer", "consumer", "aggregated", "router", "prometheus", "grafana"
]
STORE_ROLES: tuple[ServiceRole, ...] = ("redis", "kv-server")
# Services of these roles are restarted by the supervisor if they hang, too.
PROBED_ROLES: tuple[ServiceRole, ...] = ("kv-server", "producer", "consumer", "aggregated")
MONITORING_ROLES: tuple[ServiceRole, ...] = ("prometheus", "grafana")


@dataclass(frozen=True)
class ConfigFile:
    """A file that a service reads at its start.

    `text` may hold `@{name}` for a secret; the runtime fills it in, in a file only its owner reads.

    Attributes:
        path: on this machine.
        target: in the service's container; "" if it is a process.
    """

    path: str
    text: str
    target: str = ""


@dataclass(frozen=True)
class HealthCheck:
    """How readiness is asked: an HTTP GET that answers 200, or a Redis PING."""

    kind: Literal["http", "redis"]
    path: str = ""


@dataclass(frozen=True)
class Mount:
    """A folder or file of this machine in a container.

    Attributes:
        source: "" for /dev/shm that is one memory with other containers of the stack.
    """

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class Published:
    """A container's port on an address of this machine."""

    address: str
    port: int
    container_port: int


@dataclass(frozen=True)
class DeviceAccess:
    """The GPUs of a container, and the rights that using them takes.

    Attributes:
        driver, ids: of a device reservation; "" and () if device nodes are given.
        names: device nodes.
        groups: numbers of the groups that own those nodes.
        seccomp: file in `compose` with the system call filter; "" for Docker's own.
    """

    driver: str = ""
    ids: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    seccomp: str = ""


@dataclass(frozen=True)
class Container:
    """What a service is beside its arguments where it runs in a container.

    Attributes:
        user: 'uid:gid' it runs as, which can read the files that are mounted.
        secrets: files with a secret of the stack each, mounted below /run/secrets.
        health_argv: the command whose success means healthy, run inside.
        limit_mib: of memory, beyond which the kernel ends it.
        big_locks: it may lock memory without limit, as pinned memory does.
    """

    image: str
    user: str
    networks: tuple[str, ...]
    health_argv: tuple[str, ...]
    limit_mib: int
    mounts: tuple[Mount, ...] = ()
    published: tuple[Published, ...] = ()
    secrets: tuple[str, ...] = ()
    devices: DeviceAccess = DeviceAccess()
    shm_mib: int = 64
    big_locks: bool = False


@dataclass(frozen=True)
class Service:
    """One process or container of a stack.

    Attributes:
        env: what is set on top of the environment it is started from.
        extra_ports: ports it opens beside the one it serves on.
        depends_on: services that must be ready before this one is started.
        ready_s: seconds from its start within which it must be ready.
        host, port: where this machine reaches it; port 0 if it does not.
        socket: its Unix socket, which this machine's processes use instead; "" if none.
        container: None if it is a process of this machine.
    """

    name: str
    role: ServiceRole
    argv: tuple[str, ...]
    host: str
    port: int
    health: HealthCheck
    ready_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    files: tuple[ConfigFile, ...] = ()
    extra_ports: tuple[int, ...] = ()
    depends_on: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    memory_mib: int = 0
    socket: str = ""
    container: Container | None = None

    @property
    def url(self) -> str:
        """Where this machine reaches the service; a wildcard address is reached on loopback."""
        if not self.port and self.socket:
            return f"unix://{self.socket}"
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host  # noqa: S104 - compared, not bound
        return f"http://{host_port(host, self.port)}"

    def fingerprint(self) -> str:
        """Return a digest that changes when the service would be run differently."""
        shown = asdict(self)
        del shown["ready_s"]  # our patience; the service runs no differently for it
        del shown["socket"]  # its files say so too
        return _digest(shown)


def container_of(service: Service) -> Container:
    """Return a service's container."""
    if service.container is None:
        raise ValueError(f"{service.name} is not a container")
    return service.container


def escaped(text: str) -> str:
    """Return a text in which neither Compose nor Kubernetes finds a variable."""
    return text.replace("$", "$$")


@dataclass(frozen=True)
class Stack:
    """All services of a stack, in an order in which each follows what it depends on.

    Attributes:
        secrets: names of secrets that the kit generates for it.
        user_secrets: names of secrets that the user supplies.
        remote: engines of other hosts, or all of an exported stack, which are only asked.
    """

    name: str
    runtime: str
    services: tuple[Service, ...]
    secrets: tuple[str, ...]
    user_secrets: tuple[str, ...] = ()
    remote: tuple[Service, ...] = ()

    @property
    def front(self) -> Service:
        """The service that clients talk to, which depends on Redis and the engines.

        Raises:
            StateError: the router is on another host.
        """
        for service in self.every:
            if service.role == "router":
                return service
        raise self.no_front()

    def no_front(self) -> StateError:
        """Return the error for a command that needs the router, where another host has it."""
        return StateError(
            f"the stack '{self.name}' has no router on this host",
            hint="use the host whose deploy.yaml lists these engines in router.engines",
        )

    @property
    def every(self) -> tuple[Service, ...]:
        """What runs here, and the engines of other hosts."""
        return (*self.services, *self.remote)

    @property
    def has_front(self) -> bool:
        """Whether clients are served on this host."""
        return any(service.role == "router" for service in self.every)

    @property
    def url(self) -> str:
        """Where clients are served; "" if that is on another host."""
        return self.front.url if self.has_front else ""

    @property
    def redis(self) -> tuple[Service, ...]:
        """The kit's own Redis: one, several that share the keys, or none."""
        return tuple(service for service in self.every if service.role == "redis")

    @property
    def stores(self) -> tuple[Service, ...]:
        """What keeps the KV that engines share, and loses it when it ends."""
        return tuple(service for service in self.services if service.role in STORE_ROLES)

    @property
    def monitoring(self) -> tuple[Service, ...]:
        """What watches the stack; it serves without them."""
        return tuple(service for service in self.services if service.role in MONITORING_ROLES)

    def service(self, name: str) -> Service:
        """Return the service of that name; KeyError if there is none."""
        for service in self.every:
            if service.name == name:
                return service
        raise KeyError(name)

    def fingerprint(self) -> str:
        """Return a digest that changes when any service would be run differently."""
        own = [self.name, self.runtime, *self.secrets]
        return _digest([*own, *(service.fingerprint() for service in self.services)])


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
