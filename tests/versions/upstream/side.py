"""One run of upstream's tests: on a release as it is, or with the fixes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.versions.installed import installed
from tests.versions.upstream.sdist import extra_packages

HERE = Path(__file__).parent
TEST_SECONDS = 120
# Whose server the kit runs.
SERVER_RELEASES = ("0.5.6",)
WORST_LAST = ("passed", "xpassed", "xfailed", "skipped", "failed", "hung", "crashed", "not run")


class WrongRelease(Exception):
    """The tests imported another LMCache than the one under test."""


@dataclass(frozen=True)
class End:
    """How a test ended, and why where it did not pass."""

    outcome: str
    why: str = ""


@dataclass
class Side:
    """Test id → how it ended, and fix id → its state in that process (none where untouched)."""

    ends: dict[str, End] = field(default_factory=dict)
    fixes: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> set[str]:
        """The files that have run."""
        return {_file(test) for test in self.ends}

    def add(self, more: Side) -> None:
        """Take over another run's outcomes."""
        self.ends.update(more.ends)
        self.fixes.update(more.fixes)

    def only(self, files: Sequence[str]) -> Side:
        """Return the outcomes of some files."""
        ends = {test: end for test, end in self.ends.items() if _file(test) in files}
        return Side(ends, self.fixes)

    def count(self, *outcomes: str) -> int:
        """Return how many tests ended in one of `outcomes`."""
        return sum(end.outcome in outcomes for end in self.ends.values())

    def as_dict(self) -> dict[str, Any]:
        """Return what is kept of it as JSON."""
        ends = {test: [end.outcome, end.why] for test, end in self.ends.items()}
        return {"ends": ends, "fixes": self.fixes}

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> Side:
        """Return what `as_dict` gave."""
        return cls({test: End(*end) for test, end in kept["ends"].items()}, kept["fixes"])


@dataclass(frozen=True)
class Run:
    """Where and how to run: `folder` holds the release's `tests/`.

    `connector` is the folder of `pdkit_connector`, None to leave the release untouched.
    """

    version: str
    folder: Path
    connector: Path | None
    file_seconds: int

    def tests(self, targets: Sequence[str]) -> Side:
        """Run `targets`, files or test ids; go on behind a file that hangs or kills its process."""
        side, left = Side(), list(targets)
        while left:
            log = self.folder / "outcomes.jsonl"
            log.unlink(missing_ok=True)
            tail, died = self._pytest(left, log)
            entries = _entries(log)
            if not any("collected" in entry for entry in entries):
                side.ends[left[0]] = End("crashed", f"pytest did not start: {tail}")
                break
            self._require_release(entries)
            _take(side, entries)
            culprit = _file(next((e["started"] for e in reversed(entries) if "started" in e), ""))
            if not died or not culprit:
                break
            _blame(side, entries, culprit, died)
            files = [_file(target) for target in left]
            left = left[files.index(culprit) + 1 :]
        return side

    def _pytest(self, targets: Sequence[str], log: Path) -> tuple[str, str]:
        """Run pytest once; return the last line it wrote, and how it died ("" where it did not)."""
        command = (
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "log_cli=false",
            "-p", "pdkit_upstream_plugin", "-p", "pdkit_upstream_redis",
            f"--timeout={TEST_SECONDS}", "--timeout-method=signal",
            "--rootdir", str(self.folder), *targets,
        )  # fmt: skip
        with (self.folder / "output.txt").open("w+b") as output:
            pytest = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environ(log),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                died = self._watch(pytest, log)
            finally:
                # With what upstream's tests left running: servers of theirs, never anyone else's.
                _end_group(pytest)
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
        return (lines[-1] if lines else "it wrote nothing"), died

    def _watch(self, pytest: subprocess.Popen[bytes], log: Path) -> str:
        """Wait for pytest, and kill it where one file takes more than its time."""
        current, since = "", time.monotonic()
        while pytest.poll() is None:
            time.sleep(1)
            started = [entry["started"] for entry in _entries(log) if "started" in entry]
            now = _file(started[-1]) if started else ""
            if now != current:
                current, since = now, time.monotonic()
            if time.monotonic() - since > self.file_seconds:
                return "hung"
        return "crashed" if pytest.returncode < 0 else ""

    def _environ(self, log: Path) -> dict[str, str]:
        path = (installed(self.version), HERE, extra_packages())
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "PDKIT_UPSTREAM_LOG": str(log),
        }
        if self.version in SERVER_RELEASES:
            environ["PDKIT_UPSTREAM_SERVER"] = "yes"
        if self.connector:
            environ["PDKIT_UPSTREAM_CONNECTOR"] = str(self.connector)
        return environ

    def _require_release(self, entries: list[dict[str, Any]]) -> None:
        used = Path(next(entry["lmcache"] for entry in entries if "lmcache" in entry))
        if not used.is_relative_to(installed(self.version)):
            raise WrongRelease(f"the tests of {self.version} imported {used}")


def _entries(log: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a log that may still be written to."""
    if not log.exists():
        return []
    whole, _, _ = log.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _take(side: Side, entries: list[dict[str, Any]]) -> None:
    """Add a log's outcomes to `side`; of several for one test the worst counts."""
    for entry in entries:
        side.fixes.update(entry.get("fixes", {}))
        if "test" in entry:
            end = End(entry["outcome"], entry["why"])
            worse = max(side.ends.get(entry["test"], end), end, key=_badness)
            side.ends[entry["test"]] = worse


def _badness(end: End) -> int:
    return WORST_LAST.index(end.outcome)


def _blame(side: Side, entries: list[dict[str, Any]], culprit: str, died: str) -> None:
    """Record the tests of the file that ended its process: the one that ran, and those behind."""
    running = [entry["started"] for entry in entries if "started" in entry][-1]
    side.ends[running] = End(died, "its process " + died)
    for test in next(entry["collected"] for entry in entries if "collected" in entry):
        if _file(test) == culprit and test not in side.ends:
            side.ends[test] = End("not run", f"behind {running}")


def _file(test: str) -> str:
    return test.partition("::")[0]


def _end_group(leader: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
