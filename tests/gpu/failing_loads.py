"""A connector whose every load fails: it promises the beginning of a prompt and loads nothing."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

PROMISED = 32


class _Blocks(KVConnectorMetadata):  # type: ignore[misc]
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids


class FailingLoads(KVConnectorBase_V1):  # type: ignore[misc]
    """Tells vLLM after the step that all blocks to load are invalid, once for each request."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._promised: set[str] = set()
        self._blocks: list[int] = []
        self._failed: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, _computed: int) -> tuple[int, bool]:
        if request.request_id in self._promised:
            return 0, False
        self._promised.add(request.request_id)
        return PROMISED, False

    def update_state_after_alloc(self, _request: Any, blocks: Any, external: int) -> None:
        if external:
            self._blocks += blocks.get_block_ids()[0]

    def build_connector_meta(self, _scheduler_output: Any) -> _Blocks:
        ids, self._blocks = self._blocks, []
        return _Blocks(ids)

    def start_load_kv(self, _forward_context: Any, **_more: Any) -> None:
        self._failed = set(self._get_connector_metadata().ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, _layer: str) -> None:
        pass

    def save_kv_layer(self, *_layer: Any, **_more: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
