"""The command that checks a running stack."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.app import app
from deploy.cli.options import (
    Context,
    ExportFolder,
    InCluster,
    Json,
    Name,
    Namespace,
    require_fitting,
)
from deploy.cli.printing import progress
from deploy.cli.result import CommandResult
from deploy.cli.shared import check_errors, stack_name
from deploy.errors import ConfigError, PdkitError, UsageError

if TYPE_CHECKING:
    from deploy.verify.report import CheckReport
    from deploy.workflows.check import CheckOptions
    from deploy.workflows.cluster_job import JobOptions


@app.command()
def check(  # noqa: PLR0913 - one parameter an option
    folder: ExportFolder = None,
    *,
    pairs: Annotated[
        list[str] | None,
        typer.Option(help="Pairs to check, such as 'producer-0:*'; repeatable (default: all)."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Check only the pairs and the router, as `deploy up` does."),
    ] = False,
    min_hit_rate: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0,
            help="Lowest eligible hit rate that passes; 1 means all that can hit.",
        ),
    ] = 1.0,
    repeat: Annotated[int, typer.Option(min=1, help="Number of runs in a row.")] = 1,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="Also send the prompt in this file and report where its KV came from."),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(help="Also write the findings to this file as JUnit XML.")
    ] = None,
    kubernetes: InCluster = False,
    context: Context = None,
    namespace: Namespace = None,
    name: Name = None,
    json: Json = False,
) -> CommandResult:  # fmt: skip
    """Check that the running stack reuses KV completely and correctly."""
    remote = {"FOLDER": folder, "--context": context, "--namespace": namespace}
    require_fitting(kubernetes=kubernetes, needs=remote, refuses={"--name": name})
    if junit and not junit.absolute().parent.is_dir():
        raise UsageError(
            f"--junit {junit}: folder {junit.absolute().parent} does not exist",
            hint=f"mkdir -p {junit.absolute().parent}",
        )
    prompt = _text(prompt_file) if prompt_file else None
    if kubernetes:
        from deploy.workflows.cluster_job import JobOptions

        named = (namespace or "kubernetes") if junit else ""
        asked = JobOptions(
            tuple(pairs or ()),
            quick=quick,
            least=min_hit_rate,
            prompt=prompt,
            repeat=repeat,
            junit=named,
        )
        return _in_cluster(context, namespace, folder, asked, junit)
    from deploy.workflows.check import CheckOptions

    options = CheckOptions(tuple(pairs or ("*:*",)), quick=quick, least=min_hit_rate, prompt=prompt)
    return _here(stack_name(name), options, repeat, junit)


def _in_cluster(
    context: str | None, namespace: str | None, folder: Path | None, options: JobOptions,
    junit: Path | None,
) -> CommandResult:  # fmt: skip
    from deploy.output.junit import junit_xml, write_junit
    from deploy.runtime.kubectl import Kubectl
    from deploy.workflows.cluster_job import check_by_job

    try:
        found = check_by_job(Kubectl(context or "", namespace or ""), folder, progress(), options)
    except PdkitError as ended:
        if junit:
            _keep(junit, junit_xml([], options.junit, ended))
        raise
    if junit:
        write_junit(junit, found.junit)
    return CommandResult("check", found.data, found.text, found.errors)


def _here(chosen: str, options: CheckOptions, repeat: int, junit: Path | None) -> CommandResult:
    from deploy.cli.check_runs import repeated, shown_of, summary
    from deploy.runtime.home import Home
    from deploy.runtime.lock import stack_lock
    from deploy.workflows.check import check_stack

    home, report = Home.from_environ(), progress()
    with stack_lock(home.lock_file(chosen), chosen):
        runs = repeated(partial(check_stack, home, chosen, report), options, repeat, report)
        reports = _written(runs, junit, chosen)
    return CommandResult("check", *summary(reports), check_errors(shown_of(reports), chosen))


def _written(runs: Iterator[CheckReport], junit: Path | None, name: str) -> list[CheckReport]:
    """Return the runs' reports, and write them where JUnit is asked for.

    When a run ends in an error, the reports before it are written together with that error: CI
    needs them then most of all.
    """
    from deploy.output.junit import junit_xml, write_junit

    reports: list[CheckReport] = []
    try:
        for report in runs:
            reports.append(report)
    except PdkitError as ended:
        if junit:
            _keep(junit, junit_xml(reports, name, ended))
        raise
    if junit:
        write_junit(junit, junit_xml(reports, name))
    return reports


def _keep(junit: Path, xml: str) -> None:
    """Write JUnit XML of a run that ended in an error, which is worth more than this one."""
    from deploy.output.junit import write_junit

    try:
        write_junit(junit, xml)
    except ConfigError as exc:
        progress()(f"warning: {exc.message}")


def _text(file: Path) -> str:
    """Return a file's text.

    Raises:
        UsageError: it cannot be read, or is not text.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise UsageError(
            f"--prompt-file {file}: {why}", hint=f"printf 'your prompt' > {file}"
        ) from exc
