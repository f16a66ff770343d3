"""A stack that was started before: its state, its plan, its services and its Redis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

from deploy.connector.pdkit_connector.redis_url import parse_redis_url
from deploy.errors import PdkitError, StackUnhealthy, StateError
from deploy.metrics.lmcache_server import LmcacheServerUse
from deploy.metrics.page import MetricsPage
from deploy.metrics.reading import ServiceCondition
from deploy.planning.address import host_port
from deploy.planning.engines import ENGINE_ROLES
from deploy.planning.memory import MIB
from deploy.planning.plan import Plan
from deploy.runtime.engine_api import ApiError, EngineApi
from deploy.runtime.home import Home, StackHome
from deploy.runtime.launcher import Launcher, ServiceState
from deploy.runtime.secrets import Secret, read_secrets
from deploy.runtime.state import UNFIT, read_state_file
from deploy.runtime.store import Store, open_shards
from deploy.runtime.url_store import open_url_store
from deploy.runtime.whole_page import whole_page
from deploy.stack.layout import API_KEY, ENGINE_KEY, REDIS_PASSWORD, REDIS_URL
from deploy.stack.service import Service, Stack
from deploy.workflows.prepare import Prepared, prepare
from deploy.workflows.saved_state import StackState, restored_state

PROBE_TIMEOUT_S = 2.0
PAGE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RunningStack:
    """What every command on an existing stack works with."""

    prepared: Prepared
    state: StackState
    launcher: Launcher
    secrets: dict[str, Secret]

    @property
    def stack(self) -> Stack:
        """The services as they were planned."""
        return self.prepared.stack

    def service_state(self, service: Service) -> ServiceState:
        """Return whether a service runs, whether or not it serves.

        An engine of another host runs if it answers.
        """
        if service in self.stack.remote:
            return "running"
        return self.launcher.state(self.state.services.get(service.name))

    def is_ready(self, service: Service, *, within_s: float = PROBE_TIMEOUT_S) -> bool:
        """Ask a service whether it serves."""
        password = self.secrets.get(REDIS_PASSWORD)
        return service_is_ready(service, self.launcher, password, within_s=within_s)

    def hint_on(self, service: Service) -> str:
        """Return the command that shows why a service does not answer."""
        if service in self.stack.remote:
            return f"deploy status on the host of {service.url}"
        return f"deploy logs {service.name} --name {self.stack.name}; deploy down; deploy up"

    def condition(self, service: Service, *, within_s: float = PAGE_TIMEOUT_S) -> ServiceCondition:
        """Return a service's state; of one that runs, whether it is ready.

        Args:
            within_s: for its answer. On a busy machine a sound service can take seconds.
        """
        state = self.service_state(service)
        if state != "running":
            return state
        return "ready" if self.is_ready(service, within_s=within_s) else "not ready"

    def api(self, service: Service, *, timeout_s: float = 120.0) -> EngineApi:
        """Return a client of an engine or the router, with the key that it asks for."""
        return EngineApi(service.url, timeout_s=timeout_s, api_key=self.key(service))

    def key(self, service: Service) -> Secret | None:
        """Return the key that an engine or the router asks for; None if it asks for none."""
        if service.role in ENGINE_ROLES:
            return self.secrets.get(ENGINE_KEY)
        return self.secrets.get(API_KEY) if service.role == "router" else None

    def any_running(self) -> bool:
        """Tell whether any service runs."""
        return any(self.service_state(service) == "running" for service in self.stack.services)

    def stopped(self) -> list[Service]:
        """Return the services that do not run."""
        return [one for one in self.stack.services if self.service_state(one) != "running"]


def launcher_for(runtime: str, name: str, files: StackHome) -> Launcher:
    """Return the launcher of a stack's runtime."""
    if runtime == "compose":
        from deploy.runtime.compose.launcher import ComposeLauncher

        return ComposeLauncher(name, files)
    from deploy.runtime.process.launcher import ProcessLauncher  # it imports psutil

    return ProcessLauncher(files)


def service_is_ready(
    service: Service,
    launcher: Launcher,
    redis_password: Secret | None,
    *,
    within_s: float = PROBE_TIMEOUT_S,
) -> bool:
    """Ask a service whether it serves, in its own way."""
    if service.health.kind == "redis":
        with launcher.open_store(service, redis_password) as store:
            return store.ping()
    with EngineApi(service.url, timeout_s=within_s) as api:
        return api.is_healthy(service.health.path)


def answering_pages(running: RunningStack) -> dict[str, MetricsPage]:
    """Return the metrics pages of the engines that answer, by their names."""
    names = [engine.name for engine in running.prepared.plan.all_engines]

    def answered(name: str) -> MetricsPage | None:
        with suppress(ApiError):
            return engine_page(running, name)
        return None

    with ThreadPoolExecutor(max_workers=len(names)) as pool:
        pages = list(pool.map(answered, names))
    return {name: page for name, page in zip(names, pages, strict=True) if page is not None}


def engine_page(
    running: RunningStack, name: str, *, timeout_s: float = PAGE_TIMEOUT_S
) -> MetricsPage:
    """Return an engine's metrics page with what its workers count and report.

    Raises:
        ApiError: no answer.
    """
    with running.api(running.stack.service(name), timeout_s=timeout_s) as api:
        return whole_page(api.metrics)


