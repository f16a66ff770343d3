"""What an engine really runs, as far as its KV depends on it, and the name that its keys get by it.

The plan gives all engines of a stack the same, and its digest is the seed of their keys. An engine
that runs something else than planned, such as another vLLM after an upgrade of its virtual
environment, would still find the KV of the others. So each engine derives an identity from vLLM's
own configuration, and LMCache uses it as the model's name in keys: such an engine finds nothing,
and its report names the row that differs.

Rows are equal in all processes of an engine, and in producers and consumers. So they come from what
vLLM was given and not from the loaded model: loading changes some configurations, in workers only.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pdkit_connector.log import get_logger
from pdkit_connector.model_files import DIGEST_VARIABLE, NAMED_VARIABLE
from pdkit_connector.releases import installed_lmcache, installed_vllm

UNKNOWN, ANY = "unknown", "any"
# In vLLM's `kv_connector_extra_config`: the rows that the plan knows.
PLANNED = "pdkit.planned"


def planned(vllm_config: Any) -> Mapping[str, Any]:
    """Return the rows that the plan knows."""
    given = vllm_config.kv_transfer_config.get_from_extra_config(PLANNED, None)
    return given if isinstance(given, Mapping) else {}


def _context(config: Any) -> Any:
    """Return the longest context, unless the plan knows that the model's KV is the same in all."""
    free = planned(config).get("context") == ANY
    return ANY if free else config.model_config.max_model_len


def _model(config: Any) -> Any:
    """Return the fingerprint of a folder, which was taken or compared when the engine started.

    Else a hub's model and its commit.
    """
    model = config.model_config.model
    name = Path(model).name if Path(model).is_absolute() else model
    return os.environ.get(DIGEST_VARIABLE) or [name, config.model_config.revision]


def _parallel(config: Any) -> Any:
    one = config.parallel_config
    # Not how tokens are interleaved, which vLLM changes in workers only; it is refused anyway.
    names = (
        "pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size",
    )  # fmt: skip
    return [getattr(one, name, 1) for name in names]


def _attention(config: Any) -> Any:
    chosen = getattr(getattr(config, "attention_config", None), "backend", None)
    return [chosen and str(chosen), os.environ.get("VLLM_ATTENTION_BACKEND")]


def _shape(config: Any) -> Any:
    one = config.model_config
    return [one.get_total_num_kv_heads(), one.get_head_size(), getattr(one, "use_mla", None)]


def _speculative(config: Any) -> Any:
    one = config.speculative_config
    return one and [one.method, one.num_speculative_tokens]


def _lora(config: Any) -> Any:
    return config.lora_config and config.lora_config.max_lora_rank


# Row → why KV depends on it, and where it is taken.
ROWS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "vllm": (
        "another release computes KV in another way, or lays it out in another order",
        lambda _: installed_vllm(),
    ),
    "lmcache": ("another release stores chunks in another order", lambda _: installed_lmcache()),
    "model": ("the content of the weights and of what describes them", _model),
    "files": (
        "the content of other folders and files that arguments name, such as adapters",
        lambda _: os.environ.get(NAMED_VARIABLE, ""),
    ),
    "overrides": (
        "`--hf-overrides` changes numbers of the model",
        lambda config: config.model_config.hf_overrides,
    ),
    "dtype": ("KV is computed in it", lambda config: config.model_config.dtype),
    "configuration": (
        "another config.json, or another implementation of the model",
        lambda config: [
            getattr(config.model_config, name, None)
            for name in ("hf_config_path", "config_format", "model_impl", "code_revision")
        ],
    ),
    "kv_dtype": (
        "KV is kept in it, but for the layers that are left out",
        lambda config: [
            config.cache_config.cache_dtype,
            *(getattr(config.cache_config, "kv_cache_dtype_skip_layers", None) or ()),
        ],
    ),
    "kv_scales": (
        "scales of FP8 KV that an engine takes from its own first requests",
        lambda config: getattr(config.cache_config, "calculate_kv_scales", False),
    ),
    "quantization": (
        "weights are used in other precision",
        lambda config: config.model_config.quantization,
    ),
    "shape": ("heads that share K and V, and their size", _shape),
    "context": (
        "LongRoPE, dynamic scaling and Llama 4 choose positions by the longest context; `any` for "
        "models that do not",
        _context,
    ),
    "sliding_window": (
        "tokens outside it have no influence",
        lambda config: [
            config.cache_config.sliding_window,
            getattr(config.model_config, "disable_sliding_window", None),
        ],
    ),
    "tensor_parallel": (
        "each rank holds a share of the heads",
        lambda config: config.parallel_config.tensor_parallel_size,
    ),
    "parallel": ("each rank holds a share of the layers, or of the tokens", _parallel),
    "attention": ("the back end that was chosen may round in another way", _attention),
    "lora": ("adapters change weights", _lora),
    "speculative": ("some draft models keep KV of their own", _speculative),
}


def kv_rows(vllm_config: Any) -> dict[str, str]:
    """Return what KV of this engine depends on: row → value.

    A row that this vLLM cannot tell is "unknown": no row is worth an engine.
    """
    return {name: _told(take, vllm_config) for name, (_, take) in ROWS.items()}


def _told(take: Callable[[Any], Any], vllm_config: Any) -> str:
    try:
        value = take(vllm_config)
        if value is not None and not isinstance(value, (str, int, list, dict)):
            # Functions among the overrides have no other name that two processes share.
            value = getattr(value, "__qualname__", None) or str(value).removeprefix("torch.")
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    except Exception:  # noqa: BLE001 - see above
        return UNKNOWN


def key_name(rows: Mapping[str, str]) -> str:
    """Return the model's name in keys. It has no path: the same model lies elsewhere elsewhere."""
    digest = hashlib.sha256(json.dumps(dict(rows), sort_keys=True).encode()).hexdigest()
    return f"kv-{digest[:16]}"


def with_key_name(vllm_config: Any, name: str) -> Any:
    """Return vLLM's configuration for LMCache, which takes the model's name in keys from there.

    All other parts are vLLM's own, so that what vLLM changes in them is seen.
    """
    given = copy.copy(vllm_config)
    given.model_config = copy.copy(vllm_config.model_config)
    given.model_config.model = name
    return given


def identified(vllm_config: Any) -> tuple[Any, dict[str, Any]]:
    """Return the configuration for LMCache, and what the engine reports of its identity."""
    told = facts(kv_rows(vllm_config), vllm_config)
    return with_key_name(vllm_config, told["key_name"]), told


def facts(rows: Mapping[str, str], vllm_config: Any) -> dict[str, Any]:
    """Return what an engine reports of its identity, beside the format of its KV."""
    unplanned = differences(rows, planned(vllm_config))
    for name, value in unplanned.items():
        get_logger().warning(
            "pdkit-connector %s is %s, and %s was planned: this engine finds no KV of engines that "
            "run as planned",
            name, rows[name], value,
        )  # fmt: skip
    return {
        "model": rows["model"],
        "key_name": key_name(rows),
        "rows": dict(rows),
        "unplanned": unplanned,
    }


def differences(rows: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, str]:
    """Return each row that is not as given: row → the given value; what is unknown differs not."""
    return {
        str(name): str(value)
        for name, value in given.items()
        if rows.get(name, UNKNOWN) not in (str(value), UNKNOWN)
    }
