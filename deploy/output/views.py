"""Each command's result as people read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from deploy.output.table import duration, percent, size, table, told, told_size
from deploy.planning.memory import GIB
from deploy.planning.plan import Plan
from deploy.planning.redis import RedisPlan
from deploy.verify.store_path import StorePath
from deploy.workflows.prepare import Prepared, engine_image

if TYPE_CHECKING:  # each command imports its own workflow alone
    from deploy.workflows.down import DownResult
    from deploy.workflows.history import HistoryEntry
    from deploy.workflows.images import ImageRow
    from deploy.workflows.patches import Patches
    from deploy.workflows.status import StackStatus
    from deploy.workflows.swap import SwapResult
    from deploy.workflows.up import UpResult

_EVENTS_SHOWN = 10
_DOES = {"producer": "prefill", "consumer": "decode", "aggregated": "both"}


def plan_view(prepared: Prepared) -> str:
    """Return the plan as facts and a table of services."""
    plan = prepared.plan
    shared = plan.url + (", with a key" if plan.keyed else "")
    facts = [
        f"stack    {plan.name}: {plan.topology} on {plan.vendor.name}, runtime {plan.runtime}",
        f"model    {plan.model.served_name} ({plan.model.ref})",
        f"context  {_context(plan)}, block {plan.block_size}, "
        f"chunk {plan.chunk_size}"
        + (f", {plan.kv_bytes_per_token} bytes of KV a token" if plan.kv_bytes_per_token else "")
        + f", {plan.dtype}",
        f"memory   {size(plan.memory_mib)} expected{_staging(plan)}",
        f"store    {_store(prepared)}",
        *([f"limits   {_limits(plan)}"] if plan.shares_kv else []),
        *([f"image    {engine_image(prepared)}"] if engine_image(prepared) else []),
        f"address  {shared}",
        *(f"note     {line}" for line in prepared.notes),
    ]
    rows: list[tuple[object, ...]] = [
        *(_redis_row(shard, plan) for shard in plan.redis),
        *(
            (
                engine.name,
                _DOES[engine.role],
                _devices(plan, engine.devices, engine.cpu_threads),
                engine.port,
                size(engine.memory_mib),
            )
            for engine in plan.engines
        ),
        ("router", "front", "-", plan.port, "-"),
    ]  # fmt: skip
    body = table(("service", "does", "devices", "port", "memory"), rows)
    return "\n".join((*facts, "", body))


def _staging(plan: Plan) -> str:
    if not plan.shares_kv:
        return ""
    staging = size(round(plan.limits.staging_gib * 1024))
    return f", {staging} of it staging for each of {plan.storing_ranks} ranks"


def _store(prepared: Prepared) -> str:
    plan = prepared.plan
    if plan.user_redis:
        return f"your own Redis, from {prepared.spec.redis.url_file}"
    if not plan.redis:
        return "none: each engine has its own prefix cache"
    tokens = f", about {plan.store_tokens:,} tokens of KV" if plan.store_tokens else ""
    shards = f" in {len(plan.redis)} shards" if len(plan.redis) > 1 else ""
    return f"{size(plan.redis_memory_mib)} of Redis{shards}{tokens}"


def _redis_row(shard: RedisPlan, plan: Plan) -> tuple[object, ...]:
    port = (shard.port or "socket") if plan.runtime == "process" else "-"
    return (shard.name, "store", "-", port, size(shard.memory_mib))


def plan_data(prepared: Prepared) -> dict[str, Any]:
    """Return the plan for scripts."""
    plan = prepared.plan
    staging_gib = plan.limits.staging_gib if plan.shares_kv else 0
    return {
        "name": plan.name,
        "vendor": plan.vendor.name,
        "runtime": plan.runtime,
        "image": engine_image(prepared),
        "topology": str(plan.topology),
        "tp": plan.tp,
        "model": {
            "ref": plan.model.ref,
            "served_name": plan.model.served_name,
            "source": plan.model.source,
        },
        "router": {"host": plan.bind, "port": plan.port},
        "front": {"host": plan.bind, "port": plan.port, "url": plan.url, "keyed": plan.keyed},
        "redis": {
            "user_supplied": plan.user_redis,
            "shards": len(plan.redis),
            "port": plan.redis[0].port if plan.redis else 0,
            "memory_mib": plan.redis_memory_mib,
            "tokens": plan.store_tokens,
        },
        "staging": {
            "bytes_per_rank": int(staging_gib * GIB),
            "ranks": plan.storing_ranks,
        },
        "deadlines": {
            "lookup_s": plan.limits.lookup_s,
            "load_s": plan.limits.load_s,
            "store_s": plan.limits.store_s,
            "silent_s": plan.limits.silent_s,
        },
        "value_bytes": plan.limits.value_bytes,
        "dtype": plan.dtype,
        "block_size": plan.block_size,
        "chunk_size": plan.chunk_size,
        "max_model_len": plan.max_model_len,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_cache_bytes": plan.kv_cache_bytes,
        "gpu_share": plan.gpu_share,
        "memory_mib": plan.memory_mib,
        "layerwise": plan.layerwise,
        "save_decode_cache": plan.save_decode_cache,
        "engines": [
            {
                "name": engine.name,
                "role": engine.role,
                "port": engine.port,
                "devices": list(engine.devices),
                "cpu_threads": engine.cpu_threads,
                "memory_mib": engine.memory_mib,
            }
            for engine in plan.engines
        ],
        "notes": list(prepared.notes),
        "inventory": asdict(prepared.inventory),
    }


def _path_table(paths: Sequence[tuple[str, StorePath]]) -> str:
    rows = [
        (
            name,
            f"{path.stored_bytes / 1e9:.2f}",
            f"{path.loaded_bytes / 1e9:.2f}",
            f"{path.load_gb_s:.2f}" if path.loaded_s else "-",
            f"{path.lookup_ms:.1f}" if path.lookups else "-",
            f"{path.refused:.0f}",
            f"{path.left_out + path.not_loaded:.0f}",
            f"{path.failures:.0f}",
            f"{path.late:.0f}",
        )
        for name, path in paths
    ]
    header = ("Redis path", "GB in", "GB out", "GB/s out", "lookup ms", "refused", "lost",
              "failures", "late")  # fmt: skip
    return table(header, rows)


def up_view(result: UpResult, total_s: float) -> str:
    """Return how long the start took, and where the stack is reached."""
    plan = result.running.prepared.plan
    url = result.running.stack.front.url
    lines = [f"The stack '{plan.name}' ({plan.topology}) serves {plan.model.served_name} at {url}"]
    if result.slowest_engine_s:
        lines.append(
            f"slowest engine's own start: {result.slowest_engine_s:.1f} s; "
            f"deploy up, all told: {total_s:.1f} s"
        )
    body = f'{{"model": "{plan.model.served_name}", "prompt": "Hello", "max_tokens": 16}}'
    which = "" if plan.name == "pdkit" else f" --name {plan.name}"
    file = result.running.prepared.spec.api_key_file
    key = f'-H "Authorization: Bearer $(cat {file})" ' if file else ""
    lines += [
        "",
        f"talk to it   curl {url}/v1/completions -H 'Content-Type: application/json' {key}\\",
        f"               -d '{body}'",
        f"look at it   deploy status{which}",
        f"check again  deploy check{which}",
        f"stop it      deploy down{which}",
    ]
    return "\n".join(lines)


def status_view(status: StackStatus) -> str:
    """Return a stack's services as a table, with the hit rate since the engines started."""
    if not status.up:
        others = f"; running: {', '.join(status.others)}" if status.others else ""
        return f"the stack '{status.name}' is not up{others}"
    rows = [
        (
            service.name,
            service.condition + (", drained" if service.drained else ""),
            service.pid or "-",
            duration(service.uptime_s) if service.uptime_s else "-",
            size(service.resident_mib) if service.resident_mib else "-",
            service.restarts,
            percent(service.cache.external_hits / service.cache.external_queries)
            if service.cache and service.cache.external_queries
            else "-",
        )
        for service in status.services
    ]
    header = ("service", "state", "pid", "up", "memory", "restarts", "external hits")
    lines = [
        f"stack '{status.name}': {status.topology}, {status.model}, {status.url}",
        f"on {status.vendor}, runtime {status.runtime}"
        + (f", image {status.image}" if status.image else ""),
        "",
        table(header, rows),
    ]
    if status.store or status.user_redis:
        lines += ["", _store_line(status)]
    if paths := [(service.name, service.path) for service in status.services if service.path]:
        lines += ["", _path_table(paths)]
    lines += [f"warning: {line}" for line in status.warnings]
    if status.events:
        lines += ["", "events, the newest last:"]
        for event in status.events[-_EVENTS_SHOWN:]:
            at = datetime.fromisoformat(event.at).isoformat(timespec="seconds")
            lines.append(f"{at}  {event.service} {event.text}")
    if len(status.history) > 1:
        lines += ["", "history, newest first:", _history(status.history)]
    return "\n".join(lines)


