"""LMCache's server as a service, and how engines are told to use it."""

from __future__ import annotations

import math
from pathlib import PurePosixPath
from typing import Any

from deploy.planning.kv_server import KvServerPlan
from deploy.planning.plan import EnginePlan, Plan
from deploy.stack.layout import Layout
from deploy.stack.service import Health, Service

# Seconds between an engine's pings, and for the answer to one. An engine that lost the server
# computes prompts itself until a ping is answered again.
HEARTBEAT_S = 5.0
# How much longer than the supervisor the server waits for an engine: one that it forgot while it
# stood still would never be known to it again. LMCache's least is 30.
_FORGET_S = 30


def kv_server_service(server: KvServerPlan, plan: Plan, layout: Layout) -> Service:
    """Return the server, which listens on Unix sockets only."""
    requests, pages = layout.kv_sockets
    forget_s = math.ceil(plan.spec.timeouts.hung_s) + _FORGET_S
    return Service(
        name=server.name,
        role="kv-server",
        argv=(
            layout.engine_program, "-m", "pdkit_connector.kv_server", requests, pages,
            "--l1-size-gb", f"{server.kv_mib / 1024:g}",
            # All of it at once: what is not there is noticed when the stack starts.
            "--no-l1-use-lazy",
            "--eviction-policy", "LRU",
            "--chunk-size", str(plan.chunk_size),
            # The other way moves KV by pickle, which runs what a client sends.
            "--supported-transfer-mode", "lmcache_driven",
            # Each engine's transfers are done in order, and wait for no other engine's.
            "--max-gpu-workers", str(len(plan.engines)),
            "--worker-reap-timeout-seconds", str(forget_s),
            "--worker-registration-grace-seconds", str(forget_s * 4),
            "--no-run-script-api-enabled",
        ),
        host="",
        port=0,
        socket=pages,
        health=Health("http", "/healthcheck"),
        ready_s=plan.spec.timeouts.ready_s,
        env={
            "PYTHONPATH": layout.connector_dir,
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "DO_NOT_TRACK": "1",
            "TMPDIR": str(PurePosixPath(requests).parent),
        },
        memory_mib=server.memory_mib,
    )  # fmt: skip


def transfer_config(layout: Layout) -> dict[str, Any]:
    """Return what vLLM's `--kv-transfer-config` says of the server."""
    requests, _ = layout.kv_sockets
    return {
        "kv_connector": "PatchedLMCacheMPConnector",
        "kv_connector_module_path": "pdkit_connector.mp_connector",
        "kv_connector_extra_config": {
            "lmcache.mp.server_urls": [f"ipc://{requests}"],
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            "lmcache.mp.heartbeat_interval": HEARTBEAT_S,
        },
    }


def transfer_env(engine: EnginePlan, layout: Layout) -> dict[str, str]:
    """Return the variables of an engine that uses the server."""
    requests, _ = layout.kv_sockets
    return {
        "PDKIT_KV_SERVER_SOCKET": requests,
        "PDKIT_SHARED_MEMORY": f"{layout.shared_memory}-{engine.name}",
    }
