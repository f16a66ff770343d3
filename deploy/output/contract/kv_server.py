"""The data on LMCache's server."""

from __future__ import annotations

from typing_extensions import TypedDict


class PlannedServer(TypedDict):
    """LMCache's server.

    Attributes:
        kv_mib: its memory for KV.
        memory_mib: that is expected of it, all in all.
        tokens: of KV that it holds, if known.
        shared_memory_mib: of the engines' KV in /dev/shm, where it reaches it.
    """

    kv_mib: int
    memory_mib: int
    tokens: int | None
    shared_memory_mib: int


class KvServerUse(TypedDict):
    """How full LMCache's server is, and what engines found there.

    Attributes:
        max_bytes: its memory for KV.
        asked_tokens, found_tokens: of prompts' whole chunks, since its start.
        redis_tokens: of these, those that were not found there and loaded from Redis.
    """

    used_bytes: int
    max_bytes: int
    asked_tokens: int
    found_tokens: int
    redis_tokens: int