def _store_line(status: StackStatus) -> str:
    whose = "your own Redis" if status.user_redis else "Redis"
    store = status.store
    if store is None:
        return f"{whose}: does not answer"
    most = "no limit" if store.max_memory_bytes == 0 else told_size(store.max_memory_bytes)
    return (
        f"{whose}: {told(store.keys)} keys, {told_size(store.used_memory_bytes)} of {most}, "
        f"{told(store.evicted_keys)} evicted"
    )


def down_view(result: DownResult) -> str:
    """Return what became of a stack, and what is left of it in a Redis of the user's own."""
    lines = [f"the stack '{result.name}' {'is down' if result.was_up else 'was not up'}"]
    if result.others and not result.was_up:
        lines[0] += f"; running: {', '.join(result.others)}"
    left = result.left
    if left and left.removed:
        lines.append(f"removed from your Redis: {left.keys} keys {left.prefix}*")
    elif left and left.why_not:
        lines.append(f"keys {left.prefix}* may remain in your Redis: {left.why_not}")
    elif left and left.keys:
        many = f"{left.keys}" if left.all_seen else f"at least {left.keys}"
        lines += [
            f"{many} keys {left.prefix}* stay in your Redis for the next start of this stack",
            f"remove them: deploy down --volumes --name {result.name}, with -f STACK_FILE where "
            "redis.url_file is not in ./deploy.yaml",
        ]
    return "\n".join(lines)


