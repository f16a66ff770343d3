"""Threads with connections of their own, so that values move in parallel."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent import futures
from functools import partial
from typing import Any

from pdkit_connector.counters import Counters
from pdkit_connector.log import get_logger
from pdkit_connector.redis_path.link import Deadline, Link
from pdkit_connector.redis_path.routing_table import Route, RoutingTable
from pdkit_connector.redis_url import Node

Job = Callable[["Links"], None]


class Links:
    """The connections of one thread, one per server, opened by `open` or when first needed.

    Other threads open them, since resolving a name has no time limit. A connection that comes too
    late for one caller serves the next.
    """

    def __init__(self, table: RoutingTable, counters: Counters) -> None:
        self._table = table
        self._counters = counters
        self._links: dict[Node, Link] = {}
        self._coming: dict[object, futures.Future[Any]] = {}

    def open(self) -> None:
        """Begin to connect before the first caller does, who tries again if this fails.

        Of a cluster, only one server is known to be needed. To be called before all else.
        """
        if route := self._table.route():
            node = route(b"")
            self._coming[node] = _begun(partial(self._connect, node))
        else:
            self._coming["route"] = _begun(self._table.learn)

    def route(self, deadline: Deadline) -> Route:
        """Return the function that maps a key to its server."""
        known = self._table.route()
        return known or self._aside("route", self._table.learn, deadline)

    def to(self, node: Node, deadline: Deadline) -> Link:
        """Return the connection to a server; raise redis-py's error if there is none."""
        link = self._links.get(node)
        if link is None:
            link = self._aside(node, partial(self._connect, node), deadline)
            self._links[node] = link
        return link

    def drop(self, *nodes: Node) -> None:
        """Close the connections to servers: their state is unknown, or the servers changed."""
        for node in nodes:
            if link := self._links.pop(node, None):
                link.close()

    def changed(self) -> None:
        """Ask again which server has which keys."""
        self._table.changed()
        self.drop(*self._links)

    def close(self) -> None:
        """Close all connections."""
        self.drop(*self._links)
        for late in self._coming.values():
            late.add_done_callback(_close)
        self._coming.clear()

    def _connect(self, node: Node) -> Link:
        link = Link(self._table.connect(node))
        self._counters.add("connects")
        return link

    def _aside(self, name: object, work: Callable[[], Any], deadline: Deadline) -> Any:
        """Run `work` in another thread; if it takes too long, the next caller gets its result."""
        left_s = deadline.call_s()
        future = self._coming.pop(name, None)
        if future is None or (future.done() and future.exception()):
            future = _begun(work)
        if not futures.wait([future], left_s).done:
            self._coming[name] = future
            raise TimeoutError("no connection in time")
        return future.result()


def _begun(work: Callable[[], Any]) -> futures.Future[Any]:
    future: futures.Future[Any] = futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as exc:  # noqa: BLE001 - whoever waits raises it
            future.set_exception(exc)

    threading.Thread(target=run, name="pdkit-redis-connect", daemon=True).start()
    return future


def _close(late: futures.Future[Any]) -> None:
    if late.exception() is None and isinstance(link := late.result(), Link):
        link.close()


class Lanes:
    """A few threads that take jobs from one queue, in order, and count their CPU time."""

    def __init__(
        self,
        operation: str,
        count: int,
        make_links: Callable[[], Links],
        counters: Counters,
        *,
        where: str = "",
    ) -> None:
        """Start the threads.

        Args:
            operation: what the jobs do, load or store.
            where: a part of the threads' names, such as the shard.
        """
        self._operation = operation
        self._counters = counters
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._links = [make_links() for _ in range(count)]
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(links,),
                name=f"pdkit-redis-{operation}{where}-{n}",
                daemon=True,
            )
            for n, links in enumerate(self._links)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def count(self) -> int:
        """How many jobs run in parallel."""
        return len(self._threads)

    def open(self) -> None:
        """Begin to open the threads' connections; to be called before the first job."""
        for links in self._links:
            links.open()

    def submit(self, job: Job) -> bool:
        """Queue a job, which must not raise; return False if the lanes are closed."""
        with self._lock:
            if not self._closed:
                self._jobs.put(job)
            return not self._closed

    def close(self, limit_s: float) -> None:
        """End the threads after the queued jobs; wait no longer than the limit."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        ends = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))

    def _run(self, links: Links) -> None:
        counted_s = 0.0
        while (job := self._jobs.get()) is not None:
            try:
                job(links)
            except Exception:  # noqa: BLE001 - where a job does raise, the thread must live on
                get_logger().exception("pdkit-connector ERROR Redis: a job failed")
                links.close()
            if self._jobs.empty():  # once for all chunks of a prompt
                counted_s = self._count(counted_s)
        self._count(counted_s)
        links.close()

    def _count(self, counted_s: float) -> float:
        """Count this thread's CPU time beyond what was counted, and return all of it."""
        used_s = time.thread_time()
        self._counters.add("cpu_seconds", used_s - counted_s, operation=self._operation)
        return used_s


class Dropping:
    """Closes the connections to these servers if anything fails on them, as a context.

    A class, which takes a fraction of a generator's time: there are two in each lookup.
    """

    __slots__ = ("_links", "_nodes")

    def __init__(self, links: Links, *nodes: Node) -> None:
        self._links, self._nodes = links, nodes

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._links.drop(*self._nodes)
