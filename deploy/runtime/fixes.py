"""The connector's fixes: what they are, and what becomes of them with some LMCache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from deploy.errors import MissingTool
from deploy.runtime.compose.docker import run_docker
from deploy.stack.layout import CONNECTOR

_MODULE = ("-m", "pdkit_connector")
_TIMEOUT_S = 300


@dataclass(frozen=True)
class FixReport:
    """What became of one fix.

    Attributes:
        state: applied, guarded, not needed, not applicable, failed or disabled.
        evidence: the observation it rests on.
    """

    id: str
    state: str
    evidence: str
    title: str = ""
    link: str = ""


@dataclass(frozen=True)
class FixReports:
    """The fixes with one LMCache.

    Attributes:
        lmcache: its version.
        proved: the fixes were tried on that version by the kit's tests.
    """

    lmcache: str
    proved: bool
    fixes: Sequence[FixReport]


@cache
def known_fixes(connector: Path) -> dict[str, tuple[str, str]]:
    """Return id → title and upstream link of every fix, asked of the connector itself, once."""
    command = (sys.executable, *_MODULE, "--list")
    done = _run(command, {**os.environ, "PYTHONPATH": str(connector)})
    return {fix["id"]: (fix["title"], fix["link"]) for fix in json.loads(done.stdout)}


def fixes_of_interpreter(python: str, connector: Path) -> FixReports:
    """Try the fixes with the LMCache of an interpreter, in a process that serves nothing.

    Raises:
        MissingTool: it has no LMCache, or does not run.
    """
    environ = {
        **os.environ,
        "PYTHONPATH": str(connector),
        "LMCACHE_TRACK_USAGE": "false",
    }
    return _parsed(_run((python, *_MODULE, "--json"), environ), python)


def fixes_of_image(image_id: str, interpreter: str, connector: Path) -> FixReports:
    """Try the fixes with the LMCache of an image, in a container without a network.

    Raises:
        MissingTool: it has no LMCache where `interpreter` finds it.
        DockerUnavailable: no Docker engine answers.
    """
    arguments = (
        "run", "--rm", "--network", "none", "--cap-drop", "ALL",
        "--volume", f"{connector}:{CONNECTOR}:ro",
        "--env", f"PYTHONPATH={CONNECTOR}", "--env", "LMCACHE_TRACK_USAGE=false",
        "--entrypoint", interpreter, image_id, *_MODULE, "--json",
    )  # fmt: skip
    return _parsed(run_docker(arguments, timeout_s=_TIMEOUT_S, check=False), image_id)


def _run(command: Sequence[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            env=environ,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise MissingTool(
            f"{command[0]} does not run as a Python interpreter ({exc})",
            hint="set engine.python in deploy.yaml",
        ) from exc


def _parsed(done: subprocess.CompletedProcess[str], where: str) -> FixReports:
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise MissingTool(
            f"the fixes cannot be tried in {where}: {lines[-1].strip() if lines else 'no answer'}",
            hint="deploy patches --image REF, of an image that holds vLLM and LMCache",
            details=tuple(lines[-4:]),
        ) from None
    names = ("id", "state", "evidence", "title", "link")
    fixes = [FixReport(**{name: fix[name] for name in names}) for fix in told["fixes"]]
    return FixReports(told["lmcache"], told["proved"], fixes)
