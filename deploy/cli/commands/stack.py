"""The commands that start and stop a stack."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from deploy.cli.app import app
from deploy.cli.hints import naming_origins
from deploy.cli.options import File, Json, Name, takes_stack_options
from deploy.cli.printing import progress
from deploy.cli.result import CommandResult
from deploy.cli.shared import check_errors, load_source, named_spec, plan_answer
from deploy.config.runtimes import RUNTIMES
from deploy.errors import RedisUnreachable


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
    """Start a stack, and check that KV is reused. Starts only what does not run yet."""
    from deploy.document import as_document
    from deploy.output.check_view import check_view
    from deploy.output.views import up_view
    from deploy.runtime.boot import require_systemd
    from deploy.runtime.home import Home
    from deploy.runtime.lock import stack_lock
    from deploy.workflows.facts import runtime_here
    from deploy.workflows.preflight import require_fit
    from deploy.workflows.up import Up, bring_up, come_back_on_boot, prepare_here, resumed_spec
    from deploy.workflows.user_files import require_user_files

    report = progress()
    source = load_source(flags, file, ask=not json)
    home, name = Home.from_environ(), source.spec.name
    if on_boot and not RUNTIMES[runtime_here(source.spec, home)].survives_reboot:
        require_systemd()
    if dry_run:
        with naming_origins(source.origins):
            planned = prepare_here(source.spec, home, report)
            require_user_files(planned, home.stack(name).secrets_dir)
            require_fit(planned, home, report)
            return plan_answer("up", planned)
    with stack_lock(home.lock_file(name), name), naming_origins(source.origins):
        began = time.monotonic()
        # Without options, use the settings that the stack was started with.
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
    done = Up(
        name=result.running.stack.name,
        url=result.running.stack.url,
        model=result.running.prepared.plan.model.served_name,
        started=result.started,
        slowest_engine_s=result.slowest_engine_s,
        ready_s=result.seconds,
        total_s=total_s,
        check=checked,
        warnings=result.warnings,
    )
    return CommandResult("up", as_document(done), text, check_errors(checked, name))


@app.command()
def down(
    *,
    name: Name = None,
    file: File = None,
    volumes: Annotated[
        bool,
        typer.Option(
            "--volumes",
            help="Also delete the stack's keys from your own Redis (pdkit's own Redis is always "
            "removed).",
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

    home, spec = Home.from_environ(), named_spec(name, file, consented=volumes, ask=not json)
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
