"""The command that proves a running stack."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.answer import Answer
from deploy.cli.app import app
from deploy.cli.options import Json, Name
from deploy.cli.shared import check_errors, progress, stack_name
from deploy.errors import UsageError


@app.command()
def check(  # noqa: PLR0913 - one parameter an option
    *,
    pairs: Annotated[
        list[str] | None,
        typer.Option(help="Which pairs, such as 'producer-0:*'; may be given several times."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the pairs and the router, as 'up' does.")
    ] = False,
    min_hit_rate: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0,
            help="The eligible hit rate to reach; 1 asks for exactly what can be a hit.",
        ),
    ] = 1.0,
    repeat: Annotated[int, typer.Option(min=1, help="How many times, one after the other.")] = 1,
    junit: Annotated[
        Path | None, typer.Option(help="Write the findings into this file, too, as JUnit XML.")
    ] = None,
    name: Name = None,
    json: Json = False,
) -> Answer:  # fmt: skip
    """Prove on the running stack that KV crosses, completely and rightly."""
    from deploy.output.check_view import check_view, runs_view
    from deploy.output.junit import write_junit
    from deploy.runtime.home import Home
    from deploy.runtime.lock import stack_lock
    from deploy.workflows.check import CheckOptions, check_stack

    if junit and not junit.absolute().parent.is_dir():
        raise UsageError(
            f"--junit {junit}: there is no folder {junit.absolute().parent}",
            hint=f"mkdir -p {junit.absolute().parent}",
        )
    home, chosen = Home.from_environ(), stack_name(name)
    options = CheckOptions(tuple(pairs or ("*:*",)), quick=quick, least=min_hit_rate)
    reports = []
    with stack_lock(home.lock_file(chosen), chosen):
        for run in range(repeat):
            report = progress()
            if repeat > 1:
                report(f"run {run + 1} of {repeat}")
            reports.append(check_stack(home, chosen, report, options))
    if junit:
        write_junit(junit, reports, chosen)
    # What is shown is the first run that failed, else the last.
    shown = next((one for one in reports if not one.passed), reports[-1])
    data, text = shown.as_dict(), check_view(shown)
    if repeat > 1:
        passed = sum(one.passed for one in reports)
        data = {**data, "runs": repeat, "runs_passed": passed, "passed": passed == repeat}
        text = f"{text}\n\n{runs_view(reports)}"
    return Answer("check", data, text, check_errors(shown, chosen))
