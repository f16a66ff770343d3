"""The plan: each engine with its devices, ports and memory, the store and the router."""

from __future__ import annotations

from dataclasses import dataclass

from deploy.config.fields import IN_ENGINES, Connector
from deploy.config.model import Model
from deploy.config.runtimes import RUNTIMES
from deploy.config.spec import SettledSpec
from deploy.config.vendors import Vendor, vendor_named
from deploy.errors import PdkitError
from deploy.planning.address import host_port
from deploy.planning.checks import check_engine_settings, check_kind, check_spec
from deploy.planning.engines import (
    DECODE,
    PREFILL,
    EnginePlan,
    engine_memory_mib,
    plan_engines,
    remote_engines,
)
from deploy.planning.gpus import allot, gpu_memory, gpu_need
from deploy.planning.inventory import Gpu, Inventory
from deploy.planning.limits import TransferLimits, redis_limits
from deploy.planning.lmcache_server import LmcacheServerPlan, kv_server
from deploy.planning.memory import (
    MIB,
    bytes_per_token,
    chosen_dtype,
    kv_space,
    loaded_bytes,
    max_model_len,
    store_mib,
)
from deploy.planning.redis import RedisPlan, redis_shards, shard_count
from deploy.planning.topology import Topology
from deploy.planning.ways_out import with_ways_out

_READY_S = 600.0
_START_S = 200.0  # beside the reading of the weights
_SLOW_DISK = 250e6  # bytes per second, as of a network disk

