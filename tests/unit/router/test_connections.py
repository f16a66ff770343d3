"""Connections to an engine that goes away at the wrong moment."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from pdkit_router.request import Refused, Request
from pdkit_router.route import Forwarder, Group
from pdkit_router.upstream import Connections, Engine, EngineConnection, EngineLost

from tests.unit.router.conftest import engines_up


@pytest.mark.parametrize("closing", [True, False])
def test_a_connection_lost_before_its_first_request_counts_as_not_asked(closing: bool) -> None:
    """As by an engine that is killed with connections that it has not accepted."""

    async def create(make: Callable[[], EngineConnection], *_: Any) -> Any:
        connection = make()
        transport: Any = SimpleNamespace(is_closing=lambda: closing)
        connection.connection_made(transport)
        if closing:
            connection.connection_lost(None)
        return transport, connection

    async def get() -> Connections:
        asyncio.get_running_loop().create_connection = create  # type: ignore[method-assign, assignment]
        connections = Connections("127.0.0.1", 9)
        await connections.get()
        return connections

    if closing:
        with pytest.raises(EngineLost, match="closed a new connection") as caught:
            asyncio.run(get())
        assert not caught.value.asked
    else:
        assert len(asyncio.run(get()).open) == 1


def test_broken_connections_are_retried_on_two_engines_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two engines are asked twice each; a third is not."""
    asked = Counter[str]()

    @asynccontextmanager
    async def exchange(engine: Engine, *_: Any, **__: Any) -> AsyncIterator[None]:
        asked[engine.name] += 1
        raise EngineLost("it broke off", asked=True, stale=True)
        yield

    async def health(*_: Any) -> str:
        return "up"

    monkeypatch.setattr(Engine, "exchange", exchange)
    monkeypatch.setattr(Engine, "health", health)
    forwarder = Forwarder(Group(()), Group(engines_up(3)), "recompute", 5.0, Counter())
    request = Request("POST", "/v1/completions", (), bytearray(b'{"model": "m", "prompt": "x"}'))
    with pytest.raises(Refused, match="no engine can answer"):
        asyncio.run(forwarder.serve(request, None))  # type: ignore[arg-type]
    assert sorted(asked.values()) == [2, 2]
