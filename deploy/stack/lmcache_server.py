"""LMCache's server as a service, and how engines are told to use it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import yaml

from deploy.errors import ConfigError
from deploy.planning.engines import EnginePlan
from deploy.planning.hosts import spans_hosts
from deploy.planning.limits import TransferLimits
from deploy.planning.lmcache_server import LmcacheServerPlan
from deploy.planning.memory import GIB
from deploy.planning.plan import Plan
from deploy.stack.layout import Layout
from deploy.stack.redis_path import redis_path_settings
from deploy.stack.service import ConfigFile, HealthCheck, Service

# Seconds between an engine's pings, and for the answer to one. An engine that lost the server
# computes prompts itself until a ping is answered again.
HEARTBEAT_S = 5.0
# How much longer than the supervisor the server waits for an engine: one that it forgets while
# the engine is suspended would never be registered again. LMCache's least is 30.
_FORGET_S = 30
# LMCache gives memory that is being stored to Redis to others after 300 s, and memory that is being
# loaded into after 600: transfers end before that.
_LONGEST_S = 240.0
# What the kernel takes for the path of a Unix socket.
_SOCKET_BYTES = 107


def kv_server_service(
    server: LmcacheServerPlan, plan: Plan, layout: Layout, urls: Sequence[str], namespace: str
) -> Service:
    """Return the server, which listens on Unix sockets only; URLs may hold secret placeholders.

    Raises:
        ConfigError: the stack's folder has too long a path for them.
    """
    pages = layout.kv_pages
    _require_short(pages.path)
    place = layout.file(server.name, "second-tier.yaml")
    settings = redis_path_settings(plan, layout, urls, _limits(plan), namespace)
    forget_s = math.ceil(plan.spec.timeouts.hung_s) + _FORGET_S
    return Service(
        name=server.name,
        role="kv-server",
        argv=(
            layout.engine_program, "-m", "pdkit_connector.lmcache_server",
            layout.kv_requests, pages.seen_at,
            "--l1-size-gb", f"{server.kv_mib / 1024:g}",
            # All of it at once: what is not there is noticed when the stack starts.
            "--no-l1-use-lazy",
            "--eviction-policy", "LRU",
            "--chunk-size", str(plan.chunk_size),
            # The other way moves KV by pickle, which runs what a client sends.
            "--supported-transfer-mode", "lmcache_driven",
            # Each rank's transfers are done in order, and wait for no other rank's.
            "--max-gpu-workers", str(len(plan.engines) * plan.tp),
            "--worker-reap-timeout-seconds", str(forget_s),
            "--worker-registration-grace-seconds", str(forget_s * 4),
            "--no-run-script-api-enabled",
            "--l2-adapter", _second_tier(place.seen_at),
            # What comes from Redis stays, as what engines store does.
            "--l2-prefetch-policy", "retain",
        ),
        host="",
        port=0,
        socket=pages.path,
        health=HealthCheck("http", "/healthcheck"),
        ready_s=plan.ready_s,
        env={
            "PYTHONPATH": layout.connector_dir,
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "DO_NOT_TRACK": "1",
            **layout.kv_server_env(plan),
            **_metrics_env(server, plan, layout),
        },
        files=(ConfigFile(place.path, yaml.safe_dump(settings, sort_keys=True), place.target),),
        extra_ports=(server.metrics_port,) if server.metrics_port else (),
        depends_on=tuple(shard.name for shard in plan.redis),
        memory_mib=server.memory_mib,
    )  # fmt: skip


def _metrics_env(server: LmcacheServerPlan, plan: Plan, layout: Layout) -> dict[str, str]:
    """Return where the server shows Prometheus its metrics; nothing if none watches it."""
    place = layout.kv_metrics(server)
    return {"PDKIT_METRICS_ADDRESS": f"{place.bind}:{place.port}"} if plan.prometheus_port else {}


def _require_short(socket: str) -> None:
    """Refuse a path that no Unix socket can have.

    Raises:
        ConfigError: naming it.
    """
    if len(socket.encode()) > _SOCKET_BYTES:
        raise ConfigError(
            f"the socket of LMCache's server would be {socket}, which is longer than "
            f"{_SOCKET_BYTES} bytes",
            setting="connector",
            retry=({"--connector": "lmcache"},),
            hint="PDKIT_HOME=/A/SHORTER/FOLDER",
        )


def _second_tier(settings_file: str) -> str:
    """Return LMCache's description of the kit's plug-in for its second tier."""
    plugin = {
        "type": "plugin",
        "module_path": "pdkit_connector.redis_path.second_tier",
        "class_name": "SecondTier",
        "adapter_params": {"settings_file": settings_file},
    }
    return json.dumps(plugin, sort_keys=True)


def _limits(plan: Plan) -> TransferLimits:
    """Return the limits of a client that loads prompts whole, where engines load in pieces."""
    limits = plan.limits
    prompt_bytes = (plan.max_model_len or 0) * (limits.token_bytes or 0)
    pieces = max(1.0, prompt_bytes / (limits.staging_gib * GIB))
    return replace(
        limits,
        load_s=round(min(_LONGEST_S, limits.load_s * pieces), 1),
        store_s=min(_LONGEST_S, limits.store_s),
    )


def transfer_config(plan: Plan, layout: Layout, namespace: str) -> dict[str, Any]:
    """Return the server's part of vLLM's `--kv-transfer-config`."""
    # Another host's engines load from Redis what this host's find in the server's memory.
    stored_in = "redis" if spans_hosts(plan.spec, plan.topology) else "memory"
    return {
        "kv_connector": "PatchedLMCacheMPConnector",
        "kv_connector_module_path": "pdkit_connector.server_connector",
        "kv_connector_extra_config": {
            "lmcache.mp.server_urls": [f"ipc://{layout.kv_requests}"],
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            "lmcache.mp.heartbeat_interval": HEARTBEAT_S,
            "lmcache.mp.save_decode_cache": plan.save_decode_cache,
            "pdkit.namespace": namespace,
            "pdkit.stored_in": stored_in,
        },
    }


def transfer_env(engine: EnginePlan, layout: Layout) -> dict[str, str]:
    """Return the variables of an engine that uses the server."""
    return {
        "PDKIT_KV_SERVER_SOCKET": layout.kv_requests,
        "PDKIT_SHARED_MEMORY": f"{layout.shared_memory}-{engine.name}",
    }
