"""What a result says about the machine, the software and the stack."""

from __future__ import annotations

import os
import platform
from contextlib import suppress

import psutil

from deploy import __version__
from deploy.benchmark.facts import Machine, ModelFacts, StackFacts, Versions
from deploy.metrics.connector import ConnectorReport
from deploy.metrics.page import MetricsPage
from deploy.planning.inventory import Gpu
from deploy.runtime.engine_api import ApiError
from deploy.runtime.host import machine_memory_mib, processor_name
from deploy.workflows.running import RunningStack, engine_page, store_of


def machine_facts(running: RunningStack) -> Machine:
    """Return the machine for the result: processor, GPUs in use, load."""
    return Machine(
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(machine_memory_mib() / 1024, 1),
        gpus=[gpu.name for gpu in used_gpus(running)],
        load_1m=round(psutil.getloadavg()[0], 2),
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def used_gpus(running: RunningStack) -> list[Gpu]:
    """Return the GPUs that the stack's engines have."""
    plan = running.prepared.plan
    used = {index for engine in plan.engines for index in engine.devices}
    gpus = running.prepared.inventory.gpus_of(plan.vendor.name)
    return [gpu for gpu in gpus if gpu.index in used]


def versions(running: RunningStack, vllm: str) -> Versions:
    """Return the versions that the services report, or that their environment has."""
    page = MetricsPage()
    with suppress(ApiError):
        page = engine_page(running, running.prepared.plan.engines[0].name)
    with store_of(running) as store:
        stats = store.stats()
    return Versions(
        pdkit=__version__,
        vllm=vllm or None,
        lmcache=ConnectorReport.read(page).lmcache or None,
        redis=stats.version if stats else None,
        router=__version__,
        generator=f"pdkit {__version__}",
    )


def model_facts(running: RunningStack, context: int) -> ModelFacts:
    """Return the model for the result; `context` is in tokens."""
    plan = running.prepared.plan
    return ModelFacts(
        name=plan.model.served_name,
        dtype=plan.dtype,
        kv_bytes_a_token=plan.kv_bytes_per_token,
        context=context,
    )


def up_extra_s(running: RunningStack) -> float | None:
    """Return the seconds of `up` beyond its slowest engine's start; None after a restart."""
    names = {engine.name for engine in running.prepared.plan.engines}
    records = running.state.services
    first = all(name in records and not running.launcher.restarts(records[name]) for name in names)
    return running.state.up_extra_s if first else None


def stack_facts(running: RunningStack) -> StackFacts:
    """Return the stack's shape and settings for the result."""
    plan = running.prepared.plan
    return StackFacts(
        vendor=plan.vendor.name,
        runtime=plan.runtime,
        topology=str(plan.topology).removesuffix("+redis"),
        tp=plan.tp,
        engines=len(plan.engines),
        gpus=len({index for engine in plan.engines for index in engine.devices}),
        redis=bool(plan.redis) or plan.user_redis,
        shards=len(plan.redis),
        chunk_size=plan.chunk_size,
    )
