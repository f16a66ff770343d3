"""A plan for several identical machines, and what the network between them must carry."""

from __future__ import annotations

import math
from dataclasses import replace

from deploy.config.spec import MAX_SHARDS
from deploy.planning.engines import EnginePlan
from deploy.planning.plan import Plan
from deploy.planning.rates import computed_gb_s
from deploy.planning.redis import redis_shards


def across(plan: Plan, machines: int) -> Plan:
    """Return the plan of several machines, each with the engines and the Redis servers of this one.

    If that is more Redis servers than engines can use, some memory for Redis stays unused: no
    machine gives its servers more memory than it has for Redis.
    """
    if machines == 1:
        return plan
    shards = min(machines * len(plan.redis), MAX_SHARDS)
    own_mib = plan.redis_memory_mib // max(1, math.ceil(shards / machines))
    redis = redis_shards(0, shards, shards * own_mib) if shards else ()
    return replace(plan, engines=tuple(_numbered(plan.engines, machines)), redis=redis)


def _numbered(engines: tuple[EnginePlan, ...], machines: int) -> list[EnginePlan]:
    """Return the engines of all machines, grouped by role and numbered from 0."""
    found = []
    for role in dict.fromkeys(engine.role for engine in engines):
        own = [engine for engine in engines if engine.role == role]
        name = own[0].name.rpartition("-")[0]
        found += [replace(one, name=f"{name}-{at}") for at, one in enumerate(machines * own)]
    return found


def network_note(plan: Plan, machines: int, link_gbit: float | None) -> list[str]:
    """Return the network traffic of each machine; nothing for one machine.

    A chunk goes from its producer to Redis, and from there to a consumer; Redis servers are spread
    over the machines. So a machine sends, and receives, twice the KV that it computes.

    Args:
        plan: of one machine.
        link_gbit: bandwidth of a machine's link each way, in Gbit/s; None if unknown.
    """
    if machines == 1 or not plan.shares_kv:
        return []
    computed = computed_gb_s(plan)
    if computed is None:
        return [
            "what the network must carry is unknown: the GPUs' names are needed "
            "(--inventory FILE), and the size of the model's weights"
        ]
    needed = 2 * 8 * computed
    said = (
        f"estimate: prefill of a machine computes up to {computed:.1f} GB/s of KV, for which it "
        f"sends and receives {needed:.0f} Gbit/s"
    )
    if link_gbit is None:
        return [f"{said}; --link-gbit N compares that with its link"]
    if needed <= link_gbit:
        return [f"{said}; its link carries {link_gbit:g}"]
    return [
        f"{said}; its link carries {link_gbit:g}, so under full load, loading KV is slower than "
        "computing it"
    ]
