"""`deploy status`: what runs, how long, how full, and how often the store was hit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from pydantic import computed_field

from deploy import __version__
from deploy.document import Rounded
from deploy.metrics.connector import SILENT_WORKERS
from deploy.metrics.engine import CacheCounters
from deploy.metrics.lmcache_server import LmcacheServerUse
from deploy.metrics.page import MetricsPage
from deploy.metrics.reading import ServiceCondition
from deploy.metrics.store_stats import StoreStats
from deploy.planning.engines import DECODE, ENGINE_ROLES
from deploy.runtime.drains import drained_engines
from deploy.runtime.events import ServiceEvent, read_events
from deploy.runtime.home import Home
from deploy.runtime.process.front import is_there
from deploy.stack.service import Service
from deploy.verify.store_path import StorePath
from deploy.workflows.fix_states import stack_warnings
from deploy.workflows.model_files import model_changed
from deploy.workflows.prepare import engine_image
from deploy.workflows.running import (
    RunningStack,
    answering_pages,
    find_stack,
    kv_server_page,
    kv_server_use,
    store_of,
)
from deploy.workflows.saved_state import HistoryEntry, stack_history


@dataclass(frozen=True)
class ServiceStatus:
    """One service as it is now.

    Attributes:
        uptime_s: since its last start; 0 if it does not run.
        resident_mib: memory of the process or container and its helpers.
        log: the log's path, or the command that shows it.
        cache: an engine's own counters since its start; None for other services, or no answer.
        path: what the engine moved to and from Redis since its start; None as for `cache`, and if
            LMCache's own client moves it.
        drained_by: the command that keeps requests from it; "" if none does.
    """

    name: str
    role: str
    condition: ServiceCondition
    pid: int
    url: str
    uptime_s: float
    resident_mib: int
    restarts: int
    log: str
    cache: CacheCounters | None
    path: StorePath | None = None
    drained: bool = False
    drained_by: str = ""


@dataclass(frozen=True)
class StackStatus:
    """A stack as it is now.

    Attributes:
        up: it was started and not taken down.
        image: image of the engines; "" if they are processes.
        url: the address for clients.
        services: one row for each service.
        store: what Redis reports; None if it does not answer.
        user_redis: Redis is the user's own.
        kv_server: the report of LMCache's server; None without a server or an answer.
        history: earlier plans, the newest first.
        events: what died, came back, was restarted or drained, the oldest first.
        warnings: what to know before trusting the KV.
        others: other stacks, if this one is not up.
    """

    name: str
    up: bool
    vendor: str = ""
    runtime: str = ""
    image: str = ""
    topology: str = ""
    model: str = ""
    url: str = ""
    services: Sequence[ServiceStatus] = ()
    store: StoreStats | None = None
    user_redis: bool = False
    kv_server: LmcacheServerUse | None = None
    history: Sequence[HistoryEntry] = ()
    events: Sequence[ServiceEvent] = ()
    warnings: Sequence[str] = ()
    others: Sequence[str] = ()

    @computed_field
    @property
    def healthy(self) -> bool:
        """Every service is ready."""
        return self.up and not self.sick

    @property
    def sick(self) -> list[str]:
        """The services that are not ready."""
        redis = ["the Redis of redis.url_file"] if self.user_redis and not self.store else []
        return [s.name for s in self.services if s.condition != "ready"] + redis

    @computed_field
    @property
    def external_hit_rate(self) -> Rounded:
        """Hit rate of the engines that answer clients, since they started."""
        caches = [s.cache for s in self.services if s.role in DECODE and s.cache]
        queries = sum(cache.external_queries for cache in caches)
        return sum(cache.external_hits for cache in caches) / queries if queries else 0.0


def stack_status(home: Home, name: str) -> StackStatus:
    """Look at a stack.

    Raises:
        StateError: its state file cannot be understood.
    """
    running = find_stack(home, name)
    if running is None:
        return StackStatus(name, up=False, others=home.stacks_beside(name))
    running = replace(running, launcher=running.launcher.at_once())
    plan = running.prepared.plan
    pages, of_server = answering_pages(running), kv_server_page(running)
    events = read_events(home.stack(name).events_file)
    drained = drained_engines(home.stack(name).drain_file)
    services = _all_services(running, {**pages, **of_server}, drained)
    with store_of(running) as store:
        stats = store.stats()
    return StackStatus(
        name=name,
        up=True,
        vendor=plan.vendor.name,
        runtime=plan.runtime,
        image=engine_image(running.prepared),
        topology=str(plan.topology),
        model=plan.model.served_name,
        url=running.stack.url,
        services=services,
        store=stats,
        user_redis=plan.user_redis,
        kv_server=kv_server_use(running, of_server),
        history=stack_history(running.state),
        events=events,
        warnings=[
            *_older(running),
            *_model_changed(running),
            *_of_engines(running, pages),
            *_uncounted(running, pages),
            *_failing(services, events),
            *_unwatched(running, home),
        ],
    )


def _is_older(running: RunningStack, service: Service) -> bool:
    """Tell whether another version of the kit started a service that runs the kit's code."""
    record = running.state.services.get(service.name)
    runs_ours = service.role in (*ENGINE_ROLES, "kv-server", "router")
    return runs_ours and record is not None and record.version != __version__


