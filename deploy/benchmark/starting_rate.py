"""Where the search of a sweep's run begins: close to where the runs before it ended."""

from __future__ import annotations

import math
import random
from statistics import median

from deploy.benchmark.candidates import named
from deploy.benchmark.slo import RESOLUTION
from deploy.benchmark.sweep import Sweep


def starting_rate(sweep: Sweep, name: str, number: int, seed: int) -> float | None:
    """Return the first rate that a topology tries in a round; None where no run has one yet.

    Each run begins a bit off the known rate, by its own seeded factor. Searches that begin with the
    same rate try the same ones, and so hide how coarse they are: intervals would be too narrow.
    """
    known = _known_rate(sweep, name)
    if known is None:
        return None
    chance = random.Random(f"{seed} {name} {number}")  # noqa: S311 - no secret
    return known * math.pow(RESOLUTION, chance.uniform(-0.5, 0.5))


def _known_rate(sweep: Sweep, name: str) -> float | None:
    """Return the topology's own rate so far, else an estimate from those of others."""
    own = [run.rate for run in sweep.of(name) if run.rate]
    if own:
        return median(own)
    others = [run.rate / _units(run.topology) for run in sweep.runs if run.rate]
    return median(others) * _units(name) if others else None


def _units(name: str) -> int:
    return named(name)[0].units
