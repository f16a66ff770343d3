"""Build the stack of a plan: Redis, producers, consumers and the router in front of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from deploy.assets import asset
from deploy.config.spec import StackSpec
from deploy.planning.plan import EnginePlan, Plan
from deploy.stack.engine import EngineFolders, engine_argv, engine_env, lmcache_config
from deploy.stack.router import router_argv, router_env
from deploy.stack.service import ConfigFile, Health, Service, Stack

REDIS_PASSWORD = "redis_password"  # noqa: S105 - the name of the secret, not the secret
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ProcessLayout:
    """Where the parts of a stack lie on the machine that runs it as processes.

    Attributes:
        run_dir: holds one folder a service, for its configuration files.
        temp_dir: the engines' own, sockets among it; a short path, since those are limited.
        engine_python: the interpreter that has vLLM, LMCache and the router.
    """

    run_dir: Path
    temp_dir: Path
    engine_python: str
    redis_server: str
    connector_dir: Path


def build_stack(plan: Plan, spec: StackSpec, layout: ProcessLayout) -> Stack:
    """Return the stack of services that carries out the plan."""
    engines = tuple(_engine(engine, plan, spec, layout) for engine in plan.engines)
    return Stack(
        name=plan.name,
        runtime=plan.runtime,
        services=(_redis(plan, spec, layout), *engines, _router(plan, spec, layout)),
        secrets=(REDIS_PASSWORD,),
    )


def _redis(plan: Plan, spec: StackSpec, layout: ProcessLayout) -> Service:
    path = layout.run_dir / "redis" / "redis.conf"
    own = (
        f"bind {_LOOPBACK}",
        f"port {plan.redis_port}",
        f"dir {json.dumps(str(path.parent))}",  # quoted as Redis reads it, for folders with spaces
        f"maxmemory {plan.redis_memory_mib}mb",
        f"requirepass @{{{REDIS_PASSWORD}}}",
    )
    text = asset("compose", "redis.conf").read_text(encoding="utf-8") + "\n".join(own) + "\n"
    return Service(
        name="redis",
        role="redis",
        argv=(layout.redis_server, str(path)),
        host=_LOOPBACK,
        port=plan.redis_port,
        health=Health("redis"),
        ready_s=min(30.0, spec.timeouts.ready_s),
        files=(ConfigFile(str(path), text),),
        memory_mib=plan.redis_memory_mib,
    )


def _engine(engine: EnginePlan, plan: Plan, spec: StackSpec, layout: ProcessLayout) -> Service:
    config = layout.run_dir / engine.name / "lmcache.yaml"
    folders = EngineFolders(layout.connector_dir, config, layout.temp_dir)
    url = f"redis://:@{{{REDIS_PASSWORD}}}@{_LOOPBACK}:{plan.redis_port}"
    return Service(
        name=engine.name,
        role=engine.role,
        argv=(layout.engine_python, *engine_argv(engine, plan, spec, host=_LOOPBACK)),
        host=_LOOPBACK,
        port=engine.port,
        health=Health("http", "/health"),
        ready_s=spec.timeouts.ready_s,
        env=engine_env(engine, plan, spec, folders),
        files=(ConfigFile(str(config), lmcache_config(engine.role, plan, spec, url)),),
        depends_on=("redis",),
        devices=engine.devices,
        memory_mib=engine.memory_mib,
    )


def _router(plan: Plan, spec: StackSpec, layout: ProcessLayout) -> Service:
    return Service(
        name="router",
        role="router",
        argv=(layout.engine_python, *router_argv(plan, host=plan.bind)),
        host=plan.bind,
        port=plan.router_port,
        health=Health("http", "/readiness"),
        ready_s=spec.timeouts.ready_s,
        env=router_env(),
        extra_ports=(plan.router_metrics_port,),
        depends_on=tuple(engine.name for engine in plan.engines),
    )
