"""Hand-off through the store: a producer answers when the prompt's KV is in it."""

from __future__ import annotations

from pdkit_router.handoff import Fields
from pdkit_router.upstream import Exchange


class StoreHandoff:
    """Consumers find the KV by the prompt, so a decode is sent nothing."""

    name = "store"
    pins = False
    reusable = True
    own_ids = False

    def asks(self, path: str, fields: Fields) -> Fields:  # noqa: ARG002
        """Return nothing: producers store the KV of every prompt."""
        return {}

    async def read(self, exchange: Exchange) -> Fields | None:
        """Drop the answer."""
        exchange.pass_to(lambda _: None)
        await exchange.ended
        return {} if exchange.status == 200 else None
