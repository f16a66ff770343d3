"""What engines have counted at a time, beside what a check has sent them."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.metrics.engine import CacheCounters
from deploy.verify.hits import Counted


@dataclass(frozen=True)
class CheckReading:
    """What engines have counted at one time, and what the check has sent them.

    Attributes:
        finished, sent: requests, to producers and consumers.
        sent_tokens: of prompts sent to consumers, by the router too, answered or not.
        tokens: the consumers' own counters, added up.
    """

    finished: int
    sent: int
    sent_tokens: int
    tokens: CacheCounters

    def since(self, earlier: CheckReading) -> Counted:
        """Return the consumers' counts since then, and the requests of other clients among them.

        A request that is not done, or whose client left, never counts as finished. But an engine
        counts a prompt's tokens in the moment in which it counts its hits, at its admission: each
        is one that it held itself, or one that it asked the store for. A request that is admitted
        again, after it was preempted, counts as neither. So more tokens than were sent are others'.
        """
        grown = self.tokens.since(earlier.tokens)
        strange = grown.prompt_tokens > self.sent_tokens - earlier.sent_tokens
        return Counted(
            grown.external_queries,
            grown.external_hits,
            grown.local_hits,
            max(int(strange), self.ahead(earlier)),
        )

    def ahead(self, earlier: CheckReading) -> int:
        """Return the requests of other clients that were finished since then."""
        return self.finished - earlier.finished - (self.sent - earlier.sent)
