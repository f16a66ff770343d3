"""What is told of two runs of the same tests: as Markdown and as JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.versions.upstream.explanations import EXPLANATIONS
from tests.versions.upstream.side import End, Side

PASSED = ("passed", "xpassed")
FAILED = ("failed", "hung", "crashed", "not run", "absent")
SKIPPED = ("skipped", "xfailed")

HEAD = """# LMCache's own tests, with and without the fixes

LMCache's test files on what the fixes touch, taken from each release's source archive and run
against that release's wheel: once as it is, once after every fix was applied as it is in an engine
(with nothing known of the engine, so that no guard refuses). No GPU was present: tests that need
one skip or fail on both sides. "Skipped" counts expected failures too. `-` in the tables means
none.

No Redis is asked: the tests put stand-ins in its place, which are completed as pdkit_upstream_redis
says, by pipelines and, on the fixed side, by a Sentinel whose clients are awaited.

A test whose outcome differs is run again on both sides, as often as said below. It is listed as
unstable where one of the sides does not repeat its outcome.

Made by `.venv/bin/python -m tests.versions.upstream`; do not edit.
"""


@dataclass(frozen=True)
class Change:
    """A test that ended otherwise with the fixes; `why` is the reason of the worse end."""

    test: str
    before: str
    after: str
    why: str
    stable: bool = True
    explanation: str = ""

    @classmethod
    def of(cls, test: str, before: End | None, after: End | None) -> Change:
        """Compare a test's two ends; None is a test that this side does not have."""
        first, second = before or End("absent"), after or End("absent")
        return cls(test, first.outcome, second.outcome, second.why or first.why)

    def repeated(self, repeats: Sequence[tuple[Side, Side]]) -> Change:
        """Return this change, unstable where a repeat gave another outcome on its side."""
        absent = End("absent")
        ends = [(a.ends.get(self.test, absent), b.ends.get(self.test, absent)) for a, b in repeats]
        same = all((a.outcome, b.outcome) == (self.before, self.after) for a, b in ends)
        return self if same or "::" not in self.test else replace(self, stable=False)

    def explained(self, version: str) -> Change:
        """Return this change with the first explanation that names it."""
        name = f"{version} {self.test} {self.why}"
        told = next((text for like, text in EXPLANATIONS.items() if re.search(like, name)), "")
        return replace(self, explanation=told)

    @property
    def bad(self) -> bool:
        """Say whether a fix seems to have broken what worked."""
        worse = self.before in PASSED and self.after not in PASSED
        return worse and self.stable and not self.explanation


@dataclass
class Compared:
    """Both runs of one release, or why there are none."""

    version: str
    files: list[str] = field(default_factory=list)
    before: Side = field(default_factory=Side)
    after: Side = field(default_factory=Side)
    changes: list[Change] = field(default_factory=list)
    why_not: str = ""

    def __post_init__(self) -> None:
        """Find the changes' explanations."""
        self.changes = [change.explained(self.version) for change in self.changes]


def as_json(compared: Sequence[Compared]) -> dict[str, Any]:
    """Return every outcome by release."""
    return {
        each.version: {"why_not": each.why_not}
        if each.why_not
        else {
            "files": each.files,
            "untouched": each.before.as_dict(),
            "fixed": each.after.as_dict(),
            "changes": [vars(change) for change in each.changes],
        }
        for each in compared
    }


def as_markdown(compared: Sequence[Compared], notes: Sequence[str]) -> str:
    """Return the report; `notes` are sentences about this very run."""
    parts = [
        HEAD,
        *(f"{note}\n" for note in notes),
        _totals(compared),
        "## Tests whose outcome changed\n",
        _changed(compared),
    ]
    parts += ["## Fixes that were applied\n", _fixes(compared)]
    parts += ["## Tests that fail on both sides\n", _failures(compared)]
    parts += ["## By file\n", "Passed / failed / skipped, untouched → fixed.\n", _files(compared)]
    return "\n".join(parts)


def _totals(compared: Sequence[Compared]) -> str:
    head = ("LMCache", "tests", "untouched: passed", "failed", "skipped", "fixed: passed", "failed")
    rows = []
    for each in compared:
        if each.why_not:
            rows.append((each.version, each.why_not, *("-" for _ in range(7))))
            continue
        counts = (str(count) for side in (each.before, each.after) for count in _counts(side))
        changed = str(len(each.changes) or "-")
        rows.append((each.version, str(len(each.before.ends)), *counts, changed))
    return _table((*head, "skipped", "changed"), rows)


def _counts(side: Side, file: str = "") -> tuple[int, int, int]:
    ends = {test: end for test, end in side.ends.items() if test.startswith(file)}
    some = Side(ends)
    return some.count(*PASSED), some.count(*FAILED), some.count(*SKIPPED)


def _changed(compared: Sequence[Compared]) -> str:
    rows = [
        (
            each.version,
            _code(change.test),
            f"{change.before} → {change.after}",
            _meaning(change),
        )
        for each in compared
        for change in each.changes
    ]
    return _table(("LMCache", "test", "outcome", "why"), rows) if rows else "None.\n"


def _meaning(change: Change) -> str:
    if not change.stable:
        return f"unstable: did not repeat. {change.explanation}".strip()
    return change.explanation or f"**not explained**: {change.why}"


def _fixes(compared: Sequence[Compared]) -> str:
    rows = []
    for each in compared:
        states: dict[str, list[str]] = {}
        for fix, state in each.after.fixes.items():
            states.setdefault(state, []).append(fix)
        named = "; ".join(
            f"{state}: {', '.join(states[state])}"
            for state in ("applied", "guarded", "failed")
            if state in states
        )
        rows.append((each.version, named or "-"))
    return _table(("LMCache", "fixes"), rows)


def _failures(compared: Sequence[Compared]) -> str:
    rows = []
    for each in compared:
        both = [
            (test.partition("::")[0], end.why)
            for test, end in each.after.ends.items()
            if end.outcome in FAILED and each.before.ends.get(test, End("absent")).outcome in FAILED
        ]
        for (file, why), count in Counter(both).items():
            rows.append((each.version, _code(file), str(count), why))
    return _table(("LMCache", "file", "tests", "why"), rows) if rows else "None.\n"


def _files(compared: Sequence[Compared]) -> str:
    ran = [each for each in compared if not each.why_not]
    files = sorted({file for each in ran for file in each.files})
    rows = []
    for file in files:
        cells = []
        for each in ran:
            before, after = _counts(each.before, file), _counts(each.after, file)
            text = "/".join(map(str, before))
            text += "" if before == after else " → " + "/".join(map(str, after))
            cells.append(text if file in each.files else "-")
        rows.append((_code(file.removeprefix("tests/")), *cells))
    return _table(("file", *(each.version for each in ran)), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _code(text: str) -> str:
    return f"`{text}`"
