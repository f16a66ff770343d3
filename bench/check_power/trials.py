"""Trials by kind of damage, each kept in a file the moment that it is done."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.check_power.damage import NOTHING
from bench.check_power.stack import Bench
from bench.kit import say

# Whole checks of the stack without damage.
HEALTHY = "healthy"


@dataclass(frozen=True)
class Series:
    """What trials have in common.

    Attributes:
        layers: of the model in a real one's shape; 0 is the tiny model.
        tier: of LMCache's server; "" without it.
        dtype: of KV.
    """

    seed: int
    layers: int = 0
    tier: str = ""
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Outcome:
    """One trial, or one check of a healthy stack.

    Attributes:
        number: its place among those of its kind and series.
        failures: what the check found wrong, a sentence each.
        max_logprob_diff: infinite where answers have no token in common, or none came.
    """

    kind: str
    seed: int
    number: int
    failures: Sequence[str]
    max_logprob_diff: float
    seconds: float
    layers: int = 0
    tier: str = ""
    dtype: str = "bfloat16"

    @property
    def series(self) -> Series:
        return Series(self.seed, self.layers, self.tier, self.dtype)

    @property
    def noticed(self) -> bool:
        return bool(self.failures)


class Record:
    """Outcomes as lines of JSON in a file, so that a run that was stopped goes on where it was."""

    def __init__(self, file: Path) -> None:
        self._file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        self.outcomes = [Outcome(**json.loads(line)) for line in lines]

    def has(self, series: Series, kind: str, number: int) -> bool:
        wanted = series, kind, number
        return any((o.series, o.kind, o.number) == wanted for o in self.outcomes)

    def add(self, outcome: Outcome) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        self.outcomes.append(outcome)


def planned(kinds: Sequence[str], trials: int, healthy: int) -> Iterator[tuple[str, int]]:
    """Yield the trials: those without damage, then each kind in turn, so all see the same load.

    Trials without damage come first, because NaN stays in an engine's KV memory after its request,
    and spoils some later answer.
    """
    yield from ((HEALTHY, number) for number in range(healthy))
    yield from ((NOTHING, number) for number in range(trials) if NOTHING in kinds)
    for number in range(trials):
        yield from ((kind, number) for kind in kinds if kind != NOTHING)


def run(bench: Bench, record: Record, plan: Sequence[tuple[str, int]], series: Series) -> None:
    """Do what is planned and not yet recorded."""
    left = [one for one in plan if not record.has(series, *one)]
    for done, (kind, number) in enumerate(left, start=1):
        began = time.monotonic()
        seed = f"{series.seed}/{kind}/{number}"
        seen = bench.healthy() if kind == HEALTHY else bench.trial(kind, seed)
        seconds = time.monotonic() - began
        outcome = Outcome(
            kind,
            number=number,
            failures=seen.failures,
            max_logprob_diff=seen.max_logprob_diff,
            seconds=seconds,
            **asdict(series),
        )
        record.add(outcome)
        found = "; ".join(outcome.failures) or "nothing found"
        say(f"{done} of {len(left)}: {kind} {number}: {found}")
