"""What tests want of a release of LMCache, done by a process that imports torch and vLLM once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.versions.installed import installed


@dataclass(frozen=True)
class Job:
    """All cells on a release, or what pytest is to run on it."""

    release: str
    tests: tuple[str, ...] = ()


class Releases:
    """The process; it does a batch of jobs side by side."""

    def __init__(self) -> None:
        # Cells need the same hashes in each process that they start.
        environ = {
            **os.environ,
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "LMCACHE_TRACK_USAGE": "false",
        }
        self._process = subprocess.Popen(
            (sys.executable, str(Path(__file__).with_name("forks.py"))),
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._begun: set[Job] = set()
        self._ended: dict[Job, tuple[int, str]] = {}

    def __enter__(self) -> Releases:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        # With all that it began; it may have ended, as a test wants it to.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def begin(self, jobs: Sequence[Job]) -> None:
        """Have jobs done, each once, side by side."""
        new = [job for job in dict.fromkeys(jobs) if job not in self._begun]
        wanted = [
            {"release": job.release, "tests": job.tests, "folder": str(installed(job.release))}
            for job in new
        ]
        assert self._process.stdin
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        self._begun.update(new)

    def said(self, job: Job) -> str:
        """Wait for a job and return what it printed; fail where it failed."""
        assert job in self._begun
        while job not in self._ended:
            self._read_one()
        code, said = self._ended[job]
        assert code == 0, f"{job} ended with {code}: {said[-4000:]}"
        return said

    def _read_one(self) -> None:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, f"the process of all releases ended with {self._process.wait()}"
        told = json.loads(line)
        job = Job(told["release"], tuple(told["tests"]))
        self._ended[job] = told["code"], told["said"]
