"""The application that all commands belong to."""

from __future__ import annotations

from typing import Annotated

import typer

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
