"""The commands that restart services, and take engines out of use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.app import app
from deploy.cli.options import Json, Name
from deploy.cli.printing import progress
from deploy.cli.result import CommandResult
from deploy.cli.shared import locked_stack
from deploy.errors import UsageError

if TYPE_CHECKING:
    from deploy.workflows.drain import DrainOptions

Wait = Annotated[
    float, typer.Option(help="Seconds to wait for an engine's requests to end (default: 600).",
                        show_default=False),
]  # fmt: skip
Force = Annotated[
    bool, typer.Option("--force", help="Continue even if requests are refused meanwhile.")
]
Engine = Annotated[str, typer.Argument(help="Engine name, such as consumer-0.")]


@app.command()
def restart(
    service: Annotated[
        str | None, typer.Argument(help="Service to restart (default: all engines in turn).")
    ] = None,
    *,
    wait: Wait = 600.0,
    force: Force = False,
    name: Name = None,
    json: Json = False,
) -> CommandResult:
    """Restart a service, or all engines one after the other. Engines lose no request."""
    from dataclasses import asdict

    from deploy.workflows.restart import restart_services

    options = _options(wait, force)
    with locked_stack(name) as (home, chosen):
        result = restart_services(home, chosen, service, progress(), options)
    lines = (f"{who} was restarted in {took:.1f} s" for who, took in result.seconds.items())
    return CommandResult("restart", asdict(result), "\n".join(lines))


@app.command()
def drain(
    engine: Engine,
    *,
    wait: Wait = 600.0,
    force: Force = False,
    name: Name = None,
    json: Json = False,
) -> CommandResult:
    """Send an engine no new requests, and wait until it has none left."""
    from deploy.document import as_document
    from deploy.workflows.drain import Drained
    from deploy.workflows.drain import drain as take_out

    options = _options(wait, force)
    with locked_stack(name) as (home, chosen):
        take_out(home, chosen, engine, progress(), options)
    done = f"{engine} gets no new requests and has no requests left"
    text = f"{done}\nuse it again: deploy undrain {engine}"
    return CommandResult("drain", as_document(Drained(chosen, engine, drained=True)), text)


@app.command()
def undrain(engine: Engine, *, name: Name = None, json: Json = False) -> CommandResult:
    """Send requests to a drained engine again."""
    from deploy.document import as_document
    from deploy.workflows.drain import Drained
    from deploy.workflows.drain import undrain as put_back

    with locked_stack(name) as (home, chosen):
        put_back(home, chosen, engine)
    data = as_document(Drained(chosen, engine, drained=False))
    return CommandResult("undrain", data, f"{engine} gets requests again")


def _options(wait_s: float, force: bool) -> DrainOptions:
    from deploy.workflows.drain import DrainOptions

    if not 0 <= wait_s < float("inf"):
        raise UsageError(f"--wait {wait_s:g} is not a number of seconds", hint="--wait 600")
    return DrainOptions(wait_s, force=force)
