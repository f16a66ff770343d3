"""What a plan refuses: contradicting settings, those that break sharing KV, and kinds of models."""

from __future__ import annotations

from collections.abc import Mapping

from deploy.config.engine_args import options
from deploy.config.engine_inputs import RefusedSetting, refused_option, refused_variable
from deploy.config.fields import IN_ENGINES, MP
from deploy.config.model import Model
from deploy.config.spec import MAX_CHUNK, SettledSpec
from deploy.config.vendors import Vendor, vendor_named
from deploy.errors import Changes, ConfigError
from deploy.planning.address import check_bind, check_collector
from deploy.planning.hosts import check_hosts
from deploy.planning.inventory import Inventory
from deploy.planning.lmcache_server import check_kv_server
from deploy.planning.memory import ANSWER_TOKENS, WINDOW_OFF
from deploy.planning.redis import check_redis
from deploy.planning.topology import FIRST_ENGINE_OFFSET, NO_SPLIT, Topology

_LAST_PORT = 65535
_ANOTHER: Changes = {"--model": "FOLDER"}
_ALONE: Changes = {**NO_SPLIT, "--topology": "1a"}
_KIND = "a --model of another kind"
_TEXT = "with a model that generates text"
# Why no connector of this kit carries states. LMCache 0.5.6 lists such models as working through
# its server, with a group of objects for each kind of layer.
_STATES: Mapping[str, str] = {
    IN_ENGINES: "LMCache inside engines stores KV by tokens, and has no place for states",
    MP: "LMCache's server stores them only with --separate-object-groups (LMCache 0.5.6), which "
    "pdkit does not start it with: its check of answers does not cover states yet",
}


def check_spec(spec: SettledSpec, model: Model, block_size: int, topology: Topology) -> None:
    """Refuse values that do not go together.

    Raises:
        ConfigError: naming one of them, and the one it contradicts.
    """
    check_bind(spec)
    check_collector(spec)
    check_hosts(spec, topology)
    _check_chunks(spec, block_size)
    _check_gpu_access(spec)
    check_kv_server(spec, topology, model)
    check_redis(spec, topology)
    _check_tensor_parallel(spec, model, topology)
    _check_ports(spec.port, topology)


