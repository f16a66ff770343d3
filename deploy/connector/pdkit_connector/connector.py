"""The connector that vLLM loads by `kv_connector_module_path: pdkit_connector.connector`."""

from __future__ import annotations

import logging
import time
from functools import cache
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

from pdkit_connector import spans
from pdkit_connector.engine_report import REPORT
from pdkit_connector.errors import ConnectorError, UnsupportedSetting
from pdkit_connector.identity.kv_identity import identified
from pdkit_connector.kv_report import kv_facts
from pdkit_connector.log import get_logger
from pdkit_connector.metrics import open_socket
from pdkit_connector.redis_url import scheme_of
from pdkit_connector.registry import FixState, Registry, Setting, disabled_ids, discover
from pdkit_connector.releases import release_line
from pdkit_connector.step_clock import timed_steps


@cache
def process_registry() -> Registry:
    """Return the registry of this process; its scheduler and worker connectors share it."""
    return Registry(discover())


@timed_steps
class PatchedLMCacheConnector(LMCacheConnectorV1):  # type: ignore[misc]
    """LMCacheConnectorV1 with the fixes; refuses to run if KV could never be shared."""

    # Requests of this step that are traced, and how many of their tokens are loaded.
    _traced: tuple[tuple[spans.TraceHeaders, int], ...] = ()

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Apply the fixes, then start LMCache; raise ConnectorError where either fails."""
        if vllm_config.kv_transfer_config.get_from_extra_config("use_native", False):
            raise UnsupportedSetting(
                "kv_connector_extra_config has use_native: true, which runs vLLM's own copy of the "
                "LMCache adapter past these fixes; remove it"
            )
        # Of requests that are traced: the first lookup's beginning, end and tokens.
        self._lookups: dict[str, tuple[int, int, int]] = {}
        self._registry = process_registry()
        setting = Setting.from_vllm(vllm_config, kv_cache_config)
        self._registry.apply(setting, disabled_ids(self._registry.fixes))
        # After B15: it makes LMCache read, and log, its configuration.
        require_plain_redis(setting)
        REPORT.set_fixes(self._registry.outcomes)
        # One process of an engine logs; all do the same.
        if role == KVConnectorRole.WORKER and vllm_config.parallel_config.rank == 0:
            announce(self._registry)
        self._registry.require_no_failure()
        given, self._identity = identified(vllm_config)
        super().__init__(given, role, kv_cache_config)
        self._require_lmcache("start")

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Check vLLM's KV tensors against the fixes, then give them to LMCache."""
        self._registry.check_kv_caches(kv_caches)
        super().register_kv_caches(kv_caches)
        self._require_lmcache("take vLLM's KV tensors")
        require_plugins(self._lmcache_engine)
        REPORT.set_kv({**kv_facts(self._lmcache_engine), **self._identity})
        open_worker_socket(self._lmcache_engine, self._vllm_config.parallel_config.rank)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look a prompt up, as LMCache does; vLLM asks at each step until it has blocks for it."""
        began_ns = time.time_ns()
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        if found[0] is not None and getattr(request, "trace_headers", None):
            self._lookups.setdefault(request.request_id, (began_ns, time.time_ns(), found[0]))
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note what will be loaded, as LMCache does."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if not (headers := getattr(request, "trace_headers", None)):
            return
        if looked_up := self._lookups.pop(request.request_id, None):
            began_ns, ended_ns, found = looked_up
            spans.note("lookup", headers, began_ns, ended_ns, found_tokens=found)
        if num_external_tokens:
            self._traced += ((headers, num_external_tokens),)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request, as LMCache does, also one that waited for blocks until then."""
        self._lookups.pop(request.request_id, None)
        ended: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return ended

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return this step's work for the workers, as LMCache does."""
        metadata = super().build_connector_meta(scheduler_output)
        if self._traced:
            metadata.pdkit_traced, self._traced = self._traced, ()
        return metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what this step needs, as LMCache does; of layerwise loads this is the beginning."""
        began_ns = time.time_ns()
        super().start_load_kv(forward_context, **kwargs)
        for headers, tokens in getattr(self._connector_metadata, "pdkit_traced", ()):
            spans.note("load", headers, began_ns, tokens=tokens)

    def _require_lmcache(self, what: str) -> None:
        """Raise where LMCache gave up and would only recompute from here on.

        If the user has disabled a fix, the engine goes on, so that the bug can be seen.
        """
        reason = start_failure(self._lmcache_engine)
        if reason is None:
            return
        message = f"LMCache failed to {what}, so this engine can never share KV: {reason}"
        get_logger().error("pdkit-connector ERROR %s", message)
        if not self._registry.disabled:
            raise ConnectorError(message)


def start_failure(adapter: Any) -> str | None:
    """Return LMCache's reason for giving up, in one line; None if it runs.

    Since 0.3.14 a manager catches what goes wrong and keeps the reason; before, the adapter's
    constructor raises it. An adapter with neither engine nor lookup client has given up for sure.
    """
    manager = getattr(adapter, "_manager", None)
    if getattr(manager, "_init_failed", False):
        lines = str(getattr(manager, "_init_failed_reason", "")).strip().splitlines()
        return lines[-1] if lines else "it gave no reason"
    halves = [
        getattr(adapter, name)
        for name in ("lmcache_engine", "lookup_client")
        if hasattr(adapter, name)
    ]
    if halves and all(half is None for half in halves):
        return "it has neither an engine nor a lookup client"
    return None


def require_plugins(adapter: Any) -> None:
    """Raise ConnectorError where a store that the configuration names was not made.

    LMCache logs that and goes on without, so that nothing would ever be stored.
    """
    engine: Any = getattr(adapter, "lmcache_engine", None)
    if (manager := getattr(engine, "storage_manager", None)) is None:
        return
    named = set(getattr(engine.config, "storage_plugins", None) or ())
    if missing := sorted(named - set(manager.storage_backends)):
        from pdkit_connector.redis_path.settings import failures

        why = "; ".join(failures) or "see LMCache's own error above"
        raise ConnectorError(
            f"LMCache has no store {', '.join(missing)}, so this engine can never share KV: {why}"
        )


def open_worker_socket(adapter: Any, rank: int) -> None:
    """Let a worker answer the API server, with any client for KV, and without a store.

    Of an MLA model all ranks hold the same KV, which the first one stores and loads for all. Where
    LMCache did not start there is no engine, and its report says which fix is turned off.
    """
    engine: Any = getattr(adapter, "lmcache_engine", None)
    open_socket(rank if engine is None else engine.metadata.worker_id)


def announce(registry: Registry) -> None:
    """Log the release and one line a fix."""
    get_logger().info("%s", release_line())
    levels = {FixState.FAILED: logging.ERROR, FixState.DISABLED: logging.WARNING}
    for outcome in registry.outcomes:
        get_logger().log(levels.get(outcome.state, logging.INFO), "%s", outcome.line())


_SCHEME = "redis"


def require_plain_redis(setting: Setting) -> None:
    """Refuse any use of `remote_url` but whole, uncompressed chunks in one redis:// server.

    Raises:
        UnsupportedSetting: naming LMCache's setting. It shows no more of a URL than its scheme.
    """
    if not (url := setting.lmcache_value("remote_url")):
        return
    scheme, serde = scheme_of(str(url)), setting.lmcache_value("remote_serde")
    asked = (
        ("remote_url", (f"{scheme}://" if scheme else "no scheme") if scheme != _SCHEME else ""),
        ("use_layerwise", _on(setting.lmcache_value("use_layerwise"))),
        ("enable_async_loading", _on(setting.lmcache_value("enable_async_loading"))),
        ("remote_serde", serde if serde not in (None, "naive") else ""),
    )
    for name, value in asked:
        if value:
            raise UnsupportedSetting(
                f"LMCache is set to {name}: {value}, which is not supported with LMCache's own "
                "Redis client. With it, whole chunks go as they are to one redis:// server. "
                f"Way out: leave {name} out of LMCache's configuration, or use the kit's own Redis "
                "client: leave redis.client out of deploy.yaml, then deploy up."
            )


def _on(value: Any) -> str:
    is_on = value.strip().lower() in ("true", "1", "yes", "on") if isinstance(value, str) else value
    return "true" if is_on else ""
