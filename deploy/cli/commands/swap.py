"""The commands that replace a stack's vendor, image or connector."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from deploy.cli.app import app
from deploy.cli.options import Json, Name
from deploy.cli.printing import progress
from deploy.cli.result import CommandResult
from deploy.cli.shared import locked_stack
from deploy.errors import UsageError

if TYPE_CHECKING:
    from deploy.runtime.home import Home
    from deploy.workflows.swap import SwapResult


@app.command()
def swap(
    vendor: Annotated[str | None, typer.Argument(help="New vendor: cuda, rocm or cpu.")] = None,
    *,
    image: Annotated[
        str | None,
        typer.Option(
            help="New engine image: a profile from `deploy images list` or an image reference "
            "(default: the vendor's profile)."
        ),
    ] = None,
    connector: Annotated[
        str | None,
        typer.Option(
            help="New connector: lmcache, or lmcache-mp, through LMCache's server (default: as "
            "before)."
        ),
    ] = None,
    allow_untested: Annotated[
        bool,
        typer.Option(
            "--allow-untested",
            help="Allow an untested pair of vLLM and LMCache versions (default: refuse it).",
        ),
    ] = False,
    name: Name = None,
    json: Json = False,
) -> CommandResult:
    """Replace the engines' vendor, image or connector.

    If the new engines do not start or their check fails, the old ones are restored.
    """
    from deploy.config.fields import Connector
    from deploy.config.vendors import VENDORS, meant_vendor
    from deploy.workflows.swap import SwapTo, swap_stack

    if vendor is None and image is None and connector is None:
        raise UsageError(
            "give a vendor or --image to swap to, or --connector", hint="deploy swap rocm"
        )
    connectors = get_args(Connector)
    if connector not in (None, *connectors):
        raise UsageError(
            f"--connector: '{connector}' is not one of {', '.join(connectors)}",
            hint=f"deploy swap --connector {connectors[-1]}",
        )
    if vendor not in (None, *VENDORS):
        meant = meant_vendor(vendor or "")
        guess = f"; did you mean '{meant}'?" if meant else ""
        raise UsageError(
            f"'{vendor}' is not one of {', '.join(VENDORS)}{guess}",
            hint=f"deploy swap {meant or 'rocm'}",
        )

    def work(home: Home, stack: str, report: Callable[[str], None]) -> SwapResult:
        to = SwapTo(vendor, image, connector, allow_untested)
        return swap_stack(home, stack, to, report)

    return _run("swap", name, work)


@app.command()
def rollback(*, name: Name = None, json: Json = False) -> CommandResult:
    """Return to the last plan that worked before this one."""
    from deploy.workflows.swap import roll_back

    return _run("rollback", name, lambda home, stack, report: roll_back(home, stack, report=report))


def _run(
    command: str, name: str | None, work: Callable[[Home, str, Callable[[str], None]], SwapResult]
) -> CommandResult:
    from deploy.document import as_document
    from deploy.output.check_view import check_view
    from deploy.output.views import swap_view

    with locked_stack(name) as (home, chosen):
        result = work(home, chosen, progress())
    text = swap_view(result)
    if result.check:
        text = f"{check_view(result.check)}\n\n{text}"
    return CommandResult(command, as_document(result), text)
