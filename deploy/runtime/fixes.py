"""The connector's fixes: the list, and which of them apply to an installed LMCache."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deploy.errors import MissingTool
from deploy.runtime.compose.docker import last_line, run_docker
from deploy.runtime.host import run_python
from deploy.stack.containers import call_filter
from deploy.stack.layout import CONNECTOR
from deploy.stack.service import DeviceAccess

_MODULE = ("-m", "pdkit_connector")
_TIMEOUT_S = 300


@dataclass(frozen=True)
class FixReport:
    """The result of one fix.

    Attributes:
        state: applied, guarded, not needed, not applicable, failed or disabled.
        evidence: the observation it rests on.
        reason: what the bug does and what the fix does, a paragraph.
    """

    id: str
    state: str
    evidence: str
    title: str = ""
    link: str = ""
    reason: str = ""


@dataclass(frozen=True)
class FixReports:
    """The results of all fixes with one LMCache.

    Attributes:
        lmcache: its version.
        tested: the kit's tests ran the fixes with that version.
    """

    lmcache: str
    tested: bool
    fixes: Sequence[FixReport]


@cache
def known_fixes(connector: Path) -> dict[str, tuple[str, str]]:
    """Return id → title and upstream link of every fix, asked of the connector itself, once."""
    done = _run(sys.executable, "--list", {"PYTHONPATH": str(connector)})
    return {fix["id"]: (fix["title"], fix["link"]) for fix in json.loads(done.stdout)}


def fixes_of_interpreter(
    python: str, connector: Path, environ: Mapping[str, str] = MappingProxyType({})
) -> FixReports:
    """Try the fixes with the LMCache of an interpreter, in a process that serves nothing.

    `environ` is set on top of this process' own.

    Raises:
        MissingTool: it has no LMCache, or does not run.
    """
    full = {**environ, **_variables(connector, environ)}
    return _parsed(_run(python, "--json", full), python)


def fixes_of_image(
    image_id: str,
    interpreter: str,
    connector: Path,
    environ: Mapping[str, str] = MappingProxyType({}),
    devices: DeviceAccess | None = None,
) -> FixReports:
    """Try the fixes with the LMCache of an image, in a container without a network.

    Without `devices` the container has no GPU, and libraries that need the driver do not load.

    Raises:
        MissingTool: it has no LMCache where `interpreter` finds it.
        DockerUnavailable: no Docker engine answers.
    """
    variables = {**environ, **_variables(Path(CONNECTOR), environ)}
    arguments = (
        "run", "--rm", "--network", "none", "--cap-drop", "ALL",
        "--volume", f"{connector}:{CONNECTOR}:ro",
        *_options("--env", (f"{name}={value}" for name, value in variables.items())),
        *(device_options(devices) if devices else ()),
        "--entrypoint", interpreter, image_id, *_MODULE, "--json",
    )  # fmt: skip
    return _parsed(run_docker(arguments, timeout_s=_TIMEOUT_S, check=False), image_id)


def _variables(connector: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that fixes need; the connector's folder is first on PYTHONPATH."""
    path = [str(connector), *filter(None, [environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": ":".join(path), "LMCACHE_TRACK_USAGE": "false"}


def device_options(devices: DeviceAccess) -> tuple[str, ...]:
    """Return the options of `docker run` by which a container gets the GPUs of an engine."""
    by_runtime = devices.driver not in ("", "cdi")
    filters = [f"seccomp={call_filter(devices.seccomp)}"] if devices.seccomp else []
    return (
        *(("--gpus", f'"device={",".join(devices.ids)}"') if by_runtime else ()),
        *_options("--device", (*(() if by_runtime else devices.ids), *devices.names)),
        *_options("--group-add", map(str, devices.groups)),
        *_options("--security-opt", filters),
    )


def _options(name: str, values: Iterable[str]) -> tuple[str, ...]:
    return tuple(part for value in values for part in (name, value))


def _run(python: str, option: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return run_python(python, *_MODULE, option, environ=environ, timeout_s=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise MissingTool(
            f"{python} does not run as a Python interpreter ({exc})",
            hint="set engine.python in deploy.yaml",
        ) from exc


def _parsed(done: subprocess.CompletedProcess[str], where: str) -> FixReports:
    try:
        told: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise MissingTool(
            f"the fixes cannot be tried in {where}: {last_line(done.stderr)}",
            hint="deploy fixes --image REF, of an image that holds vLLM and LMCache",
            details=tuple(lines[-4:]),
        ) from None
    names = ("id", "state", "evidence", "title", "link", "reason")
    fixes = [FixReport(**{name: fix[name] for name in names}) for fix in told["fixes"]]
    return FixReports(told["lmcache"], told["tested"], fixes)
