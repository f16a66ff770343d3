"""A page of LMCache's server that drops one prompt's KV from the first tier.

`deploy check` asks for it, to see that the same prompt then comes from Redis alone. KV of other
prompts is not touched, and none is dropped that Redis lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

PAGE = "/pdkit/forget"


def add_page(app: Any) -> None:
    """Add the page to LMCache's: POST `{"model", "ranks", "tokens"}`, as `forget` takes them."""
    from starlette.responses import JSONResponse

    async def page(request: Any) -> Any:
        asked = await request.json()
        try:
            model, ranks = str(asked["model"]), int(asked["ranks"])
            tokens = [int(token) for token in asked["tokens"]]
        except (KeyError, TypeError, ValueError) as exc:
            return JSONResponse({"error": f"{type(exc).__name__}: {exc}"}, 400)
        found = await asyncio.to_thread(forget, request.app.state.engine, model, ranks, tokens)
        return JSONResponse(found)

    app.add_route(PAGE, page, methods=["POST"])


def forget(engine: Any, model: str, ranks: int, tokens: Sequence[int]) -> dict[str, int]:
    """Drop a prompt's KV from the first tier, if the second has all of it.

    Returns:
        How many objects it has (`objects`), how many of them Redis has (`in_redis`), and how many
        the first tier still has (`left`), because they are in use.
    """
    from lmcache.v1.multiprocess.cache_control.key_resolver import resolve_grouped_object_keys

    context, storage = engine.context, engine.storage_manager
    layouts = context.layout_desc_registry.find_group_layout_descs(model, ranks)
    if not layouts:
        return {"objects": 0, "in_redis": 0, "left": 0}
    windows = context.layout_desc_registry.find_attn_desc(model, ranks)
    rows, _ = resolve_grouped_object_keys(
        context.token_hasher, model, ranks, list(tokens), "", layouts, windows
    )
    keys = [key for row in rows for key in row.keys]
    ((_, second), *_) = storage.l2_adapters()
    in_redis = len(second.held(keys, layouts))
    left = len(keys) if in_redis < len(keys) else storage.delete_l1_keys(keys)[1]
    return {"objects": len(keys), "in_redis": in_redis, "left": left}
