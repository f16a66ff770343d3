"""KV that is older than the model: `python -m bench.check_power.older --store STORE`.

Leaves canaries by the check's own code, stops the engines, puts other weights into the model's
folder and starts them again, with the same keys. The kit refuses that: here, the stack's state is
told that the model has no files to compare. Then each canary is looked at by the check's own code.
Before, engines are started again over unchanged weights, where no canary may be noticed. At the
end, whole quick checks run, with more restarts among them.

Exits with 1 if KV of a model with other weights goes unnoticed once, or an alarm is false.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.check_power import report
from bench.check_power.damage import as_floats, as_words
from bench.check_power.running import COMMON, NAME, SERVER_SPEC, SPEC
from bench.kit import free_ports, say, started
from deploy.planning.engines import ENGINE_ROLES
from deploy.runtime.home import Home
from deploy.tiny_model import ensure_tiny_model
from deploy.tiny_model.recipe import tensors
from deploy.tiny_model.shape import SEED
from deploy.tiny_model.weights import safetensors_bytes
from deploy.verify.canaries import Canary, Look
from deploy.workflows.check import CheckOptions, check_stack
from deploy.workflows.check.canaries import Asked, identity_of, leave, look_at
from deploy.workflows.check.keys import CheckKeys
from deploy.workflows.check.probes import measure_noise
from deploy.workflows.check.session import Session
from deploy.workflows.running import require_stack
from deploy.workflows.start import StackStart

# What becomes of the weights → whether each canary must be noticed, none, or it is not said.
UNCHANGED, OTHER = "unchanged", "another seed"
SHARES = (0.001, 0.01, 0.05)  # of each weight, as normal noise
_CHECKS_PER_START = 10
_HEADER_BYTES = 8
# How KV is stored → the stack: the kit's Redis path, LMCache's Redis client, LMCache's server.
KITS_CLIENT = "redis path"
STORES = {KITS_CLIENT: COMMON, "lmcache": SPEC, "lmcache-mp": SERVER_SPEC}


@dataclass(frozen=True)
class OlderRow:
    """Canaries that were looked at after the same change of weights.

    Attributes:
        stored: how KV is stored.
        change: what became of the weights.
        looked: canaries whose KV was loaded, `noticed` of them found wrong; of whole checks, those
            that ran, and those that failed.
        differences: from a fresh computation, in order; infinite if no token is in common.
    """

    stored: str
    dtype: str
    change: str
    looked: int
    noticed: int
    evicted: int
    differences: Sequence[float]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether it is as it must be."""
        if self.change == OTHER:
            return self.noticed == self.looked > 0
        return self.noticed == 0 or self.change not in (UNCHANGED, report.OLD_CHECKS)


class OlderBench:
    """A running stack with a model folder of its own."""

    def __init__(self, home: Home, stored: str, model: Path) -> None:
        self.home, self.stored, self.model = home, stored, model
        file = home.stack(NAME).state_file
        state = json.loads(file.read_text())
        state["model"]["files"] = []  # its version stays, and with it the keys
        file.write_text(json.dumps(state))
        self.running = require_stack(home, NAME)
        plan = self.running.prepared.plan
        self.dtype = plan.dtype
        self.pair = plan.producers[0].name, plan.consumers[0].name
        self.restart()  # as they are started from now on: without files to compare

    def restart(self, weights: bytes | None = None) -> None:
        """Stop the engines, replace their weights, and start them again."""
        prepared = self.running.prepared
        start = StackStart(prepared, self.running.state, self.home, lambda _: None)
        engines = [one for one in prepared.stack.services if one.role in ENGINE_ROLES]
        records = {one.name: self.running.state.services[one.name] for one in engines}
        start.launcher.stop(records, grace_s=prepared.spec.timeouts.stop_s)
        if weights is not None:
            (self.model / "model.safetensors").write_bytes(weights)
        start.run(engines)
        self.running = require_stack(self.home, NAME)

    def leave(self, count: int) -> list[Canary]:
        """Have the producer leave canaries, as a check does at its end."""
        with self._session() as session:
            identity = identity_of(self.running)
            found = [leave(session, self.pair[0], identity) for _ in range(count)]
        return [one for one in found if one is not None]

    def look(self, canaries: Sequence[Canary]) -> Iterator[Look]:
        """Look at canaries as a check does, which measures the noise before."""
        producer, consumer = self.pair
        with self._session() as session:
            measure_noise(session, self.pair)
            identity = identity_of(self.running)
            for canary in canaries:
                yield from look_at(session, [Asked(canary, producer, [consumer])], identity)

    def row(self, change: str, canaries: Sequence[Canary]) -> OlderRow:
        began, looks = time.monotonic(), list(self.look(canaries))
        there = [look for look in looks if look.loaded]
        differences = sorted(look.max_logprob_diff or 0.0 for look in there)
        row = OlderRow(
            self.stored, self.dtype, change, len(there), sum(look.wrong for look in there),
            sum(look.outcome == "evicted" for look in looks), differences,
            (time.monotonic() - began) / max(1, len(looks)),
        )  # fmt: skip
        say(f"{change}: {row.noticed} of {row.looked} noticed, {row.evicted} evicted")
        return row

    def checks(self, count: int) -> OlderRow:
        """Run whole quick checks; the engines are started again among them."""
        failed, differences, took, looked = 0, [], 0.0, 0
        for number in range(count):
            if number % _CHECKS_PER_START == 0:
                self.restart()
            checked = check_stack(self.home, NAME, lambda _: None, CheckOptions(quick=True))
            found = checked.canaries
            loaded = [one for one in found.looks if one.loaded] if found else []
            differences += [one.max_logprob_diff or 0.0 for one in loaded]
            looked += len(found.compared) if found else 0
            failed += not checked.passed
            took += checked.seconds
            said = "; ".join(checked.failures) or "passed"
            say(
                f"check {number + 1}: {said}; {len(loaded)} canaries loaded; "
                f"{checked.seconds:.1f} s"
            )
        return OlderRow(
            self.stored, self.dtype, report.OLD_CHECKS, count, failed, 0,
            sorted(differences), took / max(1, count),
        )  # fmt: skip

    @contextmanager
    def _session(self) -> Iterator[Session]:
        tagged = self.running.prepared.plan.uses_redis
        with Session(self.running, CheckKeys(tagged=tagged), lambda _: None) as session:
            yield session


