"""Kinds of models and KV that would give wrong answers or crash engines: the plan refuses them."""

from __future__ import annotations

from deploy.config.engine_args import options
from deploy.config.model import Model
from deploy.config.spec import SettledSpec
from deploy.config.vendors import Vendor
from deploy.errors import Changes, ConfigError
from deploy.planning.inventory import Inventory

_WINDOW_OFF = "--disable-sliding-window"
_ANOTHER: Changes = {"--model": "FOLDER"}
_KIND = "with a model of another kind"


def check_kind(spec: SettledSpec, model: Model, vendor: Vendor, inventory: Inventory) -> None:
    """Refuse a model whose KV the connector cannot carry.

    Raises:
        ConfigError: which kind it is, and why.
    """
    name, kind = model.served_name, model.kind
    if kind.state:
        raise ConfigError(
            f"{name} has layers that keep a state instead of KV (config.json: "
            f"{kind.state}); LMCache stores KV by tokens, and cannot store it",
            setting="model",
            retry=(_ANOTHER,),
            note=_KIND,
        )
    if kind.window and _WINDOW_OFF not in spec.engine.args:
        raise ConfigError(
            f"every layer of {name} has a sliding window ({kind.window} tokens); vLLM "
            "drops the KV behind it, and LMCache would store other bytes in its place",
            setting="model",
            hint=f"set engine.args to [{_WINDOW_OFF}] and engine.max_model_len to {kind.window} "
            "at most",
        )
    if kind.mla and not vendor.has_gpus:
        raise ConfigError(
            f"{name} has MLA (kv_lora_rank in config.json), whose KV the connector does "
            "not support on CPUs",
            setting="model",
            retry=(_ANOTHER,),
            note=_KIND,
        )
    if _wants_fp8(spec.engine.args) and not vendor.has_gpus and not inventory.fast_bfloat16:
        raise ConfigError(
            "--kv-cache-dtype fp8 needs AVX-512 on CPUs, which this processor lacks",
            setting="engine.args",
            hint="leave --kv-cache-dtype out of engine.args",
        )


def _wants_fp8(args: tuple[str, ...] | list[str]) -> bool:
    return options(args).get("--kv-cache-dtype", "").startswith("fp8")
