"""What `plan --json` and `render --json` print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.planning.connector import ConnectorChoice
from deploy.planning.inventory import Inventory


@dataclass(frozen=True)
class PlannedModel:
    """The model.

    Attributes:
        ref: a folder, or a Hugging Face id.
        served_name: what clients call it.
        source: tiny, folder or hub.
    """

    ref: str
    served_name: str
    source: str


@dataclass(frozen=True)
class RouterAddress:
    """Where the router listens."""

    host: str
    port: int


@dataclass(frozen=True)
class Front:
    """The address for clients.

    Attributes:
        url: "" if another host has the router.
        keyed: clients must send an API key.
    """

    host: str
    port: int
    url: str
    keyed: bool


@dataclass(frozen=True)
class PlannedRedis:
    """The store.

    Attributes:
        user_supplied: it is the user's own.
        shards: Redis servers that share the keys; 0 without a Redis of pdkit's.
        port: 0 if this machine reaches it another way.
        tokens: how many tokens of KV fit, if known.
    """

    user_supplied: bool
    shards: int
    port: int
    memory_mib: int
    tokens: int | None


@dataclass(frozen=True)
class PlannedServer:
    """LMCache's server.

    Attributes:
        kv_mib: its memory for KV.
        memory_mib: the memory that it is expected to take in total.
        tokens: how many tokens of KV it holds, if known.
        shared_memory_mib: the engines' KV in /dev/shm, where the server accesses it.
    """

    kv_mib: int
    memory_mib: int
    tokens: int | None
    shared_memory_mib: int


@dataclass(frozen=True)
class Staging:
    """Host memory through which KV passes."""

    bytes_per_rank: int
    ranks: int


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which a call to Redis counts as failed."""

    lookup_s: float
    load_s: float
    store_s: float
    silent_s: float


@dataclass(frozen=True)
class PlannedEngine:
    """One engine.

    Attributes:
        devices: indices of its GPUs.
    """

    name: str
    role: str
    port: int
    devices: Sequence[int]
    cpu_threads: int | None
    memory_mib: int


@dataclass(frozen=True)
class RemoteEngine:
    """An engine of another host, which this host's router uses."""

    name: str
    role: str
    url: str


@dataclass(frozen=True)
class Plan:
    """What would run where.

    Attributes:
        image: of the engines; "" if they are processes.
        router: the router's address; `front` says more.
        connector: how engines share KV.
        connector_choice: why, and what the other way would be; null if they share none.
        kv_server: LMCache's server; null if engines do not share KV through it.
        value_bytes: of a chunk in Redis, if known.
        max_model_len: longest prompt and answer, in tokens, if known.
        gpu_share: the part of a GPU's memory that an engine may use.
        memory_mib: of all services.
        smallest_machines: that hold the model with one engine: "1 GPU of 24 GiB"; empty if its size
            is unknown, and on CPUs.
        notes: what to know, one line each.
        inventory: the machine that the plan is for.
    """

    name: str
    vendor: str
    runtime: str
    image: str
    topology: str
    tp: int
    model: PlannedModel
    router: RouterAddress
    front: Front
    redis: PlannedRedis
    connector: str
    connector_choice: ConnectorChoice | None
    kv_server: PlannedServer | None
    staging: Staging
    deadlines: Deadlines
    value_bytes: int | None
    dtype: str
    block_size: int | None
    chunk_size: int
    max_model_len: int | None
    kv_bytes_per_token: int | None
    kv_cache_bytes: int | None
    gpu_share: float | None
    memory_mib: int
    layerwise: bool
    save_decode_cache: bool
    engines: Sequence[PlannedEngine]
    remote_engines: Sequence[RemoteEngine]
    smallest_machines: Sequence[str]
    notes: Sequence[str]
    inventory: Inventory


@dataclass(frozen=True)
class RenderedFiles:
    """`deploy render -o`.

    Attributes:
        files: files that were written.
        start: the command that starts them.
    """

    files: Sequence[str]
    start: str


# `deploy render` without -o prints the document itself: Compose's, or that of the processes.
Rendered = RenderedFiles | dict[str, Any]
