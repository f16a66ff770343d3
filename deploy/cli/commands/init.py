"""The command that writes a deploy.yaml for this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.app import app
from deploy.cli.options import Json
from deploy.cli.result import CommandResult


@app.command()
def init(
    *,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", help="File to write (default: deploy.yaml)."),
    ] = None,
    json: Json = False,
) -> CommandResult:
    """Write a commented deploy.yaml for this machine. Never overwrites a file."""
    import shlex

    from deploy.config.sources import DEFAULT_FILE, named_file
    from deploy.document import as_document
    from deploy.workflows.init import Written, survey_machine, write_example

    named = named_file(file, os.environ)
    target = named or DEFAULT_FILE
    found = survey_machine()
    write_example(target, found)
    chosen = ", ".join(f"{name}: {value}" for name, value in found.settings.items())
    option = f" -f {shlex.quote(str(file))}" if file else ""
    text = (
        f"wrote {target} with {chosen}\nfound: {found.machine}\n\n"
        f"see what it plans   deploy plan{option}\nstart it            deploy up{option}"
    )
    done = Written(str(target), found.settings, found.machine, found.cached)
    return CommandResult("init", as_document(done), text)
