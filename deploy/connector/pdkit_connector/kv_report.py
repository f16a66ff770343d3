"""The format of KV in this engine: names, sizes, hashes, and the address of Redis.

Engines share KV only where all of it agrees. Where nothing is found, a difference is the first
thing to look for. LMCache's own objects know it, once it has started.
"""

from __future__ import annotations

import sys
from typing import Any
from urllib.parse import parse_qsl

from pdkit_connector.redis_url import split_url
from pdkit_connector.registry import describe
from pdkit_connector.releases import installed_lmcache


def kv_facts(adapter: Any) -> dict[str, Any]:
    """Report the parts of keys, the format of chunks and their store; no secret is among it.

    What a release does not report is left out, or None.
    """
    try:
        return _facts(adapter)
    except Exception as exc:  # noqa: BLE001 - no report is worth an engine
        return {"unknown": describe(exc)}


def public_address(url: str) -> str:
    """Return a Redis address without user, password and options: host:port/db, or a socket."""
    parts = split_url(url)
    database = dict(parse_qsl(parts.query)).get("db", "0")
    if parts.scheme == "unix":
        return f"{parts.path}/{database}"
    if parts.scheme.endswith("-sentinel"):
        return f"{parts.scheme}:{_hosts(parts.netloc)}{parts.path}/{database}"
    path = parts.path.strip("/")
    return f"{_hosts(parts.netloc)}/{path or database}"


def _facts(adapter: Any) -> dict[str, Any]:
    engine = getattr(adapter, "lmcache_engine", None)
    config, metadata = getattr(engine, "config", None), getattr(engine, "metadata", None)
    return {
        "lmcache": installed_lmcache(),
        "vllm": _version("vllm"),
        "model": getattr(metadata, "model_name", None),
        "world_size": getattr(metadata, "world_size", None),
        "chunk_size": getattr(config, "chunk_size", None),
        "layerwise": bool(getattr(config, "use_layerwise", False)),
        "hash_algorithm": getattr(config, "pre_caching_hash_algorithm", None),
        # Without an engine, nothing was hashed and nothing goes anywhere.
        "hash_root": _hash_root() if engine else None,
        **_shape(metadata),
        **(_store(engine, config) if engine else {}),
    }


def _hosts(netloc: str) -> str:
    return netloc.rpartition("@")[2]


def _version(package: str) -> str | None:
    return getattr(sys.modules.get(package), "__version__", None)


def _hash_root() -> str | None:
    """Return the start of every first chunk's hash, which the hash seed decides."""
    database = sys.modules.get("lmcache.v1.token_database")
    root = getattr(database, "NONE_HASH", None)
    return None if root is None else f"{_number(root) % 2**64:016x}"


def _number(root: Any) -> int:
    return int.from_bytes(root, "big") if isinstance(root, bytes) else int(root)


def _shape(metadata: Any) -> dict[str, Any]:
    """Describe a worker's share of a token.

    LMCache's shape: layers, K and V, tokens of a chunk, heads, elements of a head.
    """
    shape = getattr(metadata, "kv_shape", None)
    if shape is None or len(shape) != 5:
        return {}
    layers, planes, _, heads, head_size = map(int, shape)
    return {
        "dtype": str(metadata.kv_dtype).removeprefix("torch."),
        "layers": layers,
        "planes": planes,
        "heads": heads,
        "head_size": head_size,
    }


def _store(engine: Any, config: Any) -> dict[str, Any]:
    """Return whose client moves chunks, and where to."""
    backends = getattr(getattr(engine, "storage_manager", None), "storage_backends", None) or {}
    for backend in backends.values():
        if hasattr(backend, "pdkit_facts"):
            return {"client": "pdkit", **backend.pdkit_facts()}
    url = getattr(config, "remote_url", None)
    if url:
        return {"client": "lmcache", "redis": public_address(url)}
    return {"client": "none"}
