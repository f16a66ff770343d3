"""The stack a user asks for, as written in deploy.yaml, flags and environment variables.

Pydantic models at the edge: strict, frozen, unknown keys refused. Defaults that depend on the
vendor or the machine are `None` here and are settled by the planner.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

MAX_CHUNK = 8192  # tokens
VendorChoice = Literal["auto", "cuda", "rocm", "cpu"]
RuntimeChoice = Literal["auto", "compose", "process"]
GpuAccess = Literal["auto", "runtime", "cdi"]


def _no_boolean(value: object) -> object:
    """Refuse yes and no where a number is meant: YAML reads booleans, Python takes them for 1."""
    if isinstance(value, bool):
        raise ValueError("a number is expected, not yes or no")
    return value


def _located(path: Path) -> Path:
    """Return a path of this machine from its root: the next command may come from elsewhere."""
    return path.expanduser().absolute()


def _address(value: str) -> str:
    """Return an IP address; Docker takes a name for every address there is."""
    if value == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError("expected an IP address, such as 127.0.0.1 or 0.0.0.0") from None


HostPath = Annotated[Path, AfterValidator(_located)]
Port = Annotated[int, BeforeValidator(_no_boolean), Field(ge=1024, le=65535)]
Count = Annotated[int, BeforeValidator(_no_boolean), Field(ge=1, le=64)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Gibibytes = Annotated[float, Field(gt=0, le=4096)]
Share = Annotated[float, Field(gt=0, le=0.98)]
ImageName = Annotated[str, Field(min_length=1, max_length=512)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)


class EngineSpec(_Strict):
    """How every vLLM engine of the stack is run."""

    python: Path | None = Field(None, description="interpreter that has vLLM and LMCache")
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    block_size: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="tokens a KV block"
    )
    max_model_len: Annotated[int, Field(ge=64)] | None = None
    kv_cache_gib: Gibibytes | None = Field(None, description="KV space of each rank")
    gpu_memory: Share = Field(0.9, description="share of a GPU's memory that engines on it use")
    memory_gib: Gibibytes | None = Field(None, description="a container's limit of host memory")
    args: tuple[str, ...] = Field((), description="further vLLM arguments, for all engines")
    env: dict[str, str] = Field(default_factory=dict)


class LMCacheSpec(_Strict):
    """The LMCache instance inside every engine."""

    chunk_size: Annotated[int, Field(ge=1, le=MAX_CHUNK)] = Field(256, description="tokens a chunk")
    staging_gib: Gibibytes | None = Field(None, description="host memory for chunks on their way")


class RedisSpec(_Strict):
    """The store between producers and consumers."""

    client: Literal["pdkit", "lmcache"] = Field(
        "pdkit", description="who moves KV: the kit's own path, or LMCache's redis:// connector"
    )
    server: Path | None = Field(None, description="redis-server binary")
    memory_gib: Gibibytes | None = Field(
        None, description="maxmemory; least recently used chunks go first"
    )
    image: ImageName | None = Field(None, description="image that has redis-server")
    url_file: HostPath | None = Field(
        None, description="file with the URL of a Redis of the user's own, instead of the kit's"
    )
    tls_files: tuple[HostPath, ...] = Field(
        (), description="files that the URL names for TLS, for containers to see"
    )


class RouterSpec(_Strict):
    """The router in front."""

    image: ImageName | None = Field(None, description="image that has vllm-router")


class TimeoutSpec(_Strict):
    """Deadlines of `up` and `down`, in seconds."""

    ready_s: Seconds = 600.0
    stop_s: Seconds = 15.0


class StackSpec(_Strict):
    """One stack: as many producers and consumers as asked for, a Redis and a router."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")] = "pdkit"
    vendor: VendorChoice = "auto"
    runtime: RuntimeChoice = "auto"
    gpus: Count | None = None
    topology: Annotated[str, Field(pattern=r"^[1-9][0-9]?p[1-9][0-9]?d$")] | None = None
    producers: Count | None = None
    consumers: Count | None = None
    tp: Count = 1
    producer_tp: Count | None = None
    consumer_tp: Count | None = None
    image: ImageName | None = Field(None, description="a profile of the catalogue, or a reference")
    allow_unproven: bool = False
    gpu_access: GpuAccess = Field("auto", description="how containers get GPUs")
    hub_cache: HostPath | None = Field(None, description="folder that holds models of the hub")
    hf_token_file: HostPath | None = Field(None, description="file with a token of the hub")
    model: Annotated[str, Field(min_length=1)] | None = None
    connector: Literal["lmcache"] = "lmcache"
    layerwise: bool = False
    save_decode_cache: bool = False
    port: Port = 8000
    bind: Annotated[str, AfterValidator(_address)] = "127.0.0.1"
    api_key_file: HostPath | None = Field(
        None, description="file with the key that clients must bring"
    )
    engine: EngineSpec = EngineSpec()
    lmcache: LMCacheSpec = LMCacheSpec()
    redis: RedisSpec = RedisSpec()
    router: RouterSpec = RouterSpec()
    timeouts: TimeoutSpec = TimeoutSpec()
