"""The text output of `deploy doctor`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from deploy.doctor.finding import Finding
from deploy.workflows.doctor import Examination

_WIDTH = 7  # of the longest status, 'unknown'


def doctor_view(found: Examination) -> str:
    """Return the findings by area, with why and fix of those that are not ok, and a verdict."""
    shape = f" ({found.topology})" if found.topology else ""
    lines = [f"stack '{found.name}'{shape} on {found.vendor}, runtime {found.runtime}", ""]
    width = max((len(one.id) for one in found.findings), default=0)
    for one in found.findings:
        lines += _finding(one, width)
    return "\n".join((*lines, "", _verdict(found)))


def _finding(one: Finding, width: int) -> Iterator[str]:
    yield f"{one.status.ljust(_WIDTH)}  {one.id.ljust(width)}  {one.message}"
    margin = " " * (_WIDTH + 2 + width + 2)
    if one.why:
        yield f"{margin}why: {one.why}"
    if one.fix:
        yield f"{margin}try: {one.fix}"


def _verdict(found: Examination) -> str:
    counts = Counter(one.status for one in found.findings)
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    end = "`deploy up` would fail" if found.failed else "nothing blocks `deploy up`"
    return f"{said}: {end}"
