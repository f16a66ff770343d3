"""Helpers of commands: which stack a command is about, and errors from its result."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.cli.result import CommandResult

if TYPE_CHECKING:
    from deploy.config.sources import SpecSource
    from deploy.config.spec import StackSpec
    from deploy.errors import CheckFailed, StackUnhealthy
    from deploy.runtime.home import Home
    from deploy.verify.report import CheckReport
    from deploy.workflows.prepare import Prepared

# Nobody reads more than this before typing y.
_MOST_CHARACTERS = 4000
_PATIENCE_S = 300


def load_source(flags: dict[str, Any], file: Path | None, *, ask: bool) -> SpecSource:
    """Return the settings from options, environment and stack file, and where they came from.

    Args:
        ask: on a terminal, ask whether to use a file that must be allowed.

    Raises:
        ConfigError: a setting is wrong, or ./deploy.yaml runs programs and is not allowed yet.
    """
    from deploy.config.sources import load_spec, named_file

    source = load_spec(flags, os.environ, file)
    require_consent(source, named=named_file(file, os.environ) is not None, ask=ask)
    if source.file and file is None:
        print(f"reading {source.file}", file=sys.stderr)
    return source


def require_consent(source: SpecSource, *, named: bool, ask: bool) -> None:
    """Refuse a file that names programs or addresses until the user allows it.

    The current folder may belong to somebody else. Naming a file (-f, PDKIT_FILE) allows it until
    it changes, and so does an answer on the terminal.

    Raises:
        ConfigError: it was never allowed, or has changed.
    """
    from deploy.errors import ConfigError
    from deploy.runtime import consent
    from deploy.runtime.home import Home

    reaching = source.reaching()
    if source.file is None or not reaching:
        return
    home = Home.from_environ()
    if named:
        consent.remember(home, source.file, source.content)
        return
    if consent.is_known(home, source.file, source.content):
        return
    if ask and is_allowed_now(source, reaching):
        if not consent.remember(home, source.file, source.content):
            print(f"the answer was not saved: {home.state} is not writable", file=sys.stderr)
        return
    raise ConfigError(
        f"{source.file} sets {', '.join(reaching)}, and is new or has changed since you used "
        "it: read it first; it can run programs and send secrets",
        retry=({"-f": str(source.file)},),
        note="which remembers the file until it changes",
    )


def stack_name(given: str | None) -> str:
    """Return the stack name that `up` would use here, validated."""
    return named_spec(given).name


@contextlib.contextmanager
def locked_stack(given: str | None) -> Iterator[tuple[Home, str]]:
    """Lock the stack that the command is about; yield the home folder and the stack's name."""
    from deploy.runtime.home import Home
    from deploy.runtime.lock import stack_lock

    home, name = Home.from_environ(), stack_name(given)
    with stack_lock(home.lock_file(name), name):
        yield home, name


def named_spec(
    name: str | None, file: Path | None = None, *, consented: bool = False, ask: bool = False
) -> StackSpec:
    """Return the spec that `up` would use here, with another name if one is given.

    Args:
        consented: `require_consent` must allow the file, because its addresses are used.
        ask: on a terminal, ask whether to use such a file.
    """
    from deploy.config.sources import load_spec, named_file

    source = load_spec({"name": name}, os.environ, file)
    if consented:
        require_consent(source, named=named_file(file, os.environ) is not None, ask=ask)
    return source.spec


def check_errors(report: CheckReport | None, name: str) -> list[CheckFailed]:
    """Return the error of a failed check, with the best next step as its hint."""
    from deploy.errors import CheckFailed

    if report is None or report.passed:
        return []
    hint = report.diagnosis[0].hint if report.diagnosis else f"deploy logs --name {name}"
    return [CheckFailed(report.failures[0], hint=hint)]


def unhealthy(sick: Sequence[str], name: str, *, hint: str = "") -> list[StackUnhealthy]:
    """Return an error if a service of the stack is not ready.

    Args:
        hint: what to type; by default, the command that starts those services again here.
    """
    if not sick:
        return []
    from deploy.errors import StackUnhealthy

    hint = hint or f"deploy up --resume --name {name}"
    return [StackUnhealthy(f"not ready: {', '.join(sick)}", hint=hint)]


def plan_answer(command: str, prepared: Prepared) -> CommandResult:
    """Return a plan as the answer of a command."""
    from deploy.output.plan_view import plan_data, plan_view

    return CommandResult(command, plan_data(prepared), plan_view(prepared))


def is_allowed_now(source: SpecSource, reaching: Sequence[str]) -> bool:
    """Show what a file sets that can do harm, and ask; False where nobody can read and answer."""
    if not _someone_is_there():
        return False
    from deploy.output.views import settings_view

    shown = settings_view(source.spec, reaching)
    if len(shown) > _MOST_CHARACTERS:
        return False
    return _answer(
        f"{source.file} is new or has changed since you used it. With these settings it can run "
        f"programs, open ports or send secrets:\n\n{shown}\n"
        "Use it, and remember this until the file changes? [y/N] "
    ) in (b"y", b"yes")


def _someone_is_there() -> bool:
    """Whether a person can answer: not in CI, which may have a terminal, nor in the background."""
    # With a pipe as stdout, a pager behind it may read the same terminal.
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if os.environ.get("CI") or not all(stream and stream.isatty() for stream in streams):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # not the terminal that controls this process
        return False


def _answer(question: str) -> bytes:
    """Return the line that is typed after the question, without what was typed ahead of it."""
    import select
    import termios

    terminal = sys.stdin.fileno()
    termios.tcflush(terminal, termios.TCIFLUSH)
    print(question, end="", file=sys.stderr, flush=True)
    if not select.select([terminal], [], [], _PATIENCE_S)[0]:
        print(f"no answer in {_PATIENCE_S} s", file=sys.stderr)
        return b""
    return os.read(terminal, 1024).strip().lower()
