"""What goes wrong in a Redis while a stack uses it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from bench.store_gate import Command, at_each_store, let_through

# Replaces the second half of every value that does not end in the noise yet; returns how many.
_SPOIL = """
local spoiled = 0
for _, key in ipairs(redis.call('KEYS', '*')) do
  local size = redis.call('STRLEN', key)
  if size > 4096 and redis.call('GETRANGE', key, -16, -1) ~= string.sub(ARGV[1], -16) then
    local half = math.floor(size / 4) * 2
    redis.call('SETRANGE', key, size - half, string.sub(ARGV[1], -half))
    spoiled = spoiled + 1
  end
end
return spoiled
"""
_NOISE_BYTES = 1 << 19


@contextmanager
def behind_each_store(store: redis.Redis, *commands: Command) -> Iterator[list[Any]]:
    """Run commands right behind every store, before anybody can know of it; yields the answers."""
    answers: list[Any] = []
    with at_each_store(store, lambda: answers.extend(let_through(store, *commands))):
        yield answers


def spoil() -> Command:
    """Return the command that spoils all chunks that are not spoiled yet; it answers how many.

    The second half of their bytes becomes bfloat16 numbers of ordinary size, so that nothing looks
    broken.
    """
    noise = bytearray(os.urandom(_NOISE_BYTES))
    noise[1::2] = bytes(0x3F | (byte & 0x80) for byte in noise[1::2])
    return "EVAL", _SPOIL, 0, bytes(noise)
