"""A sweep: every run of every topology, how many and from which rate, and the verdict."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from pydantic import Field, ValidationError

from deploy.benchmark.candidates import Candidate, named
from deploy.benchmark.facts import Machine, ModelFacts, StrictModel, Versions
from deploy.benchmark.results import Workload, write_document
from deploy.benchmark.slo import RESOLUTION
from deploy.benchmark.statistics import Ratio, median_of, noise, paired_ratio, repeats_for
from deploy.benchmark.verdict import BenchVerdict, Terms, comparison, decide
from deploy.errors import UsageError

FORMAT: Literal[1] = 1
SWEEP_FILE, BEST_FILE = "sweep.json", "best.yaml"


class SweepRun(StrictModel):
    """One start of one topology: `up`, check, load, `down`."""

    topology: str = Field(description="such as 1p2d, 4a, 4a+redis, or 2a:tp2 with its TP")
    round: int
    folder: str | None = Field(description="of its result, beside sweep.json")
    seconds: float
    rate: float | None = Field(
        description="requests/s: the highest rate that held the SLO; without SLO, the throughput "
        "of a closed loop; null if none was measured"
    )
    error: str | None = Field(None, description="why there is no rate")


class RatioInterval(StrictModel):
    """A ratio with its 95 % interval; null if there are too few rounds for one."""

    value: float
    low: float | None
    high: float | None


class SweepVerdict(StrictModel):
    """What the sweep says.

    Attributes:
        winner: the topology to run; the baseline unless another is shown to be better.
        ratio: the best disaggregated topology's rate per GPU or engine, over the best aggregated
            one's; null if one of the two has none.
    """

    sentence: str
    winner: str | None
    disaggregated: str | None
    baseline: str | None
    ratio: RatioInterval | None


class Sweep(StrictModel):
    """A whole sweep, as `sweep.json` stores it."""

    format: Literal[1] = FORMAT
    kind: Literal["sweep"] = "sweep"
    started: str = Field(description="UTC, ISO 8601")
    command: list[str]
    key: str = Field(
        description="digest of stack, workload and options; the same digest resumes the sweep"
    )
    unit: str = Field(description="what rates are divided by: GPU or engine")
    slo: str | None
    slo_share: float | None = Field(
        None, description="of requests that must keep the SLO; null without one"
    )
    concurrency: int | None = Field(
        None, description="requests in flight in the closed loop; null with an SLO"
    )
    seed: int | None = Field(None, description="of lengths and arrivals; the same for all runs")
    rounds: int
    topologies: list[str]
    refused: dict[str, str] = Field(description="topology → why it cannot be started here")
    runs: list[SweepRun]
    verdict: SweepVerdict | None = None
    model: ModelFacts | None = Field(None, description="null until a run is done")
    workload: Workload | None = Field(None, description="null until a run is done")
    machine: Machine | None = Field(None, description="at the first run; null until one is done")
    versions: Versions | None = Field(
        None, description="those of LMCache and Redis where a topology has them"
    )

    def of(self, topology: str) -> list[SweepRun]:
        """Return the runs of a topology, in the order in which they ended."""
        return [run for run in self.runs if run.topology == topology]

    def has(self, topology: str, number: int) -> bool:
        """Whether a run is done; one that failed is not tried again."""
        return any(run.error or run.round == number for run in self.of(topology))

    @property
    def left(self) -> list[tuple[str, int]]:
        """The runs that are not done, a round after the other, every other one backwards.

        What grows or shrinks while a sweep runs, such as the machine's heat, meets all alike then.
        """
        return [
            (name, number)
            for number in range(self.rounds)
            for name in self.topologies[:: -1 if number % 2 else 1]
            if not self.has(name, number)
        ]


class TopologyRow(NamedTuple):
    """A topology in the table; rates are medians, of the whole stack and per GPU or engine."""

    topology: str
    units: int
    rounds: int
    rate: float | None
    per_unit: float | None
    low: float | None
    high: float | None
    why_not: str


def rows(sweep: Sweep) -> list[TopologyRow]:
    """Return the topologies, the best first; those without a rate last."""
    found = [_row(sweep, name) for name in sweep.topologies]
    found += [
        TopologyRow(name, _candidate(name).units, 0, None, None, None, None, why)
        for name, why in sweep.refused.items()
    ]
    return sorted(found, key=lambda row: -(row.per_unit or 0.0))


def _row(sweep: Sweep, name: str) -> TopologyRow:
    runs, units = sweep.of(name), _candidate(name).units
    values = [run.rate / units for run in runs if run.rate]
    why = next((run.error for run in runs if run.error), "") or _unheld(len(values), len(runs))
    if why:
        return TopologyRow(name, units, len(values), None, None, None, None, why)
    one = median_of(values)
    return TopologyRow(
        name, units, len(values), units * one.value, one.value, one.low, one.high, ""
    )


def _unheld(held: int, runs: int) -> str:
    """Say why rates are no sample: rounds that held none would be left out of it."""
    if not runs:
        return "no run yet"
    return (
        ""
        if held == runs
        else f"no rate that was tried held the SLO in {runs - held} of {runs} rounds"
    )


def _candidate(name: str) -> Candidate:
    return named(name)[0]


def judge(sweep: Sweep) -> BenchVerdict:
    """Compare the best disaggregated topology with the best aggregated one, by rounds.

    Rates are per GPU or engine. Round for round they ran soon after one another, so the pairs'
    ratios leave out what changed slowly on the machine.
    """
    rates = {row.topology: by_round(sweep, row.topology) for row in rows(sweep) if row.rate}
    split = _best(rates, lambda one: not one.topology.aggregated)
    whole = _best(rates, lambda one: bool(one.topology.aggregated))
    if split is None or whole is None:
        missing = "aggregated" if whole is None else "disaggregated"
        sentence = f"No verdict: no {missing} topology has a rate to compare with"
        return BenchVerdict("cannot tell", sentence, split or whole, split, whole)
    ratio = _ratio(rates[split], rates[whole])
    found = decide(ratio, split, whole, _terms(split, whole, sweep))
    return replace(found, sentence=" ".join((found.sentence, *_about_redis(rates, sweep))))


def judged(sweep: Sweep) -> Sweep:
    """Return the sweep with its verdict."""
    found = judge(sweep)
    ratio = found.ratio and RatioInterval(
        value=found.ratio.value, low=found.ratio.low, high=found.ratio.high
    )
    verdict = SweepVerdict(
        sentence=found.sentence,
        winner=found.winner,
        disaggregated=found.disaggregated,
        baseline=found.baseline,
        ratio=ratio,
    )
    return sweep.model_copy(update={"verdict": verdict})


def _about_redis(rates: Mapping[str, Mapping[int, float]], sweep: Sweep) -> list[str]:
    """Say what sharing KV gives aggregated engines, if the sweep had both kinds."""
    shared = _best(rates, lambda one: bool(one.topology.aggregated) and not one.plain)
    plain = _best(rates, lambda one: one.plain)
    if shared is None or plain is None:
        return []
    ratio = _ratio(rates[shared], rates[plain])
    return [comparison(ratio, shared, plain, _terms(shared, plain, sweep))]


def _terms(first: str, second: str, sweep: Sweep) -> Terms:
    same = _candidate(first).units == _candidate(second).units
    goal = f"under {sweep.slo}" if sweep.slo else ""
    return Terms(None if same else sweep.unit, goal)


def by_round(sweep: Sweep, name: str) -> dict[int, float]:
    """Return a topology's rate per GPU or engine in each round that has one."""
    units = _candidate(name).units
    return {run.round: run.rate / units for run in sweep.of(name) if run.rate}


