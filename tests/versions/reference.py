"""The reference page of the fixes, made from the fixes themselves and the trials' verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INTRO = Path(__file__).with_name("reference_intro.md").read_text(encoding="utf-8")
SIGNS = {"fixed": "fixed", "guarded": "guarded", "not needed": "-", "not here": ""}


def page(
    fixes: Sequence[Any], versions: Sequence[str], verdicts: Mapping[tuple[str, str], str]
) -> str:
    """Return the page; `verdicts` is (fix id, version) → the matrix's word."""
    rows = [["fix", "bug", *versions], ["---"] * (len(versions) + 2)]
    for fix in fixes:
        signs = [SIGNS[verdicts[fix.id, version]] for version in versions]
        rows.append([f"[{fix.id}](#{fix.id.lower()})", fix.title, *signs])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n".join((INTRO, table, *(section(fix) for fix in fixes)))


def section(fix: Any) -> str:
    """Return what is said of one fix."""
    upstream = "not reported upstream" if fix.link == "none" else f"upstream: <{fix.link}>"
    heading = f'## <a id="{fix.id.lower()}"></a>{fix.id}: {fix.title}'
    return "\n".join(("", heading, "", fix.reason, "", upstream[0].upper() + upstream[1:]))
