"""Run a vendor's tool, always with a deadline."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Without its persistence daemon, the NVIDIA driver wakes each GPU for a second or two.
TIMEOUT_S = 15.0
# Folders that installers use and do not add to PATH.
_FOLDERS = ("opt/rocm/bin", "usr/lib/wsl/lib")
_REAP_S = 1.0
_MAX_LINE = 200
NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class ToolOutput:
    """What a tool printed, and in a few words what was wrong, if anything.

    Attributes:
        problem: "" if the tool ended with 0; such as 'not installed', 'no answer in 15 s'.
    """

    stdout: str = ""
    stderr: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Tools:
    """The tools of a machine.

    Attributes:
        root: below it lie the folders that installers leave out of PATH.
    """

    environ: Mapping[str, str]
    root: Path = Path("/")
    timeout_s: float = TIMEOUT_S

    def find(self, name: str) -> str | None:
        """Return the path of a tool, or None if it is not installed."""
        folders = [str(self.root / folder) for folder in _FOLDERS]
        return shutil.which(name, path=os.pathsep.join([self.environ.get("PATH", ""), *folders]))

    def ask(self, name: str, *arguments: str) -> ToolOutput:
        """Run a tool; any failure is in the answer's `problem`."""
        path = self.find(name)
        if path is None:
            return ToolOutput(problem=NOT_INSTALLED)
        try:
            process = self.start(path, *arguments)
        except OSError as exc:
            return ToolOutput(problem=not_started(exc))
        return _await(process, self.timeout_s)

    def start(
        self, path: str, *arguments: str, stderr: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """Start a tool, which `kill` ends.

        Raises:
            OSError: it does not start.
        """
        # Its own session, so that helpers that the tool started can be ended with it.
        return subprocess.Popen(
            (path, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**self.environ, "LC_ALL": "C"},
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )


def _await(process: subprocess.Popen[str], timeout_s: float) -> ToolOutput:
    ended = False
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
        ended = True
    except subprocess.TimeoutExpired:
        return ToolOutput(problem=f"no answer in {timeout_s:g} s")
    finally:
        if not ended:  # a deadline, or Ctrl-C
            kill(process)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
    if process.returncode == 0:
        return ToolOutput(stdout, stderr)
    said = first_line(stdout) or first_line(stderr)
    return ToolOutput(
        stdout, stderr, f"failed with {process.returncode}" + (f": {said}" if said else "")
    )


def not_started(error: OSError) -> str:
    """Return in a few words why a tool did not start."""
    return f"does not start ({error.strerror})"


def kill(process: subprocess.Popen[str]) -> None:
    """End a tool and its helpers; do not wait long: one that hangs in a driver cannot be killed."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_S)


def first_line(text: str) -> str:
    """Return the first line that is not empty, cut to what a message can hold."""
    return next((line.strip()[:_MAX_LINE] for line in text.splitlines() if line.strip()), "")
