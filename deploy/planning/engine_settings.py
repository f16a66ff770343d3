"""Arguments and variables that users may not give to engines: the plan decides what they change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from deploy.config.spec import SettledSpec
from deploy.config.vendors import vendor_named
from deploy.errors import ConfigError


@dataclass(frozen=True)
class RefusedSetting:
    """Why a setting is refused, and what to use instead; "" where there is nothing."""

    why: str
    instead: str = ""


_BY_PLAN = "is set by the plan"
_SET = RefusedSetting(_BY_PLAN)
_GPUS = RefusedSetting(_BY_PLAN)  # what to use instead depends on the vendor
_PIPELINE = RefusedSetting(
    "spreads an engine over GPUs that the plan does not count",
    "use --tp for an engine on several GPUs",
)
_DATA = RefusedSetting(
    "starts several engines in one, on GPUs that the plan does not count",
    "use --topology for more engines",
)
_CONTEXT = RefusedSetting(
    "splits the KV of a prompt among ranks, which the connector does not support"
)
_HOSTS = RefusedSetting(
    "spreads an engine over several hosts, which the plan does not do",
    "use router.engines for engines on other hosts",
)
_TLS = RefusedSetting("makes engines answer by HTTPS, and the router asks by HTTP")
_OFFLOADING = RefusedSetting("replaces the connector that the plan sets")


def _set(instead: str) -> RefusedSetting:
    return RefusedSetting(_BY_PLAN, f"use {instead} instead")


# vLLM's options, with all of their names.
_OPTIONS: Mapping[str, RefusedSetting] = {
    "--model": _set("--model"),
    "--served-model-name": _set("--model"),
    "--host": _set("engine.bind"),
    "--port": _set("--port"),
    "--uds": _set("--port"),
    "--dtype": _set("engine.dtype"),
    "--block-size": _set("engine.block_size"),
    "--max-model-len": _set("engine.max_model_len"),
    "--tensor-parallel-size": _set("--tp"),
    "-tp": _set("--tp"),
    "--kv-cache-memory-bytes": _set("engine.kv_cache_gib"),
    "--gpu-memory-utilization": _set("engine.gpu_memory"),
    "--device-memory-utilization": _set("engine.gpu_memory"),
    "--kv-transfer-config": _set("--layerwise and --save-decode-cache"),
    "--otlp-traces-endpoint": _set("tracing.otlp_endpoint"),
    "--enable-prompt-tokens-details": _SET,
    "--distributed-executor-backend": _SET,
    "--device-ids": _GPUS,
    # Every user of the machine can read arguments.
    "--api-key": _set("--api-key-file"),
    "--hf-token": _set("hf_token_file"),
    "--config": RefusedSetting(
        "reads options from a file, which the plan does not see", "put them into engine.args"
    ),
    "--kv-offloading-size": _OFFLOADING,
    "--kv-offloading-backend": _OFFLOADING,
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--pipeline-parallel-size": _PIPELINE,
    "-pp": _PIPELINE,
    # All that begin with it, too.
    "--data-parallel": _DATA,
    **{f"-dp{letter}": _DATA for letter in ("", *"abehlmnpr")},
    "--decode-context-parallel-size": _CONTEXT,
    "-dcp": _CONTEXT,
    "--prefill-context-parallel-size": _CONTEXT,
    "-pcp": _CONTEXT,
    "--nnodes": _HOSTS,
    "-n": _HOSTS,
    "--node-rank": _HOSTS,
    "-r": _HOSTS,
    "--master-addr": _HOSTS,
    "--master-port": _HOSTS,
    "--headless": _HOSTS,
}
_VARIABLES: Mapping[str, RefusedSetting] = {
    "PYTHONHASHSEED": RefusedSetting(
        "is set by pdkit: keys match only if all engines have the same"
    ),
    "TMPDIR": _SET,
    "HOME": _SET,
    "USER": _SET,
    "LOGNAME": _SET,
    # Engines would count in one another's files.
    "PROMETHEUS_MULTIPROC_DIR": RefusedSetting("must not be the same for several engines"),
    "CUDA_VISIBLE_DEVICES": _GPUS,
    "NVIDIA_VISIBLE_DEVICES": _GPUS,
    "HIP_VISIBLE_DEVICES": _GPUS,
    "ROCR_VISIBLE_DEVICES": _GPUS,
    "CUDA_DEVICE_ORDER": _SET,
    "VLLM_API_KEY": RefusedSetting(
        "would make engines refuse the router, which has a key of the stack's own",
        "use --api-key-file instead, for a key that clients must send",
    ),
    "VLLM_PORT": _set("--port"),
    "VLLM_MODEL_REDIRECT_PATH": _set("--model"),
    "VLLM_CPU_KVCACHE_SPACE": _set("engine.kv_cache_gib"),
    "LMCACHE_CHUNK_SIZE": _set("lmcache.chunk_size"),
    "LMCACHE_MAX_LOCAL_CPU_SIZE": _set("lmcache.staging_gib"),
    "LMCACHE_REMOTE_URL": _set("redis.url_file"),
    "LMCACHE_USE_LAYERWISE": _set("--layerwise"),
    "LMCACHE_SAVE_DECODE_CACHE": _set("--save-decode-cache"),
    "PDKIT_ENGINE_KEY_FILE": _set("engine.key_file"),
}
_FAMILIES: Mapping[str, RefusedSetting] = {
    "LMCACHE_": RefusedSetting("overrides LMCache's configuration, which the plan sets"),
    "PDKIT_": _SET,
    "VLLM_DP_": _DATA,
}
# Of these families, but no part of the plan.
_ALLOWED = frozenset({"LMCACHE_LOG_LEVEL", "PDKIT_DISABLE_FIXES"})


def check_engine_settings(spec: SettledSpec) -> None:
    """Refuse arguments and variables by which engines would not be as they are planned.

    Raises:
        ConfigError: naming the first.
    """
    for argument in spec.engine.args:
        name, refused = _option(argument)
        if refused:
            raise _error(spec, "engine.args", f"'{name}'", refused)
    for name in spec.engine.env:
        if refused := refused_variable(name):
            raise _error(spec, "engine.env", name, refused)


def refused_variable(name: str) -> RefusedSetting | None:
    """Return why engines may not be given a variable; None if they may."""
    if name in _ALLOWED:
        return None
    family = (refused for prefix, refused in _FAMILIES.items() if name.startswith(prefix))
    return _VARIABLES.get(name) or next(family, None)


def _option(argument: str) -> tuple[str, RefusedSetting | None]:
    """Return an option's full name and why it is refused, as vLLM's parser reads the argument.

    It takes underscores for dashes, any beginning of a name, `--no-` before a flag, `--config.key`
    for a key of a JSON value, and a number right behind a short name.
    """
    name = argument.partition("=")[0].partition(".")[0]
    if not name.startswith("--"):
        name = re.sub(r"\d+$", "", name)
        return name, _OPTIONS.get(name)
    name = name.replace("_", "-")
    flag = f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name
    for known, refused in _OPTIONS.items():
        if flag == known or (refused is _DATA and flag.startswith(known)):
            return name, refused
        if len(flag) > len("--") and known.startswith(flag):
            return known, refused
    return name, None


def _error(spec: SettledSpec, setting: str, name: str, refused: RefusedSetting) -> ConfigError:
    hint = refused.instead or f"leave it out of {setting}"
    if refused is _GPUS and (visible := vendor_named(spec.vendor).visible_devices):
        hint = f"{visible}=0,1 deploy up, which plans with these GPUs only"
    return ConfigError(f"{name} {refused.why}", setting=setting, hint=hint)
