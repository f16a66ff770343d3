"""Build the stack of a plan: Redis, producers, consumers and the router in front of them."""

from __future__ import annotations

import json

from deploy.assets import asset
from deploy.config.spec import StackSpec
from deploy.planning.plan import EnginePlan, Plan
from deploy.stack.containers import in_container
from deploy.stack.engine import engine_argv, engine_env, lmcache_config
from deploy.stack.layout import LOOPBACK, ContainerLayout, Layout
from deploy.stack.router import router_argv, router_env
from deploy.stack.service import ConfigFile, Health, Service, Stack

REDIS_PASSWORD = "redis_password"  # noqa: S105 - the name of the secret, not the secret
API_KEY = "api_key"


def build_stack(plan: Plan, spec: StackSpec, layout: Layout) -> Stack:
    """Return the stack of services that carries out the plan."""
    services = [_redis(plan, spec, layout)]
    for engine in plan.engines:
        # Engines that measure a GPU at the same time would count each other's memory.
        before = [services[-1].name] if plan.shares_gpus and len(services) > 1 else []
        services.append(_engine(engine, plan, spec, layout, before))
    services.append(_router(plan, spec, layout))
    if plan.keyed:
        services.append(_gateway(plan, spec, layout))
    if isinstance(layout, ContainerLayout):
        services = [in_container(service, plan, spec, layout) for service in services]
    return Stack(plan.name, plan.runtime, tuple(services), (REDIS_PASSWORD,))


def _redis(plan: Plan, spec: StackSpec, layout: Layout) -> Service:
    place = layout.redis(plan)
    file = layout.file("redis", "redis.conf")
    own = (
        f"bind {place.bind}",
        f"port {place.port}",
        f"dir {json.dumps(layout.redis_dir())}",  # quoted as Redis reads it: it may have spaces
        f"maxmemory {plan.redis_memory_mib}mb",
        f"requirepass @{{{REDIS_PASSWORD}}}",
    )
    text = asset("compose", "redis.conf").read_text(encoding="utf-8") + "\n".join(own) + "\n"
    return Service(
        name="redis",
        role="redis",
        argv=(layout.redis_program, file.seen_at),
        host=LOOPBACK,
        port=plan.redis_port,
        health=Health("redis"),
        ready_s=min(30.0, spec.timeouts.ready_s),
        files=(ConfigFile(file.path, text, file.target),),
        memory_mib=plan.redis_memory_mib,
    )


def _engine(
    engine: EnginePlan, plan: Plan, spec: StackSpec, layout: Layout, before: list[str]
) -> Service:
    file = layout.file(engine.name, "lmcache.yaml")
    url = f"redis://:@{{{REDIS_PASSWORD}}}@{layout.redis(plan).reached_at}"
    return Service(
        name=engine.name,
        role=engine.role,
        argv=(layout.engine_program, *engine_argv(engine, plan, spec, layout)),
        host=LOOPBACK,
        port=engine.port,
        health=Health("http", "/health"),
        ready_s=spec.timeouts.ready_s,
        env=engine_env(engine, plan, spec, layout, file.seen_at),
        files=(
            ConfigFile(
                file.path, lmcache_config(engine.role, plan, spec, layout, url), file.target
            ),
        ),
        depends_on=("redis", *before),
        devices=engine.devices,
        memory_mib=engine.memory_mib,
    )


def _router(plan: Plan, spec: StackSpec, layout: Layout) -> Service:
    return Service(
        name="router",
        role="router",
        argv=(layout.router_program, *router_argv(plan, layout)),
        host=plan.router_bind,
        port=plan.router_port,
        health=Health("http", "/readiness"),
        ready_s=spec.timeouts.ready_s,
        env=router_env(plan, layout),
        extra_ports=(plan.router_metrics_port,),
        depends_on=tuple(engine.name for engine in plan.engines),
    )


def _gateway(plan: Plan, spec: StackSpec, layout: Layout) -> Service:
    place = layout.gateway(plan)
    return Service(
        name="gateway",
        role="gateway",
        argv=(
            layout.router_program, "-m", "pdkit_gateway",
            "--host", place.bind,
            "--port", str(place.port),
            "--upstream", f"http://{layout.router(plan).reached_at}",
            "--key-file", layout.secret(API_KEY),
        ),
        host=plan.bind,
        port=plan.port,
        health=Health("http", "/readiness"),
        ready_s=spec.timeouts.ready_s,
        env={"PYTHONPATH": layout.gateway_dir},
        depends_on=("router",),
    )  # fmt: skip
