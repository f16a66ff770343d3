"""How full Redis is."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.planning.redis_memory import RedisMemory, together


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (
            {"used_memory": "8388608", "maxmemory": "1073741824", "maxmemory_policy": "noeviction"},
            RedisMemory(8 << 20, 1 << 30, "noeviction"),
        ),
        ({"used_memory": 8, "maxmemory": 0}, RedisMemory(8, 0, None)),
        ({"maxmemory_policy": ""}, RedisMemory(None, None, None)),
    ],
    ids=["text", "redis-py's numbers", "hidden from this user"],
)
def test_what_info_says(info: dict[str, Any], expected: RedisMemory) -> None:
    assert RedisMemory.read(info) == expected


def test_a_field_that_is_no_number() -> None:
    with pytest.raises(ValueError, match="much"):
        RedisMemory.read({"used_memory": "much"})


@pytest.mark.parametrize(
    ("memory", "text", "share"),
    [
        (RedisMemory(8 << 20, 1 << 30), "8 MiB of 1.0 GiB", 1 / 128),
        (RedisMemory(8 << 20, 0), "8 MiB of no limit", None),
        (RedisMemory(0, 1 << 30), "0 MiB of 1.0 GiB", None),
        (RedisMemory(), "? of ?", None),
    ],
)
def test_in_words_and_as_a_share(memory: RedisMemory, text: str, share: float | None) -> None:
    assert (str(memory), memory.share) == (text, share)


def test_a_limit_as_it_is_set() -> None:
    limits = [RedisMemory(limit_bytes=limit).limit_mib for limit in (1 << 30, 0, None)]
    assert limits == ["1024 MiB", "", ""]


@pytest.mark.parametrize(
    ("policy", "evicts", "keeps"),
    [
        ("allkeys-lru", True, False),
        ("noeviction", False, True),
        ("volatile-ttl", False, True),
        (None, False, False),
    ],
)
def test_whether_it_makes_room_for_kv(policy: str | None, evicts: bool, keeps: bool) -> None:
    memory = RedisMemory(policy=policy)
    assert (memory.evicts_kv, memory.keeps_kv) == (evicts, keeps)


def test_shards_together() -> None:
    one, other = RedisMemory(10, 100, "allkeys-lru"), RedisMemory(20, 200, "allkeys-lru")
    assert together([one, other]) == RedisMemory(30, 300, "allkeys-lru")
    assert together([one, RedisMemory(20, 0)]).limit_bytes == 0
    assert together([one, RedisMemory()]) == RedisMemory(None, None, "allkeys-lru")
