"""The requests of one step, as LMCache's adapter hands them from its scheduler to its worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def of_step(impl: Any) -> list[Any]:
    """Return the requests of the step that is bound to the connector, or none."""
    metadata = getattr(impl._parent, "_connector_metadata", None)
    return list(getattr(metadata, "requests", ()))


def is_to_load(request: Any) -> bool:
    """Tell whether the step loads KV of the request."""
    return request.load_spec is not None and bool(request.load_spec.can_load)


@contextmanager
def without(impl: Any, unfit: Callable[[Any], bool]) -> Iterator[list[Any]]:
    """Take the unfit requests out of the step's metadata, give them, and put them back."""
    requests = of_step(impl)
    taken = [request for request in requests if unfit(request)]
    if not taken:
        yield taken
        return
    metadata = impl._parent._connector_metadata
    metadata.requests = [request for request in requests if not unfit(request)]
    try:
        yield taken
    finally:
        metadata.requests = requests


def resumed_ids(scheduler_output: Any) -> frozenset[str]:
    """Return the requests of a step that resume after a preemption.

    None where vLLM hands over a list of requests, as it did before 0.9.2.
    """
    cached = scheduler_output.scheduled_cached_reqs
    if isinstance(cached, list):
        return frozenset()
    if hasattr(cached, "resumed_req_ids"):
        return frozenset(cached.resumed_req_ids)
    marked = zip(cached.req_ids, cached.resumed_from_preemption, strict=True)
    return frozenset(req_id for req_id, resumes in marked if resumes)


def running(impl: Any, scheduler_output: Any) -> Iterator[tuple[str, Any, Any]]:
    """Give id, vLLM's request and the adapter's tracker of each request known before this step."""
    cached = scheduler_output.scheduled_cached_reqs
    for req_id in () if isinstance(cached, list) else cached.req_ids:
        request = impl._unfinished_requests.get(req_id)
        tracker = impl._request_trackers.get(req_id)
        if request is not None and tracker is not None:
            yield req_id, request, tracker


def unpin(impl: Any, requests: list[Any]) -> None:
    """Release what a lookup pinned for requests that the adapter was not shown."""
    if impl.lmcache_engine is not None:
        for request in requests:
            impl.lmcache_engine.lookup_unpin(request.req_id)
