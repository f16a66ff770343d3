"""The reference of all rules, as docs/reference/doctor.md holds it between its marks."""

from __future__ import annotations

from itertools import groupby

from deploy.doctor.rules import RULES

BEGIN, END = "<!-- rules: made from deploy/doctor -->", "<!-- end of rules -->"


def reference() -> str:
    """Return a table for each area, in the order in which findings are shown."""
    parts = []
    for area, rules in groupby(RULES, key=lambda rule: rule.area):
        rows = [
            f"| `{rule.id}` | {rule.looks_at} | {rule.fails or '-'} | {rule.warns or '-'} "
            f"| {rule.fix or '-'} |"
            for rule in rules
        ]
        head = ("| finding | looks at | fails if | warns if | fix |", "|---|---|---|---|---|")
        parts.append("\n".join((f"### {area}", "", *head, *rows)))
    return "\n\n".join(parts)
