"""`deploy status --watch`: repeated readings of a stack, and what is new in each."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

from deploy.errors import PdkitError
from deploy.metrics.frame import Frame
from deploy.metrics.reading import Complaint, ServiceReading, StackReading
from deploy.metrics.store_stats import StoreStats
from deploy.metrics.watching import Memory, next_frame
from deploy.runtime.home import Home
from deploy.runtime.logs import LogReader, complaints
from deploy.stack.service import Service
from deploy.workflows.running import RunningStack, find_stack, metrics_page, store_of

_PAGE_TIMEOUT_S = 2.0  # an engine that hangs must not block the others


class Watch(ABC):
    """Reads a stack repeatedly; services, or all of it, may come and go."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._memory: Memory | None = None

    def frame(self) -> Frame:
        """Read the stack, and return its state and what is new.

        Raises:
            PdkitError: the first reading failed; later failures are part of the frame.
        """
        try:
            reading = self._read()
        except (PdkitError, OSError) as exc:
            if self._memory is None:
                raise
            reading = self._nothing(trouble=str(exc) or type(exc).__name__)
        self._memory, frame = next_frame(self._memory, reading)
        return frame

    @abstractmethod
    def _read(self) -> StackReading:
        """Read everything once; raises PdkitError or OSError if that fails."""

    def _nothing(self, *, trouble: str = "") -> StackReading:
        return StackReading(self._name, now(), time.monotonic(), trouble=trouble)


class StackWatch(Watch):
    """Reads a stack of this machine."""

    def __init__(self, home: Home, name: str) -> None:
        super().__init__(name)
        self._home = home
        self._logs: LogReader | None = None
        self._logged: tuple[str, ...] = ()

    def _read(self) -> StackReading:
        at, began = now(), time.monotonic()
        running = find_stack(self._home, self._name)
        if running is None:
            self._logs = None
            return self._nothing()
        plan, url = running.prepared.plan, running.stack.url
        every = running.stack.every
        with ThreadPoolExecutor(max_workers=len(every) + 1) as pool:
            asked = pool.submit(_stats, running)
            services = pool.map(lambda service: _reading(running, service), every)
            found = {service.name: service for service in services}
        return StackReading(
            self._name,
            at,
            began,
            up=True,
            what=in_a_line(str(plan.topology), plan.model.served_name, url),
            user_redis=plan.user_redis,
            shares_kv=plan.shares_kv,
            services=found,
            store=asked.result(),
            complaints=self._complaints(running, found),
        )

    def _complaints(
        self, running: RunningStack, found: Mapping[str, ServiceReading]
    ) -> tuple[Complaint, ...]:
        """Return new warnings and errors in the services' logs."""
        names = tuple(service.name for service in running.stack.services if service.name in found)
        if self._logs is None or self._logged != names:
            self._logs, self._logged = running.launcher.log_reader(names), names
        return complaints(self._logs.read())


def _reading(running: RunningStack, service: Service) -> ServiceReading:
    record, launcher = running.state.services.get(service.name), running.launcher
    condition = running.condition(service, within_s=_PAGE_TIMEOUT_S)
    alive = record is not None and condition in ("ready", "not ready")
    pid = launcher.pid(record) if record and alive else 0
    # A router that lacks engines is not ready, and counts what it cannot serve.
    counts = condition == "ready" or (alive and service.role == "router")
    page = metrics_page(running, service, timeout_s=_PAGE_TIMEOUT_S) if counts else None
    return ServiceReading(
        service.name,
        service.role,
        condition,
        pid,
        page,
        time.monotonic(),
        remote=service in running.stack.remote,
    )


def _stats(running: RunningStack) -> StoreStats | None:
    with store_of(running) as store:
        return store.stats()


def in_a_line(*parts: str) -> str:
    """Return a stack's topology, model and address, as far as known."""
    return ", ".join(filter(None, parts))


def now() -> datetime:
    """Return the local time."""
    return datetime.now().astimezone()
