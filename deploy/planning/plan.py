"""The plan: each engine with its devices, ports and memory, the store and the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deploy.config.model import Model, ModelShape
from deploy.config.spec import MAX_CHUNK, StackSpec
from deploy.config.vendors import Vendor, vendor_named
from deploy.errors import ConfigError
from deploy.planning.inventory import Inventory
from deploy.planning.topology import Topology, resolve_topology

Role = Literal["producer", "consumer"]
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_MIB_PER_GIB = 1024
_FIRST_ENGINE_OFFSET = 10
# vLLM's options that follow from the plan, and what sets them.
_OWN_OPTIONS = {
    "--model": "--model",
    "--served-model-name": "--model",
    "--host": "bind",
    "--port": "--port",
    "--dtype": "engine.dtype",
    "--block-size": "engine.block_size",
    "--max-model-len": "engine.max_model_len",
    "--tensor-parallel-size": "--tp",
    "-tp": "--tp",
    "--kv-cache-memory-bytes": "engine.kv_cache_gib",
    "--kv-transfer-config": "--layerwise and --save-decode-cache",
}


@dataclass(frozen=True)
class EnginePlan:
    """One vLLM engine: who it is, where it listens, what it may use.

    Attributes:
        devices: accelerator indices; empty where engines run on the host's processors.
        memory_mib: what the engine is expected to hold resident, all parts together.
    """

    name: str
    role: Role
    port: int
    devices: tuple[int, ...]
    cpu_threads: int
    memory_mib: int


@dataclass(frozen=True)
class Plan:
    """Everything that is settled before a stack is built from it.

    Attributes:
        kv_bytes_per_token: K and V of one token, all layers, one replica; None where the model's
            config is not known yet.
        kv_cache_bytes: KV space of one engine, or of each of its ranks.
        max_model_len: tokens of prompt and answer together; None leaves it to the engine.
    """

    name: str
    vendor: Vendor
    runtime: str
    model: Model
    topology: Topology
    tp: int
    layerwise: bool
    save_decode_cache: bool
    bind: str
    router_port: int
    router_metrics_port: int
    redis_port: int
    engines: tuple[EnginePlan, ...]
    block_size: int
    chunk_size: int
    kv_bytes_per_token: int | None
    kv_cache_bytes: int
    max_model_len: int | None
    redis_memory_mib: int

    @property
    def producers(self) -> tuple[EnginePlan, ...]:
        return tuple(engine for engine in self.engines if engine.role == "producer")

    @property
    def consumers(self) -> tuple[EnginePlan, ...]:
        return tuple(engine for engine in self.engines if engine.role == "consumer")

    @property
    def memory_mib(self) -> int:
        """Expected resident memory of the whole stack."""
        return self.redis_memory_mib + sum(engine.memory_mib for engine in self.engines)

    @property
    def ports(self) -> dict[int, str]:
        """Every port the stack listens on, and whose it is."""
        return {
            self.router_port: "router",
            self.redis_port: "redis",
            self.router_metrics_port: "router metrics",
            **{engine.port: engine.name for engine in self.engines},
        }


def make_plan(spec: StackSpec, model: Model, inventory: Inventory) -> Plan:
    """Settle a spec for a model and a machine.

    Raises:
        ConfigError: values that do not go together, each named with the one it contradicts.
    """
    vendor = vendor_named(spec.vendor)
    topology = resolve_topology(spec, vendor)
    _check_chunks(spec)
    _check_engine_settings(spec)
    _check_tensor_parallel(spec.tp, model.shape, model.served_name)
    _check_ports(spec.port, topology)
    kv_cache_bytes = int((spec.engine.kv_cache_gib or vendor.kv_cache_gib) * 2**30)
    return Plan(
        name=spec.name,
        vendor=vendor,
        runtime="process" if spec.runtime == "auto" else spec.runtime,
        model=model,
        topology=topology,
        tp=spec.tp,
        layerwise=spec.layerwise,
        save_decode_cache=spec.save_decode_cache,
        bind=spec.bind,
        router_port=spec.port,
        redis_port=spec.port + 1,
        router_metrics_port=spec.port + 2,
        engines=_engines(spec, vendor, topology, inventory, kv_cache_bytes),
        block_size=spec.engine.block_size,
        chunk_size=spec.lmcache.chunk_size,
        kv_bytes_per_token=_kv_bytes_per_token(spec, model.shape),
        kv_cache_bytes=kv_cache_bytes,
        max_model_len=_max_model_len(spec, model.shape, kv_cache_bytes),
        redis_memory_mib=max(1, round(spec.redis.memory_gib * _MIB_PER_GIB)),
    )


def _engines(
    spec: StackSpec,
    vendor: Vendor,
    topology: Topology,
    inventory: Inventory,
    kv_cache_bytes: int,
) -> tuple[EnginePlan, ...]:
    names: list[tuple[Role, str]] = [
        *(("producer", f"producer-{index}") for index in range(topology.producers)),
        *(("consumer", f"consumer-{index}") for index in range(topology.consumers)),
    ]
    staging_mib = round(spec.lmcache.staging_gib * _MIB_PER_GIB)
    memory_mib = spec.tp * (vendor.engine_base_mib + kv_cache_bytes // 2**20 + staging_mib)
    threads = max(1, inventory.cpus // (topology.engines * spec.tp))
    return tuple(
        EnginePlan(name, role, spec.port + _FIRST_ENGINE_OFFSET + index, (), threads, memory_mib)
        for index, (role, name) in enumerate(names)
    )


def _check_chunks(spec: StackSpec) -> None:
    chunk, block = spec.lmcache.chunk_size, spec.engine.block_size
    if chunk % block:
        nearest = min(max(1, round(chunk / block)), MAX_CHUNK // block) * block
        raise ConfigError(
            f"lmcache.chunk_size: {chunk} is not a multiple of engine.block_size {block}; KV moves "
            "in whole blocks",
            hint=f"set lmcache.chunk_size to {nearest}",
        )


def _check_engine_settings(spec: StackSpec) -> None:
    for argument in spec.engine.args:
        option = argument.partition("=")[0].replace("_", "-")
        if option in _OWN_OPTIONS:
            raise ConfigError(
                f"engine.args: '{option}' is the plan's to set",
                hint=f"use {_OWN_OPTIONS[option]} instead",
            )
    if "PYTHONHASHSEED" in spec.engine.env:
        raise ConfigError(
            "engine.env: PYTHONHASHSEED is the plan's to set: keys match only where it is equal",
            hint="leave it out of engine.env",
        )


def _check_tensor_parallel(tp: int, shape: ModelShape | None, name: str) -> None:
    if tp == 1 or shape is None:
        return
    fits_kv = shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0
    if shape.attention_heads % tp or not fits_kv:
        possible = max(n for n in range(1, tp) if shape.kv_heads % n == 0)
        raise ConfigError(
            f"--tp: {tp} does not divide {name}'s {shape.attention_heads} attention heads and "
            f"{shape.kv_heads} KV heads evenly",
            hint=f"deploy plan --tp {possible}",
        )


def _check_ports(port: int, topology: Topology) -> None:
    last = port + _FIRST_ENGINE_OFFSET + topology.engines - 1
    if last > 65535:
        raise ConfigError(
            f"--port: {port} leaves no room: the stack's last engine would listen on {last}",
            hint=f"deploy plan --port {65535 - (last - port)}",
        )


def _kv_bytes_per_token(spec: StackSpec, shape: ModelShape | None) -> int | None:
    return shape.kv_bytes_per_token(DTYPE_BYTES[spec.engine.dtype]) if shape else None


def _max_model_len(spec: StackSpec, shape: ModelShape | None, kv_cache_bytes: int) -> int | None:
    """Return the asked length, else the longest that the model and the KV space both allow.

    Raises:
        ConfigError: more than the model or the KV space allows, or less than a chunk.
    """
    asked = spec.engine.max_model_len
    if shape is None:
        return asked
    fits = kv_cache_bytes // shape.kv_bytes_per_token(DTYPE_BYTES[spec.engine.dtype])
    limit = shape.max_positions or fits
    if asked is not None and asked > limit:
        raise ConfigError(
            f"engine.max_model_len: {asked} is more than the model's {limit} positions",
            hint=f"set engine.max_model_len to {limit} or less",
        )
    if asked is not None and asked > fits:
        raise ConfigError(
            f"engine.max_model_len: {asked} tokens do not fit into a KV space of {fits}",
            hint=f"set engine.max_model_len to {fits} or less, or engine.kv_cache_gib to more",
        )
    length = asked or min(limit, fits)
    if length <= spec.lmcache.chunk_size:
        field = "engine.max_model_len" if asked else "engine.kv_cache_gib"
        raise ConfigError(
            f"{field}: prompts of {length} tokens leave no room for a chunk (lmcache.chunk_size "
            f"{spec.lmcache.chunk_size}) and an answer, so no KV would ever be shared",
            hint=f"raise {field}, or set a smaller lmcache.chunk_size",
        )
    return length
