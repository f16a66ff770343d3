"""B10: compressed KV read without blocking is never decompressed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pdkit_connector.layer_steps import silent
from pdkit_connector.loop_probe import run_aside
from pdkit_connector.registry import Fix, Need, ProbeResult
from pdkit_connector.setting import Setting

_BACKEND = "lmcache.v1.storage_backend.remote_backend"


def probe(setting: Setting) -> ProbeResult:
    """Let a remote backend read without blocking, and see whether it deserializes."""
    if setting.lmcache_value("remote_serde") in ("naive", "kivi"):
        # LMCache's kivi is a placeholder that returns what it is given.
        return ProbeResult(Need.NOT_APPLICABLE, "remote_serde leaves objects as they are")
    read = _read_without_blocking()
    if read == ["plain"]:
        return ProbeResult(Need.NOT_NEEDED, "batched_get_non_blocking deserializes")
    return ProbeResult(Need.NEEDED, f"batched_get_non_blocking gives {read} of a stored object")


def guard(setting: Setting) -> str | None:
    """Return why a serializer that changes objects cannot be used with the current readers."""
    serde = setting.lmcache_value("remote_serde")
    if serde in (None, "naive", "kivi"):
        return None
    readers = [name for name in ("enable_async_loading", "use_layerwise") if _on(setting, name)]
    if not readers:
        return None
    return f"LMCache is set to remote_serde {serde} with {' and '.join(readers)}"


def _on(setting: Setting, name: str) -> bool:
    value = setting.lmcache_value(name)
    return value.strip().lower() in ("true", "1", "yes", "on") if isinstance(value, str) else value


def _read_without_blocking() -> list[Any]:
    """Return what the backend gives for one object that its connection has as "packed"."""
    from lmcache.v1.storage_backend.remote_backend import RemoteBackend

    async def get(_lookup_id: str, keys: list[Any]) -> list[str]:
        return ["packed"] * len(keys)

    backend: Any = object.__new__(RemoteBackend)
    backend.local_cpu_backend = SimpleNamespace()
    backend.connection = SimpleNamespace(batched_get_non_blocking=get)
    # Releases differ in where they keep the time-out.
    backend.config = SimpleNamespace(blocking_timeout_secs=10)
    backend.blocking_timeout_secs = 10
    backend.deserializer = SimpleNamespace(deserialize=lambda _obj: "plain")
    backend._mla_worker_id_as0_mode = False
    with silent(_BACKEND):
        return list(run_aside(backend.batched_get_non_blocking("probe", ["key"])))


FIX = Fix(
    id="B10",
    title="compressed KV is loaded without being decompressed",
    link="none",
    reason=(
        "Asynchronous and layerwise loading read through batched_get_non_blocking, which returns "
        "the stored bytes as they are. With a serializer that changes them (cachegen) the load "
        "fails or fills KV blocks with compressed data; cachegen cannot store single layers "
        "either. Use remote_serde: naive, or turn both ways of loading off."
    ),
    probe=probe,
    guard=guard,
)
