"""Connections to an engine that goes away at the wrong moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pdkit_router.engine_side import Connections, EngineConnection, EngineLost


@pytest.mark.parametrize("closing", [True, False])
def test_a_connection_that_is_lost_before_its_first_request(closing: bool) -> None:
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
