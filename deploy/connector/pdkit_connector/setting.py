"""What is known of the engine that the fixes serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setting:
    """Facts of one engine; a field is None where no engine runs (`python -m pdkit_connector`).

    `vllm_config` and `kv_cache_config` are vLLM's own objects, for what only one fix asks about.
    """

    device_type: str | None = None
    block_size: int | None = None
    cache_dtype: str | None = None
    model_dtype: Any = None
    head_size: int | None = None
    kv_cache_specs: tuple[str, ...] | None = None
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    engine: bool = False
    vllm_config: Any = None
    kv_cache_config: Any = None

    @classmethod
    def from_vllm(cls, vllm_config: Any, kv_cache_config: Any) -> Setting:
        """Read the facts off vLLM's own configuration objects."""
        groups = getattr(kv_cache_config, "kv_cache_groups", None)
        specs = None if groups is None else tuple(type(g.kv_cache_spec).__name__ for g in groups)
        return cls(
            device_type=vllm_config.device_config.device_type,
            block_size=vllm_config.cache_config.block_size,
            cache_dtype=str(vllm_config.cache_config.cache_dtype),
            model_dtype=vllm_config.model_config.dtype,
            head_size=vllm_config.model_config.get_head_size(),
            kv_cache_specs=specs,
            extra_config=dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {}),
            engine=True,
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
        )

    def lmcache_value(self, name: str) -> Any:
        """Return LMCache's value of `name` in force, None where no engine runs.

        A `lmcache.<name>` entry of vLLM's extra configuration wins, as it does in LMCache.
        """
        if not self.engine:
            return None
        if f"lmcache.{name}" in self.extra_config:
            return self.extra_config[f"lmcache.{name}"]
        from lmcache.integration.vllm.utils import lmcache_get_or_create_config

        return getattr(lmcache_get_or_create_config(), name, None)
