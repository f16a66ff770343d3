"""Run the steps of scripts/test in two lanes: one shown as it goes, one in its idle moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import BinaryIO

from tests.report.results import REPO, results_folder

# The other lane takes what this one leaves of the cores.
SECOND = ("nice", "-n", "15")


@dataclass(frozen=True)
class Step:
    """One step: commands in turn, each a program and its arguments."""

    name: str
    commands: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Ended:
    """A step that ran: the second of the run in which it began and ended, and its exit code."""

    name: str
    began_s: float
    ended_s: float
    code: int


@dataclass
class Run:
    """Both lanes of a run; after a step that failed neither begins another.

    Attributes:
        began_s: when the run began, on the monotonic clock.
        ended: what ran, in the order in which it ended.
    """

    began_s: float = field(default_factory=time.monotonic)
    ended: list[Ended] = field(default_factory=list)
    _running: set[subprocess.Popen[bytes]] = field(default_factory=set)
    _stopped: bool = False

    @property
    def failed(self) -> list[Ended]:
        return [step for step in self.ended if step.code]

    def seconds(self) -> float:
        return time.monotonic() - self.began_s

    def both(self, shown: Sequence[Step], kept: Sequence[Step]) -> None:
        """Run both lanes to their ends: `shown` as it goes, `kept` with its output at each end."""
        with ThreadPoolExecutor(1) as pool, self._ended_with_us():
            other = pool.submit(self._lane, kept, kept=True)
            self._lane(shown, kept=False)
            other.result()
            stopped = self._stopped
        if stopped:
            sys.exit(128 + signal.SIGTERM)

    def _lane(self, steps: Sequence[Step], *, kept: bool) -> None:
        for step in steps:
            if self.failed or self._stopped:
                return
            began = self.seconds()
            if kept:
                code = self._kept(step)
            else:
                _say(f"\n== {step.name} ({began:.0f} s)\n")
                code = self._code(step)
            self.ended.append(Ended(step.name, began, self.seconds(), code))

    def _kept(self, step: Step) -> int:
        log = results_folder() / f"{step.name}.log"
        with log.open("wb") as output:
            code = self._code(step, output)
        text = log.read_text(errors="replace")
        _say(f"\n== {step.name}, beside the others ({self.seconds():.0f} s)\n{text}\n")
        return code

    def _code(self, step: Step, output: BinaryIO | None = None) -> int:
        prefix = SECOND if output else ()
        for command in step.commands:
            process = subprocess.Popen(
                (*prefix, *command),
                cwd=REPO,
                process_group=0,
                stdout=output,
                stderr=output and subprocess.STDOUT,
            )
            self._running.add(process)
            if self._stopped:
                self._stop()
            code = _waited(process)
            self._running.discard(process)
            if code:
                return code
        return 0

    @contextmanager
    def _ended_with_us(self) -> Iterator[None]:
        """End the steps, and wait for them, where the run itself is ended."""
        before = signal.signal(signal.SIGTERM, lambda *_: self._stop())
        try:
            yield
        finally:
            self._stop()
            signal.signal(signal.SIGTERM, before)

    def _stop(self) -> None:
        """End what runs; what is being started ends itself."""
        self._stopped = True
        for process in list(self._running):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)


def _waited(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process; a signal that comes just before the wait is seen, too."""
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(1)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
