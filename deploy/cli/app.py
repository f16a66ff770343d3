"""The application that all commands belong to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.models import CommandInfo

from deploy import __version__

app = typer.Typer(
    name="deploy",
    help="Disaggregated prefill/decode vLLM with checked KV reuse through LMCache and Redis.",
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
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    pass


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """Return the application with the typed command alone; with all, if it is no command.

    Typer inspects the options of all commands that it has, and that takes as long as a plan.
    """
    named = [one for one in app.registered_commands if arguments[:1] == [_name_of(one)]]
    if not named:
        return app
    narrowed = copy.copy(app)
    narrowed.registered_commands, narrowed.registered_groups = named, []
    return narrowed


def _name_of(command: CommandInfo) -> str:
    return command.name or str(getattr(command.callback, "__name__", ""))
