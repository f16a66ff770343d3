"""Build the stack of a plan: Redis, producers, consumers and the router in front of them.

A Redis that the user brings is no service: engines are given its URL, and depend on nothing.
"""

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
REDIS_URL = "redis_url"
API_KEY = "api_key"


def build_stack(plan: Plan, spec: StackSpec, layout: Layout) -> Stack:
    """Return the stack of services that carries out the plan."""
    engines: list[Service] = []
    for engine in plan.engines:
        # Engines that measure a GPU at the same time would count each other's memory.
        before = [engines[-1].name] if plan.shares_gpus and engines else []
        engines.append(_engine(engine, plan, spec, layout, before))
    services = [
        *([] if plan.redis_brought else [_redis(plan, spec, layout)]),
        *engines,
        _router(plan, spec, layout),
        *([_gateway(plan, spec, layout)] if plan.keyed else []),
    ]
    if isinstance(layout, ContainerLayout):
        services = [in_container(service, plan, spec, layout) for service in services]
    made, brought = ((), (REDIS_URL,)) if plan.redis_brought else ((REDIS_PASSWORD,), ())
    return Stack(plan.name, plan.runtime, tuple(services), made, brought)


def _redis(plan: Plan, spec: StackSpec, layout: Layout) -> Service:
    place = layout.redis(plan)
    file = layout.file("redis", "redis.conf")
    own = (
        f"bind {place.bind}",
        f"port {place.port}",
        f"dir {json.dumps(layout.redis_dir())}",  # quoted as Redis reads it: it may have spaces
        f"maxmemory {plan.redis_memory_mib}mb",
        f"requirepass @{{{REDIS_PASSWORD}}}",
        *_socket(layout.redis_socket()),
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


def _socket(path: str) -> tuple[str, ...]:
    return (f"unixsocket {json.dumps(path)}", "unixsocketperm 600") if path else ()


def _engine(
    engine: EnginePlan, plan: Plan, spec: StackSpec, layout: Layout, before: list[str]
) -> Service:
    file = layout.file(engine.name, "lmcache.yaml")
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
                file.path,
                lmcache_config(engine.role, plan, spec, layout, _redis_url(plan, spec, layout)),
                file.target,
            ),
        ),
        depends_on=(*(() if plan.redis_brought else ("redis",)), *before),
        devices=engine.devices,
        memory_mib=engine.memory_mib,
    )


def _redis_url(plan: Plan, spec: StackSpec, layout: Layout) -> str:
    """Return the URL by which engines reach Redis, what is secret of it as placeholders.

    A Unix socket moves KV faster than loopback (`bench/redis_path`); LMCache's client knows none.
    """
    if plan.redis_brought:
        return f"@{{{REDIS_URL}}}"
    if (path := layout.redis_socket()) and spec.redis.client == "pdkit":
        return f"unix://:@{{{REDIS_PASSWORD}}}@{path}"
    return f"redis://:@{{{REDIS_PASSWORD}}}@{layout.redis(plan).reached_at}"


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
