"""Start the services of a stack that do not run, in the order of their dependencies."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus

from deploy.config.engine_inputs import refused_variable
from deploy.config.runtimes import RUNTIMES
from deploy.errors import PdkitError, StackUnhealthy
from deploy.planning.engines import ENGINE_ROLES
from deploy.planning.notes import smaller
from deploy.runtime.engine_api import REFUSED, EngineApi
from deploy.runtime.home import Home
from deploy.runtime.host import require_memory
from deploy.runtime.interrupts import cleaning_up, uninterrupted
from deploy.runtime.launcher import LOG_TAIL, Started
from deploy.runtime.ports import require_free
from deploy.runtime.process.sessions import kept_back
from deploy.runtime.readiness import wait_ready
from deploy.runtime.secrets import Secret
from deploy.runtime.supervisor import end_supervisor, start_supervisor
from deploy.stack.layout import ENGINE_KEY, REDIS_PASSWORD
from deploy.stack.service import MONITORING_ROLES, HealthCheck, Service
from deploy.tiny_model import ensure_tiny_model
from deploy.workflows.model_files import require_same_model
from deploy.workflows.prepare import Prepared, Report
from deploy.workflows.running import (
    PROBE_TIMEOUT_S,
    RunningStack,
    launcher_for,
    plans_of_others,
    service_is_ready,
    stack_as_planned,
)
from deploy.workflows.saved_state import StackState, write_state
from deploy.workflows.user_files import provide_caches, stack_secrets
from deploy.workflows.user_redis import require_redis

# Services that are stopped because another one died have nothing to finish.
ABORT_GRACE_S = 1.5


class StackStart:
    """One start: services in order of their dependencies, state written after each.

    Attributes:
        prepared: what is started.
        state: as it is written, with a record of each service that was started. `before` is what
            it goes back to if nothing of it runs any more.
        alone: it may start without engines of other hosts, which its router then waits for.
        not_watching: why a service that only watches the stack was not started, or is not ready.
    """

    def __init__(
        self,
        prepared: Prepared,
        state: StackState,
        home: Home,
        report: Report,
        *,
        before: StackState | None = None,
    ) -> None:
        self.prepared = prepared
        self.state = state
        self.alone = False
        self.not_watching: dict[str, PdkitError] = {}
        self._before = before
        self._home = home
        self._report = report
        self._files = home.stack(prepared.stack.name)
        self.launcher = launcher_for(prepared.plan.runtime, prepared.stack.name, self._files)
        self._started: dict[str, tuple[Service, Started]] = {}

    def running(self) -> RunningStack:
        """Return the stack as it was started, without planning it again."""
        return stack_as_planned(self.prepared, self.state, self._home, self.launcher)

    def missing(self) -> list[Service]:
        """Return the services that do not run."""
        return [
            service
            for service in self.prepared.stack.services
            if self.launcher.state(self.state.services.get(service.name)) != "running"
        ]

    def require_room(self, missing: list[Service]) -> None:
        """Check that ports are free and memory is available. Changes nothing.

        Raises:
            PortTaken, NotEnoughMemory: naming what is taken, or how much there is.
        """
        closed = [service for service in missing if not self.launcher.holds(service)]
        require_ports(self.prepared, self._home, closed)
        require_host_memory(self.prepared, missing)

    def require_redis(self) -> None:
        """Check that the user's own Redis answers, where there is one.

        Raises:
            ConfigError, RedisUnreachable: naming it, and why it cannot be used.
        """
        require_redis(self.prepared, self._files.secrets_dir)

    def run(self, missing: list[Service]) -> dict[str, float]:
        """Start services and wait for them; return service → seconds from its start to readiness.

        Those that only watch the stack come last. If one fails, `not_watching` says why: the stack
        serves without it.

        Raises:
            ModelChanged: an engine would get other weights than those that the stack serves.
            PdkitError: one cannot be started, died or was too slow. What was started still runs:
                the caller ends it.
        """
        prepared = self.prepared
        self._require_same_model(missing)
        if prepared.model.source == "tiny":
            self._report(f"tiny model: {ensure_tiny_model(self._home.models)}")
        self._report(f"data type: {prepared.plan.dtype}")
        if chosen := prepared.chosen_connector:
            self._report(f"connector: {chosen}")
        self._report_kept_back()
        secrets = stack_secrets(prepared, self._files.secrets_dir)
        provide_caches(prepared)
        self.launcher.prepare(prepared.stack, secrets, stop_s=prepared.spec.timeouts.stop_s)
        took: dict[str, float] = {}
        watching = [service for service in missing if service.role in MONITORING_ROLES]
        for batch in _batches([service for service in missing if service not in watching]):
            took |= self._start_batch(batch, secrets)
        for service in watching:
            try:
                took |= self._start_batch([service], secrets)
            except PdkitError as exc:
                self.not_watching[service.name] = exc
        self.keep_up()
        return {service.name: took[service.name] for service in missing if service.name in took}

    def _report_kept_back(self) -> None:
        """Name variables of the shell that the user may expect services to have."""
        if not RUNTIMES[self.prepared.plan.runtime].as_user:
            return
        for name in kept_back(os.environ):
            refused = refused_variable(name)
            other = (
                refused.instead if refused else "to pass it on, set it in engine.env in deploy.yaml"
            )
            said = f"{name} of this shell is not passed on"
            self._report(f"{said}; {other}" if other else said)

    def warnings(self) -> tuple[str, ...]:
        """Return the error of a supervisor that does not run, with its log and the next command."""
        name = self.prepared.stack.name
        return tuple(
            "\n".join(
                (
                    f"the stack serves, but {exc.message}; try again: "
                    f"deploy restart {service} --name {name}",
                    *(f"  {line}" for line in exc.details),
                )
            )
            for service, exc in self.not_watching.items()
        )

    def keep_up(self) -> None:
        """Have services that die restarted from now on, unless the spec says otherwise."""
        self.launcher.keep_up(self.state.services)
        front = self.launcher.take_front()
        if self.prepared.spec.supervise:
            start_supervisor(self._home, self.prepared.stack.name, front)
        if front:
            front.close()

    def start_again(self, service: Service) -> Started:
        """Start one service that died, and do not wait for it.

        Raises:
            ModelChanged: an engine would get other weights than those that the stack serves.
            PdkitError: it cannot be started.
        """
        self._require_same_model([service])
        self._stop_leftovers(service)  # its helpers may still hold GPU memory
        self.require_room([service])
        self._start_one(service, stack_secrets(self.prepared, self._files.secrets_dir))
        return self._started[service.name][1]

    @contextmanager
    def undone_on(self, causes: tuple[type[BaseException], ...]) -> Iterator[None]:
        """Stop what was started if one of `causes` ends the block; interrupts do not disturb it."""
        try:
            yield
        except causes:
            with cleaning_up():
                self.undo()
            raise

    def undo(self) -> None:
        """Stop what was started; logs stay, so that the message can point at them."""
        records = {name: started.record for name, (_, started) in self._started.items()}
        if front := self.launcher.take_front():
            front.close()
        if records:
            self.launcher.stop(records, grace_s=ABORT_GRACE_S)
            self._started.clear()
            self._report("stopped everything that was started")
        kept = {name: rec for name, rec in self.state.services.items() if name not in records}
        self.state = replace(self.state, services=kept)
        if kept:
            self.save(self.state)
        elif self._before is not None:
            self.save(replace(self._before, services={}))
        else:
            end_supervisor(self._files.supervisor_socket)
            self.launcher.stop_marked(grace_s=ABORT_GRACE_S)
            self.launcher.clear(keep_logs=True)

    def save(self, state: StackState) -> None:
        """Replace the state, and write it."""
        self.state = state
        write_state(self._files.state_file, state)

    def _require_same_model(self, services: Sequence[Service]) -> None:
        if any(service.role in ENGINE_ROLES for service in services):
            require_same_model(self.prepared)

    def _stop_leftovers(self, service: Service) -> None:
        """Stop what is left of a service's last process."""
        if before := self.state.services.get(service.name):
            self.launcher.stop({service.name: before}, grace_s=ABORT_GRACE_S)

    def _start_one(self, service: Service, secrets: dict[str, Secret]) -> None:
        before = self.state.services.get(service.name)
        with uninterrupted():  # no command could find a service without a record
            started = self.launcher.start(
                service, secrets, starts=before.starts + 1 if before else 1
            )
            self._started[service.name] = (service, started)
            try:
                self.save(self.state.with_service(started.record))
            except OSError:  # such as a full disk
                self.launcher.stop({service.name: started.record}, grace_s=ABORT_GRACE_S)
                raise

    def _start_batch(self, batch: list[Service], secrets: dict[str, Secret]) -> dict[str, float]:
        for service in batch:
            self._stop_leftovers(service)
            self._start_one(service, secrets)
        names = {service.name for service in batch}
        self._report(f"started {', '.join(service.name for service in batch)}")
        return wait_ready(
            # What watches the stack does not fail because another service dies meanwhile.
            {
                name: one
                for name, one in self._started.items()
                if name in names or batch[0].role not in MONITORING_ROLES
            },
            lambda service: self._is_ready(self._asked(service), secrets),
            self._report,
            self.launcher,
            only=names,
        )

    def _is_ready(self, service: Service, secrets: dict[str, Secret]) -> bool:
        """Tell whether a service serves.

        Raises:
            StackUnhealthy: it refuses the stack, which no waiting changes.
        """
        if service.health.kind != "http":
            return service_is_ready(service, self.launcher, secrets.get(REDIS_PASSWORD))
        is_engine = service.role in ENGINE_ROLES
        path, key = service.health.path, secrets.get(ENGINE_KEY) if is_engine else None
        with EngineApi(service.url, timeout_s=PROBE_TIMEOUT_S, api_key=key) as api:
            status = api.status(path)
            ready = status == HTTPStatus.OK
            if ready and is_engine:  # its health is open to all; the router asks for its models
                path = "/v1/models"
                status = api.status(path)
        if status in REFUSED:
            raise StackUnhealthy(
                f"{service.name} answers {path} with {status}: it wants another key than the "
                f"stack's; log: {self.launcher.where_log(service.name)}",
                hint="take VLLM_API_KEY out of what starts it, such as its image; for a key that "
                "clients must send: --api-key-file FILE",
                details=self.launcher.log_lines(service.name, LOG_TAIL),
            )
        return ready

    def _asked(self, service: Service) -> Service:
        """Return a service with the health check that this start waits for."""
        if self.alone and service.role == "router" and self.prepared.stack.remote:
            return replace(service, health=HealthCheck("http", "/liveness"))
        return service