def _best(
    rates: Mapping[str, Mapping[int, float]], fits: Callable[[Candidate], bool]
) -> str | None:
    fitting = {
        name: median(found.values()) for name, found in rates.items() if fits(_candidate(name))
    }
    return max(fitting, key=lambda name: fitting[name], default=None)


def _ratio(first: Mapping[int, float], second: Mapping[int, float]) -> Ratio:
    both = sorted(first.keys() & second.keys())
    if not both:
        return Ratio(median(first.values()) / median(second.values()), None, None, 0)
    return paired_ratio([first[number] for number in both], [second[number] for number in both])


def write_sweep(folder: Path, sweep: Sweep) -> Path:
    """Replace the folder's sweep in one step, and return its file."""
    return write_document(folder / SWEEP_FILE, sweep)


def sweep_file(folder: Path) -> Path:
    """Return where the sweep of a folder is; a `sweep.json` itself may be named, too."""
    return folder if folder.name == SWEEP_FILE else folder / SWEEP_FILE


def read_sweep(folder: Path) -> Sweep:
    """Return the sweep of a folder.

    Raises:
        UsageError: there is none, or this version cannot read it.
    """
    file = sweep_file(folder)
    try:
        return Sweep.model_validate(json.loads(file.read_text(encoding="utf-8")))
    except OSError as exc:
        raise UsageError(
            f"{file}: {exc.strerror}", hint="deploy bench sweep, which writes it"
        ) from exc
    except (ValidationError, ValueError) as exc:
        raise UsageError(
            f"{file} is not a sweep that this version of pdkit can read",
            hint="deploy bench sweep --out DIR with a new folder",
        ) from exc


def rounds_for(sweep: Sweep, within: float) -> int:
    """Return the rounds that give the verdict's ratio ± `within`, by the noise of those done.

    No more than now where there is nothing to compare, or one of both has not run in each round.
    """
    verdict = judge(sweep)
    if verdict.disaggregated is None or verdict.baseline is None:
        return sweep.rounds
    split, whole = (by_round(sweep, name) for name in (verdict.disaggregated, verdict.baseline))
    if not len(split) == len(whole) == sweep.rounds:
        return sweep.rounds
    return max(sweep.rounds, repeats_for(noise([split[at] / whole[at] for at in split]), within))


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
