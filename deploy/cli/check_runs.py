"""A check that is repeated, here or in a cluster's Job, and what all its runs found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from deploy.output.check_view import check_view, runs_view
from deploy.verify.report import CheckReport
from deploy.workflows.check import CheckOptions
from deploy.workflows.prepare import Report


def repeated(
    check: Callable[[CheckOptions], CheckReport], options: CheckOptions, count: int, report: Report
) -> Iterator[CheckReport]:
    """Yield the report of each run; the user's own prompt is sent in the first one only."""
    for run in range(count):
        if count > 1:
            report(f"run {run + 1} of {count}")
        yield check(options)
        # After the first run, engines hold the prompt's KV in their own prefix caches.
        options = replace(options, prompt=None)


def shown_of(reports: Sequence[CheckReport]) -> CheckReport:
    """Return the first run that failed, else the last one."""
    return next((one for one in reports if not one.passed), reports[-1])


def summary(reports: Sequence[CheckReport]) -> tuple[dict[str, Any], str]:
    """Return the result of all runs as JSON and as text."""
    shown = shown_of(reports)
    if len(reports) == 1:
        return shown.as_dict(), check_view(shown)
    whole = replace(
        shown,
        runs=len(reports),
        runs_passed=sum(one.passed for one in reports),
        slowest_s=max(one.seconds for one in reports),
    )
    return whole.as_dict(), f"{check_view(shown)}\n\n{runs_view(reports)}"
