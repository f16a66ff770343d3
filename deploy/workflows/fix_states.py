"""`deploy fixes`: the connector's fixes, in a stack that runs or in an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import computed_field

from deploy.assets import connector_path
from deploy.config.catalog import load_catalog
from deploy.errors import ConfigError, MissingImage, MissingTool, PdkitError, StateError
from deploy.metrics.connector import ConnectorReport
from deploy.metrics.page import MetricsPage
from deploy.runtime.compose.images import find_image
from deploy.runtime.fixes import FixReports, fixes_of_image, fixes_of_interpreter
from deploy.runtime.home import Home
from deploy.runtime.host import find_engine_python
from deploy.workflows.running import RunningStack, answering_pages, find_stack

# States in which a bug exists and is not fixed.
UNANSWERED = ("failed", "disabled")
_NOT_FOR_MP = (
    "the fixes are for LMCache inside the engines, and this stack uses LMCache's server "
    "(--connector lmcache-mp)"
)


def fixes_of(home: Home, name: str, image: str | None) -> Fixes:
    """Return the fixes of an image, else of a stack that is up, else of this interpreter.

    Raises:
        ConfigError: the image holds no vLLM and LMCache.
        MissingImage: it is not on this machine.
        MissingTool: there is no stack, and no engine can run here.
    """
    if image is not None:
        return _image_fixes(image)
    running = find_stack(home, name)
    if running is not None:
        return stack_fixes(running, answering_pages(running))
    if stacks := home.stacks_beside(name):
        raise StateError(
            f"no stack '{name}'; running stacks: {', '.join(stacks)}",
            hint=f"deploy fixes --name {stacks[0]}",
        )
    python = find_engine_python(None)
    return _tried(f"{python}, no stack is up", fixes_of_interpreter(python, connector_path()))


def _image_fixes(asked: str) -> Fixes:
    catalog = load_catalog()
    engine = catalog.named(asked)
    found = find_image(engine.image)
    if found is None:
        get = "build" if engine.build else "pull"
        raise MissingImage(
            f"--image: {engine.image} is not on this machine",
            hint=f"deploy images {get} {engine.name}"
            if engine.name
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


def _tried(where: str, reports: FixReports) -> Fixes:
    rows = [
        FixRow(fix.id, fix.title, fix.link, {fix.state: ()}, fix.evidence) for fix in reports.fixes
    ]
    return Fixes(where, reports.lmcache, reports.tested, rows)


@dataclass(frozen=True)
class FixRow:
    """One fix, as `deploy fixes` shows it.

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
        """Whether no engine has the bug without the fix."""
        return not any(state in UNANSWERED for state in self.states)


@dataclass(frozen=True)
class Fixes:
    """The fixes in one place.

    Attributes:
        where: the stack, image or interpreter.
        lmcache: its version there; "" if unknown.
        tested: the kit's tests ran the fixes with that version.
        silent: engines that answer and report no fix.
        not_for: the reason why there are no fixes; "" if there are some.
    """

    where: str
    lmcache: str
    tested: bool
    fixes: Sequence[FixRow]
    silent: Sequence[str] = ()
    not_for: str = ""

    @computed_field
    @property
    def warnings(self) -> list[str]:
        """What to know before trusting the KV."""
        found = [
            f"fix {row.id} is {state} in {', '.join(engines) or self.where}: {row.title} "
            f"({row.link})"
            for row in self.fixes
            for state, engines in row.states.items()
            if state in UNANSWERED
        ]
        found += [f"{engine} answers but reports no fixes" for engine in self.silent]
        if self.lmcache and not self.tested:
            found.append(
                f"the fixes are untested with LMCache {self.lmcache}: each was chosen by its probe"
            )
        return found


def stack_fixes(running: RunningStack, pages: Mapping[str, MetricsPage]) -> Fixes:
    """Return the fixes as the engines of a stack report them on their metrics pages."""
    from deploy.runtime.fixes import known_fixes  # `deploy status` does without it

    return _reported(running, pages, known_fixes(connector_path()))


def stack_warnings(running: RunningStack, pages: Mapping[str, MetricsPage]) -> list[str]:
    """Return warnings about a stack's fixes."""
    found = _reported(running, pages, {})
    if all(row.answered for row in found.fixes):
        return found.warnings  # they name no fix, whose title would have to be looked up
    return stack_fixes(running, pages).warnings


def _reported(
    running: RunningStack, pages: Mapping[str, MetricsPage], known: Mapping[str, tuple[str, str]]
) -> Fixes:
    reports = {name: ConnectorReport.read(page) for name, page in pages.items()}
    ids = [*known, *sorted({fix for one in reports.values() for fix in one.fixes} - known.keys())]
    rows = [_row(fix, known.get(fix, ("", "none")), reports) for fix in ids]
    releases = sorted({one.lmcache for one in reports.values() if one.lmcache})
    plan = running.prepared.plan
    return Fixes(
        where=f"stack '{running.stack.name}'",
        lmcache=", ".join(releases),
        tested=all(one.tested for one in reports.values()),
        fixes=[row for row in rows if row.states],
        silent=[name for name, one in reports.items() if plan.uses_redis and not one.fixes],
        not_for=_NOT_FOR_MP if plan.kv_server else "",
    )


def _row(fix: str, known: tuple[str, str], reports: Mapping[str, ConnectorReport]) -> FixRow:
    states: dict[str, list[str]] = {}
    for engine, one in reports.items():
        if fix in one.fixes:
            states.setdefault(one.fixes[fix], []).append(engine)
    evidence = next((one.evidence[fix] for one in reports.values() if fix in one.evidence), "")
    return FixRow(fix, *known, states, evidence)
