"""Run the steps that are not done yet, and write the page."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import redis

from bench.gpu_proof import page
from bench.gpu_proof.model import SHAPES, SMALL
from bench.gpu_proof.results import ROOT, WRONG_ANSWERS, Result, Results, kit_commit
from bench.gpu_proof.session import Session, StepFailed
from bench.gpu_proof.steps import STEPS, Step
from bench.kit import free_ports, say
from deploy.config.compat import judge
from deploy.config.fields import IN_ENGINES, MP, Connector
from deploy.runtime.detect import detect_inventory, detected_vendor
from deploy.runtime.engine_api import ApiError
from deploy.runtime.host import engine_versions

STEP_S = 460
# Exit codes.
DONE, FAILED, USAGE, MISSING, TO_GO_ON, INTERRUPTED = 0, 1, 2, 3, 4, 130
# What may go wrong in a step on an unknown machine: it fails, and the next one runs.
_TROUBLE = (
    *(StepFailed, ApiError, httpx.HTTPError, redis.RedisError, subprocess.SubprocessError),
    *(OSError, LookupError, ValueError, TypeError, RuntimeError),
)


class TimeIsUp(StepFailed):
    """A step took longer than it may."""


def run(asked: argparse.Namespace, *, began: float) -> int:
    """Run what is asked for; return the exit code."""
    session = _session(asked)
    if session is None:
        return MISSING
    works = (None, *working_connectors(session.vendor))
    steps = [
        step
        for step in STEPS
        if step.needs_gpus <= session.gpus
        and (
            step.name == asked.only or (step.connector in works and (step.short or not asked.short))
        )
    ]
    chosen = [step for step in steps if asked.only in (None, step.name)]
    if not chosen:
        names = ", ".join(step.name for step in steps)
        say(f"error: --only: '{asked.only}' is not one of {names}")
        return USAGE
    results = Results(session.state / "results")
    try:
        return _run_steps(chosen, session, results, until=began + 60 * asked.minutes, asked=asked)
    except KeyboardInterrupt:
        say("interrupted; run this again to go on")
        return INTERRUPTED
    finally:
        if not asked.keep:
            _end(session)
        _write_page(asked, session, steps, results)


def working_connectors(vendor: str) -> tuple[Connector, ...]:
    """Return the connectors that work with the installed versions; the kit names what is wrong."""
    versions = engine_versions(sys.executable)
    found = (IN_ENGINES, MP)
    works = tuple(one for one in found if judge(vendor, *versions, connector=one).works)
    return works or (IN_ENGINES,)


def _run_steps(
    steps: Sequence[Step],
    session: Session,
    results: Results,
    *,
    until: float,
    asked: argparse.Namespace,
) -> int:
    """Run steps that have not passed before, with this very kit; one asked for by name anyway."""
    commit, code = kit_commit(), DONE
    for number, step in enumerate(steps, 1):
        where = f"[{number}/{len(steps)}] {step.name}"
        if not asked.only and results.is_done(step.name, commit):
            say(f"{where}: done before")
            continue
        if time.time() > until:
            say(f"{asked.minutes:g} minutes are up; run this again to go on")
            return TO_GO_ON
        say(f"{where}: {step.title}")
        result = _ran(step, session, commit)
        results.write(result)
        why = "; ".join([*result.failures, *result.facts.get(WRONG_ANSWERS, ())])
        say(f"    {result.verdict}{why and f': {why}'} ({result.seconds:.0f} s)")
        code = code if result.passed else FAILED
    return code


def _session(asked: argparse.Namespace) -> Session | None:
    """Return the session on this machine; None, and say why, where it has no GPU."""
    machine = detect_inventory()
    vendor = "cpu" if asked.cpu else detected_vendor(machine)
    if vendor == "cpu" and not asked.cpu:
        say(f"error: there is no GPU here ({'; '.join(machine.seen)}); try: --cpu --short")
        return None
    state = asked.state.absolute()
    state.mkdir(parents=True, exist_ok=True)
    shape = SMALL if asked.short else SHAPES[asked.shape]
    return Session(
        state, vendor, _port(asked, state), len(machine.gpus_of(vendor)), shape, asked.short
    )


def _port(asked: argparse.Namespace, state: Path) -> int:
    """Return the port that was asked for, or of the last run: its stack may be up."""
    file = state / "port"
    if asked.port is None and file.is_file():
        return int(file.read_text(encoding="utf-8"))
    port = asked.port or free_ports()
    file.write_text(str(port), encoding="utf-8")
    return int(port)


def _ran(step: Step, session: Session, commit: str) -> Result:
    began = time.monotonic()
    try:
        with _deadline(STEP_S):
            facts, failures = step.run(session)
    except _TROUBLE as exc:
        facts, failures = {}, [f"{type(exc).__name__}: {exc}"]
    if failures:
        session.keep_logs(step.name)
    return Result(step.name, round(time.monotonic() - began, 1), facts, list(failures), commit)


@contextmanager
def _deadline(seconds: int) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeIsUp(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _end(session: Session) -> None:
    try:
        session.down()
    except StepFailed as exc:
        say(f"the stack could not be stopped: {exc}")


def _write_page(
    asked: argparse.Namespace, session: Session, steps: Sequence[Step], results: Results
) -> None:
    # One that was asked for by name may not be of this form.
    listed = [step for step in STEPS if step in steps or results.read(step.name)]
    found = [(step, results.read(step.name)) for step in listed]
    tools = results.read("tools")
    name = tools.facts["name"] if tools else session.vendor
    if MP in (kinds := {step.connector for step in steps}) and IN_ENGINES not in kinds:
        name = f"{name}-{MP}"  # another pair of versions than that of the other page
    # What processors did is no result of a GPU: it stays with the state.
    on_gpus = session.vendor != "cpu"
    folder = ROOT / "docs/results" if on_gpus else session.state
    file = asked.results or folder / f"gpu-{name}.md"
    file.write_text(page.text(name, found), encoding="utf-8")
    say(f"\n{page.steps_table(found)}\n\nwritten: {file}")
    if on_gpus and tools and tools.facts["fixtures"]:
        shutil.copytree(
            session.state / "fixtures", ROOT / "tests/fixtures/detect", dirs_exist_ok=True
        )
        say(f"written: {', '.join(tools.facts['fixtures'])} in tests/fixtures/detect")
