"""The commands that plan, start, look at and stop a stack."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.app import app
from deploy.cli.hints import naming_origins
from deploy.cli.options import File, Inventory, Json, Name, takes_stack_options
from deploy.cli.printing import progress
from deploy.cli.result import CommandResult
from deploy.cli.shared import check_errors, load_source, named_spec
from deploy.errors import RedisUnreachable

if TYPE_CHECKING:
    from deploy.config.spec import StackSpec
    from deploy.runtime.home import Home
    from deploy.verify.report import CheckReport
    from deploy.workflows.prepare import Prepared
    from deploy.workflows.up import UpResult


@app.command()
@takes_stack_options
def up(  # noqa: PLR0913 - one parameter an option
    *,
    file: File,
    flags: dict[str, Any],
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Skip the check that KV is reused.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan for this machine and start nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Reuse the last plan and ignore the other options.")
    ] = False,
    on_boot: Annotated[
        bool,
        typer.Option(
            "--on-boot",
            help="Let systemd start the processes again after a reboot, until deploy down.",
        ),
    ] = False,
    json: Json = False,
) -> CommandResult:
    """Start a stack, wait until it serves, and check that KV is reused. Idempotent."""
    from deploy.output.check_view import check_view
    from deploy.output.views import up_view
    from deploy.runtime.boot import require_systemd
    from deploy.runtime.home import Home
    from deploy.runtime.lock import stack_lock
    from deploy.workflows.facts import runtime_here
    from deploy.workflows.preflight import require_fit
    from deploy.workflows.up import bring_up, come_back_on_boot, prepare_here, resumed_spec
    from deploy.workflows.user_files import require_user_files

    report = progress()
    source = load_source(flags, file)
    home, name = Home.from_environ(), source.spec.name
    if on_boot and runtime_here(source.spec) == "process":
        require_systemd()
    if dry_run:
        with naming_origins(source.origins):
            planned = prepare_here(source.spec, home, report)
            require_user_files(planned, home.stack(name).secrets_dir)
            require_fit(planned, home, report)
            return _plan_answer("up", planned)
    with stack_lock(home.lock_file(name), name), naming_origins(source.origins):
        began = time.monotonic()
        # Without options, the stack as it was started is meant.
        as_it_was = resume or not source.origins.keys() - {"name"}
        was = resumed_spec(home, name, required=resume) if as_it_was else None
        result, checked = bring_up(
            was or source.spec, home, report, check=not no_check, resumed=resume
        )
        if on_boot:
            come_back_on_boot(result.running, home, report)
    total_s = time.monotonic() - began
    text = up_view(result, total_s)
    if checked:
        text = f"{check_view(checked)}\n\n{text}"
    data = _up_data(result, checked, total_s)
    return CommandResult("up", data, text, check_errors(checked, name))


def _up_data(result: UpResult, checked: CheckReport | None, total_s: float) -> dict[str, Any]:
    return {
        "name": result.running.stack.name,
        "url": result.running.stack.url,
        "model": result.running.prepared.plan.model.served_name,
        "started": {service: round(took, 2) for service, took in result.started.items()},
        "slowest_engine_s": round(result.slowest_engine_s, 2),
        "ready_s": round(result.seconds, 2),
        "total_s": round(total_s, 2),
        "check": checked.as_dict() if checked else None,
        "warnings": result.warnings,
    }


@app.command()
@takes_stack_options
def plan(
    *, file: File, flags: dict[str, Any], inventory: Inventory = None, json: Json = False
) -> CommandResult:
    """Show engines, devices, ports and memory. Needs no GPU and starts nothing."""
    from deploy.runtime.home import Home
    from deploy.workflows.facts import runtime_here
    from deploy.workflows.user_files import api_key
    from deploy.workflows.user_redis import redis_url

    source = load_source(flags, file)
    with naming_origins(source.origins):
        prepared = _prepare(source.spec, inventory, Home.from_environ(), runtime_here)
        if inventory is None:  # the paths of another machine are not looked for here
            api_key(source.spec)
            redis_url(prepared)
        return _plan_answer("plan", prepared)


@app.command()
@takes_stack_options
def render(
    *,
    file: File,
    flags: dict[str, Any],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Write the files to this folder instead of printing them."
        ),
    ] = None,
    inventory: Inventory = None,
    json: Json = False,
) -> CommandResult:
    """Print the Compose document of a stack, or its processes. Secrets are shown by name only."""
    from deploy.runtime.home import Home
    from deploy.stack.document import document_yaml
    from deploy.workflows.render import rendered, write_rendered

    home = Home.from_environ()
    # Printed output may be for any machine; written files are for this one.
    source = load_source(flags, file)
    with naming_origins(source.origins):
        probe = output is not None
        prepared = _prepare(source.spec, inventory, home, lambda _: "compose", probe=probe)
        if output is None:
            document = rendered(prepared, home)
            return CommandResult("render", document, document_yaml(document).rstrip("\n"))
        files, then = write_rendered(prepared, home, output)
    text = "\n".join((*(f"wrote {path}" for path in files), f"start it with: {then}"))
    return CommandResult("render", {"files": [str(path) for path in files], "start": then}, text)


@app.command()
def down(
    *,
    name: Name = None,
    file: File = None,
    volumes: Annotated[
        bool,
        typer.Option(
            "--volumes",
            help="Also delete the stack's keys from your own Redis (pdkit's own always goes).",
        ),
    ] = False,
    json: Json = False,
) -> CommandResult:
    """Stop a stack and remove everything it left behind. Idempotent."""
    from dataclasses import asdict

    from deploy.output.views import down_view
    from deploy.runtime.home import Home
    from deploy.runtime.lock import stack_lock
    from deploy.workflows.down import stop_stack

    home, spec = Home.from_environ(), named_spec(name, file)
    with stack_lock(home.lock_file(spec.name), spec.name):
        result = stop_stack(
            home, spec.name, progress(), volumes=volumes, url_file=spec.redis.url_file
        )
    errors = []
    if volumes and result.left and result.left.why_not:
        errors.append(
            RedisUnreachable(
                f"keys {result.left.prefix}* remain in your Redis: {result.left.why_not}",
                hint=f"make that Redis reachable, then deploy down --volumes --name {spec.name}",
            )
        )
    return CommandResult("down", asdict(result), down_view(result), errors)


def _prepare(
    spec: StackSpec,
    inventory: Path | None,
    home: Home,
    auto_runtime: Callable[[StackSpec], str],
    *,
    probe: bool = True,
) -> Prepared:
    """Return a plan to show; `auto_runtime` decides what the runtime 'auto' means."""
    from deploy.workflows.facts import stated_facts
    from deploy.workflows.prepare import prepare

    machine = None
    if inventory:
        from deploy.runtime.detect.inventory_file import read_inventory

        machine = read_inventory(inventory)
    facts = stated_facts(spec, machine, runtime=auto_runtime(spec), probe=probe)
    return prepare(spec, home, facts)


def _plan_answer(command: str, prepared: Prepared) -> CommandResult:
    from deploy.output.plan_view import plan_data, plan_view

    return CommandResult(command, plan_data(prepared), plan_view(prepared))
