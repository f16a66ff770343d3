"""All rules in the order they are shown, which findings stop `up`, and their reference page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from deploy.doctor import docker, engine, gpus, host, hub, redis, resources, stack
from deploy.doctor.finding import Finding, Rule
from deploy.doctor.observed import Seen

RULES: tuple[Rule, ...] = (
    *docker.RULES,
    *gpus.RULES,
    *resources.RULES,
    *host.RULES,
    *hub.RULES,
    *engine.RULES,
    *redis.RULES,
    *stack.RULES,
)
BEGIN, END = "<!-- rules: made from deploy/doctor -->", "<!-- end of rules -->"


def findings(seen: Seen) -> list[Finding]:
    """Return the findings of all rules, in their order."""
    return [
        Finding(id=rule.id, area=rule.area, **vars(verdict))
        for rule in RULES
        if (verdict := rule.judge(seen)) is not None
    ]


def failed(found: Sequence[Finding]) -> list[Finding]:
    """Return the findings that make `up` fail; errors in the spec first."""
    return sorted((one for one in found if one.status == "fail"), key=lambda one: not one.usage)


def warned(found: Sequence[Finding]) -> list[Finding]:
    """Return the findings that do not stop `up`."""
    return [one for one in found if one.status == "warn"]


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
