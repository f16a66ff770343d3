"""Notes of a plan: what is assumed or unknown, and which settings make a stack smaller."""

from __future__ import annotations

from dataclasses import replace

from deploy.config.runtimes import RUNTIMES
from deploy.errors import options_text
from deploy.planning.inventory import Inventory
from deploy.planning.plan import Plan, plan_as_asked
from deploy.planning.rates import rate_note
from deploy.planning.topology import Topology
from deploy.planning.ways_out import longer_context

NO_GPU_FOUND = "no GPU found: using CPUs"
_SMALL_STORE_MIB = 1024
_SMALL_PART_MIB = 512  # of KV or staging, for each rank
_MORE_MEMORY = "stop other programs, or use a machine with more memory"


def plan_notes(plan: Plan, inventory: Inventory) -> tuple[str, ...]:
    """Return notes on assumptions, unknowns, and reasons for which `up` would refuse the plan."""
    return (
        *(line for line in inventory.seen if line.startswith("assumed")),
        *_slow_dtype(plan),
        *_unknown_model(plan),
        *_short_context(plan, inventory),
        *_small_store(plan),
        *_too_big(plan, inventory),
        *_low_limit(plan),
        *rate_note(plan),
    )


def smaller(plan: Plan, over_mib: int) -> str:
    """Return settings that reduce a stack's host memory by `over_mib`, the fewest first."""
    engines = len(plan.engines)
    fewest = replace(plan.topology, aggregated=2) if plan.aggregated else Topology(1, 1)
    ranks, one_mib = engines * plan.tp, plan.engines[0].memory_mib
    staging_mib = round(plan.limits.staging_gib * 1024) if plan.uses_redis else 0
    server_mib = plan.kv_server.kv_mib if plan.kv_server else 0
    in_host_mib = 0 if plan.vendor.has_gpus else (plan.kv_cache_bytes or 0) // 2**20
    savings = {
        f"a smaller redis.memory_gib (it is {plan.redis_memory_mib / 1024:.1f})": (
            plan.redis_memory_mib - _SMALL_STORE_MIB
        ),
        f"a smaller lmcache.server_gib (it is {server_mib / 1024:.1f})": (
            server_mib - _SMALL_STORE_MIB
        ),
        f"fewer engines than {engines}, by --topology {fewest}": (engines - fewest.engines)
        * one_mib,
        f"a smaller engine.kv_cache_gib (it is {in_host_mib / 1024:g})": (
            ranks * (in_host_mib - _SMALL_PART_MIB)
        ),
        f"a smaller lmcache.staging_gib (it is {plan.limits.staging_gib:g})": (
            engines * plan.limits.ranks * (staging_mib - _SMALL_PART_MIB)
        ),
    }
    chosen: list[str] = []
    left_mib = over_mib
    for how, saved_mib in sorted(savings.items(), key=lambda one: -one[1]):
        if saved_mib > 0 and left_mib > 0:
            chosen.append(how)
            left_mib -= saved_mib
    return " and ".join(chosen if left_mib <= 0 else [*chosen, _MORE_MEMORY])


def _slow_dtype(plan: Plan) -> list[str]:
    if plan.spec.engine.dtype or plan.dtype == "bfloat16":
        return []
    return [
        f"engines compute in {plan.dtype}: without AVX-512 this processor is slow at bfloat16 "
        "(engine.dtype sets another)"
    ]


def _unknown_model(plan: Plan) -> list[str]:
    if plan.kv_bytes_per_token is not None:
        return []
    model = plan.model
    cached = model.source != "hub" or model.version
    why = (
        "does not tell pdkit how much KV its layers keep"
        if cached
        else "is not in the hub's cache here"
    )
    ways = [] if cached else [f"hf download {model.ref} config.json puts it there"]
    store = ""
    if plan.spec.redis.memory_gib is None and plan.redis:
        store = ", and Redis gets a quarter of the machine's memory"
        ways.append("redis.memory_gib sets Redis's size")
    line = f"config.json of {model.served_name} {why}: KV size and context are unknown{store}"
    return ["; ".join((line, *ways))]


def _short_context(plan: Plan, inventory: Inventory) -> list[str]:
    shape, length = plan.model.shape, plan.max_model_len
    most = shape.max_positions if shape else None
    if plan.spec.engine.max_model_len or not most or not length or 2 * length >= most:
        return []
    line = f"context: {length:,} of the model's {most:,} tokens"
    if plan.spec.engine.kv_cache_gib:
        return [f"{line}, as engine.kv_cache_gib is {plan.spec.engine.kv_cache_gib:g}"]
    line += ", as no more KV fits"
    if not plan.vendor.has_gpus:
        return [f"{line}; engine.kv_cache_gib sets the memory for it"]
    way = longer_context(plan, inventory, lambda spec, on: plan_as_asked(spec, plan.model, on))
    if way is None:
        return [line]
    return [f"{line}; with {options_text(way.changes)}: {way.plan.max_model_len:,}"]


def _small_store(plan: Plan) -> list[str]:
    held, longest = plan.store_tokens, plan.max_model_len
    if held is None or longest is None or held >= longest:
        return []
    what, setting = (
        ("LMCache's server", "lmcache.server_gib")
        if plan.kv_server
        else ("Redis", "redis.memory_gib")
    )
    return [
        f"{what} holds {held:,} tokens of KV, and a prompt may have {longest:,}: what does not "
        f"fit is computed again ({setting}, or a smaller engine.max_model_len)"
    ]


def _too_big(plan: Plan, inventory: Inventory) -> list[str]:
    over_mib = plan.memory_mib - inventory.memory_mib
    if over_mib <= 0:
        return []
    return [
        f"{plan.memory_mib / 1024:.1f} GiB expected, the machine has "
        f"{inventory.memory_mib / 1024:.1f} GiB: deploy up would refuse; what helps: "
        f"{smaller(plan, over_mib)}"
    ]


def _low_limit(plan: Plan) -> list[str]:
    """Warn of a container's memory limit that its engine will probably exceed."""
    limit, expected = plan.spec.engine.memory_gib, plan.engines[0].memory_mib / 1024
    if limit is None or not RUNTIMES[plan.runtime].limits_memory or limit >= expected:
        return []
    return [
        f"engine.memory_gib: an engine is expected to hold {expected:.1f} GiB, and is killed "
        f"above {limit:g}"
    ]
