"""The contenders in turns: in every round each does the same, close together in time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Protocol

from bench.kit import ROOT, say
from bench.redis_path.contender import MIB, TINY_BYTES
from bench.redis_path.server import Server

PROMPT_BYTES = 172 * MIB
LOOKUPS = (10, 100, 1000)
REPEATS = 20  # of a lookup, which takes a millisecond
PATIENCE_S = 60


class Measurable(Protocol):
    """A Redis of the benchmark's own, or several that share the keys."""

    @property
    def port(self) -> int: ...
    @property
    def socket(self) -> str: ...
    def cpu_s(self) -> float: ...
    def flush(self) -> None: ...


class SideFailed(RuntimeError):
    """A contender could not do what it was asked for."""


@dataclass(frozen=True)
class Sample:
    """One operation of one contender.

    Attributes:
        seconds: from the first engine's beginning to the last one's end.
        cpu_s, server_cpu_s: processor time of the engines, and of Redis.
    """

    seconds: float
    cpu_s: float
    server_cpu_s: float


def _mean(samples: Sequence[Sample]) -> Sample:
    return Sample(*(statistics.mean(values) for values in zip(*map(astuple, samples), strict=True)))


# operation → contender → one sample a round
Measured = dict[str, dict[str, list[Sample]]]


class Side:
    """A contender's process."""

    def __init__(
        self,
        name: str,
        engines: int,
        server: Measurable,
        hiredis: Path | None,
        label: str | None = None,
        kit: Path = ROOT,
    ) -> None:
        """Start it, with the connector of a tree; what it measures has the label, else its name."""
        self.name = label or name
        self._server = server
        path = [str(ROOT), str(kit / "deploy" / "connector")]
        if name == "hiredis":
            path.append(str(hiredis))
        self._process = subprocess.Popen(
            (
                sys.executable, "-m", "bench.redis_path.side", name, str(engines),
                str(server.port), server.socket,
            ),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "BENCH_STDERR" not in os.environ else None, text=True,
            start_new_session=True,
        )  # fmt: skip

    def ask(self, do: str, **more: Any) -> list[dict[str, Any]]:
        """Have all engines do something at the same time; return their answers.

        Raises SideFailed where one of them cannot.
        """
        assert self._process.stdin and self._process.stdout  # noqa: S101 - for mypy
        try:
            self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SideFailed("its process ended") from None
        if not select.select([self._process.stdout], [], [], PATIENCE_S)[0]:
            os.killpg(self._process.pid, signal.SIGKILL)  # its answer would be taken for the next
            raise SideFailed(f"it hung for {PATIENCE_S} s")
        line = self._process.stdout.readline()
        if not line:
            raise SideFailed("its process ended")
        answers: list[dict[str, Any]] = json.loads(line)
        for answer in answers:
            if "error" in answer:
                raise SideFailed(answer["error"])
        return answers

    def measure(self, do: str, **more: Any) -> Sample:
        """Have all engines do something, and measure it."""
        before = self._server.cpu_s()
        spans = self.ask(do, **more)
        server_cpu_s = self._server.cpu_s() - before
        began = min(span["began_s"] for span in spans)
        ended = max(span["ended_s"] for span in spans)
        return Sample(ended - began, sum(span["cpu_s"] for span in spans), server_cpu_s)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin  # noqa: S101 - for mypy
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextlib.contextmanager
def sides(
    wanted: Sequence[str], engines: int, server: Server, hiredis: Path | None
) -> Iterator[list[Side]]:
    """Start the contenders that can take part; say which cannot."""
    with taking_part([Side(name, engines, server, hiredis) for name in wanted]) as ready:
        yield ready


@contextlib.contextmanager
def taking_part(started: Sequence[Side]) -> Iterator[list[Side]]:
    """Yield those that can take part, and have stored what is looked up; end all at the end."""
    try:
        ready = []
        for side in started:
            try:
                side.ask("open", value_bytes=TINY_BYTES, count=LOOKUPS[-1])
                side.measure("store")
                ready.append(side)
            except SideFailed as failed:
                say(f"{side.name} takes no part: {failed}")
        yield ready
    finally:
        for side in started:
            side.close()


def lookups(ready: Sequence[Side], rounds: int) -> Measured:
    """Measure lookups of values that are all there; `sides` stored them."""

    def turn(side: Side, _number: int) -> dict[str, Sample]:
        return {
            f"lookup of {count}": _mean(
                [side.measure("lookup", count=count) for _ in range(REPEATS)]
            )
            for count in LOOKUPS
        }

    return _in_turns("lookups", ready, rounds, turn)


def transfers(ready: Sequence[Side], value_bytes: int, rounds: int, server: Measurable) -> Measured:
    """Measure storing and retrieving a prompt."""
    count = values_of_a_prompt(value_bytes)

    def turn(side: Side, number: int) -> dict[str, Sample]:
        try:
            if not number:
                side.ask("open", value_bytes=value_bytes, count=count)
            return {operation: side.measure(operation) for operation in ("store", "retrieve")}
        finally:
            server.flush()

    return _in_turns(f"{value_bytes // MIB} MiB", ready, rounds, turn)


def _in_turns(
    what: str, ready: Sequence[Side], rounds: int, turn: Callable[[Side, int], dict[str, Sample]]
) -> Measured:
    """Let all take turns; the first round, of number 0, warms up. Who fails is left out."""
    measured: Measured = {}
    failed = set[str]()
    for number in range(rounds + 1):
        for side in _order(ready, number):
            if side.name in failed:
                continue
            try:
                samples = turn(side, number)
            except SideFailed as why:
                say(f"{what}: {side.name} is left out: {why}")
                failed.add(side.name)
                continue
            for operation, sample in samples.items() if number else ():
                measured.setdefault(operation, {}).setdefault(side.name, []).append(sample)
        say(f"{what}: round {number} of {rounds}")
    return {
        operation: {name: of for name, of in of_side.items() if name not in failed}
        for operation, of_side in measured.items()
    }


def values_of_a_prompt(value_bytes: int) -> int:
    """Return how many values of a size make a prompt."""
    return round(PROMPT_BYTES / value_bytes)


def _order(ready: Sequence[Side], number: int) -> list[Side]:
    """Return the sides of a round in its order: each comes first, and before and after others."""
    start = number // 2 % len(ready)
    turned = [*ready[start:], *ready[:start]]
    return turned if number % 2 else turned[::-1]
