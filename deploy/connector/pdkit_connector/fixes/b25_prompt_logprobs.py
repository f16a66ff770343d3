"""B25: a prompt whose every token vLLM wants computed is loaded, which ends the engine's core."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pdkit_connector.in_engine.adapter_miniature import (
    CHUNK,
    LookupClient,
    miniature,
    new_request,
    quiet,
)
from pdkit_connector.in_engine.layer_steps import replace_method
from pdkit_connector.registry import Fix, Need, ProbeResult, Setting
from pdkit_connector.request_view import is_computed_whole


def probe(_setting: Setting) -> ProbeResult:
    """Look up a prompt that vLLM wants computed, and of which all tokens are held."""
    impl = miniature(client=LookupClient(CHUNK))
    params = SimpleNamespace(extra_args=None, prompt_logprobs=1)
    request = new_request(CHUNK, skip_reading_prefix_cache=True, sampling_params=params)
    with quiet():
        found = impl.get_num_new_matched_tokens(request, 0)
    if found:
        return ProbeResult(Need.NEEDED, "a prompt is loaded although its logprobs are requested")
    return ProbeResult(Need.NOT_NEEDED, "a prompt whose logprobs are requested is not loaded")


def apply(_setting: Setting) -> str:
    """Offer nothing to load for such a request; it is stored like others."""
    from lmcache.integration.vllm.vllm_v1_adapter import LMCacheConnectorV1Impl

    replace_method(LMCacheConnectorV1Impl, "get_num_new_matched_tokens", _missing)
    return "a prompt whose logprobs are requested is computed"


def _missing(match: Callable[..., Any], self: Any, request: Any, num_computed_tokens: int) -> Any:
    if not is_computed_whole(request):
        return match(self, request, num_computed_tokens)
    # The adapter expects a spec of every request that resumes.
    from lmcache.integration.vllm.vllm_v1_adapter import LoadSpec

    self.load_specs[request.request_id] = LoadSpec(num_computed_tokens, 0, False)
    return 0


FIX = Fix(
    id="B25",
    title="a stored prompt whose logprobs are requested ends the engine's core",
    link="none",
    reason=(
        "For `prompt_logprobs`, and for `echo` with `logprobs`, vLLM needs every token of the "
        "prompt computed, and skips its own prefix cache. The adapter offers it the stored KV all "
        "the same, and vLLM 0.25.1 takes it: the values of the loaded tokens are never written, "
        "and reading them ends the engine's core, with all requests that it has. Newer vLLM "
        "ignores the offer. With the fix, nothing is looked up for such a request."
    ),
    probe=probe,
    apply=apply,
    # Around the other fixes of the lookup.
    rank=200,
)
