"""The commands. Each imports what it needs when it runs, so that `--help` stays fast."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy import __version__
from deploy.cli.answer import Answer
from deploy.cli.options import File, Inventory, Json, Name, takes_stack_options
from deploy.errors import CheckFailed, ConfigError, StackUnhealthy, UsageError

if TYPE_CHECKING:
    from deploy.config.sources import SpecSource
    from deploy.verify.report import CheckReport
    from deploy.workflows.prepare import Prepared

_WATCH_S = 2.0

app = typer.Typer(
    name="deploy",
    help="Disaggregated prefill/decode vLLM with KV reuse through LMCache and Redis, proved.",
    rich_markup_mode=None,  # importing rich would triple the time of --help
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pdkit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="And exit.")
    ] = False,
) -> None:
    pass


@app.command()
@takes_stack_options
def up(
    *,
    file: File,
    flags: dict[str, Any],
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not prove that KV crosses.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan for this machine; start nothing.")
    ] = False,
    json: Json = False,
) -> Answer:
    """Start a stack, wait until it serves, and check that KV crosses. Idempotent."""
    from deploy.output.views import check_view, up_view
    from deploy.runtime.home import Home
    from deploy.runtime.lock import stack_lock
    from deploy.workflows.up import bring_up, prepare_here

    report = _progress()
    source = _load(flags, file)
    if dry_run:
        return _plan_answer("up", prepare_here(source.spec, Home.from_environ()))
    home, name = Home.from_environ(), source.spec.name
    with stack_lock(home.lock_file(name), name):
        began = time.monotonic()
        result, checked = bring_up(source.spec, home, report, check=not no_check)
    total_s = time.monotonic() - began
    data = {
        "name": name,
        "url": result.running.stack.service("router").url,
        "model": result.running.prepared.plan.model.served_name,
        "started": {service: round(took, 2) for service, took in result.started.items()},
        "slowest_engine_s": round(result.slowest_engine_s, 2),
        "ready_s": round(result.seconds, 2),
        "total_s": round(total_s, 2),
        "check": checked.as_dict() if checked else None,
    }
    text = up_view(result, total_s)
    if checked:
        text = f"{check_view(checked)}\n\n{text}"
    return Answer("up", data, text, _check_errors(checked, name))


@app.command()
@takes_stack_options
def plan(
    *, file: File, flags: dict[str, Any], inventory: Inventory = None, json: Json = False
) -> Answer:
    """Show engines, devices, ports and memory. Needs no GPU and starts nothing."""
    return _plan_answer("plan", _prepare(flags, file, inventory))


@app.command()
@takes_stack_options
def render(
    *,
    file: File,
    flags: dict[str, Any],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write into this folder instead of printing."),
    ] = None,
    inventory: Inventory = None,
    json: Json = False,
) -> Answer:
    """Print the stack as one YAML document, secrets by name only."""
    from deploy.stack.document import document_yaml, stack_document

    document = stack_document(_prepare(flags, file, inventory).stack)
    text = document_yaml(document)
    if output is None:
        return Answer("render", document, text.rstrip("\n"))
    if output.exists() and not output.is_dir():
        raise ConfigError(f"-o: '{output}' is a file", hint="deploy render -o FOLDER")
    output.mkdir(parents=True, exist_ok=True)
    target = output / "stack.yaml"
    target.write_text(text, encoding="utf-8")
    return Answer("render", {"files": [str(target)]}, f"wrote {target}")


@app.command()
def status(
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again every two seconds, until Ctrl-C.")
    ] = False,
    name: Name = None,
    json: Json = False,
) -> Answer:
    """Show what runs, how full it is, and how often the store was hit."""
    from deploy.output.views import status_view
    from deploy.runtime.home import Home
    from deploy.workflows.status import stack_status

    chosen = _stack_name(name)
    if watch and json:
        raise UsageError("--watch goes on for ever and --json prints once", hint="leave one out")
    while watch:
        typer.echo("\x1b[2J\x1b[H" if sys.stdout.isatty() else "")
        typer.echo(status_view(stack_status(Home.from_environ(), chosen)))
        time.sleep(_WATCH_S)
    found = stack_status(Home.from_environ(), chosen)
    errors = []
    if found.up and not found.healthy:
        sick = [s.name for s in found.services if s.condition != "ready"]
        errors.append(
            StackUnhealthy(f"not ready: {', '.join(sick)}", hint=f"deploy up --name {chosen}")
        )
    return Answer("status", found.as_dict(), status_view(found), errors)


@app.command()
def logs(
    service: Annotated[str | None, typer.Argument(help="One service; all if left out.")] = None,
    *,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C.")] = False,
    lines: Annotated[
        int, typer.Option("-n", "--lines", min=0, help="How many to begin with.")
    ] = 50,
    name: Name = None,
    json: Json = False,
) -> Answer:
    """Print the last lines of each service's log."""
    from deploy.runtime.home import Home
    from deploy.workflows.logs import log_files, stream, tail

    files = log_files(Home.from_environ(), _stack_name(name), service)
    found = tail(files, lines)
    one = len(files) == 1

    def shown(who: str, line: str) -> str:
        return line if one else f"{who} | {line}"

    if follow and json:
        raise UsageError("-f goes on for ever and --json prints once", hint="leave one out")
    if follow:
        for who, line in found:
            print(shown(who, line), flush=True)
        for who, line in stream(files):
            print(shown(who, line), flush=True)
    text = "\n".join(shown(who, line) for who, line in found)
    data = {
        "files": {who: str(path) for who, path in files.items()},
        "lines": [{"service": who, "line": line} for who, line in found],
    }
    return Answer("logs", data, text)


