"""The namespace of a stack's KV: what separates its keys from those of any other kind of KV."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from deploy.planning.engines import EnginePlan
from deploy.planning.plan import Plan
from deploy.stack.engine import engine_env, planned_argv
from deploy.stack.layout import Layout

_PATH = "a path, which differs between machines and containers"
_ADDRESS = "an address"
_SPACE = "how much KV fits, not what it means"
_TRACING = "where traces go"
_GPUS = "which GPUs, not of which kind"

# What the plan gives an engine that is not in the seed, and why. Everything else is, so that a new
# argument or variable separates KV until somebody knows that it need not.
UNSEEDED_ARGS: Mapping[str, str] = MappingProxyType({
    "--model": "a path in containers; the seed has the model's name and version",
    "--served-model-name": "how clients call the model",
    "--host": _ADDRESS,
    "--port": _ADDRESS,
    "--gpu-memory-utilization": _SPACE,
    "--kv-cache-memory-bytes": _SPACE,
    "--middleware": "handles requests and answers; a producer has one more than a consumer",
    "--kv-transfer-config": "role and paths; the seed has the connector and `layerwise`",
    "--otlp-traces-endpoint": _TRACING,
})  # fmt: skip
UNSEEDED_ENV: Mapping[str, str] = MappingProxyType({
    "CUDA_VISIBLE_DEVICES": _GPUS,
    "HIP_VISIBLE_DEVICES": _GPUS,
    "HF_HUB_CACHE": _PATH,
    "HF_TOKEN_PATH": _PATH,
    "HOME": _PATH,
    "LMCACHE_CONFIG_FILE": _PATH,
    "OMP_NUM_THREADS": "how fast, not what",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": _TRACING,
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": _TRACING,
    "OTEL_RESOURCE_ATTRIBUTES": _TRACING,
    "OTEL_SERVICE_NAME": _TRACING,
    "PDKIT_ENGINE_KEY_FILE": _PATH,
    "PDKIT_ENGINE_SOCKET": _ADDRESS,
    "PDKIT_KV_SERVER_SOCKET": _PATH,
    "PDKIT_PROCESS_NUMBERS": "numbers of processes",
    "PDKIT_SHARED_MEMORY": "a name of the engine's own",
    "PDKIT_STORE_BARRIER_S": "how long a producer waits for the store",
    "PYTHONHASHSEED": "the seed itself",
    "PYTHONPATH": "a path; the seed has the connector's version",
    "TMPDIR": _PATH,
    "TORCHINDUCTOR_CACHE_DIR": _PATH,
    "VLLM_CACHE_ROOT": _PATH,
})  # fmt: skip


def key_prefix(stack: str) -> str:
    """Return what the keys of all KV of a stack begin with, whatever it was started with.

    Those of LMCache's own client do not.
    """
    return f"pdkit:{stack}:"


def kv_namespace(stack: str, seed: str) -> str:
    """Return what the keys of all KV begin with that engines with this seed can load."""
    return key_prefix(stack) + seed


def hash_seed(plan: Plan, layout: Layout) -> str:
    """Return the PYTHONHASHSEED of every engine of the stack.

    The first chunk's key is hashed from it and each further one from the key before, in every
    version of vLLM and LMCache, so engines with different seeds never find each other's KV. Equal
    seeds mean KV that means the same: same image, vendor, model, numbers and layout.
    """
    hashed = json.dumps(seeded(plan.engines[0], plan, layout), sort_keys=True)
    digest = hashlib.sha256(hashed.encode()).digest()
    return str(int.from_bytes(digest[:4], "big"))  # Python takes seeds of 32 bits


def seeded(engine: EnginePlan, plan: Plan, layout: Layout) -> dict[str, object]:
    """Return what decides what an engine's KV means; the same for every engine of a stack."""
    env = engine_env(engine, plan, layout, "", "")
    return {
        # The connector is the kit's: another version may move KV in another way.
        "pdkit": layout.kit.version,
        "stack": plan.name,
        "vendor": plan.vendor.name,
        "image": layout.image_identity,
        "model": [plan.model.ref, plan.model.version],
        # In LMCache's configuration and `--kv-transfer-config`.
        "chunk_size": plan.chunk_size,
        "layerwise": plan.layerwise,
        "connector": plan.connector,
        "planned_args": [
            [option, *values]
            for option, *values in _options(planned_argv(engine, plan, layout, ""))
            if option not in UNSEEDED_ARGS
        ],
        # The user's own may choose the cache's numbers or layout.
        "args": plan.spec.engine.args,
        "env": {
            **{name: value for name, value in env.items() if name not in UNSEEDED_ENV},
            **plan.spec.engine.env,
        },
    }


def _options(argv: Sequence[str]) -> Iterator[list[str]]:
    """Yield each option with its values."""
    option: list[str] = []
    for argument in argv:
        if argument.startswith("-") and option:
            yield option
            option = []
        option.append(argument)
    yield option
