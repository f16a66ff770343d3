"""Connections to Redis, the threads that use them, and the health of each Redis.

Several Redis can share the keys, each with its own connections, threads and health: a failure of
one does not delay keys on another. Most stacks have one.
"""

from __future__ import annotations

import queue
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pdkit_connector.counters import Counters
from pdkit_connector.engine_report import REPORT
from pdkit_connector.log import get_logger
from pdkit_connector.redis_path.protocol import Deadline, Link, ReplyError
from pdkit_connector.redis_path.servers import Route, RoutingTable, parse, routing_table
from pdkit_connector.redis_path.settings import Limits
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
            late.add_done_callback(_close_late)
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


def _close_late(late: futures.Future[Any]) -> None:
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


_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_LOG_AGAIN_S = 60.0


class Backoff:
    """One way of using Redis (say, storing), which pauses after each failure, longer each time.

    A pause lasts at most a second, so that a server that comes back is used again at once.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until = 0.0
        self._logged_at: dict[str, float] = {}
        self._logged = False

    def pausing(self) -> bool:
        """Tell whether there is a pause now."""
        return time.monotonic() < self._until

    def failed(self, kind: str, why: str) -> None:
        """Begin a pause; log why, at most once a minute for each kind."""
        now = time.monotonic()
        REPORT.redis_failed(self._what, kind, why)
        with self._lock:
            if now >= self._until:  # work that fails during a pause began before it
                self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
                self._until = now + self._pause_s
            log = now - self._logged_at.get(kind, -_LOG_AGAIN_S) >= _LOG_AGAIN_S
            if log:
                self._logged_at[kind] = now
                self._logged = True
        if log:
            get_logger().warning("pdkit-connector WARNING Redis: %s failed: %s", self._what, why)

    def worked(self) -> None:
        """Forget the failure; log that it is over, if it was logged."""
        if not self._pause_s:
            return
        with self._lock:
            self._pause_s = self._until = 0.0
            logged, self._logged = self._logged, False
        if logged:
            get_logger().info("pdkit-connector Redis: %s works again", self._what)


R = TypeVar("R")

# Errors that mean: ask another server.
_MOVED = frozenset({"MOVED", "READONLY", "CLUSTERDOWN", "MASTERDOWN"})
# Errors that concern one key only: not a string, or moving to another server of the cluster.
OF_ONE_KEY = frozenset({"WRONGTYPE", "ASK", "TRYAGAIN"})
# Redis's own errors, each a kind of its own. A server may answer any word: kept by that, they would
# fill the engine's memory, its metrics page and whoever scrapes that.
_CODES = OF_ONE_KEY | _MOVED | {
    "BUSY", "CROSSSLOT", "ERR", "EXECABORT", "LOADING", "MISCONF", "NOAUTH", "NOPERM",
    "NOREPLICAS", "NOSCRIPT", "OOM", "WRONGPASS",
}  # fmt: skip


class Attempts:
    """One way of using Redis, such as reading. Failures of Redis do not raise."""

    def __init__(
        self, what: str, counters: Counters, labels: Mapping[str, str] | None = None
    ) -> None:
        """Count failures under these labels, beside their kind."""
        self._backoff = Backoff(what)
        self._counters = counters
        self._labels = labels or {}
        self._logged: set[str] = set()

    def pausing(self) -> bool:
        """Tell whether Redis failed a moment ago, so that it should not be asked now."""
        return self._backoff.pausing()

    def run(self, work: Callable[[], R], links: Links) -> R | None:
        """Do some work; return its result, or None where Redis failed.

        `work` is retried once if an idle connection had died, which does not mean that the server
        has failed, and if another server turned out to be the right one.
        """
        error: Exception
        for _ in range(2):
            try:
                done = work()
            except ReplyError as exc:
                error = exc
                if exc.code not in _MOVED:
                    break
                links.changed()
            except (ConnectionError, ssl.SSLError) as exc:
                error = exc
            except Exception as exc:  # noqa: BLE001 - redis-py's own kinds, OSError, a lying server
                error = exc
                break
            else:
                self._backoff.worked()
                return done
        self._failed(error, links)
        return None

    def _failed(self, error: Exception, links: Links) -> None:
        self._counters.add("failures", kind=_kind(error), **self._labels)
        if isinstance(error, ReplyError):
            if error.code in OF_ONE_KEY:
                return
        else:
            links.changed()  # a server that is gone may have a successor
        self._backoff.failed(_kind(error), f"{type(error).__name__}: {error}")

    def warn_once(self, about: str, what: str) -> None:
        """Log a warning, unless there was one about the same thing."""
        if about not in self._logged:
            self._logged.add(about)
            get_logger().warning("pdkit-connector WARNING Redis: %s", what)


def _kind(error: Exception) -> str:
    """Return one of a few words, whatever the server answered."""
    if isinstance(error, ReplyError):
        if error.code == "NOAUTH":
            return "auth"
        return error.code.lower() if error.code in _CODES else "error"
    name = type(error).__name__  # redis-py has a TimeoutError of its own
    if name.startswith("Authentication"):
        return "auth"
    return "timeout" if name == "TimeoutError" else "unreachable"


@dataclass(frozen=True)
class Shard:
    """One Redis: a server, a Sentinel's master or a cluster.

    Attributes:
        reads, writes: health of reading and writing.
        asking: connections for lookups; callers take turns.
        watching: connections for questions about the server itself.
    """

    reads: Attempts
    writes: Attempts
    load_lanes: Lanes
    store_lanes: Lanes
    asking: Links
    watching: Links


class Shards:
    """The shards of a client, in the same order in every client of the stack."""

    def __init__(self, urls: Sequence[str], counters: Counters, limits: Limits) -> None:
        """Connect to nothing yet; raise ConnectorError where a URL is no address."""
        self._all = tuple(
            _shard(url, counters, limits, number if len(urls) > 1 else None, len(urls))
            for number, url in enumerate(urls)
        )

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._all)

    def of(self, key: bytes) -> Shard:
        """Return the shard of a key: the same in every engine."""
        return self._all[self._number(key)]

    def split(self, keys: Sequence[bytes]) -> list[tuple[Shard, Sequence[int]]]:
        """Return the shards that have some of the keys, each with the indices of its own."""
        if len(self._all) == 1:
            return [(self._all[0], range(len(keys)))]
        indices: list[list[int]] = [[] for _ in self._all]
        for index, key in enumerate(keys):
            indices[self._number(key)].append(index)
        return [(shard, own) for shard, own in zip(self._all, indices, strict=True) if own]

    def _number(self, key: bytes) -> int:
        return zlib.crc32(key) % len(self._all)

    def open(self) -> None:
        """Begin to open the connections for values; to be called before the first job."""
        for shard in self:
            shard.load_lanes.open()
            shard.store_lanes.open()

    def close(self, store_s: float, load_s: float) -> None:
        """Finish the stores that began and close all connections, within these limits in all."""
        _close_lanes([shard.store_lanes for shard in self], store_s)
        _close_lanes([shard.load_lanes for shard in self], load_s)


def _shard(url: str, counters: Counters, limits: Limits, number: int | None, count: int) -> Shard:
    where = routing_table(parse(url))
    name, labels = ("", {}) if number is None else (f" shard {number}", {"shard": str(number)})

    def links() -> Links:
        return Links(where, counters)

    def share(total: int) -> int:
        return max(1, total // count)

    return Shard(
        Attempts(f"reading{name}", counters, labels),
        Attempts(f"storing{name}", counters, labels),
        Lanes("load", share(limits.load_lanes), links, counters, where=name),
        Lanes("store", share(limits.store_lanes), links, counters, where=name),
        links(),
        links(),
    )


def _close_lanes(lanes: Sequence[Lanes], limit_s: float) -> None:
    ends = time.monotonic() + limit_s
    for one in lanes:
        one.close(max(0.0, ends - time.monotonic()))
