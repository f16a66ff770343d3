"""What an engine really runs, as far as its KV depends on it, and the name that its keys get by it.

The plan gives all engines of a stack the same, and its digest is the seed of their keys. An engine
that runs something else than planned, such as another vLLM after an upgrade of its virtual
environment, would still find the KV of the others. So each engine derives an identity from vLLM's
own configuration, and LMCache uses it as the model's name in keys: such an engine finds nothing,
and its report names the row that differs.

The rows are taken once, when the API server has made vLLM's configuration, and travel in it to the
core and the workers: these change it when they load the model, each in its own way.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from pdkit_connector.identity.model_files import DIGEST_VARIABLE, NAMED_VARIABLE
from pdkit_connector.identity.variables import AT_START
from pdkit_connector.log import get_logger
from pdkit_connector.releases import installed_lmcache, installed_vllm

UNKNOWN, ANY = "unknown", "any"
# In vLLM's `kv_connector_extra_config`: the rows that the plan knows.
PLANNED = "pdkit.planned"
# There, too: the rows, once they are taken.
TAKEN = "pdkit.rows"
# What of a model's configuration says where it lies and who wrote it, and not what it is.
_ORIGIN = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def planned(vllm_config: Any) -> Mapping[str, Any]:
    """Return the rows that the plan knows."""
    given = vllm_config.kv_transfer_config.get_from_extra_config(PLANNED, None)
    return given if isinstance(given, Mapping) else {}


def _context(config: Any) -> Any:
    """Return the longest context, unless the plan knows that the model's KV is the same in all.

    What vLLM is to choose is the model's own longest while the model is built. Then vLLM lowers it
    to what fits, in some processes.
    """
    if planned(config).get("context") == ANY:
        return ANY
    chosen = getattr(config.model_config, "original_max_model_len", None) == -1
    return "auto" if chosen else config.model_config.max_model_len


def _model(config: Any) -> Any:
    """Return the fingerprint of a folder, which was taken or compared when the engine started.

    Else a hub's model and its commit.
    """
    model = config.model_config.model
    name = Path(model).name if Path(model).is_absolute() else model
    return os.environ.get(DIGEST_VARIABLE) or [name, config.model_config.revision]


def _configuration(config: Any) -> str:
    """Return a digest of the model's configuration as vLLM uses it, overrides included."""
    used = _without_origin(_plain(config.model_config.hf_config.to_dict()))
    return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()[:16]


def _without_origin(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_origin(one) for key, one in value.items() if key not in _ORIGIN}
    return [_without_origin(one) for one in value] if isinstance(value, list) else value


@functools.cache
def connector_version() -> str:
    """Return a digest of this package's code."""
    made, folder = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(folder.rglob("*.py")):
        made.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes() + b"\0")
    return made.hexdigest()[:16]


def _fp8_format(config: Any) -> Any:
    if not str(config.cache_config.cache_dtype).startswith("fp8"):
        return None
    from vllm.platforms import current_platform

    return current_platform.fp8_dtype()


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


class EngineRow(NamedTuple):
    """A row of an engine's identity: why KV depends on it, and where it is taken."""

    why: str
    taken_from: str
    take: Callable[[Any], Any]


ROWS: Mapping[str, EngineRow] = {
    "vllm": EngineRow(
        "another release computes KV in another way, or lays it out in another order",
        "the installed package",
        lambda _: installed_vllm(),
    ),
    "lmcache": EngineRow(
        "another release stores chunks in another order",
        "the installed package",
        lambda _: installed_lmcache(),
    ),
    "connector": EngineRow(
        "another version may arrange KV in another way",
        "the content of pdkit's connector",
        lambda _: connector_version(),
    ),
    "model": EngineRow(
        "other weights compute other KV",
        "the fingerprint of the folder, which was compared at the start; of a hub's model, its "
        "name and revision",
        _model,
    ),
    "files": EngineRow(
        "the content of other folders and files that arguments name, such as adapters",
        "their fingerprint, which was compared at the start",
        lambda _: os.environ.get(NAMED_VARIABLE, ""),
    ),
    "overrides": EngineRow(
        "`--hf-overrides` changes numbers of the model",
        "`model_config.hf_overrides`",
        lambda config: config.model_config.hf_overrides,
    ),
    "dtype": EngineRow(
        "KV is computed in it", "`model_config.dtype`", lambda config: config.model_config.dtype
    ),
    "configuration": EngineRow(
        "numbers of the model, such as heads, windows and positions, wherever they are given",
        "a digest of `model_config.hf_config`, without paths",
        _configuration,
    ),
    "implementation": EngineRow(
        "another implementation of the model may round in another way",
        "`model_config`: `model_impl`, `code_revision`",
        lambda config: [
            getattr(config.model_config, name, None) for name in ("model_impl", "code_revision")
        ],
    ),
    "kv_dtype": EngineRow(
        "KV is kept in it, but for the layers that are left out",
        "`cache_config`: `cache_dtype`, `kv_cache_dtype_skip_layers`",
        lambda config: [
            config.cache_config.cache_dtype,
            *(getattr(config.cache_config, "kv_cache_dtype_skip_layers", None) or ()),
        ],
    ),
    "kv_format": EngineRow(
        "GPUs keep FP8 numbers in two formats, and each reads the other's as half or twice as much",
        "`current_platform.fp8_dtype()`, if `cache_config.cache_dtype` is FP8",
        _fp8_format,
    ),
    "kv_scales": EngineRow(
        "scales of FP8 KV that an engine takes from its own first requests",
        "`cache_config.calculate_kv_scales`",
        lambda config: getattr(config.cache_config, "calculate_kv_scales", False),
    ),
    "quantization": EngineRow(
        "weights are used in other precision",
        "`model_config.quantization`",
        lambda config: config.model_config.quantization,
    ),
    "shape": EngineRow(
        "heads that share K and V, and their size",
        "`model_config`: KV heads, head size, `use_mla`",
        _shape,
    ),
    "context": EngineRow(
        "LongRoPE, dynamic scaling and Llama 4 choose positions by the longest context",
        "`model_config.max_model_len`; `auto` if vLLM chooses it; `any` for models whose positions "
        "do not depend on it",
        _context,
    ),
    "sliding_window": EngineRow(
        "tokens outside it have no influence",
        "`cache_config.sliding_window`, `model_config.disable_sliding_window`",
        lambda config: [
            config.cache_config.sliding_window,
            getattr(config.model_config, "disable_sliding_window", None),
        ],
    ),
    "tensor_parallel": EngineRow(
        "each rank holds a share of the heads",
        "`parallel_config.tensor_parallel_size`",
        lambda config: config.parallel_config.tensor_parallel_size,
    ),
    "parallel": EngineRow(
        "each rank holds a share of the layers, or of the tokens",
        "`parallel_config`: pipeline, decode context and prefill context",
        _parallel,
    ),
    "attention": EngineRow(
        "the back end that was chosen may round in another way",
        "`attention_config.backend`, `VLLM_ATTENTION_BACKEND`",
        _attention,
    ),
    "lora": EngineRow("adapters change weights", "`lora_config.max_lora_rank`", _lora),
    "speculative": EngineRow(
        "some draft models keep KV of their own",
        "`speculative_config`: `method`, `num_speculative_tokens`",
        _speculative,
    ),
    "additional_config": EngineRow(
        "settings of vLLM's plug-ins",
        "`additional_config`",
        lambda config: getattr(config, "additional_config", None),
    ),
    "variables": EngineRow(
        "some choose kernels, layouts and numbers",
        "the environment that the engine was started with: `VLLM_*` and those of the libraries "
        "below vLLM, without those that do not change KV",
        lambda _: AT_START,
    ),
}
# What differs between an engine's processes once it runs.
_EARLY = ("configuration", "variables")


