"""B12b: a client goes away; the scheduler's half of the adapter has no engine."""

from __future__ import annotations

from adapter_steps import Vllm
from vllm.v1.request import RequestStatus


def cell() -> None:
    for asynchronous in (False, True):
        vllm = Vllm(async_loading=asynchronous)
        cancelled: list[str] = []
        vllm.store.cancel_lookup = cancelled.append
        request = vllm.add("a", list(range(20)))
        vllm.step({"a": 12})
        request.status = RequestStatus.FINISHED_ABORTED
        assert vllm.scheduler.request_finished(request, []) == (False, None)
        # Up to 0.3.9 nothing is cancelled in asynchronous loading either.
        assert set(cancelled) <= ({"a"} if asynchronous else set())
