"""B12: LMCache failed to start and promised that vLLM goes on without it; vLLM takes steps."""

from __future__ import annotations

from adapter_steps import Vllm
from vllm.v1.request import RequestStatus


def cell() -> None:
    for layerwise in (False, True):
        vllm = Vllm(async_loading=True, use_layerwise=layerwise)
        vllm.scheduler._manager.lookup_client = None
        vllm.worker._manager.lmcache_engine = None
        take_steps(vllm)


def take_steps(vllm: Vllm) -> None:
    request = vllm.add("a", list(range(20)))
    vllm.step({"a": 12})
    vllm.worker.wait_for_layer_load("layer")
    vllm.worker.save_kv_layer("layer", None, None)
    vllm.step({"a": 12})
    vllm.preempt("a")
    vllm.step({"a": 100})
    vllm.step({"a": 1})
    vllm.check_attended(request)
    request.status = RequestStatus.FINISHED_ABORTED
    assert vllm.scheduler.request_finished(request, []) == (False, None)
