"""Work that can fail because of Redis: what is retried, counted and logged."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from typing import TypeVar

from pdkit_connector.counters import Counters
from pdkit_connector.log import get_logger
from pdkit_connector.redis_path.backoff import Backoff
from pdkit_connector.redis_path.lanes import Links
from pdkit_connector.redis_path.link import ReplyError

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
        self._told: set[str] = set()

    def pausing(self) -> bool:
        """Tell whether Redis failed a moment ago, so that it should not be asked now."""
        return self._backoff.pausing()

    def run(self, work: Callable[[], R], links: Links) -> R | None:
        """Return what `work` returns, or None where Redis failed.

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

    def tell_once(self, about: str, what: str) -> None:
        """Log a warning, unless there was one about the same thing."""
        if about not in self._told:
            self._told.add(about)
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
