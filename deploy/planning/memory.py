"""How much memory engines and the store get, in host memory and on GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.config.model import Model
from deploy.config.shape import ModelShape
from deploy.config.spec import SettledSpec
from deploy.config.vendors import Vendor, vendor_named
from deploy.errors import ConfigError, NotEnoughMemory
from deploy.planning.gpus import GpuMemory
from deploy.planning.inventory import Inventory

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MIB = 2**20
GIB = 2**30
# GPU memory beside weights and KV: activations, graphs, libraries.
_GPU_BASE_BYTES = 3 * GIB
_ESTIMATE_USED = 0.9
# The store is this many times as large as the producers' KV spaces together, so that it still has
# what they dropped.
_STORE_FACTOR = 2
_STORE_FLOOR_MIB = 1024
_STORE_HOST_PART = 4  # at most a quarter of the machine's memory
_UNKNOWN_CONTEXTS = 16  # how many of the longest prompts the store holds, if KV spaces are unknown
_UNKNOWN_CONTEXT = 8192
# Length of each answer of `deploy check`: a context must hold a chunk and this many tokens.
# With 16, all exchanged chunks and heads and all zeroed layers that were tried on the tiny model
# moved a log-probability past the tolerance (docs/results/check-power.md).
ANSWER_TOKENS = 16
# vLLM then gives all layers full attention, and ends the context at the window.
WINDOW_OFF = "--disable-sliding-window"


def size(mib: float) -> str:
    """Return MiB as MiB or GiB."""
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


@dataclass(frozen=True)
class KvSpace:
    """The KV space of one engine.

    Attributes:
        told_bytes: size that each rank is given; None if it takes what its GPU share leaves.
        tokens: how many fit, all ranks together; None if too little is known of the model.
    """

    told_bytes: int | None
    tokens: int | None


def chosen_dtype(spec: SettledSpec, vendor: Vendor, inventory: Inventory) -> str:
    """Return the data type of weights and KV: the one that is set, else the fast one."""
    slow = not vendor.has_gpus and not inventory.fast_bfloat16
    return spec.engine.dtype or ("float32" if slow else "bfloat16")


def loaded_bytes(weight_bytes: int, dtype: str) -> int:
    """Return the memory of weights that are computed in `dtype`; files have two bytes a number."""
    return weight_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES["bfloat16"]


def bytes_per_token(dtype: str, shape: ModelShape | None) -> int | None:
    """Return the KV of one token over all layers of one replica, in bytes."""
    return shape.kv_bytes_per_token(DTYPE_BYTES[dtype]) if shape else None


def kv_space(
    spec: SettledSpec,
    vendor: Vendor,
    model: Model,
    gpu: GpuMemory | None,
    *,
    dtype: str,
    block_size: int,
) -> KvSpace:
    """Return the KV space of each engine.

    Raises:
        NotEnoughMemory: the weights leave no room for any KV on the engine's share of its GPUs.
    """
    told_gib = spec.engine.kv_cache_gib or vendor.kv_cache_gib
    told = int(told_gib * GIB) if told_gib else None
    room = told
    if gpu is not None:
        room = _gpu_room(spec, model, int(gpu.memory_mib * gpu.share) * MIB, told)
        if room is not None and gpu.shared:
            # Engines that measure a shared GPU at the same time would count each other's memory,
            # and after a reboot all of them start at once.
            told = room = told or int(room * _ESTIMATE_USED)
    if model.shape is None or room is None:
        return KvSpace(told, None)
    # Each rank holds its part of the KV heads, or a copy if there are fewer heads than ranks.
    a_token = model.shape.rank_kv_bytes_per_token(DTYPE_BYTES[dtype], spec.tp)
    # vLLM keeps one block for itself.
    spare = block_size * a_token
    tokens = room // a_token
    if told is None:
        return KvSpace(None, tokens)
    return KvSpace(told + spare, tokens // block_size * block_size)


def _gpu_room(spec: SettledSpec, model: Model, share_bytes: int, told: int | None) -> int | None:
    """Return the bytes for KV on each of an engine's GPUs; None if the weights are unknown."""
    if model.weight_bytes is None:
        return told
    weights = model.weight_bytes // spec.tp
    room = share_bytes - weights - _GPU_BASE_BYTES
    if room <= 0:
        raise NotEnoughMemory(
            f"{model.served_name} has {weights / GIB:.1f} GiB of weights for each GPU, "
            f"and an engine may use {share_bytes / GIB:.1f} GiB of it",
            setting="model",
            retry=({"--tp": str(spec.tp * 2)},),
        )
    if told is not None and told > room:
        raise NotEnoughMemory(
            f"{told / GIB:g} GiB of KV do not fit beside the weights; there"
            f" is room for {room / GIB:.1f}",
            setting="engine.kv_cache_gib",
            hint=f"set engine.kv_cache_gib to {int(10 * room / GIB) / 10:g} or less, or leave it "
            "out",
        )
    return told or room


