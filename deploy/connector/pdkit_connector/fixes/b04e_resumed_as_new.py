"""B4e: a request that resumes as a new one is loaded partly, but reported as loaded fully."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdkit_connector.in_engine.adapter_miniature import LookupClient, miniature, new_request, quiet
from pdkit_connector.in_engine.layer_steps import replace_method
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting

_PROMPT, _COMPUTED, _TOKENS = 5, 8, 9


def probe(_setting: Setting) -> ProbeResult:
    """Track a request whose output counts as computed when it is new to the adapter."""
    from lmcache.integration.vllm.vllm_v1_adapter import RequestTracker

    client = LookupClient()
    request = new_request(
        _TOKENS,
        req_id="probe",
        prompt_token_ids=list(range(_PROMPT)),
        prefill_token_ids=list(range(_TOKENS)),
        block_ids=([1, 2, 3],),
    )
    with quiet():
        miniature(client=client).get_num_new_matched_tokens(request, 0)
        tracker = RequestTracker.from_new_request(None, request, _TOKENS, _COMPUTED, False)
    if len(client.tokens) <= _PROMPT:
        return ProbeResult(Need.NOT_NEEDED, "only the prompt is looked up")
    if tracker.token_ids == list(range(_TOKENS)):
        return ProbeResult(Need.NOT_NEEDED, "the tokens that vLLM sends with a request count")
    return ProbeResult(
        Need.NEEDED, f"of {_TOKENS} computed tokens {len(tracker.token_ids)} are known"
    )


def apply(_setting: Setting) -> str:
    """Track the tokens that vLLM sends with a request, output included."""
    from lmcache.integration.vllm.vllm_v1_adapter import RequestTracker

    replace_method(RequestTracker, "from_new_request", _with_output)
    return "a request that resumes as new brings its output tokens"


def _with_output(
    make: Callable[..., Any],
    config: Any,
    request: Any,
    num_tokens_to_compute: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    tracker = make(config, request, num_tokens_to_compute, *args, **kwargs)
    tokens = getattr(request, "prefill_token_ids", None)
    if tokens is not None and len(tokens) > len(request.prompt_token_ids or ()):
        tracker.token_ids = list(tokens[:num_tokens_to_compute])
    return tracker


FIX = Fix(
    id="B4e",
    title="output tokens of a request that resumes as new are never loaded",
    link="none",
    reason=(
        "vLLM's second model runner gets a preempted request as a new one, with its output among "
        "the tokens to prefill. The adapter looks up all tokens and tells vLLM how many it holds, "
        "but loads only those of the prompt: vLLM attends to unwritten KV."
    ),
    probe=probe,
    apply=apply,
)
