"""B4g: after a preemption, the adapter and a worker in the same process append to one list."""

from __future__ import annotations

import inspect
from typing import Any


def cell() -> None:
    """Resume a request, let both sides take its next block, and look at the adapter's blocks."""
    from lmcache.integration.vllm.vllm_v1_adapter import RequestTracker

    takes = inspect.signature(RequestTracker.update).parameters
    tracker: Any = object.__new__(RequestTracker)
    tracker.req_id, tracker.token_ids = "request", [7] * 32
    tracker.allocated_block_ids, tracker.num_saved_tokens = [1, 2], 0
    resumed = ([5, 6],)  # what vLLM's scheduler hands to the adapter and to its worker alike
    more: dict[str, Any] = {"preempted": True, "all_token_ids": [7] * 33}
    tracker.update([7], resumed, **{k: v for k, v in more.items() if k in takes})
    workers = resumed
    # The next step brings block 8: the scheduler's side first, then the worker's, as vLLM does it.
    tracker.update([7], ([8],))
    workers[0].extend([8])
    assert tracker.allocated_block_ids == [5, 6, 8], tracker.allocated_block_ids
    assert workers[0] == [5, 6, 8], workers[0]
