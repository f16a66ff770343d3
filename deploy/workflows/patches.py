"""`deploy patches`: the connector's fixes, in a stack that runs or in an image."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.assets import connector_path
from deploy.config.catalog import load_catalog
from deploy.errors import ConfigError, MissingImage, MissingTool, PdkitError, StateError
from deploy.runtime.compose.images import find_image
from deploy.runtime.fixes import FixReports, fixes_of_image, fixes_of_interpreter, known_fixes
from deploy.runtime.home import Home
from deploy.runtime.host import find_engine_python
from deploy.workflows.running import RunningStack, find_stack

_FIX = re.compile(
    r'pdkit-connector fix=(?P<fix>\S+) state=(?P<state>\S+)(?: evidence=(?P<why>".*"))?'
)
_KV = re.compile(r"pdkit-connector kv=(?P<facts>\{.*\})")
_REDIS_FAILED = re.compile(r"pdkit-connector WARNING Redis: (?P<said>\w+ failed: .+)")
_RELEASE = re.compile(r'pdkit-connector lmcache=(?P<release>\S+) proved="(?P<proved>[^"]*)"')

# States in which a bug that is there is not answered.
UNANSWERED = ("failed", "disabled")


@dataclass(frozen=True)
class FixRow:
    """One fix, as `deploy patches` shows it.

    Attributes:
        states: state → the engines that reported it; one state with no engines for an image.
        evidence: the observation that the first of them rests on.
    """

    id: str
    title: str
    link: str
    states: Mapping[str, Sequence[str]]
    evidence: str

    @property
    def answered(self) -> bool:
        return not any(state in UNANSWERED for state in self.states)


@dataclass(frozen=True)
class Patches:
    """The fixes in one place.

    Attributes:
        where: the stack, image or interpreter.
        lmcache: its version there; "" where nothing says it.
        proved: the fixes were tried on that version by the kit's tests.
        silent: engines that reported no fix, though they run with the connector.
    """

    where: str
    lmcache: str
    proved: bool
    fixes: Sequence[FixRow]
    silent: Sequence[str] = ()

    @property
    def warnings(self) -> list[str]:
        """What somebody should know before trusting the KV."""
        found = [
            f"fix {row.id} is {state} in {', '.join(engines) or self.where}: {row.title} "
            f"({row.link})"
            for row in self.fixes
            for state, engines in row.states.items()
            if state in UNANSWERED
        ]
        found += [f"{engine} runs but reported no fixes" for engine in self.silent]
        if self.lmcache and not self.proved:
            found.append(
                f"the fixes are untested with LMCache {self.lmcache}: each was chosen by its probe"
            )
        return found


@dataclass
class EngineFixes:
    """What one engine's connector wrote into its log since its last start.

    Attributes:
        kv: what KV means in this engine (`kv_report`).
        redis_said: the last failures of Redis that it told, the newest last.
    """

    release: str = ""
    proved: bool = True
    states: dict[str, str] = field(default_factory=dict)
    evidence: dict[str, str] = field(default_factory=dict)
    kv: dict[str, Any] = field(default_factory=dict)
    redis_said: list[str] = field(default_factory=list)


def engine_fixes(running: RunningStack, engine: str) -> EngineFixes:
    """Read an engine's own report; empty where its log holds none."""
    found = EngineFixes()
    for line in running.launcher.log_lines(engine):
        if match := _FIX.search(line):
            found.states[match["fix"]] = match["state"].replace("-", " ")
            found.evidence[match["fix"]] = _unquoted(match["why"])
        elif match := _KV.search(line):
            found.kv = _facts(match["facts"])
        elif match := _REDIS_FAILED.search(line):
            found.redis_said.append(match["said"])
        elif match := _RELEASE.search(line):
            found = EngineFixes(match["release"], match["proved"] == "yes")
    return found


def stack_patches(running: RunningStack) -> Patches:
    """Return the fixes as the engines of a stack reported them."""
    engines = [engine.name for engine in running.prepared.plan.engines]
    told = {name: engine_fixes(running, name) for name in engines}
    known = known_fixes(connector_path())
    ids = [*known, *sorted({fix for one in told.values() for fix in one.states} - known.keys())]
    rows = [_row(fix, known.get(fix, ("", "none")), told) for fix in ids]
    releases = sorted({one.release for one in told.values() if one.release})
    return Patches(
        where=f"stack '{running.stack.name}'",
        lmcache=", ".join(releases),
        proved=all(one.proved for one in told.values()),
        fixes=[row for row in rows if row.states],
        silent=[
            name
            for name in (engines if running.prepared.plan.shares_kv else ())
            if not told[name].states
            and running.service_state(running.stack.service(name)) == "running"
        ],
    )


def patches_of(home: Home, name: str, image: str | None) -> Patches:
    """Return the fixes of an image, else of a stack that is up, else of this interpreter.

    Raises:
        ConfigError: the image holds no vLLM and LMCache.
        MissingImage: it is not on this machine.
        MissingTool: there is no stack, and no engine can run here.
    """
    if image is not None:
        return _image_patches(image)
    running = find_stack(home, name)
    if running is not None:
        return stack_patches(running)
    if stacks := home.stacks_beside(name):
        raise StateError(
            f"no stack '{name}'; running stacks: {', '.join(stacks)}",
            hint=f"deploy patches --name {stacks[0]}",
        )
    python = find_engine_python(None)
    return _tried(f"{python}, no stack is up", fixes_of_interpreter(python, connector_path()))


def _image_patches(asked: str) -> Patches:
    catalog = load_catalog()
    engine = catalog.named(asked)
    found = find_image(engine.image)
    if found is None:
        get = "build" if engine.build else "pull"
        raise MissingImage(
            f"--image: {engine.image} is not on this machine",
            hint=f"deploy images {get} {engine.profile}"
            if engine.profile
            else f"docker pull {engine.image}",
        )
    refusal: PdkitError | None = None
    for interpreter in catalog.interpreters_of(engine):
        try:
            reports = fixes_of_image(found.id, interpreter, connector_path())
        except MissingTool as exc:
            refusal = exc
        else:
            return _tried(f"image {engine.image}", reports)
    raise ConfigError(f"--image: {refusal}", hint="deploy images list")


def _facts(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError:  # the line was cut
        return {}


def _unquoted(evidence: str | None) -> str:
    """Return the words of an evidence that a log line quotes as JSON."""
    try:
        return str(json.loads(evidence or '""'))
    except ValueError:  # the line was cut
        return evidence or ""


def _row(fix: str, known: tuple[str, str], told: Mapping[str, EngineFixes]) -> FixRow:
    states: dict[str, list[str]] = {}
    for engine, one in told.items():
        if fix in one.states:
            states.setdefault(one.states[fix], []).append(engine)
    evidence = next((one.evidence[fix] for one in told.values() if fix in one.evidence), "")
    return FixRow(fix, *known, states, evidence)


def _tried(where: str, reports: FixReports) -> Patches:
    rows = [
        FixRow(fix.id, fix.title, fix.link, {fix.state: ()}, fix.evidence) for fix in reports.fixes
    ]
    return Patches(where, reports.lmcache, reports.proved, rows)