def kv_rows(vllm_config: Any) -> dict[str, str]:
    """Collect the identity of this engine's KV: row → value.

    A row that this vLLM cannot tell is "unknown": no row is worth an engine.
    """
    return {name: _told(row.take, vllm_config) for name, row in ROWS.items()}


def _told(take: Callable[[Any], Any], vllm_config: Any) -> str:
    try:
        value = take(vllm_config)
    except Exception:  # noqa: BLE001 - see above
        return UNKNOWN
    try:
        value = _plain(value)
    except Exception:  # noqa: BLE001 - such as a value that holds itself
        value = _described(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _plain(value: Any) -> Any:
    """Convert a value to JSON types: equal in all processes, and different for different values."""
    if value is None or (isinstance(value, (str, int, float)) and not isinstance(value, Enum)):
        return value
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): _plain(value[key]) for key in value}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(one) for one in value), key=json.dumps)
    return _plain_object(value)


def _plain_object(value: Any) -> Any:
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if code := getattr(value, "__code__", None):
        return [value.__qualname__, code.co_code.hex(), *map(_described, code.co_consts)]
    if name := getattr(value, "__qualname__", None):
        return f"{value.__module__}.{name}"
    if callable(hashed := getattr(value, "compute_hash", None)):
        return [type(value).__qualname__, hashed()]  # one of vLLM's own configurations
    if held := getattr(value, "__dict__", None):
        return [type(value).__qualname__, _plain(held)]
    return _described(value)


def _described(value: Any) -> str:
    return _ADDRESS.sub("", repr(value)).removeprefix("torch.")


def take_rows_early() -> None:
    """Have vLLM's configuration carry the rows from the moment the API server has made it.

    What the plan did not give is logged there, once for an engine.
    """
    from vllm.engine.arg_utils import EngineArgs

    make = EngineArgs.create_engine_config

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        config = make(*args, **kwargs)
        if transfer := config.kv_transfer_config:
            rows = kv_rows(config)
            transfer.kv_connector_extra_config[TAKEN] = rows
            warn_of_unplanned(rows, planned(config))
        return config

    EngineArgs.create_engine_config = made


def rows_of(vllm_config: Any) -> dict[str, str]:
    """Return the rows that the API server took; without any, what each process knows alike."""
    if taken := vllm_config.kv_transfer_config.get_from_extra_config(TAKEN, None):
        return dict(taken)
    named = _told(
        lambda config: [
            getattr(config.model_config, name, None) for name in ("hf_config_path", "config_format")
        ],
        vllm_config,
    )
    return {**kv_rows(vllm_config), **dict.fromkeys(_EARLY, UNKNOWN), "configuration": named}


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
    told = facts(rows_of(vllm_config), vllm_config)
    return with_key_name(vllm_config, told["key_name"]), told


def facts(rows: Mapping[str, str], vllm_config: Any) -> dict[str, Any]:
    """Return an engine's report of its identity, beside the format of its KV."""
    return {
        "model": rows["model"],
        "key_name": key_name(rows),
        "rows": dict(rows),
        "unplanned": differences(rows, planned(vllm_config)),
    }


def warn_of_unplanned(rows: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Log each row that is not as given."""
    for name, value in differences(rows, given).items():
        get_logger().warning(
            "pdkit-connector %s is %s, and %s was planned: this engine finds no KV of engines that "
            "run as planned",
            name, rows[name], value,
        )  # fmt: skip


def differences(rows: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, str]:
    """Return each row that is not as given: row → the given value; what is unknown differs not."""
    return {
        str(name): str(value)
        for name, value in given.items()
        if rows.get(name, UNKNOWN) not in (str(value), UNKNOWN)
    }
