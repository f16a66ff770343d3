"""How much of its worker's steps a connector takes.

In each step vLLM binds the step's metadata, calls the connector before, between and after the
model's layers, and clears the metadata. Time is the worker's own: where a GPU computes on after the
last call, a step ends before it does. Without requests to compute, vLLM calls the connector, too,
but not for saves: such steps would not be there without it, and do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any, TypeVar

from pdkit_connector.counters import COUNTERS

# What vLLM's worker calls in a step; two of them for each layer.
CALLS = ("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_finished")

_Connector = TypeVar("_Connector", bound=type)
_Method = Callable[..., Any]


def timed_steps(connector: _Connector) -> _Connector:
    """Have a class of connectors count the seconds of steps, in its calls and outside of them."""
    owner: Any = connector
    owner._pdkit_began_s, owner._pdkit_calls_s, owner._pdkit_computed = None, 0.0, False
    owner.bind_connector_metadata = _beginning(owner.bind_connector_metadata)
    owner.clear_connector_metadata = _ending(owner.clear_connector_metadata)
    for name in CALLS:
        setattr(owner, name, _timed(getattr(owner, name), computed=name == "wait_for_save"))
    return connector


def _beginning(method: _Method) -> _Method:
    @wraps(method)
    def bind(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._pdkit_began_s, self._pdkit_calls_s = perf_counter(), 0.0
        self._pdkit_computed = False
        return method(self, *args, **kwargs)

    return bind


def _timed(method: _Method, *, computed: bool) -> _Method:
    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_s = perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self._pdkit_calls_s += perf_counter() - began_s
            self._pdkit_computed = self._pdkit_computed or computed

    return call


def _ending(method: _Method) -> _Method:
    @wraps(method)
    def clear(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if (began_s := self._pdkit_began_s) is not None and self._pdkit_computed:
            self._pdkit_began_s = None
            calls_s = self._pdkit_calls_s
            COUNTERS.add("step_seconds", calls_s, part="connector")
            COUNTERS.add("step_seconds", perf_counter() - began_s - calls_s, part="rest")
        return result

    return clear
