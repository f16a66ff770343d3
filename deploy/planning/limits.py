"""Limits for moving KV through Redis: staging memory, value sizes and deadlines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deploy.config.engine_args import batched_tokens
from deploy.config.shape import ModelShape
from deploy.config.spec import SettledSpec
from deploy.errors import ConfigError
from deploy.planning.inventory import Inventory
from deploy.planning.memory import DTYPE_BYTES, GIB, MIB

# Redis refuses larger strings unless its proto-max-bulk-len is raised.
REDIS_VALUE_BYTES = 512 * MIB
# Before a value's payload (pdkit_connector.redis_path.value).
_HEADER_BYTES = 128
# vLLM's default for --max-num-batched-tokens in its API server: by GPU memory, and otherwise.
_LARGE_GPU_MIB, _LARGE_STEP, _STEP = 160 * 1024, 16384, 8192
_STAGED_STEPS = 4  # of a prompt, in staging memory
_STAGING_HOST_PART = 4  # at most a quarter of the machine's memory, all ranks together
_LEAST_CHUNKS = 2  # LMCache's staging: one chunk is sent while the next is copied
_STAGING_UNIT = 64 * MIB
_UNKNOWN_TOKEN_BYTES = 160 * 1024  # of a 70B model, on each of two ranks
# Bytes per second from Redis, all engines together, below which waiting is not worth it. One
# thread of Redis moves four to eight times as much.
_SLOWEST = 250_000_000
# Extra time for a machine that is busy with something else. Engines on CPUs compute on the cores
# that a lookup needs.
_LOOKUP_S, _LOOKUP_CPU_S, _SILENT_S, _BUSY_S = 0.5, 2.0, 5.0, 10.0
_KEY_S = 20e-6
# What Redis may have to send a rank, over all its connections, before it answers a lookup.
_SENDER_BYTES = 8 * MIB


@dataclass(frozen=True)
class TransferLimits:
    """Limits of each rank that stores, as its connector gets them.

    Attributes:
        ranks: ranks per engine that store; 1 for an MLA model, whose ranks hold the same KV.
        token_bytes: KV of one token on each of them; None while the model's config is unknown.
        staging_gib: host memory for chunks in transit, including those that wait to be stored.
        value_bytes: size of a chunk's value, or in layerwise mode of one layer of it; None while
            the model's config is unknown.
        chunk_memory: memory that Redis needs for a chunk of all ranks; None as above.
        lookup_s, load_s, store_s: deadlines for a lookup of the longest prompt, for a load that
            fills staging memory, and for storing a chunk that waits behind a full one.
        silent_s: a load or store fails after this time without a byte from Redis.
    """

    ranks: int
    token_bytes: int | None
    staging_gib: float
    value_bytes: int | None
    chunk_memory: int | None
    lookup_s: float
    load_s: float
    store_s: float
    silent_s: float

    @property
    def stored_token_bytes(self) -> int | None:
        """KV of one token in the store, if known: of all ranks, some of which may have the same."""
        return self.token_bytes * self.ranks if self.token_bytes else None


@dataclass(frozen=True)
class _Traffic:
    """What moves through Redis: the bytes of a token on each rank, and the number of ranks.

    Attributes:
        prompt: tokens of the longest prompt, if known.
        step: tokens that an engine computes, and stores, at once.
    """

    token_bytes: int | None
    ranks: int
    engines: int
    prompt: int | None
    step: int


def redis_limits(
    spec: SettledSpec,
    shape: ModelShape | None,
    dtype: str,
    inventory: Inventory,
    *,
    engines: int,
    prompt: int | None,
) -> TransferLimits:
    """Return the limits for a stack whose longest prompt has that many tokens, if known.

    Raises:
        ConfigError: chunks are too large for Redis or for staging memory, or engine.args name a
            size of steps that is not a number.
    """
    traffic = _Traffic(
        token_bytes=shape.rank_kv_bytes_per_token(DTYPE_BYTES[dtype], spec.tp) if shape else None,
        ranks=shape.storing_ranks(spec.tp) if shape else spec.tp,
        engines=engines,
        prompt=prompt,
        step=batched_tokens(spec.engine.args) or _default_step(inventory),
    )
    value = _value_bytes(spec, traffic, shape)
    staging = _staging_bytes(spec, traffic, inventory)
    senders = traffic.ranks * engines
    silent_s = _SILENT_S + senders * (value or 0) / _SLOWEST
    staged_s = _BUSY_S + senders * staging / _SLOWEST
    keys = engines * (prompt or traffic.step) / spec.lmcache.chunk_size
    busy_s = _LOOKUP_CPU_S if spec.vendor == "cpu" else _LOOKUP_S
    lookup_s = busy_s + senders * _SENDER_BYTES / _SLOWEST + keys * _KEY_S
    return TransferLimits(
        ranks=traffic.ranks,
        token_bytes=traffic.token_bytes,
        staging_gib=staging / GIB,
        value_bytes=value,
        chunk_memory=_chunk_memory(spec, traffic, shape, value),
        lookup_s=_tenths(lookup_s),
        load_s=_tenths(staged_s),
        store_s=_tenths(staged_s),
        silent_s=_tenths(silent_s),
    )


def _default_step(inventory: Inventory) -> int:
    large = any(gpu.memory_mib >= _LARGE_GPU_MIB for gpu in inventory.gpus)
    return _LARGE_STEP if large else _STEP


def _tenths(seconds: float) -> float:
    return math.ceil(10 * seconds) / 10


def _value_bytes(spec: SettledSpec, traffic: _Traffic, shape: ModelShape | None) -> int | None:
    """Return the size of one value of Redis.

    Raises:
        ConfigError: it is larger than Redis accepts.
    """
    if traffic.token_bytes is None or shape is None:
        return None
    chunk, parts = spec.lmcache.chunk_size, shape.all_layers if spec.layerwise else 1
    value = chunk * traffic.token_bytes // parts + _HEADER_BYTES
    if value > REDIS_VALUE_BYTES:
        most = (REDIS_VALUE_BYTES - _HEADER_BYTES) * parts // traffic.token_bytes
        fitting = 1 << (most.bit_length() - 1)
        raise ConfigError(
            f"a chunk of {chunk} tokens is a value of {value:,} bytes, and "
            f"Redis takes {REDIS_VALUE_BYTES:,} at most",
            setting="lmcache.chunk_size",
            hint=f"set lmcache.chunk_size to {fitting}",
        )
    return value


def _chunk_memory(
    spec: SettledSpec, traffic: _Traffic, shape: ModelShape | None, value: int | None
) -> int | None:
    """Return the memory that Redis needs for a chunk of all ranks.

    Its allocator has four sizes to each power of two: a value just above 16 MiB takes 20.
    """
    if value is None or shape is None:
        return None
    step = 1 << max(4, (value - 1).bit_length() - 3)
    values = traffic.ranks * (shape.all_layers if spec.layerwise else 1)
    return math.ceil(value / step) * step * values


def _staging_bytes(spec: SettledSpec, traffic: _Traffic, inventory: Inventory) -> int:
    """Return the size that the spec sets, else room for a few steps of the longest prompt.

    Raises:
        ConfigError: the size that is set is too small for two chunks or, in layerwise mode, for a
            prompt.
    """
    least = _least_staging(spec, traffic)
    if spec.lmcache.staging_gib is not None:
        asked = int(spec.lmcache.staging_gib * GIB)
        if asked < least:
            raise _too_small(spec, least, traffic)
        return asked
    share = inventory.memory_mib * MIB // (_STAGING_HOST_PART * traffic.ranks * traffic.engines)
    tokens = _STAGED_STEPS * traffic.step
    wanted = min(traffic.prompt or tokens, tokens) * (traffic.token_bytes or _UNKNOWN_TOKEN_BYTES)
    return math.ceil(max(min(wanted, share), least) / _STAGING_UNIT) * _STAGING_UNIT


def _least_staging(spec: SettledSpec, traffic: _Traffic) -> int:
    """Return the least staging memory with which whole KV can move."""
    if traffic.token_bytes is None:
        return 1
    tokens = _LEAST_CHUNKS * spec.lmcache.chunk_size
    if spec.layerwise and traffic.prompt is not None:
        # A load holds all layers of all chunks; so does a store that starts meanwhile.
        tokens = max(tokens, traffic.prompt + min(traffic.prompt, traffic.step))
    return tokens * traffic.token_bytes


def _too_small(spec: SettledSpec, least: int, traffic: _Traffic) -> ConfigError:
    needed = math.ceil(100 * least / GIB) / 100
    of = f"room for two chunks of {spec.lmcache.chunk_size} tokens"
    ways = "or a smaller lmcache.chunk_size"
    if spec.layerwise:
        of = f"a prompt of {traffic.prompt} tokens, which layerwise mode moves in one piece,"
        ways = "or a smaller engine.max_model_len, or leave layerwise out"
    return ConfigError(
        f"{spec.lmcache.staging_gib:g} GiB is too little; {of} takes {needed:g}",
        setting="lmcache.staging_gib",
        hint=f"set lmcache.staging_gib to {needed:g} or more, {ways}",
    )
