"""`deploy up`: start a stack, wait until it serves, and stop it all again if that fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from deploy.config.spec import StackSpec
from deploy.errors import StateError
from deploy.runtime.home import Home
from deploy.runtime.host import detect_inventory, require_memory
from deploy.runtime.launcher import Launched, ProcessLauncher, wait_ready
from deploy.runtime.ports import require_free
from deploy.runtime.secrets import Secret, ensure_secrets
from deploy.runtime.state import StackState, write_state
from deploy.stack.build import REDIS_PASSWORD
from deploy.stack.service import Service
from deploy.tiny_model import ensure_tiny_model
from deploy.workflows.prepare import Prepared, Report, found_programs, prepare
from deploy.workflows.running import (
    RunningStack,
    find_stack,
    machine_facts,
    require_stack,
    service_is_ready,
)

# A service that is told to stop because another one died has nothing to finish.
_ABORT_GRACE_S = 1.5


@dataclass(frozen=True)
class UpResult:
    """What `up` did.

    Attributes:
        started: seconds from each started service's own start to its readiness; empty if all ran.
        seconds: from the command's start until the stack served.
    """

    running: RunningStack
    started: dict[str, float]
    seconds: float

    @property
    def slowest_engine_s(self) -> float:
        engines = {engine.name for engine in self.running.prepared.plan.engines}
        return max((took for name, took in self.started.items() if name in engines), default=0.0)


def prepare_here(spec: StackSpec, home: Home) -> Prepared:
    """Plan a spec for this machine, with the programs found on it.

    Raises:
        ConfigError, MissingTool: the spec is wrong, or a program is missing.
    """
    return prepare(spec, home, detect_inventory(), found_programs(spec))


def start_stack(spec: StackSpec, home: Home, report: Report) -> UpResult:
    """Bring a stack up, or start what is missing of one that is up. The caller holds its lock.

    Raises:
        StateError: the stack is up with another plan.
        MachineError: this machine lacks something; nothing was started.
        StackUnhealthy: a service died or was too slow; what this call started was stopped.
    """
    began = time.monotonic()
    prepared = prepare_here(spec, home)
    existing = find_stack(home, spec.name)
    if existing is not None:
        prepared = _same_plan(existing, prepared)
    missing = _missing_services(prepared, existing)
    if not missing:
        report(f"the stack '{spec.name}' is already up")
        return UpResult(require_stack(home, spec.name), {}, time.monotonic() - began)
    _require_room(prepared, missing)
    if prepared.plan.model.source == "tiny":
        report(f"tiny model: {ensure_tiny_model(home.models)}")
    started = _Start(prepared, home, existing, report).run(missing)
    return UpResult(require_stack(home, spec.name), started, time.monotonic() - began)


def _same_plan(existing: RunningStack, prepared: Prepared) -> Prepared:
    """Return the plan to go on with: the running stack's own, if it is what is asked for.

    Raises:
        StateError: services of another plan are running under this name.
    """
    states = [existing.service_state(service) for service in existing.stack.services]
    if "running" not in states:
        return prepared
    if existing.state.fingerprint != prepared.stack.fingerprint():
        name = existing.stack.name
        raise StateError(
            f"the stack '{name}' is up with another plan: {_difference(existing, prepared)}",
            hint=f"deploy down --name {name}, or choose another --name and --port",
        )
    return existing.prepared


def _difference(existing: RunningStack, prepared: Prepared) -> str:
    """Name the settings in which a running stack differs from what is asked for."""
    running = existing.prepared.spec.model_dump(mode="json")
    asked = prepared.spec.model_dump(mode="json")
    changed = [
        f"{field} is {running[field]}, not {asked[field]}"
        for field in asked
        if running[field] != asked[field]
    ]
    return "; ".join(changed) or "it was started by another version of pdkit, or on other programs"


def _missing_services(prepared: Prepared, existing: RunningStack | None) -> list[Service]:
    services = list(prepared.stack.services)
    if existing is None:
        return services
    return [service for service in services if existing.service_state(service) != "running"]


def _require_room(prepared: Prepared, missing: list[Service]) -> None:
    name = prepared.stack.name
    wanted = {port for service in missing for port in (service.port, *service.extra_ports)}
    ports = {port: whose for port, whose in prepared.plan.ports.items() if port in wanted}
    require_free(ports, base=prepared.plan.router_port, host=prepared.plan.bind, stack=name)
    engines = [service for service in missing if service.role in ("producer", "consumer")]
    require_memory(
        sum(service.memory_mib for service in missing),
        engines=len(engines),
        hint=f"deploy up --name {name} --topology 1p1d, or a smaller engine.kv_cache_gib",
    )


class _Start:
    """One start: services in order of their dependencies, state written after each."""

    def __init__(
        self, prepared: Prepared, home: Home, existing: RunningStack | None, report: Report
    ) -> None:
        self._stack = prepared.stack
        self._files = home.stack(prepared.stack.name)
        self._report = report
        self._launcher = ProcessLauncher(self._files)
        self._launched: dict[str, tuple[Service, Launched]] = {}
        self._fresh = existing is None or not any(
            existing.service_state(service) == "running" for service in prepared.stack.services
        )
        self._state = (
            existing.state
            if existing is not None and not self._fresh
            else StackState(
                name=prepared.stack.name,
                fingerprint=prepared.stack.fingerprint(),
                spec=prepared.spec.model_dump(mode="json"),
                machine=machine_facts(prepared),
            )
        )

    def run(self, missing: list[Service]) -> dict[str, float]:
        """Start the services and wait for all; undo everything on any failure or interrupt."""
        if self._fresh:
            self._launcher.stop_marked(grace_s=_ABORT_GRACE_S)
        secrets = ensure_secrets(self._files.secrets_dir, self._stack.secrets)
        with self._undo_on_failure():
            took: dict[str, float] = {}
            for batch in _batches(missing):
                took |= self._start_batch(batch, secrets)
            return {service.name: took[service.name] for service in missing}

    def _start_batch(self, batch: list[Service], secrets: dict[str, Secret]) -> dict[str, float]:
        for service in batch:
            self._start_one(service, secrets)
        self._report(f"started {', '.join(service.name for service in batch)}")
        password = secrets[REDIS_PASSWORD]
        return wait_ready(
            self._launched,
            lambda service: service_is_ready(service, password),
            self._report,
            self._launcher,
            only={service.name for service in batch},
        )

    def _start_one(self, service: Service, secrets: dict[str, Secret]) -> None:
        before = self._state.services.get(service.name)
        launched = self._launcher.start(service, secrets, starts=before.starts + 1 if before else 1)
        self._launched[service.name] = (service, launched)
        self._state = self._state.with_service(launched.record)
        write_state(self._files.state_file, self._state)

    @contextmanager
    def _undo_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        """Stop what was started; logs stay, so that the message can point at them."""
        self._report("stopping what was started")
        records = {name: launched.record for name, (_, launched) in self._launched.items()}
        self._launcher.stop(records, grace_s=_ABORT_GRACE_S)
        if self._fresh:
            self._launcher.clear(keep_logs=True)
            return
        kept = {name: rec for name, rec in self._state.services.items() if name not in records}
        write_state(self._files.state_file, replace(self._state, services=kept))


def _batches(services: list[Service]) -> list[list[Service]]:
    """Group services so that each follows what it depends on; those of a group start together."""
    waiting, batches = list(services), []
    while waiting:
        names = {service.name for service in waiting}
        batch = [service for service in waiting if not names & set(service.depends_on)]
        if not batch:
            raise ValueError(f"services wait for one another: {', '.join(sorted(names))}")
        batches.append(batch)
        waiting = [service for service in waiting if service not in batch]
    return batches
