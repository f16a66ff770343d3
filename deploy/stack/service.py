"""The one intermediate form: a stack is its services, and every runtime is a function of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

ServiceRole = Literal["redis", "producer", "consumer", "router"]


@dataclass(frozen=True)
class ConfigFile:
    """A file that a service reads at its start.

    `text` may hold `@{name}` for a secret; the runtime fills it in, in a file only its owner reads.
    """

    path: str
    text: str


@dataclass(frozen=True)
class Health:
    """How readiness is asked: an HTTP GET that answers 200, or a Redis PING."""

    kind: Literal["http", "redis"]
    path: str = ""


@dataclass(frozen=True)
class Service:
    """One process or container of a stack.

    Attributes:
        env: what is set on top of the environment it is started from.
        extra_ports: ports it opens beside the one it serves on.
        depends_on: services that must be ready before this one is started.
        ready_s: seconds from its start within which it must be ready.
    """

    name: str
    role: ServiceRole
    argv: tuple[str, ...]
    host: str
    port: int
    health: Health
    ready_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    files: tuple[ConfigFile, ...] = ()
    extra_ports: tuple[int, ...] = ()
    depends_on: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    memory_mib: int = 0

    @property
    def url(self) -> str:
        """Where this machine reaches the service; a wildcard address is reached on loopback."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host  # noqa: S104
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


@dataclass(frozen=True)
class Stack:
    """All services of a stack, in an order in which each follows what it depends on."""

    name: str
    runtime: str
    services: tuple[Service, ...]
    secrets: tuple[str, ...]

    def service(self, name: str) -> Service:
        """Return the service of that name; KeyError if there is none."""
        for service in self.services:
            if service.name == name:
                return service
        raise KeyError(name)

    def fingerprint(self) -> str:
        """Return a digest that changes when any service would be run differently."""
        shown = asdict(self)
        for service in shown["services"]:
            del service["ready_s"]  # our patience; the service runs no differently for it
        text = json.dumps(shown, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
