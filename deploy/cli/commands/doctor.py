"""The command that finds problems before a stack is started."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from deploy.cli.app import app
from deploy.cli.hints import naming_origins
from deploy.cli.options import File, Json, takes_stack_options
from deploy.cli.printing import progress
from deploy.cli.result import CommandResult
from deploy.cli.shared import load_source
from deploy.errors import PdkitError


@app.command()
@takes_stack_options
def doctor(*, file: File, flags: dict[str, Any], json: Json = False) -> CommandResult:
    """Find what would stop `deploy up` or lower the hit rate.

    Names a fix for each problem. Starts nothing.
    """
    from deploy.document import as_document
    from deploy.output.views import doctor_view
    from deploy.runtime.home import Home
    from deploy.workflows.doctor import examine
    from deploy.workflows.preflight import refusal
    from deploy.workflows.up import resumed_spec

    source, home = load_source(flags, file, ask=not json), Home.from_environ()
    spec = source.spec
    # As with `up`: without options, use the settings that the stack was started with.
    if not source.origins.keys() - {"name"}:
        with suppress(PdkitError):  # a state that is broken is a finding
            spec = resumed_spec(home, spec.name, required=False) or spec
    with naming_origins(source.origins):
        found = examine(spec, home, progress())
    errors = [refusal(found.failed)] if found.failed else []
    return CommandResult("doctor", as_document(found), doctor_view(found), errors)
