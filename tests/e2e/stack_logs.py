"""A pytest plugin: a failed test shows what its stack's services logged last, without secrets.

The last lines go into the failure, and so to the terminal and into JUnit's file; whole logs go into
test-results/logs.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from deploy.connector.pdkit_connector.redaction import MASK, Redactor, secrets_in
from deploy.errors import PdkitError
from deploy.runtime.home import Home, StackHome
from deploy.runtime.logs import first_error, last_lines
from deploy.workflows.running import find_stack

LOGS = Path(__file__).resolve().parents[2] / "test-results" / "logs"
SHOWN, KEPT = 40, 5000
# CLOCK_REALTIME_COARSE: Linux may give a file the time of its last tick, milliseconds ago.
_FILE_CLOCK = 5
# A secret that the kit makes. `up` removes it when it fails.
_MADE = re.compile(r"(?<![\w-])(?=[\w-]*[a-z])(?=[\w-]*[A-Z])[\w-]{43,}(?![\w-])", re.ASCII)


@dataclass(frozen=True)
class Log:
    """The last lines of a service of a stack, and its condition."""

    stack: str
    service: str
    condition: str
    lines: tuple[str, ...]


class Stacks:
    """What the hooks know: the folder of this run's homes, and the test that runs."""

    folder: Path | None = None
    began = 0.0
    kept: tuple[Log, ...] = ()  # of stacks that a failure has taken down since
    secrets: ClassVar[set[str]] = set()


@pytest.fixture(scope="session", autouse=True)
def homes(tmp_path_factory: pytest.TempPathFactory) -> None:
    Stacks.folder = tmp_path_factory.getbasetemp().resolve()


def before_command(arguments: tuple[str, ...]) -> None:
    """Keep the logs that `deploy down` is about to remove because something failed."""
    if Stacks.folder is not None and arguments[:1] == ("down",) and sys.exc_info()[0]:
        Stacks.kept += tuple(_logs(Stacks.folder))
        Stacks.secrets |= _secrets(Stacks.folder)


def pytest_runtest_logstart() -> None:
    Stacks.began, Stacks.kept = time.clock_gettime(_FILE_CLOCK), ()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and Stacks.folder is not None:
        _explain(report, item.nodeid, Stacks.folder)
    return report


def _explain(report: pytest.TestReport, nodeid: str, homes: Path) -> None:
    folder = LOGS / re.sub(r"[^\w.-]+", "-", nodeid)[:150]
    Stacks.secrets |= _secrets(homes)
    plain = str(report.longrepr)
    if redacted(plain) != plain:
        report.longrepr = redacted(plain)
    report.sections = [(title, redacted(text)) for title, text in report.sections]
    found = {(log.stack, log.service): log for log in (*Stacks.kept, *_logs(homes))}
    for log in found.values():
        lines = redacted("\n".join(log.lines)).splitlines()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{log.stack}-{log.service}.log").write_text("\n".join(lines) + "\n")
        if log.condition != "ready":
            title = f"{log.service} of the stack {log.stack} ({log.condition}), its last lines"
            # An engine's last lines are of the process that noticed, not of the one that failed.
            cause = f"first error: {first_error(lines) or 'none'}"
            _add_section(report, title, "\n".join((cause, *lines[-SHOWN:])))


def redacted(text: str) -> str:
    """Return a text without secrets: those of the stacks, and what has the form of one."""
    redact = Redactor(tuple(Stacks.secrets))
    # Line by line: it cuts the end off what is long, and whole logs are.
    return "".join(_MADE.sub(MASK, redact(line)) for line in text.splitlines(keepends=True))


def _secrets(homes: Path) -> set[str]:
    found = set[str]()
    for pattern in ("*/secrets/*", "*/stacks/*/secrets/*"):
        for file in homes.glob(pattern):
            with suppress(OSError):
                text = file.read_text()
                found |= {*text.split(), *secrets_in(text)}
    return found


def _add_section(report: pytest.TestReport, title: str, text: str) -> None:
    """Add to the failure itself: sections of the report are left out of JUnit's file."""
    longrepr: Any = report.longrepr
    if hasattr(longrepr, "addsection"):
        longrepr.addsection(title, text)
    else:
        report.longrepr = f"{longrepr}\n--- {title} ---\n{text}"


def _logs(folder: Path) -> Iterator[Log]:
    """Yield the logs of every stack that is up, or has ended in this test."""
    for root in sorted(folder.glob("*/stacks/*")):
        home = root.parents[1]
        if home.is_symlink():
            continue  # pytest's own link to a test's newest folder
        try:
            yield from _logs_of(Home(home, home / "cache"), root.name)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the test's own failure counts
            yield Log(root.name, "report", "not read", (repr(exc),))


def _logs_of(home: Home, name: str) -> Iterator[Log]:
    try:
        running = find_stack(home, name)
    except PdkitError:  # broken state, or Docker gone: that is what the test is about
        running = None
    if running is None:
        yield from _ended(home.stack(name))
        return
    for service in running.stack.services:
        condition = running.condition(service)
        if condition != "not started":
            lines = running.launcher.log_lines(service.name, KEPT)
            yield Log(name, service.name, condition, lines)


def _ended(stack: StackHome) -> Iterator[Log]:
    for path in sorted(stack.logs_dir.glob("*.log")):
        if path.stat().st_mtime >= Stacks.began:
            yield Log(stack.root.name, path.stem, "ended", last_lines(path, KEPT))