def _older(running: RunningStack) -> list[str]:
    older = [service for service in running.stack.services if _is_older(running, service)]
    if not older:
        return []
    records, name = running.state.services, running.stack.name
    versions = sorted({records[one.name].version for one in older})
    # All engines by one command, each other service by its own, in the order of the stack.
    what = dict.fromkeys("" if one.role in ENGINE_ROLES else f" {one.name}" for one in older)
    commands = [f"deploy restart{service} --name {name}" for service in what]
    return [
        f"pdkit {', '.join(versions)} started {', '.join(one.name for one in older)}; this is "
        f"{__version__}, restart them: {', then '.join(commands)}"
    ]


def _model_changed(running: RunningStack) -> list[str]:
    """Return a warning about a model's files that no engine is started with."""
    error = model_changed(running.prepared)
    return [f"{error.message}, so none is started: {error.hint}"] if error else []


def _of_engines(running: RunningStack, pages: Mapping[str, MetricsPage]) -> list[str]:
    """Return warnings about engines that this version started: it can judge no others."""
    services = running.stack.services
    known = {one.name for one in services if not _is_older(running, one)}
    return stack_warnings(running, {name: page for name, page in pages.items() if name in known})


def _uncounted(running: RunningStack, pages: Mapping[str, MetricsPage]) -> list[str]:
    """Return warnings about engines of this host only."""
    return [
        f"{name}: {silent:.0f} of its workers did not report, so its counters may be old; if this "
        f"persists: deploy restart {name} --name {running.stack.name}"
        for name, page in pages.items()
        if (silent := page.total(SILENT_WORKERS)) and name in running.state.services
    ]


def _failing(services: Sequence[ServiceStatus], events: Sequence[ServiceEvent]) -> list[str]:
    """Return warnings about services that are not ready since something failed.

    A command that started one again notes no event.
    """
    last = {event.service: event for event in events}
    return [
        f"{service.name}, since {event.at}: {event.text}"
        for service in services
        if service.condition != "ready"
        if (event := last.get(service.name)) and event.kind == "failed"
    ]


def _unwatched(running: RunningStack, home: Home) -> list[str]:
    name = running.stack.name
    if not running.prepared.spec.supervise or is_there(home.stack(name).supervisor_socket):
        return []
    return [
        "the supervisor does not run, so services that die are not restarted; start it: "
        f"deploy up --resume --name {name}"
    ]


def _all_services(
    running: RunningStack, pages: Mapping[str, MetricsPage], drained: Mapping[str, str]
) -> list[ServiceStatus]:
    """Read all services at once: Docker takes a second for a container's memory."""
    services = running.stack.every
    with ThreadPoolExecutor(max_workers=len(services)) as pool:
        return list(
            pool.map(
                lambda one: _service_status(running, one, pages.get(one.name), drained), services
            )
        )


def _service_status(
    running: RunningStack, service: Service, page: MetricsPage | None, drained: Mapping[str, str]
) -> ServiceStatus:
    launcher = running.launcher
    record = running.state.services.get(service.name)
    condition = running.condition(service)
    cache, path = page_counters(page) if page and condition == "ready" else (None, None)
    alive = record is not None and condition in ("ready", "not ready")
    return ServiceStatus(
        name=service.name,
        role=service.role,
        condition=condition,
        pid=launcher.pid(record) if record and alive else 0,
        url=_url(service),
        uptime_s=round(launcher.uptime_s(record), 1) if record and alive else 0.0,
        resident_mib=launcher.resident_mib(record) if record and alive else 0,
        restarts=launcher.restarts(record) if record else 0,
        log=launcher.where_log(service.name) if service not in running.stack.remote else "",
        cache=cache,
        path=path,
        drained=service.name in drained,
        drained_by=drained.get(service.name, ""),
    )


def _url(service: Service) -> str:
    """Return where this machine reaches a service; "" if it does not."""
    if service.socket or service.port == 0:
        return service.socket
    return service.url


def page_counters(page: MetricsPage) -> tuple[CacheCounters | None, StorePath | None]:
    """Return the counters of an engine, and of each service that uses Redis."""
    try:
        cache = CacheCounters.read(page)
    except LookupError:
        cache = None
    return cache, StorePath.read(page.samples)
