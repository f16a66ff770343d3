"""Concurrent multi-turn chat for a stack: growing histories, short prompts, clients that leave."""

from __future__ import annotations

import asyncio
import random
import string
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL = "pdkit-tiny"


@dataclass(frozen=True)
class Users:
    """How many chat at the same time, and how.

    Attributes:
        first_prompt: characters of each user's first message, in turn; a character is a token of
            the tiny model.
        leaving: users that close the stream in the middle of every second answer, and go on as if
            they had read no more than that.
    """

    count: int = 10
    turns: int = 4
    first_prompt: tuple[int, ...] = (20, 700, 1100, 300)
    later_prompt: int = 150
    answer_tokens: int = 48
    leaving: tuple[int, ...] = (2, 5, 8)
    seed: int = 1


@dataclass
class Seen:
    """What the clients saw: answers, streams they left, and statuses other than 200."""

    answers: int = 0
    left: int = 0
    refused: list[str] = field(default_factory=list)
    longest: int = 0


def chat(base_url: str, users: Users, *, timeout_s: float = 180.0) -> Seen:
    """Let all users chat at once until each has had its turns."""
    return asyncio.run(_chat(base_url, users, timeout_s))


def text(length: int, seed: object) -> str:
    """Return letters that another seed does not give."""
    letters = (*string.ascii_lowercase, " ")
    return "".join(random.Random(str(seed)).choices(letters, k=length))


async def _chat(base_url: str, users: Users, timeout_s: float) -> Seen:
    seen = Seen()
    timeout = httpx.Timeout(timeout_s, connect=60.0)
    limits = httpx.Limits(max_connections=2 * users.count)
    async with httpx.AsyncClient(
        base_url=base_url, timeout=timeout, limits=limits, trust_env=False
    ) as client:
        await asyncio.gather(*(_user(client, users, n, seen) for n in range(users.count)))
    return seen


async def _user(client: httpx.AsyncClient, users: Users, number: int, seen: Seen) -> None:
    length = users.first_prompt[number % len(users.first_prompt)]
    history: list[dict[str, str]] = []
    for turn in range(users.turns):
        asked = text(length if turn == 0 else users.later_prompt, (users.seed, number, turn))
        history.append({"role": "user", "content": asked})
        leaves = number in users.leaving and turn % 2 == 1
        answer = await _answer(client, users, history, seen, leaves=leaves)
        history.append({"role": "assistant", "content": answer})
    seen.longest = max(seen.longest, sum(len(message["content"]) for message in history))


async def _answer(
    client: httpx.AsyncClient,
    users: Users,
    history: list[dict[str, str]],
    seen: Seen,
    *,
    leaves: bool,
) -> str:
    """Stream one answer; return as much of it as was read."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": history,
        "max_tokens": users.answer_tokens * (20 if leaves else 1),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    parts = 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            seen.refused.append(f"{response.status_code} {(await response.aread())[:300]!r}")
            return "?"
        async for line in response.aiter_lines():
            if '"error"' in line:
                seen.refused.append(line[:300])
            parts += line.startswith("data: {")
            if leaves and parts > users.answer_tokens // 2:
                seen.left += 1
                return "and so on"
    seen.answers += 1
    return text(users.answer_tokens, len(history))