# Tokens of a block where vLLM chooses: as many as back ends of latent attention on CUDA take.
_LARGE_BLOCK = 128


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a stack is built.

    Attributes:
        spec: the settings that the plan is made from.
        kv_bytes_per_token: KV of one token, all layers, one replica; None if the model's config
            is not known yet.
        kv_cache_bytes: KV space that each rank is given; None if it takes what its share of the
            GPU leaves.
        bind, port: where clients reach the stack: the router.
        keyed: clients must send a key.
        user_redis: Redis is the user's own, and no service of the stack.
        redis: the kit's own, in the order in which engines name them.
        block_size: tokens of a block; where vLLM chooses, the most that are expected.
        kv_server: LMCache's server, through which engines share KV; Redis is its second tier.
        gpu_share: part of its GPUs' memory that an engine may use; None without GPUs.
        max_model_len: tokens of prompt and answer together; None leaves it to the engine.
        remote: engines of other hosts that the router of this one uses.
    """

    spec: SettledSpec
    name: str
    vendor: Vendor
    runtime: str
    model: Model
    topology: Topology
    tp: int
    layerwise: bool
    save_decode_cache: bool
    bind: str
    port: int
    keyed: bool
    router_metrics_port: int
    prometheus_port: int
    grafana_port: int
    user_redis: bool
    redis: tuple[RedisPlan, ...]
    kv_server: LmcacheServerPlan | None
    engines: tuple[EnginePlan, ...]
    dtype: str
    block_size: int
    chunk_size: int
    kv_bytes_per_token: int | None
    kv_cache_bytes: int | None
    gpu_share: float | None
    max_model_len: int | None
    limits: TransferLimits
    gpu_groups: tuple[int, ...]
    container_gpus: tuple[str, ...]
    remote: tuple[EnginePlan, ...] = ()

    @property
    def connector(self) -> Connector:
        """How engines share KV, if they do."""
        return self.spec.connector or IN_ENGINES

    @property
    def all_engines(self) -> tuple[EnginePlan, ...]:
        """The engines of this host, and those of others that its router uses."""
        return (*self.engines, *self.remote)

    @property
    def ready_s(self) -> float:
        """How long an engine may take to become ready."""
        weights = self.model.weight_bytes or 0
        return self.spec.timeouts.ready_s or max(_READY_S, _START_S + weights / _SLOW_DISK)

    @property
    def has_router(self) -> bool:
        """Whether requests can be served from here; a host with one role only computes."""
        return bool(self.producers and self.consumers)

    @property
    def producers(self) -> tuple[EnginePlan, ...]:
        """The engines that do prefill, of other hosts too; aggregated ones do both."""
        return tuple(engine for engine in self.all_engines if engine.role in PREFILL)

    @property
    def consumers(self) -> tuple[EnginePlan, ...]:
        """The engines that do decode, of other hosts too; aggregated ones do both."""
        return tuple(engine for engine in self.all_engines if engine.role in DECODE)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The names of each engine that stores KV, with each that loads it."""
        if not self.shares_kv:
            return ()
        return tuple(
            (producer.name, consumer.name)
            for producer in self.producers
            for consumer in self.consumers
            if producer is not consumer
        )

    @property
    def aggregated(self) -> bool:
        """Whether every engine does both prefill and decode."""
        return self.topology.aggregated > 0

    @property
    def shares_kv(self) -> bool:
        """Whether engines share KV, through Redis or LMCache's server."""
        return self.topology.redis

    @property
    def uses_redis(self) -> bool:
        """Whether engines use Redis themselves, the kit's or the user's own."""
        return self.shares_kv and self.kv_server is None

    @property
    def url(self) -> str:
        """The address for clients."""
        return f"http://{host_port(self.bind, self.port)}"

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs of all engines here, each once."""
        return tuple({gpu.index: gpu for one in self.engines for gpu in one.gpus}.values())

    @property
    def shares_gpus(self) -> bool:
        """Whether several engines are on one GPU."""
        held = [index for engine in self.engines for index in engine.devices]
        return len(held) > len(set(held))

    @property
    def sets_block_size(self) -> bool:
        """Whether engines are given a block size; else vLLM takes one that its back end wants."""
        return sets_block_size(self.spec, self.model)

    @property
    def keys_per_chunk(self) -> int:
        """Keys that a rank stores per chunk: in layerwise mode one per layer, if known."""
        return self.model.shape.all_layers if self.layerwise and self.model.shape else 1

    @property
    def redis_memory_mib(self) -> int:
        """Redis's maxmemory, all shards together."""
        return sum(shard.memory_mib for shard in self.redis)

    @property
    def storing_ranks(self) -> int:
        """How many ranks of the stack have staging memory and connections to Redis."""
        return len(self.engines) * self.limits.ranks if self.uses_redis else 0

    @property
    def store_tokens(self) -> int | None:
        """Tokens whose KV engines can load at once, if known: what the first tier holds."""
        if self.kv_server:
            a_token = self.limits.stored_token_bytes
            return self.kv_server.tokens(a_token) if a_token else None
        return self.redis_tokens

    @property
    def redis_tokens(self) -> int | None:
        """Tokens whose KV Redis holds before it drops the least recently used, if known."""
        if not self.redis or not self.limits.chunk_memory:
            return None
        chunks = self.redis_memory_mib * MIB // self.limits.chunk_memory
        return chunks * self.chunk_size

    @property
    def memory_mib(self) -> int:
        """Expected resident host memory of the whole stack."""
        server = self.kv_server.memory_mib if self.kv_server else 0
        return server + self.redis_memory_mib + sum(engine.memory_mib for engine in self.engines)

    @property
    def shared_memory_mib(self) -> int:
        """How much of the engines' KV is in `/dev/shm`, where LMCache's server reaches it."""
        if self.kv_server is None or self.vendor.has_gpus:
            return 0
        return len(self.engines) * self.tp * (self.kv_cache_bytes or 0) // MIB

    @property
    def shared_memory_peak_mib(self) -> int:
        """Its peak: for a minute, the server also holds the old KV of an engine that restarts."""
        return self.shared_memory_mib * (len(self.engines) + 1) // len(self.engines)

    @property
    def ports(self) -> dict[int, str]:
        """Every port of this machine that the stack listens on, with the service's name."""
        kv_metrics = self.kv_server.metrics_port if self.kv_server else 0
        return {
            **({self.port: "router"} if self.has_router else {}),
            **{shard.port: shard.name for shard in self.redis if shard.port},
            **({self.router_metrics_port: "router metrics"} if self.has_router else {}),
            **({self.prometheus_port: "prometheus"} if self.prometheus_port else {}),
            **({self.grafana_port: "grafana"} if self.grafana_port else {}),
            **({kv_metrics: "kv-server metrics"} if kv_metrics else {}),
            **{engine.port: engine.name for engine in self.engines},
        }


def sets_block_size(spec: SettledSpec, model: Model) -> bool:
    """Tell whether engines are given a block size.

    Not for latent attention on CUDA: back ends of sparse MLA take 32, 64, 128 or 256 only, and the
    fast ones of dense MLA 32, 64 or 128, by the GPU.
    """
    latent = model.kind.mla or bool(model.shape and model.shape.latent_dim)
    if spec.engine.block_size is not None:
        return True
    return not (model.kind.state or (latent and spec.vendor == "cuda"))


