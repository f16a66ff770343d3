"""`deploy up`: start a stack, wait until it serves, prove it; stop it all again if that fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from deploy.config.spec import StackSpec
from deploy.errors import PdkitError, StateError
from deploy.runtime.home import Home
from deploy.runtime.host import detect_inventory, require_memory
from deploy.runtime.interrupts import cleaning_up, uninterrupted
from deploy.runtime.launcher import Launched, ProcessLauncher, wait_ready
from deploy.runtime.ports import require_free
from deploy.runtime.secrets import Secret, ensure_secrets
from deploy.runtime.sessions import boot_id
from deploy.runtime.state import StackState, write_state
from deploy.stack.build import REDIS_PASSWORD
from deploy.stack.service import Service
from deploy.tiny_model import ensure_tiny_model
from deploy.verify.report import CheckReport
from deploy.workflows.check import check_stack, renew_store_connections
from deploy.workflows.prepare import Prepared, Report, find_model, found_programs, prepare
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
        return max((self.started.get(name, 0.0) for name in self._engines), default=0.0)

    @property
    def outlived_redis(self) -> bool:
        """Whether Redis was started and an engine was not, which holds dead connections then."""
        return "redis" in self.started and not self._engines <= self.started.keys()

    @property
    def _engines(self) -> set[str]:
        return {engine.name for engine in self.running.prepared.plan.engines}


def prepare_here(spec: StackSpec, home: Home) -> Prepared:
    """Plan a spec for this machine, with the programs found on it.

    Raises:
        ConfigError, MissingTool: the spec is wrong, or a program is missing.
    """
    return prepare(spec, home, detect_inventory(), found_programs(spec))


def bring_up(
    spec: StackSpec, home: Home, report: Report, *, check: bool
) -> tuple[UpResult, CheckReport | None]:
    """Bring a stack up, or start what is missing of one that is up, and check it.

    The caller holds its lock. A check that fails leaves the stack up, to be looked at; an interrupt
    at any time stops what this call started.

    Raises:
        StateError: the stack is up with another plan.
        MachineError: this machine lacks something; nothing was started.
        StackUnhealthy: a service died or was too slow, and what this call started was stopped; or
            the stack stopped answering during the check.
    """
    start = _Start(spec, home, report)
    result = start.run()
    if not check:
        return result, None
    with start.undone_on((KeyboardInterrupt,)):
        if result.outlived_redis:
            renew_store_connections(result.running)
        return result, check_stack(home, spec.name, report)


class _Start:
    """One start: services in order of their dependencies, state written after each."""

    def __init__(self, spec: StackSpec, home: Home, report: Report) -> None:
        self._began = time.monotonic()
        self._home = home
        self._report = report
        self._files = home.stack(spec.name)
        self._launcher = ProcessLauncher(self._files)
        self._launched: dict[str, tuple[Service, Launched]] = {}
        self._existing = find_stack(home, spec.name)
        self._repairs = self._existing is not None and self._existing.any_running()
        if self._existing is not None and self._repairs:
            self._prepared = _same_plan(spec, home, self._existing)
            self._state = self._existing.state
        else:
            self._prepared = prepare_here(spec, home)
            self._state = _first_state(self._prepared)
        self._stack = self._prepared.stack

    def run(self) -> UpResult:
        """Start what is missing and wait for it; undo everything on any failure or interrupt."""
        name = self._stack.name
        missing = [service for service in self._stack.services if not self._runs(service)]
        if not missing:
            self._report(f"the stack '{name}' is already up")
            return self._result({})
        _require_room(self._prepared, missing, _ports_of_others(self._home, name))
        if self._prepared.model.source == "tiny":
            self._report(f"tiny model: {ensure_tiny_model(self._home.models)}")
        if not self._repairs:
            self._end_leftovers()
        with self.undone_on((BaseException,)):
            secrets = ensure_secrets(self._files.secrets_dir, self._stack.secrets)
            took: dict[str, float] = {}
            for batch in _batches(missing):
                took |= self._start_batch(batch, secrets)
            return self._result({service.name: took[service.name] for service in missing})

    @contextmanager
    def undone_on(self, causes: tuple[type[BaseException], ...]) -> Iterator[None]:
        """Stop what was started if one of `causes` ends the block, and let nothing stop that."""
        try:
            yield
        except causes:
            with cleaning_up():
                self._undo()
            raise

    def _runs(self, service: Service) -> bool:
        existing = self._existing
        return existing is not None and existing.service_state(service) == "running"

    def _result(self, started: dict[str, float]) -> UpResult:
        running = require_stack(self._home, self._stack.name)
        return UpResult(running, started, time.monotonic() - self._began)

    def _end_leftovers(self) -> None:
        """End helpers whose service died before, found by record or by mark."""
        if self._existing is not None:
            self._launcher.stop(self._existing.state.services, grace_s=_ABORT_GRACE_S)
        self._launcher.stop_marked(grace_s=_ABORT_GRACE_S)

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
        if before:
            self._launcher.stop({service.name: before}, grace_s=_ABORT_GRACE_S)
        with uninterrupted():  # a process without a record would be nobody's
            launched = self._launcher.start(
                service, secrets, starts=before.starts + 1 if before else 1
            )
            self._launched[service.name] = (service, launched)
            self._state = self._state.with_service(launched.record)
            write_state(self._files.state_file, self._state)

    def _undo(self) -> None:
        """Stop what was started; logs stay, so that the message can point at them."""
        records = {name: launched.record for name, (_, launched) in self._launched.items()}
        self._launcher.stop(records, grace_s=_ABORT_GRACE_S)
        self._report("stopped what was started")
        if not self._repairs:
            self._launcher.clear(keep_logs=True)
            return
        kept = {name: rec for name, rec in self._state.services.items() if name not in records}
        write_state(self._files.state_file, replace(self._state, services=kept))


def _same_plan(spec: StackSpec, home: Home, existing: RunningStack) -> Prepared:
    """Return the running stack's own plan, if it is what is asked for.

    Both are planned for the machine and the model as they were when the stack was started: a shell
    with fewer processors, or a hub model fetched since, makes no other stack of it.

    Raises:
        StateError: services of another plan are running under this name.
    """
    was = existing.prepared
    model = find_model(spec, home)
    if model.ref == was.model.ref:
        model = was.model
    asked = prepare(spec, home, was.inventory, was.programs, model=model)
    same_programs = (spec.engine.python, spec.redis.server) == (
        was.spec.engine.python,
        was.spec.redis.server,
    )
    if existing.state.fingerprint != asked.stack.fingerprint() or not same_programs:
        name = existing.stack.name
        changed = ", ".join(_changed(was.spec.model_dump(), spec.model_dump()))
        raise StateError(
            f"the stack '{name}' is up with another plan; "
            + (f"what differs: {changed}" if changed else "it is of another version of pdkit"),
            hint=f"deploy down --name {name}, or choose another --name and --port",
        )
    return was


def _changed(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the settings that differ, with both values; values of an environment stay unsaid."""
    for field, value in new.items():
        if isinstance(value, dict) and field != "env":
            yield from _changed(old[field], value, f"{prefix}{field}.")
        elif value != old[field]:
            was, asked = ("not set" if v is None else v for v in (old[field], value))
            shown = "" if field == "env" else f" ({was}, asked for: {asked})"
            yield f"{prefix}{field}{shown}"


