"""Several boxes alike: their engines and Redis servers, and what the network between must carry."""

from __future__ import annotations

import math
from dataclasses import replace

from deploy.config.spec import MAX_SHARDS
from deploy.planning.engines import EnginePlan
from deploy.planning.plan import Plan
from deploy.planning.rates import computed_gb_s
from deploy.planning.redis import redis_shards


def across(plan: Plan, boxes: int) -> Plan:
    """Return the plan of several boxes: each has the engines, and brings the Redis, of this one.

    Where the boxes would bring more servers than engines can use, some of their memory stays
    unused: no box has more of it in servers than it has for Redis.
    """
    if boxes == 1:
        return plan
    shards = min(boxes * len(plan.redis), MAX_SHARDS)
    own_mib = plan.redis_memory_mib // max(1, math.ceil(shards / boxes))
    redis = redis_shards(0, shards, shards * own_mib) if shards else ()
    return replace(plan, engines=tuple(_numbered(plan.engines, boxes)), redis=redis)


def _numbered(engines: tuple[EnginePlan, ...], boxes: int) -> list[EnginePlan]:
    """Return the engines of all boxes, those of a role together and numbered from 0."""
    found = []
    for role in dict.fromkeys(engine.role for engine in engines):
        own = [engine for engine in engines if engine.role == role]
        name = own[0].name.rpartition("-")[0]
        found += [replace(one, name=f"{name}-{at}") for at, one in enumerate(boxes * own)]
    return found


def network_note(plan: Plan, boxes: int, link_gbit: float | None) -> list[str]:
    """Return what the network of each box must carry; nothing for one box.

    A chunk goes from its producer to Redis, and from there to a consumer; Redis servers are spread
    over the boxes. So a box sends, and receives, twice the KV that it computes.

    Args:
        plan: of one box.
        link_gbit: what a box's link carries each way, in Gbit/s, if that is known.
    """
    if boxes == 1 or not plan.shares_kv:
        return []
    computed = computed_gb_s(plan)
    if computed is None:
        return [
            "what the network must carry is unknown: the GPUs' names are needed "
            "(--inventory FILE), and the size of the model's weights"
        ]
    needed = 2 * 8 * computed
    said = (
        f"estimate: prefill of a box computes up to {computed:.1f} GB/s of KV, for which it sends "
        f"and receives {needed:.0f} Gbit/s"
    )
    if link_gbit is None:
        return [f"{said}; --link-gbit N compares that with its link"]
    if needed <= link_gbit:
        return [f"{said}; its link carries {link_gbit:g}"]
    return [
        f"{said}; its link carries {link_gbit:g}, so under full load, loading KV is slower than "
        "computing it"
    ]
