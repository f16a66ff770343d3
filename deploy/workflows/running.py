"""A stack that was started before: its state, its plan, its processes and its Redis."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from deploy.config.model import Model, ModelShape
from deploy.config.spec import StackSpec
from deploy.errors import StackUnhealthy, StateError
from deploy.planning.inventory import Inventory
from deploy.runtime.engine_api import EngineApi
from deploy.runtime.home import Home
from deploy.runtime.launcher import ProcessLauncher, ServiceState
from deploy.runtime.secrets import Secret, read_secrets
from deploy.runtime.state import StackState, read_state
from deploy.runtime.store import Store, open_store
from deploy.stack.build import REDIS_PASSWORD
from deploy.stack.service import Service, Stack
from deploy.workflows.prepare import Prepared, Programs, prepare

_PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class RunningStack:
    """What every command on an existing stack works with."""

    prepared: Prepared
    state: StackState
    launcher: ProcessLauncher
    secrets: dict[str, Secret]

    @property
    def stack(self) -> Stack:
        return self.prepared.stack

    def service_state(self, service: Service) -> ServiceState:
        return self.launcher.state(self.state.services.get(service.name))

    def is_ready(self, service: Service) -> bool:
        return service_is_ready(service, self.secrets.get(REDIS_PASSWORD))

    def any_running(self) -> bool:
        return any(self.service_state(service) == "running" for service in self.stack.services)


def service_is_ready(service: Service, redis_password: Secret | None) -> bool:
    """Ask a service whether it serves, in its own way; within two seconds."""
    if service.health.kind == "redis":
        with open_store(service.host, service.port, redis_password) as store:
            return store.ping()
    with EngineApi(service.url, timeout_s=_PROBE_TIMEOUT_S) as api:
        return api.is_healthy(service.health.path)


def store_of(running: RunningStack) -> AbstractContextManager[Store]:
    """Open a connection to the stack's Redis for a with block."""
    redis = running.stack.service("redis")
    return open_store(redis.host, redis.port, running.secrets.get(REDIS_PASSWORD))


def machine_facts(prepared: Prepared) -> dict[str, Any]:
    """Return what was detected when the stack was planned, for its state file."""
    return {"inventory": asdict(prepared.inventory), "programs": asdict(prepared.programs)}


def find_stack(home: Home, name: str) -> RunningStack | None:
    """Return the stack of that name, or None if there is no state of one.

    Raises:
        StateError: its state file cannot be understood.
    """
    files = home.stack(name)
    state = read_state(files.state_file, name)
    if state is None:
        return None
    try:
        spec = StackSpec.model_validate(state.spec)
        inventory = Inventory(**state.machine["inventory"])
        programs = Programs(**state.machine["programs"])
        shape = state.model["shape"]
        model = Model(**{**state.model, "shape": ModelShape(**shape) if shape else None})
    except (ValidationError, KeyError, TypeError) as exc:
        raise StateError(
            f"the state of stack '{name}' does not fit this version of pdkit: {files.state_file}",
            hint=f"deploy down --name {name} finds its processes without it and clears it away",
        ) from exc
    prepared = prepare(spec, home, inventory, programs, model=model)
    secrets = read_secrets(files.secrets_dir, prepared.stack.secrets)
    return RunningStack(prepared, state, ProcessLauncher(files), secrets)


def require_stack(home: Home, name: str) -> RunningStack:
    """Return the stack of that name.

    Raises:
        StateError: there is none, or its state file cannot be understood.
    """
    running = find_stack(home, name)
    if running is None:
        others = home.stacks_beside(name)
        raise StateError(
            f"there is no stack '{name}'" + (f"; there are: {', '.join(others)}" if others else ""),
            hint=f"deploy up --name {name}" if not others else f"deploy status --name {others[0]}",
        )
    return running


def require_running(running: RunningStack) -> None:
    """Check that every service of the stack runs.

    Raises:
        StackUnhealthy: naming those that do not.
    """
    dead = [
        service.name
        for service in running.stack.services
        if running.service_state(service) != "running"
    ]
    if dead:
        name = running.stack.name
        raise StackUnhealthy(
            f"not running: {', '.join(dead)}", hint=f"deploy up --name {name} starts them again"
        )
