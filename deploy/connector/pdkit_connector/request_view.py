"""A vLLM request as LMCache's adapters should see it, without a change to vLLM's own."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

# What a request's KV depends on besides its tokens; vLLM puts all of it into its own block hashes.
FOREIGN = {
    "lora_request": "a LoRA adapter",
    "cache_salt": "a cache salt",
    "prompt_embeds": "prompt embeddings",
}


def foreign(request: Any) -> str | None:
    """Name what a request's KV depends on besides its tokens; None if on nothing."""
    for name, meaning in FOREIGN.items():
        # Tensors have no truth of their own, and vLLM takes no empty salt.
        if getattr(request, name, None) is not None:
            return meaning
    return None


def is_computed_whole(request: Any) -> bool:
    """Tell whether vLLM needs every token of a prompt computed, so that none may be loaded.

    Logprobs of a prompt, and the states of its tokens, exist only where they are computed. vLLM
    marks such requests, and reads none of their KV from its own cache.
    """
    asked = getattr(request, "sampling_params", None)
    return (
        bool(getattr(request, "skip_reading_prefix_cache", False))
        or getattr(asked, "prompt_logprobs", None) is not None
    )


class RequestView:
    """A request with some attributes of its own; all others are the request's."""

    def __init__(self, request: Any, **own: Any) -> None:
        self.__dict__.update(own, _request=request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


@contextmanager
def viewed(
    requests: MutableMapping[str, Any], views: MutableMapping[str, RequestView]
) -> Iterator[None]:
    """Put `views` in the place of the requests that they show, and the requests back after."""
    shown = {req_id: requests[req_id] for req_id in views}
    requests.update(views)
    try:
        yield
    finally:
        for req_id, request in shown.items():
            if requests.get(req_id) is views[req_id]:
                requests[req_id] = request
