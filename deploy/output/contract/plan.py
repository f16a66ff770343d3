"""The data of `plan` and `render`."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict

from deploy.planning.connector import ConnectorChoice
from deploy.planning.inventory import Inventory


class PlannedModel(TypedDict):
    """The model.

    Attributes:
        ref: a folder, or a Hugging Face id.
        served_name: what clients call it.
        source: tiny, folder or hub.
    """

    ref: str
    served_name: str
    source: str


class RouterAddress(TypedDict):
    """Where the router listens."""

    host: str
    port: int


class Front(TypedDict):
    """The address for clients.

    Attributes:
        url: "" if another host has the router.
        keyed: clients must send an API key.
    """

    host: str
    port: int
    url: str
    keyed: bool


class PlannedRedis(TypedDict):
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


class PlannedServer(TypedDict):
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


class Staging(TypedDict):
    """Host memory through which KV passes."""

    bytes_per_rank: int
    ranks: int


class Deadlines(TypedDict):
    """Seconds after which a call to Redis counts as failed."""

    lookup_s: float
    load_s: float
    store_s: float
    silent_s: float


class PlannedEngine(TypedDict):
    """One engine.

    Attributes:
        devices: indices of its GPUs.
    """

    name: str
    role: str
    port: int
    devices: list[int]
    cpu_threads: int | None
    memory_mib: int


class RemoteEngine(TypedDict):
    """An engine of another host, which this host's router uses."""

    name: str
    role: str
    url: str


class Plan(TypedDict):
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
    engines: list[PlannedEngine]
    remote_engines: list[RemoteEngine]
    notes: list[str]
    inventory: Inventory


class RenderedFiles(TypedDict):
    """`deploy render -o`.

    Attributes:
        files: files that were written.
        start: the command that starts them.
    """

    files: list[str]
    start: str


# `deploy render` without -o prints the document itself: Compose's, or that of the processes.
Rendered = RenderedFiles | dict[str, Any]