def _first_state(prepared: Prepared) -> StackState:
    return StackState(
        name=prepared.stack.name,
        fingerprint=prepared.stack.fingerprint(),
        spec=prepared.spec.model_dump(mode="json"),
        machine=machine_facts(prepared),
        model=asdict(prepared.model),
        boot=boot_id(),
    )


def _ports_of_others(home: Home, name: str) -> dict[int, str]:
    """Return port → stack of the other stacks that run, also of engines that do not listen yet."""
    found: dict[int, str] = {}
    for other in home.stacks_beside(name):
        with suppress(PdkitError):  # another stack's broken state is not this one's concern
            running = find_stack(home, other)
            if running and running.any_running():
                found |= dict.fromkeys(running.prepared.plan.ports, other)
    return found


def _require_room(prepared: Prepared, missing: list[Service], others: dict[int, str]) -> None:
    name = prepared.stack.name
    wanted = {port for service in missing for port in (service.port, *service.extra_ports)}
    ports = {port: whose for port, whose in prepared.plan.ports.items() if port in wanted}
    require_free(
        ports, base=prepared.plan.router_port, host=prepared.plan.bind, stack=name, others=others
    )
    engines = [service for service in missing if service.role in ("producer", "consumer")]
    require_memory(
        sum(service.memory_mib for service in missing),
        engines=len(engines),
        hint=f"deploy up --name {name} --topology 1p1d, or a smaller engine.kv_cache_gib",
    )


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
