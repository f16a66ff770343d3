"""A plan as people read it, and as `--json` shows it."""

from __future__ import annotations

from typing import Any

from deploy.document import as_document
from deploy.output import plan_document as document
from deploy.output.table import percent, table
from deploy.planning.memory import GIB, size
from deploy.planning.plan import Plan
from deploy.planning.redis import RedisPlan
from deploy.workflows.prepare import Prepared, engine_image

_DOES = {"producer": "prefill", "consumer": "decode", "aggregated": "both"}


def plan_view(prepared: Prepared) -> str:
    """Return the plan as facts and a table of services."""
    plan = prepared.plan
    shared = plan.url + (", with a key" if plan.keyed else "")
    choice = prepared.connector_choice
    least = prepared.smallest_machines
    facts = [
        f"stack    {plan.name}: {plan.topology} on {plan.vendor.name}, runtime {plan.runtime}",
        f"model    {plan.model.served_name} ({plan.model.ref})",
        f"context  {_context(plan)}, block {_block(plan)}, "
        f"chunk {plan.chunk_size}{_a_token(plan)}, {plan.dtype}",
        f"memory   {size(plan.memory_mib)} expected{_staging(plan)}",
        *([f"least    {' or '.join(least)}, for one engine"] if least else []),
        f"store    {_store(prepared)}",
        *([f"sharing  {choice}"] if choice else []),
        *([f"limits   {_limits(plan)}"] if plan.uses_redis else []),
        *([f"image    {engine_image(prepared)}"] if engine_image(prepared) else []),
        f"address  {shared if plan.has_router else 'engines only: the router is on another host'}",
        *(f"note     {line}" for line in prepared.notes),
    ]
    rows: list[tuple[object, ...]] = [
        *(_redis_row(shard, plan) for shard in plan.redis),
        *_server_row(plan),
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
        *((one.name, _DOES[one.role], one.url, "-", "-") for one in plan.remote),
        *([("router", "front", "-", plan.port, "-")] if plan.has_router else []),
        *(_monitoring_rows(prepared) if plan.prometheus_port else ()),
    ]  # fmt: skip
    body = table(("service", "does", "devices", "port", "memory"), rows)
    return "\n".join((*facts, "", body))


def _staging(plan: Plan) -> str:
    if not plan.uses_redis:
        shared = plan.shared_memory_mib
        return f", {size(shared)} of it in /dev/shm" if shared else ""
    staging = size(round(plan.limits.staging_gib * 1024))
    return f", {staging} of it staging for each of {plan.storing_ranks} ranks"


def _store(prepared: Prepared) -> str:
    plan = prepared.plan
    if not plan.shares_kv:
        return "none: each engine has its own prefix cache"
    if not plan.kv_server:
        return _redis(prepared)
    first = f"{size(plan.kv_server.kv_mib)} of LMCache's server{_tokens(plan.store_tokens)}"
    return f"{first}; then {_redis(prepared)}"


def _redis(prepared: Prepared) -> str:
    plan = prepared.plan
    if plan.user_redis:
        return f"your own Redis, from {prepared.spec.redis.url_file}"
    shards = f" in {len(plan.redis)} shards" if len(plan.redis) > 1 else ""
    return f"{size(plan.redis_memory_mib)} of Redis{shards}{_tokens(plan.redis_tokens)}"


def _block(plan: Plan) -> str:
    return str(plan.block_size) if plan.sets_block_size else "as vLLM chooses"


def _a_token(plan: Plan) -> str:
    """Return the size of KV, and whether vLLM said it: of the generated model the kit knows it."""
    if not plan.kv_bytes_per_token:
        return ""
    read = plan.model.source == "tiny" or (plan.model.shape and plan.model.shape.reader)
    estimated = "" if read else " (estimated from config.json)"
    return f", {plan.kv_bytes_per_token} bytes of KV per token{estimated}"


def _tokens(count: int | None) -> str:
    return f", about {count:,} tokens of KV" if count else ""


def _redis_row(shard: RedisPlan, plan: Plan) -> tuple[object, ...]:
    port = (shard.port or "socket") if plan.runtime == "process" else "-"
    return (shard.name, "store", "-", port, size(shard.memory_mib))


def _server_row(plan: Plan) -> list[tuple[object, ...]]:
    server = plan.kv_server
    if server is None:
        return []
    gpus = ", ".join(str(gpu.index) for gpu in plan.gpus)
    return [
        (server.name, "store", f"GPU {gpus}" if gpus else "-", "socket", size(server.memory_mib))
    ]


def _monitoring_rows(prepared: Prepared) -> list[tuple[object, ...]]:
    return [(one.name, "monitoring", "-", one.port, "-") for one in prepared.stack.monitoring]


def plan_data(prepared: Prepared) -> dict[str, Any]:
    """Return the plan for scripts."""
    plan = prepared.plan
    return as_document(
        document.Plan(
            name=plan.name,
            vendor=plan.vendor.name,
            runtime=plan.runtime,
            image=engine_image(prepared),
            topology=str(plan.topology),
            tp=plan.tp,
            model=document.PlannedModel(plan.model.ref, plan.model.served_name, plan.model.source),
            router=document.RouterAddress(plan.bind, plan.port),
            front=document.Front(
                host=plan.bind,
                port=plan.port,
                url=plan.url if plan.has_router else "",
                keyed=plan.keyed,
            ),
            redis=document.PlannedRedis(
                user_supplied=plan.user_redis,
                shards=len(plan.redis),
                port=plan.redis[0].port if plan.redis else 0,
                memory_mib=plan.redis_memory_mib,
                tokens=plan.redis_tokens,
            ),
            connector=plan.connector,
            connector_choice=prepared.connector_choice,
            kv_server=_server(plan),
            staging=_staging_memory(plan),
            deadlines=document.Deadlines(
                lookup_s=plan.limits.lookup_s,
                load_s=plan.limits.load_s,
                store_s=plan.limits.store_s,
                silent_s=plan.limits.silent_s,
            ),
            value_bytes=plan.limits.value_bytes,
            dtype=plan.dtype,
            block_size=plan.block_size,
            chunk_size=plan.chunk_size,
            max_model_len=plan.max_model_len,
            kv_bytes_per_token=plan.kv_bytes_per_token,
            kv_cache_bytes=plan.kv_cache_bytes,
            gpu_share=plan.gpu_share,
            memory_mib=plan.memory_mib,
            layerwise=plan.layerwise,
            save_decode_cache=plan.save_decode_cache,
            engines=[
                document.PlannedEngine(
                    name=one.name,
                    role=one.role,
                    port=one.port,
                    devices=one.devices,
                    cpu_threads=one.cpu_threads,
                    memory_mib=one.memory_mib,
                )
                for one in plan.engines
            ],
            remote_engines=[
                document.RemoteEngine(one.name, one.role, one.url) for one in plan.remote
            ],
            smallest_machines=prepared.smallest_machines,
            notes=prepared.notes,
            inventory=prepared.inventory,
        )
    )


def _staging_memory(plan: Plan) -> document.Staging:
    rank_gib = plan.limits.staging_gib if plan.uses_redis else 0
    return document.Staging(int(rank_gib * GIB), plan.storing_ranks)


def _server(plan: Plan) -> document.PlannedServer | None:
    if plan.kv_server is None:
        return None
    return document.PlannedServer(
        kv_mib=plan.kv_server.kv_mib,
        memory_mib=plan.kv_server.memory_mib,
        tokens=plan.store_tokens,
        shared_memory_mib=plan.shared_memory_mib,
    )


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
