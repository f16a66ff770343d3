"""All rules in the order they are shown, and which findings stop `up`."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.doctor import docker, engine, gpus, host, hub, redis, resources, stack
from deploy.doctor.finding import Finding, Rule
from deploy.doctor.seen import Seen

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


def findings(seen: Seen) -> list[Finding]:
    """Return what all rules find, in their order."""
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