def swap_view(result: SwapResult) -> str:
    """Return what a swap or rollback changed."""
    before, after = (f"{vendor}, {image}" if image else vendor for vendor, image in
                     (result.before, result.after))  # fmt: skip
    if result.check is None:
        return f"the stack '{result.name}' already runs on {after}; nothing was changed"
    which = "" if result.name == "pdkit" else f" --name {result.name}"
    return "\n".join(
        (
            f"The stack '{result.name}' runs on {after} (before: {before})",
            f"{result.down_s:.1f} s without service; kept running: "
            f"{', '.join(result.kept) or 'nothing'}",
            "",
            f"go back to it   deploy rollback{which}",
        )
    )


def images_view(rows: Sequence[ImageRow]) -> str:
    """Return the catalogue as a table."""
    cells = [
        (
            row.name + (" *" if row.default else ""),
            row.image,
            row.vllm or "-",
            row.lmcache or "-",
            row.verdict or "-",
            f"{row.age_days} d",
            size(row.size_mib) if row.here else f"no: {row.how}",
        )
        for row in rows
    ]
    header = ("image", "reference", "vLLM", "LMCache", "together", "pinned", "here")
    notes = [f"{row.name}: {row.note}" for row in rows if row.note]
    return "\n".join((table(header, cells), "", "* the vendor's default", *notes))


def patches_view(patches: Patches) -> str:
    """Return the fixes as a table, with what to know of them."""
    rows = [
        (
            row.id,
            "; ".join(
                f"{state} ({', '.join(engines)})" if len(row.states) > 1 else state
                for state, engines in row.states.items()
            ),
            row.title,
            row.link.removeprefix("https://github.com/"),
        )
        for row in patches.fixes
    ]
    lmcache = f", LMCache {patches.lmcache}" if patches.lmcache else ""
    return "\n".join(
        (
            f"{patches.where}{lmcache}",
            "",
            table(("fix", "state", "bug", "upstream"), rows),
            *(f"warning: {line}" for line in patches.warnings),
        )
    )


def _history(entries: Sequence[HistoryEntry]) -> str:
    rows = [
        (
            datetime.fromisoformat(one.at).isoformat(timespec="seconds"),
            one.action,
            one.outcome,
            one.vendor,
            one.image or "-",
            one.topology,
            shorten(one.reason, 60, placeholder=" …"),
        )
        for one in entries
    ]
    return table(("when", "by", "went", "vendor", "image", "topology", "why not"), rows)


def _context(plan: Plan) -> str:
    return f"{plan.max_model_len} tokens" if plan.max_model_len else "as the model says"


def _limits(plan: Plan) -> str:
    limits = plan.limits
    value = f"; values of {limits.value_bytes:,} bytes" if limits.value_bytes else ""
    return (
        f"lookup {limits.lookup_s:g} s, load {limits.load_s:g} s, store {limits.store_s:g} s, "
        f"silent Redis {limits.silent_s:g} s{value}"
    )


def _devices(plan: Plan, devices: tuple[int, ...], threads: int) -> str:
    if devices:
        shared = f", {percent(plan.gpu_share)} of it" if plan.shares_gpus and plan.gpu_share else ""
        return "GPU " + ",".join(map(str, devices)) + shared
    return f"{plan.vendor.name}, {threads} thread{'s' if threads > 1 else ''}"
