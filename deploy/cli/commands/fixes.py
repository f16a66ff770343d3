"""The command that shows the connector's fixes."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.app import app
from deploy.cli.options import Json, Name
from deploy.cli.result import CommandResult
from deploy.cli.shared import stack_name
from deploy.errors import CheckFailed


@app.command()
def fixes(
    *,
    image: Annotated[
        str | None,
        typer.Option(
            help="Look into this image instead of the running stack: a profile from `deploy images "
            "list` or an image reference. Starts no engine."
        ),
    ] = None,
    name: Name = None,
    json: Json = False,
) -> CommandResult:
    """Show the connector's fixes in the running stack or an image."""
    from deploy.document import as_document
    from deploy.output.views import fixes_view
    from deploy.runtime.home import Home
    from deploy.workflows.fix_states import fixes_of

    found = fixes_of(Home.from_environ(), stack_name(name), image)
    failed = [row.id for row in found.fixes if "failed" in row.states]
    errors = []
    if failed:
        errors.append(
            CheckFailed(
                f"needed fixes could not be applied: {', '.join(failed)}",
                hint="deploy images list, then use an image with a tested pair of versions",
            )
        )
    return CommandResult("fixes", as_document(found), fixes_view(found), errors)
