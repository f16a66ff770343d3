"""Build the stack of a plan: Redis, engines, the router in front of them, and what watches them.

The user's own Redis is not a service: engines get its URL, and depend on nothing.
"""

from __future__ import annotations

import json

from deploy.assets import asset
from deploy.planning.engines import EnginePlan
from deploy.planning.plan import Plan
from deploy.planning.redis import RedisPlan
from deploy.stack.containers import engine_secrets
from deploy.stack.engine import engine_argv, engine_env, lmcache_config
from deploy.stack.kv_identity import hash_seed, kv_namespace
from deploy.stack.layout import API_KEY, ENGINE_KEY, LOOPBACK, REDIS_PASSWORD, REDIS_URL, Layout
from deploy.stack.lmcache_server import kv_server_service
from deploy.stack.monitoring import GRAFANA_PASSWORD, monitoring_services
from deploy.stack.router import router_argv
from deploy.stack.service import ConfigFile, HealthCheck, Service, Stack


def build_stack(plan: Plan, layout: Layout) -> Stack:
    """Return the stack of services that carries out the plan."""
    seed = hash_seed(plan, layout)
    engines: list[Service] = []
    for engine in plan.engines:
        # Engines that are not told their KV space measure the GPU, and would count each other's
        # memory if they did so at the same time.
        measures = plan.shares_gpus and plan.kv_cache_bytes is None
        before = [engines[-1].name] if measures and engines else []
        engines.append(_engine(engine, plan, layout, seed, before))
    services = [
        *(_redis(shard, plan, layout) for shard in plan.redis),
        *_kv_server(plan, layout, kv_namespace(plan.name, seed)),
        *engines,
        *((_router(plan, layout),) if plan.has_router else ()),
        *monitoring_services(plan, layout),
    ]
    services = [layout.placed(service, plan) for service in services]
    key_named = plan.spec.engine.key_file is not None
    made = (
        *(name for name in engine_secrets(plan) if not (key_named and name == ENGINE_KEY)),
        *((REDIS_PASSWORD,) if plan.redis else ()),
        *((GRAFANA_PASSWORD,) if services[-1].role == "grafana" else ()),
    )
    user_secrets = (
        *((REDIS_URL,) if plan.user_redis else ()),
        *((ENGINE_KEY,) if key_named else ()),
    )
    remote = tuple(map(remote_engine, plan.remote))
    return Stack(plan.name, plan.runtime, tuple(services), made, user_secrets, remote)


def _redis(shard: RedisPlan, plan: Plan, layout: Layout) -> Service:
    place = layout.redis(shard)
    file = layout.file(shard.name, "redis.conf")
    own = (
        f"bind {place.bind}",
        f"port {place.port}",
        # Quoted as Redis reads it: it may have spaces.
        f"dir {json.dumps(layout.redis_dir(shard))}",
        f"maxmemory {shard.memory_mib}mb",
        f"requirepass @{{{REDIS_PASSWORD}}}",
        *_socket(layout.redis_socket(shard)),
    )
    text = asset("compose", "redis.conf").read_text(encoding="utf-8") + "\n".join(own) + "\n"
    return Service(
        name=shard.name,
        role="redis",
        argv=(layout.redis_program, file.seen_at),
        host=LOOPBACK,
        port=shard.port,
        health=HealthCheck("redis"),
        ready_s=min(30.0, plan.ready_s),
        files=(ConfigFile(file.path, text, file.target),),
        memory_mib=shard.memory_mib,
        socket=layout.redis_socket(shard),
    )


def _kv_server(plan: Plan, layout: Layout, namespace: str) -> tuple[Service, ...]:
    if plan.kv_server is None:
        return ()
    urls = _redis_urls(plan, layout)
    return (kv_server_service(plan.kv_server, plan, layout, urls, namespace),)


def _socket(path: str) -> tuple[str, ...]:
    return (f"unixsocket {json.dumps(path)}", "unixsocketperm 600") if path else ()


def _engine(
    engine: EnginePlan, plan: Plan, layout: Layout, seed: str, before: list[str]
) -> Service:
    namespace = kv_namespace(plan.name, seed)
    file = _lmcache_file(engine, plan, layout, namespace) if plan.uses_redis else None
    return Service(
        name=engine.name,
        role=engine.role,
        argv=(layout.engine_program, *engine_argv(engine, plan, layout, namespace)),
        host=engine.host,
        port=engine.port,
        health=HealthCheck("http", "/health"),
        ready_s=plan.ready_s,
        env=engine_env(engine, plan, layout, (file.target or file.path) if file else "", seed),
        files=(file,) if file else (),
        # Not on LMCache's server: an engine waits for it by itself, up to five minutes.
        depends_on=(*(shard.name for shard in plan.redis), *before),
        devices=engine.devices,
        memory_mib=engine.memory_mib,
    )


def remote_engine(engine: EnginePlan) -> Service:
    """Return an engine of another host: where it is reached, and nothing to run."""
    return Service(
        engine.name, engine.role, (), engine.host, engine.port, HealthCheck("http", "/health"), 0.0
    )


def _lmcache_file(engine: EnginePlan, plan: Plan, layout: Layout, namespace: str) -> ConfigFile:
    place = layout.file(engine.name, "lmcache.yaml")
    text = lmcache_config(engine.role, plan, layout, _redis_urls(plan, layout), namespace)
    return ConfigFile(place.path, text, place.target)


def _redis_urls(plan: Plan, layout: Layout) -> tuple[str, ...]:
    """Return the URLs by which engines reach Redis, what is secret of them as placeholders.

    A Unix socket moves KV faster than loopback (`bench/redis_path`); LMCache's client knows none.
    """
    if plan.user_redis:
        return (f"@{{{REDIS_URL}}}",)
    sockets = [layout.redis_socket(shard) for shard in plan.redis]
    if all(sockets) and plan.spec.redis.client == "pdkit":
        return tuple(f"unix://:@{{{REDIS_PASSWORD}}}@{path}" for path in sockets)
    places = (layout.redis(shard).reached_at for shard in plan.redis)
    return tuple(f"redis://:@{{{REDIS_PASSWORD}}}@{place}" for place in places)


def _router(plan: Plan, layout: Layout) -> Service:
    key_file = layout.secret(API_KEY) if plan.keyed else None
    return Service(
        name="router",
        role="router",
        argv=(layout.router_program, *router_argv(plan, layout, key_file)),
        host=plan.bind,
        port=plan.port,
        health=HealthCheck("http", "/readiness"),
        ready_s=plan.ready_s,
        env={"PYTHONPATH": layout.router_dir},
        extra_ports=(plan.router_metrics_port,),
        depends_on=tuple(engine.name for engine in plan.engines),
    )
