"""Where a consumer got a prompt's KV from, by its own counters and those of LMCache's server."""

from __future__ import annotations

import time
from dataclasses import dataclass

from deploy.metrics.engine import CacheCounters
from deploy.metrics.lmcache_server import looked_up_tokens, tiers_of
from deploy.metrics.page import MetricsPage
from deploy.verify.equivalence import Completion
from deploy.verify.hits import Tiers
from deploy.workflows.check.session import Session
from deploy.workflows.running import kv_server_page

_LOOKED_UP_WITHIN_S, _POLL_S = 2.0, 0.02


@dataclass(frozen=True)
class TierReading:
    """What a consumer and LMCache's server have counted.

    Attributes:
        server: None without one, without its answer, or if an engine has one on another host.
    """

    cache: CacheCounters
    server: MetricsPage | None

    @classmethod
    def of(cls, session: Session, producer: str, consumer: str) -> TierReading:
        """Read both, before the producer gets a prompt.

        Raises:
            ApiError: the consumer does not answer.
        """
        remote = {one.name for one in session.running.stack.remote}
        server = None if {producer, consumer} & remote else _server_page(session)
        return cls(session.cache_counters(consumer), server)

    def since(
        self, session: Session, consumer: str, answer: Completion, asked: int
    ) -> Tiers | None:
        """Return where the KV of one prompt came from since then.

        None if no server tells, or if others' requests moved the consumer's counters.

        Args:
            answer: the consumer's.
            asked: tokens of the prompt's whole chunks.

        Raises:
            ApiError: the consumer does not answer.
        """
        cache, server = session.counted_for(consumer, self.cache), None
        if session.running.prepared.plan.kv_server:
            server = self._looked_up(session, 2 * asked)  # by the producer and by the consumer
            if server is None:
                return None
        found = tiers_of(cache, server)
        reused = found.local + found.server + found.redis
        whole = (answer.prompt_tokens, answer.cached_tokens)
        return found if (found.asked, reused) == whole else None

    def _looked_up(self, session: Session, tokens: int) -> MetricsPage | None:
        """Wait until the server has counted its answers, and return its counts."""
        deadline = time.monotonic() + _LOOKED_UP_WITHIN_S
        while self.server is not None and (page := _server_page(session)) is not None:
            counted = page.since(self.server)
            if looked_up_tokens(counted) >= tokens or time.monotonic() > deadline:
                return counted
            time.sleep(_POLL_S)
        return None


def _server_page(session: Session) -> MetricsPage | None:
    return next(iter(kv_server_page(session.running).values()), None)
