"""Whether the connector's fixes apply where engines are about to run; tested once and cached."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from deploy.assets import connector_path
from deploy.errors import FixFailed, MissingTool
from deploy.planning.engines import ENGINE_ROLES
from deploy.runtime.fixes import FixReport, FixReports, fixes_of_image, fixes_of_interpreter
from deploy.runtime.home import Home
from deploy.runtime.host import engine_versions
from deploy.stack.service import DeviceAccess
from deploy.workflows.prepare import Prepared, Report
from deploy.workflows.software import Containers

DISABLE = "PDKIT_DISABLE_FIXES"
# Variables that decide which code an engine imports, and which fixes are switched off.
_TELLING = (DISABLE, "PYTHONPATH")


@dataclass(frozen=True)
class FixTarget:
    """The code that the fixes will be applied to: an interpreter or an image.

    Attributes:
        what: the interpreter or the image, for messages.
        identity: what changes when the code there does.
        interpreter: that runs engines; inside the image, where there is one.
        image_id: "" if engines are processes.
        environ: the engines' values of the variables in `_TELLING`.
        devices: the GPUs of one engine.
    """

    what: str
    identity: tuple[str, ...]
    interpreter: str
    image_id: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    devices: DeviceAccess | None = None

    def ask(self, connector: Path) -> FixReports:
        """Try the fixes there.

        Raises:
            MissingTool: they cannot be tried.
        """
        if not self.image_id:
            return fixes_of_interpreter(self.interpreter, connector, self.environ)
        return fixes_of_image(
            self.image_id, self.interpreter, connector, self.environ, self.devices
        )

    def key(self, connector: Path) -> str:
        """Return the name of the cached result, which differs for other code or variables."""
        asked = [
            self.identity, self.interpreter, self.image_id,
            sorted(self.environ.items()), code_digest(connector),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]


def require_fixes(planned: Prepared, home: Home, report: Report) -> bool:
    """Try the connector's fixes where the engines will run, unless a cached result says they apply.

    Engines try them again when they start. If they cannot be tried here, report that and return
    False.

    Raises:
        FixFailed: a needed fix does not apply; nothing was started.
    """
    if planned.plan.kv_server:  # they are for LMCache inside the engines
        return True
    connector = connector_path()
    place = place_of(planned)
    seen = home.cache / "fixes" / f"{place.key(connector)}.json"
    if seen.exists():
        return True
    report(f"trying the connector's fixes in {place.what}; once per version, about 10 s")
    began = time.monotonic()
    try:
        tried = place.ask(connector)
    except MissingTool as exc:
        report(f"warning: {exc.message}; engines try them when they start")
        return False
    if failed := [fix for fix in tried.fixes if fix.state == "failed"]:
        raise _refusal(failed, tried, place)
    states = Counter(fix.state for fix in tried.fixes)
    counts = ", ".join(f"{count} {state}" for state, count in states.items())
    report(f"no fix failed: {counts} ({time.monotonic() - began:.1f} s)")
    remember(seen, {"place": place.what, "lmcache": tried.lmcache, "fixes": dict(states)})
    return True


def place_of(planned: Prepared) -> FixTarget:
    """Return where the engines of a plan run."""
    software, theirs = planned.facts.software, planned.spec.engine.env
    if isinstance(software, Containers):
        images = software.images
        devices = next(
            service.container.devices
            for service in planned.stack.services
            if service.role in ENGINE_ROLES and service.container is not None
        )
        return FixTarget(
            what=f"image {images.engine}",
            identity=(),
            interpreter=images.engine_program,
            image_id=images.engine_id,
            environ=_telling(theirs),
            devices=devices,
        )
    versions = engine_versions(software.engine_python)
    return FixTarget(
        what=software.engine_python,
        identity=tuple(version or "" for version in versions),
        interpreter=software.engine_python,
        environ=_telling({**_inherited(), **theirs}),
    )


def code_digest(folder: Path) -> str:
    """Return a digest of the Python code in a folder, by names and contents."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _inherited() -> dict[str, str]:
    """Return the variables that engine processes inherit from this one, without PYTHONPATH."""
    return {DISABLE: os.environ[DISABLE]} if os.environ.get(DISABLE) else {}


def _telling(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in _TELLING if environ.get(name)}


def _refusal(failed: list[FixReport], tried: FixReports, place: FixTarget) -> FixFailed:
    first = failed[0]
    ids = ",".join(fix.id for fix in failed)
    return FixFailed(
        f"fix {first.id} ({first.title}) is needed with LMCache {tried.lmcache} of {place.what} "
        f"and could not be applied: {first.evidence}. Upstream: {first.link}. {first.reason}",
        hint="use a tested pair of vLLM and LMCache (deploy images list); or set engine: "
        f'{{env: {{{DISABLE}: "{ids}"}}}} in deploy.yaml, to run with the bug',
        details=tuple(f"also {fix.id} ({fix.link}): {fix.evidence}" for fix in failed[1:]),
    )


def remember(file: Path, what: Mapping[str, object]) -> None:
    """Write a result into the cache; a disk that is full only costs the next command time."""
    with suppress(OSError):  # it is asked again then
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(what) + "\n", encoding="utf-8")
        part.replace(file)