def max_model_len(spec: SettledSpec, model: Model, space: KvSpace) -> int | None:
    """Return the length that is set, else the longest that model and KV space allow.

    Raises:
        ConfigError: more than the model or the KV space allows, or too short to share any KV.
        NotEnoughMemory: what the weights leave of a GPU is too little for any context.
    """
    asked, least = spec.engine.max_model_len, spec.lmcache.chunk_size + ANSWER_TOKENS
    fits, limit = space.tokens, _positions(spec, model)
    length = asked
    if model.shape:
        length = _allowed_len(spec, limit or fits, space)
    if length is None or length >= least:
        return length
    no_room = (
        f"no room for a chunk (lmcache.chunk_size {spec.lmcache.chunk_size}) and an answer of "
        f"{ANSWER_TOKENS}, so no KV would ever be shared"
    )
    if asked is None and _takes_the_rest(spec) and length != limit:
        raise NotEnoughMemory(
            f"beside the weights, a GPU has space for {length} tokens of KV: {no_room}",
            setting="model",
            retry=({"--tp": str(spec.tp * 2)},),
        )
    setting, hint = "engine.kv_cache_gib", "raise engine.kv_cache_gib, or "
    if asked:
        setting = "engine.max_model_len"
        hint = f"set engine.max_model_len to {least} or more, or "
    elif length == limit:
        setting, hint = "lmcache.chunk_size", ""
    raise ConfigError(
        f"a context of {length} tokens has {no_room}",
        setting=setting,
        hint=f"{hint}set a smaller lmcache.chunk_size",
    )


def _takes_the_rest(spec: SettledSpec) -> bool:
    """Tell whether KV gets what weights leave of a GPU, so that no setting has more for it."""
    return spec.engine.kv_cache_gib is None and vendor_named(spec.vendor).has_gpus


def _positions(spec: SettledSpec, model: Model) -> int | None:
    """Return the model's longest context; with its window switched off, vLLM ends there."""
    limit = model.shape.max_positions if model.shape else None
    if model.kind.window and not model.idle_window and WINDOW_OFF in spec.engine.args:
        return min(limit or model.kind.window, model.kind.window)
    return limit


def _allowed_len(spec: SettledSpec, limit: int | None, space: KvSpace) -> int | None:
    """Return the length that is set, else the longest; None if nothing limits it.

    Raises:
        ConfigError: more than the model or the KV space allows.
    """
    asked, fits = spec.engine.max_model_len, space.tokens
    if asked is not None and limit is not None and asked > limit:
        raise ConfigError(
            f"{asked} is more than the model's {limit} positions",
            setting="engine.max_model_len",
            hint=f"set engine.max_model_len to {limit} or less",
        )
    if asked is not None and fits is not None and asked > fits:
        words = f"{asked} tokens do not fit into a KV space of {fits}"
        if _takes_the_rest(spec):
            most = _longest(limit, fits, exact=space.told_bytes is not None)
            raise ConfigError(
                words,
                setting="engine.max_model_len",
                retry=({"--tp": str(spec.tp * 2)},),
                hint=f"set engine.max_model_len to {most} or less",
            )
        raise ConfigError(
            words,
            setting="engine.max_model_len",
            hint=f"set engine.max_model_len to {fits} or less, or engine.kv_cache_gib to more",
        )
    return asked or _longest(limit, fits, exact=space.told_bytes is not None)


def _longest(limit: int | None, fits: int | None, *, exact: bool) -> int | None:
    """Return the longest context; if memory limits it, with a margin for error.

    How much else a GPU holds is unknown until the engine has measured it.
    """
    if fits is not None and not exact:
        fits = int(fits * _ESTIMATE_USED)
    known = [length for length in (limit, fits) if length is not None]
    return min(known) if known else None


def store_mib(
    space: KvSpace,
    inventory: Inventory,
    *,
    producers: int,
    a_token: int | None,
    context: int | None,
) -> int:
    """Return the size of a tier of the store: twice the producers' KV, at most a quarter of the
    machine's memory and at least 1 GiB. If a token's size is unknown, that quarter.
    """
    most = inventory.memory_mib // _STORE_HOST_PART
    if a_token is None:
        return max(_STORE_FLOOR_MIB, most)
    tokens = space.tokens or _UNKNOWN_CONTEXTS * (context or _UNKNOWN_CONTEXT)
    wanted = _STORE_FACTOR * producers * tokens * a_token // MIB
    return max(_STORE_FLOOR_MIB, min(wanted, most))