def _check_chunks(spec: SettledSpec, block: int) -> None:
    chunk = spec.lmcache.chunk_size
    if chunk % block:
        nearest = min(max(1, round(chunk / block)), MAX_CHUNK // block) * block
        raise ConfigError(
            f"{chunk} is not a multiple of engine.block_size {block}; KV moves in whole blocks",
            setting="lmcache.chunk_size",
            hint=f"set lmcache.chunk_size to {nearest}",
        )


def _check_gpu_access(spec: SettledSpec) -> None:
    if spec.gpu_access == "all" and not vendor_named(spec.vendor).container.nodes:
        raise ConfigError(
            f"'all' works only with ROCm, but the vendor is {spec.vendor}",
            setting="gpu_access",
            hint="leave gpu_access out of deploy.yaml",
        )


def _check_tensor_parallel(spec: SettledSpec, model: Model, topology: Topology) -> None:
    tp, shape = spec.tp, model.shape
    if shape is None:
        return
    if not shape.divides(tp):
        possible = max(n for n in range(1, tp) if shape.divides(n))
        # Keep the number of engines: the number of GPUs was chosen for the other TP size.
        split = {**NO_SPLIT, "--topology": str(topology)} if spec.gpus is not None else {}
        raise ConfigError(
            f"{tp} does not divide {model.served_name}'s {shape.attention_heads} attention "
            f"heads and {shape.kv_heads} KV heads evenly",
            setting="tp",
            retry=({**split, "--tp": str(possible)},),
        )


def _check_ports(port: int, topology: Topology) -> None:
    last = port + FIRST_ENGINE_OFFSET + topology.engines - 1
    if last > _LAST_PORT:
        raise ConfigError(
            f"{port} leaves no room: the stack's last engine would listen on {last}",
            setting="port",
            retry=({"--port": str(_LAST_PORT - (last - port))},),
        )


def check_engine_settings(spec: SettledSpec, *, shares_kv: bool) -> None:
    """Refuse arguments and variables by which engines would not be as they are planned.

    Raises:
        ConfigError: naming the first.
    """
    for argument in spec.engine.args:
        name, refused = refused_option(argument, shares_kv=shares_kv)
        if refused:
            raise _error(spec, "engine.args", f"'{name}'", refused)
    for name in spec.engine.env:
        if refused := refused_variable(name):
            raise _error(spec, "engine.env", name, refused)


def _error(spec: SettledSpec, setting: str, name: str, refused: RefusedSetting) -> ConfigError:
    hint = refused.instead or f"leave it out of {setting}"
    if refused.for_gpus and (visible := vendor_named(spec.vendor).visible_devices):
        hint = f"{visible}=0,1 deploy up, which plans with these GPUs only"
    return ConfigError(f"{name} {refused.why}", setting=setting, hint=hint)


def check_kind(
    spec: SettledSpec, model: Model, vendor: Vendor, inventory: Inventory, *, shares_kv: bool
) -> None:
    """Refuse a model that generates no text, or whose KV the connector cannot carry.

    Raises:
        ConfigError: which kind it is, and why.
    """
    name, kind = model.served_name, model.kind
    if kind.not_text:
        raise ConfigError(
            f"{name} is a {kind.not_text}, which generates no text from a prompt as decoders do; "
            "disaggregated prefill is for models that do",
            setting="model",
            retry=(_ANOTHER,),
            note=_TEXT,
        )
    if shares_kv:
        _check_shared_kind(spec, model, vendor)
    if _wants_fp8(spec.engine.args) and not vendor.has_gpus and not inventory.fast_bfloat16:
        raise ConfigError(
            "--kv-cache-dtype fp8 needs AVX-512 on CPUs, which this processor lacks",
            setting="engine.args",
            hint="leave --kv-cache-dtype out of engine.args",
        )


def _check_shared_kind(spec: SettledSpec, model: Model, vendor: Vendor) -> None:
    name, kind = model.served_name, model.kind
    if kind.state:
        raise ConfigError(
            f"{name} has layers that keep a state instead of KV (config.json: {kind.state}); "
            f"{_STATES[spec.connector or IN_ENGINES]}",
            setting="model",
            retry=(_ALONE,),
            hint=_KIND,
        )
    if reason := _several_groups(model):
        raise ConfigError(
            f"{name} keeps KV in several groups of blocks ({reason}); LMCache takes the blocks of "
            "one group for all of them, and would store other bytes",
            setting="model",
            retry=(_ALONE,),
            hint=_KIND,
        )
    if model.shape and model.shape.others and spec.connector != MP:
        through_server: Changes = {"--connector": MP}
        raise ConfigError(
            f"{name} keeps KV of several sizes, by layer; LMCache inside engines stores one size "
            "for all layers",
            setting="model",
            retry=(through_server, _ALONE) if vendor.name == "cuda" else (_ALONE,),
            hint=_KIND,
        )
    if kind.window and not model.idle_window and WINDOW_OFF not in spec.engine.args:
        short = kind.window < spec.lmcache.chunk_size + ANSWER_TOKENS
        raise ConfigError(
            f"every layer of {name} has a sliding window ({kind.window} tokens); vLLM "
            "drops the KV behind it, and LMCache would store other bytes in its place",
            setting="model",
            retry=(_ALONE,),
            hint=""
            if short
            else f"set engine.args to [{WINDOW_OFF}], and engine.max_model_len to {kind.window} at "
            "most",
        )
    if kind.mla and not vendor.has_gpus:
        raise ConfigError(
            f"{name} has MLA (kv_lora_rank in config.json), whose KV the connector does "
            "not support on CPUs",
            setting="model",
            retry=(_ALONE,),
            hint=_KIND,
        )


def _several_groups(model: Model) -> str:
    """Return why vLLM keeps KV of this model in several groups; "" if it does not, or unknown."""
    if model.kind.groups:
        return f"config.json: {model.kind.groups}"
    shape = model.shape
    if shape is None or shape.groups in (None, 1):
        return ""
    return f"by vLLM {shape.reader}: {shape.groups or 'no way to put them into one'}"


def _wants_fp8(args: tuple[str, ...] | list[str]) -> bool:
    return options(args).get("--kv-cache-dtype", "").startswith("fp8")
