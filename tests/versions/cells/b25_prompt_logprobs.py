"""B25: a stored prompt whose logprobs are requested; it is computed, stored, and resumes."""

from __future__ import annotations

from adapter_steps import CHUNK, Vllm
from vllm.sampling_params import SamplingParams

TEXT = list(range(3 * CHUNK))
WITH_LOGPROBS = SamplingParams(max_tokens=1000, prompt_logprobs=1)


def cell() -> None:
    stored()
    stores()
    resumes()


def stored() -> None:
    vllm = Vllm()
    vllm.add("plain", TEXT)
    vllm.step({"plain": 100})
    request = vllm.add("echo", TEXT, params=WITH_LOGPROBS)
    vllm.step({"echo": CHUNK})
    assert request.num_computed_tokens == CHUNK, "its first tokens were computed, not loaded"
    vllm.step({"echo": 100})
    vllm.check_attended(request)
    assert vllm.store.asked == ["plain"], "nothing is looked up, so that nothing is pinned"
    again = vllm.add("again", TEXT)
    assert vllm.scheduler.get_num_new_matched_tokens(again, 0) == len(TEXT) - 1


def stores() -> None:
    """Its KV is as good as any."""
    vllm = Vllm()
    vllm.add("echo", TEXT, params=WITH_LOGPROBS)
    vllm.step({"echo": CHUNK})
    vllm.step({"echo": 100})
    vllm.check_stored()
    assert max(map(len, vllm.store.chunks)) == len(TEXT)
    plain = vllm.add("plain", TEXT)
    vllm.step({"plain": 100})
    vllm.check_attended(plain)


def resumes() -> None:
    vllm = Vllm()
    request = vllm.add("echo", TEXT, params=WITH_LOGPROBS)
    vllm.step({"echo": 2 * CHUNK})
    vllm.preempt("echo")
    vllm.step({"echo": 100})
    assert request.num_computed_tokens == len(TEXT)
    vllm.check_attended(request)
    vllm.check_stored()