def noisy(weights: bytes, share: float, seed: int) -> bytes:
    """Return bfloat16 weights, each times 1 + `share` of a normal number."""
    start = _HEADER_BYTES + int.from_bytes(weights[:_HEADER_BYTES], "little")
    words = np.frombuffer(weights[start:], np.uint16)
    drawn = np.random.default_rng(seed).standard_normal(words.shape, np.float32)
    return weights[:start] + as_words(as_floats(words) * (1 + share * drawn), np.uint16).tobytes()


def changes(weights: bytes, seed: int) -> Iterator[tuple[str, Callable[[], bytes | None]]]:
    """Yield what becomes of the weights, and how."""
    yield UNCHANGED, lambda: None
    for share in SHARES:
        yield f"{100 * share:g} % noise", lambda share=share: noisy(weights, share, seed)  # type: ignore[misc]
    yield OTHER, lambda: safetensors_bytes(tensors(), seed=f"{SEED}, {seed}")


@contextmanager
def running_older(stored: str, dtype: str) -> Iterator[OlderBench]:
    """Start a stack whose model folder may be changed, and end it with the context."""
    with tempfile.TemporaryDirectory(prefix="pdkit-older-") as name:
        folder = Path(name)
        model = folder / "tiny"
        shutil.copytree(ensure_tiny_model(folder / "cache" / "models"), model)
        spec = {**STORES[stored], "model": str(model), "port": free_ports()}
        if dtype:
            spec["engine"] = {"dtype": dtype}
        with started(folder, spec):
            yield OlderBench(Home.from_environ({"PDKIT_HOME": name}), stored, model)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", choices=list(STORES), default=KITS_CLIENT)
    parser.add_argument("--trials", type=int, default=100, help="canaries")
    parser.add_argument("--healthy", type=int, default=50, help="whole quick checks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="", help="of KV; as `deploy up` chooses it")
    parser.add_argument("--record", type=Path, help="add the rows to this file, as lines of JSON")
    parser.add_argument("--results", type=Path, help="replace the section of this page")
    options = parser.parse_args()
    rows = []
    with running_older(options.store, options.dtype) as bench:
        if options.trials:
            canaries = bench.leave(options.trials)
            weights = (bench.model / "model.safetensors").read_bytes()
            for change, made in changes(weights, options.seed):
                bench.restart(made())
                rows.append(bench.row(change, canaries))
            bench.restart(weights)
        if options.healthy:
            rows.insert(0, bench.checks(options.healthy))
    record = options.record
    known = (
        [json.loads(line) for line in record.read_text().splitlines()]
        if (record and record.exists())
        else []
    )
    if record:
        with record.open("a") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    if options.results:
        every = [*(OlderRow(**one) for one in known), *rows]
        page = options.results.read_text(encoding="utf-8")
        options.results.write_text(report.with_older(page, every), encoding="utf-8")
    print(report.older_table(rows))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
