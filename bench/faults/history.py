"""What clients asked and got, one line a request, and a verdict on each afterwards."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

RESULTS = "results.jsonl"
# One for each request. "refused" and "cut" are lost requests that the fault explains.
OUTCOMES = ("right", "refused", "ended", "cut", "lost", "wrong", "late")
BAD = ("wrong", "lost", "late")
AnswerVerdict = Literal["right", "wrong", "ended", "lost", "late"]


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        prompt: the number of its prompt, whose answer is known.
        sent_s, ended_s: by the clock of the run.
        status: 0 if there was no answer.
        text: of the answer, as far as it came.
        trouble: what was wrong with it, in words; "" if it came whole.
        stream: it was answered in events.
    """

    prompt: int
    sent_s: float
    ended_s: float
    status: int
    text: str
    trouble: str
    stream: bool


def verdict(asked: Asked, answers: Mapping[int, str], late_s: float) -> AnswerVerdict:
    """Return the outcome of a request.

    A stream that says by an event that it is not complete has ended, and is not lost, if what came
    of it is right.
    """
    expected = answers[asked.prompt]
    if asked.trouble:
        told = asked.stream and "not complete" in asked.trouble
        if not told:
            return "lost"
        return "ended" if expected.startswith(asked.text) else "wrong"
    if asked.status != 200:
        return "lost"
    if asked.text != expected:
        return "wrong"
    return "late" if asked.ended_s - asked.sent_s > late_s else "right"


class History:
    """The requests of one run, kept in memory and written to a file as they end."""

    def __init__(self, file: Path | None = None) -> None:
        self.requests: list[Asked] = []
        self._file = file
        self._lock = threading.Lock()

    def add(self, asked: Asked) -> None:
        with self._lock:
            self.requests.append(asked)
            if self._file:
                with self._file.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(asdict(asked)) + "\n")


class Results:
    """The rows of all trials, in a folder from which a later run reads them again.

    Attributes:
        bad: requests that were wrong, lost or late.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._done: set[tuple[str, int]] = set()
        self.bad = 0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            for line in self._file(folder).read_text().splitlines():
                self._note(json.loads(line))

    def _file(self, folder: Path) -> Path:
        file = folder / RESULTS
        file.touch()
        return file

    def _note(self, row: dict[str, Any]) -> None:
        self._done.add((row["fault"], row["seed"]))
        self.bad += len(row["bad"])

    def has(self, fault: str, seed: int) -> bool:
        """Tell whether a trial has a result."""
        return (fault, seed) in self._done

    def add(self, row: dict[str, Any]) -> None:
        self._note(row)
        if self._folder is not None:
            with self._file(self._folder).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")

    def requests_of(self, fault: str, seed: int) -> Path | None:
        """Return the file for the requests of a trial, empty: a trial broken off is done again."""
        if self._folder is None:
            return None
        file = self._folder / f"{fault.replace(' ', '-')}-{seed}.jsonl"
        file.unlink(missing_ok=True)
        return file