def metrics_page(
    running: RunningStack, service: Service, *, timeout_s: float = PAGE_TIMEOUT_S
) -> MetricsPage | None:
    """Return a service's metrics page; None if it has none, or does not answer."""
    if service.role in ENGINE_ROLES:
        page = running.api(service, timeout_s=timeout_s)
    elif service.role == "router":  # which has it on a port of its own, without a key
        url = f"http://{host_port('127.0.0.1', running.prepared.plan.router_metrics_port)}"
        page = EngineApi(url, timeout_s=timeout_s)
    elif service.role == "kv-server":
        page = EngineApi(service.url, timeout_s=timeout_s)
    else:
        return None
    try:
        with page as api:
            return api.metrics()
    except ApiError:
        return None


def kv_server_page(running: RunningStack) -> dict[str, MetricsPage]:
    """Return the page of LMCache's server by its name; nothing without a server or an answer."""
    server = running.prepared.plan.kv_server
    if server is None:
        return {}
    service = running.stack.service(server.name)
    page = metrics_page(running, service, timeout_s=PROBE_TIMEOUT_S)
    return {} if page is None else {server.name: page}


def kv_server_use(
    running: RunningStack, pages: Mapping[str, MetricsPage]
) -> LmcacheServerUse | None:
    """Return the use of LMCache's server; None if the stack has none."""
    server = running.prepared.plan.kv_server
    if server is None or server.name not in pages:
        return None
    return LmcacheServerUse.read(pages[server.name], server.kv_mib * MIB)


def store_of(running: RunningStack) -> AbstractContextManager[Store]:
    """Open a connection to the stack's Redis, the kit's or the user's own, for a with block."""
    if running.prepared.plan.user_redis:
        return _user_store(running)
    password = running.secrets.get(REDIS_PASSWORD)
    return open_shards([running.launcher.open_store(one, password) for one in running.stack.redis])


def _user_store(running: RunningStack) -> AbstractContextManager[Store]:
    """Return the user's Redis, for a with block.

    Raises:
        StateError: the secret with its URL is not in the stack's folder any more, or is another.
    """
    held, name = running.secrets.get(REDIS_URL), running.stack.name
    try:
        return open_url_store(parse_redis_url(held.reveal() if held else ""))
    except ValueError:
        raise StateError(
            f"the URL of the Redis of stack '{name}' is missing from its secrets folder",
            hint=f"deploy up --resume --name {name}, which restores it from redis.url_file",
        ) from None


def find_stack(home: Home, name: str) -> RunningStack | None:
    """Return the stack of that name, or None if there is no state of one.

    Raises:
        StateError: its state file cannot be understood.
        DockerUnavailable: its services are containers, and no Docker engine answers.
    """
    files = home.stack(name)
    found = read_state_file(files.state_file, name)
    if found is None:
        return None
    try:
        state = restored_state(found)
        was = state.plan
        prepared = prepare(
            was.spec, home, was.machine, model=was.model, connector=was.generation.connector
        )
    except UNFIT as exc:
        raise StateError(
            f"the state of stack '{name}' does not fit this version of pdkit: {files.state_file}",
            hint=f"deploy down --name {name}, which removes it and finds the stack's services "
            "without it",
        ) from exc
    return stack_as_planned(prepared, state, home, launcher_for(was.machine.runtime, name, files))


def stack_as_planned(
    prepared: Prepared, state: StackState, home: Home, launcher: Launcher
) -> RunningStack:
    """Return a stack whose plan is at hand, with the secrets that it was given."""
    folder = home.stack(prepared.stack.name).secrets_dir
    stack = prepared.stack
    secrets = read_secrets(folder, (*stack.secrets, *stack.user_secrets, REDIS_URL, API_KEY))
    return RunningStack(prepared, state, launcher, secrets)


def plans_of_others(home: Home, name: str) -> Iterator[tuple[str, Plan]]:
    """Yield name and plan of each other stack that runs, or that a command is at work on."""
    from deploy.runtime.lock import is_locked  # `deploy status` does without it

    for other in home.stacks_beside(name):
        with suppress(PdkitError, OSError):  # its broken state is not this stack's concern
            running = find_stack(home, other)
            if running and (running.any_running() or is_locked(home.lock_file(other))):
                yield other, running.prepared.plan


def require_stack(home: Home, name: str) -> RunningStack:
    """Return the stack of that name.

    Raises:
        StateError: there is none, or its state file cannot be understood.
    """
    running = find_stack(home, name)
    if running is None:
        others = home.stacks_beside(name)
        raise StateError(
            f"no stack '{name}'" + (f"; existing stacks: {', '.join(others)}" if others else ""),
            hint=f"deploy up --name {name}" if not others else f"deploy status --name {others[0]}",
        )
    return running


def require_running(running: RunningStack) -> None:
    """Check that every service of the stack runs that serves requests.

    Raises:
        StackUnhealthy: naming those that do not.
    """
    dead = [one.name for one in running.stopped() if one not in running.stack.monitoring]
    if dead:
        raise StackUnhealthy(
            f"not running: {', '.join(dead)}",
            hint=f"deploy up --resume --name {running.stack.name}, which starts them again",
        )
