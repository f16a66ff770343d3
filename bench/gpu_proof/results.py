"""The results of the steps, one JSON file each, so that the next run can continue."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The fact of a step that tries what engines are kept from: why that is not right.
WRONG_ANSWERS = "wrong answers"


@dataclass(frozen=True)
class Result:
    """One step.

    Attributes:
        facts: what was seen, for the page.
        failures: why it failed; empty if it passed.
        commit: of the kit that ran it.
    """

    step: str
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    failures: Sequence[str] = ()
    commit: str = ""

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def verdict(self) -> str:
        """Return the result in a word or two."""
        if self.failures:
            return "FAILED"
        return "wrong answers" if self.facts.get(WRONG_ANSWERS) else "passed"


@dataclass(frozen=True)
class Results:
    """The folder of results."""

    folder: Path

    def read(self, step: str) -> Result | None:
        """Return the result of a step; None if it has not ended yet, or the file is cut off."""
        try:
            return Result(**json.loads(self._file(step).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, result: Result) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = self._file(result.step).with_suffix(".new")
        scratch.write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
        scratch.replace(self._file(result.step))

    def is_done(self, step: str, commit: str) -> bool:
        """Tell whether a step has passed with this very kit."""
        result = self.read(step)
        return result is not None and result.passed and result.commit == commit

    def _file(self, step: str) -> Path:
        return self.folder / f"{step}.json"


def kit_commit() -> str:
    """Return the commit of this checkout, marked where files differ from it; "" without git."""
    try:
        ran = subprocess.run(
            ("git", "describe", "--always", "--dirty", "--exclude=*"),  # noqa: S607 - git of PATH
            cwd=ROOT, capture_output=True, text=True, check=True, timeout=30,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout.strip()