def require_ports(prepared: Prepared, home: Home, services: Sequence[Service]) -> None:
    """Check that the services' ports are free. Changes nothing.

    Raises:
        PortTaken, MachineError: naming what is taken, or an address that is not of this machine.
    """
    plan = prepared.plan
    wanted = {port for service in services for port in (service.port, *service.extra_ports)}
    ports = {port: whose for port, whose in plan.ports.items() if port in wanted}
    others = _ports_of_others(home, plan.name)
    require_free(ports, base=plan.port, host=plan.bind, others=others)
    engines = {one.port: one.name for one in plan.engines if one.port in ports}
    host = plan.spec.engine.bind
    require_free(engines, base=plan.port, host=host, setting="engine.bind")


def require_host_memory(prepared: Prepared, services: Sequence[Service]) -> None:
    """Check that the services' memory is there. Changes nothing.

    Raises:
        NotEnoughMemory: naming how much there is.
    """
    engines = [service for service in services if service.role in ENGINE_ROLES]
    require_memory(
        sum(service.memory_mib for service in services),
        engines=len(engines),
        hint=lambda over_mib: smaller(prepared.plan, over_mib),
    )


def _ports_of_others(home: Home, name: str) -> dict[int, str]:
    """Return port → stack of the other stacks that run, also of engines that do not listen yet."""
    return {port: other for other, plan in plans_of_others(home, name) for port in plan.ports}


def _batches(services: list[Service]) -> list[list[Service]]:
    """Group services so that each follows what it depends on; those of a group start together."""
    waiting, batches = list(services), []
    while waiting:
        names = {service.name for service in waiting}
        batch = [service for service in waiting if not names & set(service.depends_on)]
        if not batch:
            raise ValueError(f"services wait for each other: {', '.join(sorted(names))}")
        batches.append(batch)
        waiting = [service for service in waiting if service not in batch]
    return batches
