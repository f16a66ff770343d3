"""A vLLM request as LMCache's adapter should see it, without a change to vLLM's own."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any


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