def make_plan(
    spec: SettledSpec, model: Model, inventory: Inventory, *, restored: bool = False
) -> Plan:
    """Plan a settled spec for a model and a machine.

    A `restored` spec is that of a stack which runs already: arguments and variables that only this
    version of the kit refuses are left as they are.

    Raises:
        ConfigError: two settings contradict each other; names both.
        MissingGpus, NotEnoughMemory: the machine has too little. Splits that are suggested were
            planned and fit.
    """

    def planned(changed: SettledSpec, machine: Inventory) -> Plan:
        return plan_as_asked(changed, model, machine, restored=restored)

    try:
        return planned(spec, inventory)
    except PdkitError as exc:
        raise with_ways_out(exc, spec, inventory, planned) from exc


def plan_as_asked(
    spec: SettledSpec, model: Model, inventory: Inventory, *, restored: bool = False
) -> Plan:
    """Return the same plan; errors suggest what nobody has planned yet."""
    vendor = vendor_named(spec.vendor)
    need = gpu_need(spec, vendor, inventory)
    topology = need.topology
    block_size = spec.engine.block_size or vendor.block_size
    if not sets_block_size(spec, model):
        block_size = _LARGE_BLOCK
    check_spec(spec, model, block_size, topology)
    if not restored:
        check_engine_settings(spec, shares_kv=topology.redis)
    check_kind(spec, model, vendor, inventory, shares_kv=topology.redis)
    gpus = allot(inventory, vendor, engines=topology.engines, ranks=spec.tp, needed=need.needed)
    memory = gpu_memory(gpus, spec.engine.gpu_memory)
    dtype = chosen_dtype(spec, vendor, inventory)
    a_token = bytes_per_token(dtype, model.shape)
    space = kv_space(spec, vendor, model, memory, dtype=dtype, block_size=block_size)
    length = max_model_len(spec, model, space)
    limits = redis_limits(
        spec, model.shape, dtype, inventory, engines=topology.engines, prompt=length
    )
    memory_mib = engine_memory_mib(
        spec,
        vendor,
        space,
        limits if topology.redis else None,
        loaded_bytes(model.weight_bytes or 0, dtype),
    )
    engines = plan_engines(spec, vendor, topology, inventory, gpus, memory_mib)
    tier = store_mib(space, inventory, producers=topology.storing, a_token=a_token, context=length)
    used_gpus = len({gpu for own in gpus for gpu in own})
    return Plan(
        spec=spec,
        name=spec.name,
        vendor=vendor,
        runtime=spec.runtime,
        model=model,
        topology=topology,
        tp=spec.tp,
        layerwise=spec.layerwise,
        save_decode_cache=spec.save_decode_cache,
        bind=spec.bind,
        port=spec.port,
        keyed=spec.api_key_file is not None,
        router_metrics_port=spec.port + 2,
        prometheus_port=spec.port + 3 if spec.monitoring else 0,
        grafana_port=spec.port + 4 if spec.monitoring else 0,
        user_redis=spec.redis.url_file is not None,
        redis=_redis(spec, topology, inventory, tier, gpus=used_gpus),
        kv_server=kv_server(spec, topology, tier),
        engines=engines,
        dtype=dtype,
        block_size=block_size,
        chunk_size=spec.lmcache.chunk_size,
        kv_bytes_per_token=a_token,
        kv_cache_bytes=space.told_bytes,
        gpu_share=memory.share if memory else None,
        max_model_len=length,
        limits=limits,
        gpu_groups=inventory.gpu_groups,
        container_gpus=inventory.container_gpus,
        remote=remote_engines(spec, topology),
    )


def _redis(
    spec: SettledSpec, topology: Topology, inventory: Inventory, default_mib: int, *, gpus: int
) -> tuple[RedisPlan, ...]:
    if spec.redis.url_file or not topology.redis:
        return ()
    asked = spec.redis.memory_gib
    memory_mib = default_mib if asked is None else max(1, round(asked * 1024))
    return redis_shards(_redis_port(spec), shard_count(spec, inventory, gpus=gpus), memory_mib)


def _redis_port(spec: SettledSpec) -> int:
    """Return the port of Redis, or 0 if none is needed.

    Processes reach it by a Unix socket, except LMCache's own client, which cannot. On a port, other
    users of the machine could take all of its connections.
    """
    by_port = not RUNTIMES[spec.runtime].own_network and spec.redis.client == "lmcache"
    return spec.port + 1 if by_port else 0