@app.command()
def down(
    *,
    name: Name = None,
    volumes: Annotated[
        bool, typer.Option("--volumes", help="Stored KV too; as processes none is kept anyway.")
    ] = False,
    json: Json = False,
) -> Answer:
    """Stop a stack and remove all it left. Idempotent."""
    from dataclasses import asdict

    from deploy.runtime.home import Home
    from deploy.runtime.lock import stack_lock
    from deploy.workflows.down import stop_stack

    home, chosen = Home.from_environ(), _stack_name(name)
    with stack_lock(home.lock_file(chosen), chosen):
        result = stop_stack(home, chosen, _progress())
    text = f"the stack '{chosen}' {'is down' if result.was_up else 'was not up'}"
    if result.others and not result.was_up:
        text += f"; up are: {', '.join(result.others)}"
    return Answer("down", asdict(result), text)


@app.command()
def check(*, name: Name = None, json: Json = False) -> Answer:
    """Prove on the running stack that KV crosses, completely and rightly."""
    from deploy.output.views import check_view
    from deploy.runtime.home import Home
    from deploy.runtime.lock import stack_lock
    from deploy.workflows.check import check_stack

    home, chosen = Home.from_environ(), _stack_name(name)
    with stack_lock(home.lock_file(chosen), chosen):
        report = check_stack(home, chosen, _progress())
    return Answer("check", report.as_dict(), check_view(report), _check_errors(report, chosen))


def _load(flags: dict[str, Any], file: Path | None) -> SpecSource:
    from deploy.config.sources import load_spec

    source = load_spec(flags, os.environ, file)
    if source.file and file is None:
        print(f"reading {source.file}", file=sys.stderr)
    return source


def _prepare(flags: dict[str, Any], file: Path | None, inventory: Path | None) -> Prepared:
    from deploy.runtime.home import Home
    from deploy.runtime.host import detect_inventory, read_inventory
    from deploy.workflows.prepare import named_programs, prepare

    spec = _load(flags, file).spec
    machine = read_inventory(inventory) if inventory else detect_inventory()
    return prepare(spec, Home.from_environ(), machine, named_programs(spec))


def _plan_answer(command: str, prepared: Prepared) -> Answer:
    from deploy.output.views import plan_data, plan_view

    return Answer(command, plan_data(prepared.plan), plan_view(prepared.plan))


def _check_errors(report: CheckReport | None, name: str) -> list[CheckFailed]:
    if report is None or report.passed:
        return []
    hint = report.diagnosis[0].hint if report.diagnosis else f"deploy logs --name {name}"
    return [CheckFailed(report.failures[0], hint=hint)]


def _stack_name(given: str | None) -> str:
    """Return the name that `up` would use here; refuse one that no stack can have."""
    from deploy.config.sources import load_spec

    return load_spec({"name": given}, os.environ).spec.name


def _progress() -> Callable[[str], None]:
    """Return a callback that writes lines with the seconds passed to stderr."""
    began = time.monotonic()

    def report(line: str) -> None:
        # A closed terminal must not end the work, nor the undoing of it.
        with contextlib.suppress(OSError):
            print(f"[{time.monotonic() - began:6.1f} s] {line}", file=sys.stderr, flush=True)

    return report
