"""The check of an exported stack, in a pod beside it: services are found by their names."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.errors import StackUnhealthy
from deploy.planning.engines import EnginePlan
from deploy.planning.plan import Plan
from deploy.runtime.home import StackHome
from deploy.runtime.names import addresses
from deploy.runtime.process.launcher import ProcessLauncher
from deploy.runtime.secrets import Secret, read_secrets
from deploy.stack.build import remote_engine
from deploy.stack.cluster.layout import workload
from deploy.stack.layout import API_KEY, ENGINE_KEY, ENGINE_PORT, REDIS_PASSWORD, REDIS_URL
from deploy.stack.service import HealthCheck, Service, ServiceRole, Stack
from deploy.verify.report import CheckReport
from deploy.workflows.check import CheckOptions, check_running
from deploy.workflows.cluster_document import ExportedStack, read_document
from deploy.workflows.prepare import Report
from deploy.workflows.running import RunningStack
from deploy.workflows.saved_state import StackState, saved_plan

_SECRETS = (API_KEY, ENGINE_KEY, REDIS_PASSWORD, REDIS_URL)
_EVERY_S = 2.0

# From a name and a port to where that is; nothing as long as no pod of it is ready.
LookUp = Callable[[str, int], Sequence[tuple[str, int]]]


@dataclass(frozen=True)
class ClusterStack(RunningStack):
    """An exported stack, as a pod beside it reaches it.

    Attributes:
        services: all of the stack; this pod runs none of them.
    """

    namespace: str
    services: tuple[Service, ...]

    @property
    def stack(self) -> Stack:
        """The services, none of which this machine runs."""
        return Stack(self.prepared.plan.name, "kubernetes", (), (), remote=self.services)

    def hint_on(self, service: Service) -> str:
        """Return the command that shows why a service does not answer."""
        kubectl = f"kubectl -n {self.namespace}"
        pods = f"-l app.kubernetes.io/component={service.role}"
        return f"{kubectl} get pods {pods}; {kubectl} logs {pods}"


def check_cluster(
    document: Path,
    secrets: Path,
    report: Report,
    options: CheckOptions,
    look_up: LookUp = addresses,
) -> CheckReport:
    """Wait until an exported stack serves, then check every pair of its engines.

    Args:
        document: what `cluster_document` wrote.
        secrets: a folder with a file for each of the stack's secrets that a check needs.

    Raises:
        StateError: the document is another version's.
        StackUnhealthy: the stack does not serve within `timeouts.ready_s`.
    """
    exported = read_document(document.read_text(encoding="utf-8"))
    running = _await_stack(exported, read_secrets(secrets, _SECRETS), report, look_up)
    return check_running(None, running, report, options)


def _await_stack(
    exported: ExportedStack, secrets: dict[str, Secret], report: Report, look_up: LookUp
) -> ClusterStack:
    within_s = exported.prepared.plan.ready_s
    deadline, told = time.monotonic() + within_s, ""
    while True:
        running = _found(exported, secrets, look_up)
        missing = ", ".join(_missing(exported.prepared.plan, running))
        if not missing:
            return running
        if time.monotonic() > deadline:
            raise StackUnhealthy(
                f"after {within_s:g} s: {missing}",
                hint=f"kubectl -n {exported.namespace} get pods -o wide",
            )
        if missing != told:
            report(f"waiting for the stack: {missing}")
        told = missing
        time.sleep(_EVERY_S)


def _missing(plan: Plan, running: ClusterStack) -> Iterator[str]:
    """Yield parts of the export that the stack lacks; more engines are fine."""
    wanted = Counter[ServiceRole](engine.role for engine in plan.engines)
    wanted.update({"redis": len(plan.redis), "router": 1})
    there = Counter(one.role for one in running.services)
    for role, count in wanted.items():
        if there[role] < count:
            yield f"{there[role]} of {count} {workload(role)} found"
    if silent := [one.name for one in running.services if not running.is_ready(one)]:
        yield f"not answering: {', '.join(silent)}"


def _found(exported: ExportedStack, secrets: dict[str, Secret], look_up: LookUp) -> ClusterStack:
    """Return the stack with the services that there are now."""
    prepared, layout = exported.prepared, exported.layout
    plan = prepared.plan
    engines = tuple(_engines(plan, look_up))
    front, front_port = workload("router"), layout.router(plan).port
    services = [
        *(
            service
            for shard in plan.redis
            for service in _services("redis", layout.redis(shard).reached_at, shard.name, look_up)
        ),
        *map(remote_engine, engines),
        *_services("router", f"{front}:{front_port}", front, look_up),
    ]
    return ClusterStack(
        replace(prepared, plan=replace(plan, engines=(), remote=engines)),
        StackState(plan.name, saved_plan(prepared, "export", fingerprint=""), boot=""),
        # It finds no process of the stack here, and connects to its Redis.
        ProcessLauncher(StackHome(Path())),
        secrets,
        exported.namespace,
        tuple(services),
    )


def _engines(plan: Plan, look_up: LookUp) -> Iterator[EnginePlan]:
    for role in dict.fromkeys(engine.role for engine in plan.engines):
        for host, port in look_up(workload(role), ENGINE_PORT):
            # As the router names it.
            name = f"{workload(role)}-{host}"
            yield EnginePlan(name, role, port, (), 0, 0, host=host, remote=True)


def _services(role: ServiceRole, address: str, name: str, look_up: LookUp) -> Iterator[Service]:
    """Yield the one service at an address; nothing as long as it has none."""
    host, _, port = address.rpartition(":")
    health = HealthCheck("redis") if role == "redis" else HealthCheck("http", "/readiness")
    for found, number in look_up(host, int(port))[:1]:
        yield Service(name, role, (), found, number, health, 0.0)
