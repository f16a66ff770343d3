"""What engines count, told from what others make them count."""

from __future__ import annotations

import pytest

from deploy.verify.report import Counted
from deploy.workflows.check import session as module
from deploy.workflows.check.session import Reading, Session

EARLIER = Reading(0, 0, 0, 0, 0)


class Told(Session):
    """A session whose engines say at each question what comes next, and the last for ever."""

    def __init__(self, *said: tuple[int, int, int]) -> None:
        """Take (hits, others, busy) of each question."""
        self.said = list(said)
        self.asked = 0

    def _busy(self) -> int:
        return self.said[min(self.asked, len(self.said) - 1)][2]

    def counted_since(self, earlier: Reading) -> Counted:  # noqa: ARG002
        hits, others, _ = self.said[min(self.asked, len(self.said) - 1)]
        self.asked += 1
        return Counted(hits, hits, 0, others)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COUNTER_DEADLINE_S", 0.2)
    monkeypatch.setattr(module, "_POLL_S", 0.002)


@pytest.mark.parametrize(
    ("said", "hits", "others"),
    [
        ([(100, 0, 0)], 100, 0),  # nobody else
        ([(100, 0, 3)], 100, 0),  # somebody else, who loads nothing
        ([(196, 0, 1), (196, 0, 1), (196, 1, 0)], 196, 1),  # who is done in time
        ([(196, 0, 2)], 196, 2),  # who is not
        ([(196, 0, 1), (196, 0, 0)], 196, 0),  # nobody after all: the counters are wrong
        ([(40, 0, 0)], 40, 0),
    ],
)
def test_whose_the_hits_are(said: list[tuple[int, int, int]], hits: int, others: int) -> None:
    counted = Told(*said).settled_since(EARLIER, told=100)
    assert (counted.hits, counted.others) == (hits, others)
