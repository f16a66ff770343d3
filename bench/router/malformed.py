"""Requests that engines refuse, by the thousand, from a seed, to a stack that runs.

    deploy up --topology 1p1d
    python -m bench.router.malformed [--name pdkit] [--requests 10000] [--seed 1]

Each is valid HTTP with a body that is wrong: values out of range or of another type, token ids that
do not exist, prompts over the limit, bad JSON. Prints how many answers there were of each status,
and what memory each service had before and after; then runs `deploy check --quick`. Fails if an
answer was neither a success nor an error in OpenAI's shape, or had a status of 500 or more, if a
service's memory grew by more than 64 MiB, or if the check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil

from deploy.runtime.home import Home
from deploy.workflows.running import RunningStack, require_stack

_AT_ONCE = 8
_WARM_UP = 500  # what these make a service allocate once, it has then
_MAY_GROW_MIB = 64
_NUMBERS = (
    0, -1, -(10**9), 10**9, 2**31, 2**63, 10**30, 1e308, -1e308, 1e-320, 0.5, True, None, "1", "x",
    [], [1], {}, {"a": 1},
)  # fmt: skip
_TEXTS = ("", "x", "\x00", "\ud800", "\U0010ffff", "a" * 300_000, "<|x|>" * 99, 5, None, [], {})
_PROMPTS = (
    *_TEXTS, [-1], [2**31], [2**64], [10**30], [1.5], [[]], [[1], ["a"]], [1] * 100_000,
    ["a"] * 200, [[1, 2], [3]], [None], [True],
)  # fmt: skip
_NUMERIC = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "logprobs", "top_logprobs",
    "prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
    "max_completion_tokens", "priority", "length_penalty", "truncate_prompt_tokens", "best_of",
)  # fmt: skip
_OTHERS: Mapping[str, tuple[Any, ...]] = {
    "stop": (*_TEXTS, ["a"] * 50, [1]),
    "stop_token_ids": ([-1], [10**12], ["a"], "a", 5),
    "logit_bias": ({"-1": 1}, {"99999999": 1}, {"x": 1}, {"1": 1e9}, {"1": "a"}, 5),
    "stream": ("x", 5, []),
    "stream_options": ({"include_usage": 5}, 5, {}),
    "response_format": ({"type": "json_schema"}, {"type": "x"}, 5, {"type": []}),
    "tools": ([{}], [5], {}, "x"),
    "tool_choice": ("required", {"type": "function"}, 5),
    "echo": (5, "x"),
    "suffix": ("x", 5),
    "model": ("nobody", 5, "", "a" * 5000),
    "cache_salt": ("", 5, "a" * 100_000),
    "kv_transfer_params": (5, "x", {"lmcache.tag.a": {}}, {"do_remote_prefill": True}),
    "vllm_xargs": (5, {"a": {}}, {"kv_transfer_params": "x"}),
    "structured_outputs": ({"regex": "("}, {"json": "x"}, {"choice": []}, 5),
}
_RAW = (
    b"", b"{", b"[]", b"null", b'{"prompt": NaN}', b'{"temperature": Infinity}', b"\xff\xfe",
    b'{"a":' * 5000, b"[" * 100_000, b'{"prompt": "\xff"}', b'{"seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "x", "prompt": 5, "model": 1}',
)  # fmt: skip


def body(chance: random.Random, model: str) -> tuple[str, bytes]:
    """Return a path and a body with one to three things wrong."""
    if chance.random() < 0.1:
        return "/v1/completions", chance.choice(_RAW)
    path = chance.choice(("/v1/completions", "/v1/completions", "/v1/chat/completions"))
    fields: dict[str, Any] = {"model": model, "max_tokens": 1}
    if path.endswith("chat/completions"):
        content = chance.choice(_PROMPTS) if chance.random() < 0.3 else "Hello"
        fields["messages"] = [{"role": chance.choice(("user", "x", 5)), "content": content}]
    else:
        fields["prompt"] = chance.choice(_PROMPTS) if chance.random() < 0.3 else "Hello"
    for _ in range(chance.randrange(1, 4)):
        if chance.random() < 0.6:
            fields[chance.choice(_NUMERIC)] = chance.choice(_NUMBERS)
        else:
            name = chance.choice(list(_OTHERS))
            fields[name] = chance.choice(_OTHERS[name])
    # What is valid after all must not compute for long.
    if not isinstance(fields["max_tokens"], int) or fields["max_tokens"] > 1:
        fields.setdefault("min_tokens", 10**9)
    return path, json.dumps(fields).encode()


def outcome(client: httpx.Client, path: str, sent: bytes) -> str:
    """Return the status, or what is wrong with the answer."""
    try:
        answer = client.post(path, content=sent, headers={"content-type": "application/json"})
    except httpx.HTTPError as exc:
        return f"WRONG no answer: {type(exc).__name__} to {path} {sent[:300]!r}"
    if answer.status_code == httpx.codes.OK:
        return "200"
    try:
        said = bool(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = False
    if said and answer.status_code < 500:
        return str(answer.status_code)
    return f"WRONG {answer.status_code} {answer.text[:200]} to {path} {sent[:300]!r}"


def memory_mib(running: RunningStack) -> dict[str, int]:
    """Return the resident memory of each service's processes."""
    found = {}
    for name, service in running.state.services.items():
        first = psutil.Process(service.pid)
        processes = (first, *first.children(recursive=True))
        found[name] = sum(one.memory_info().rss for one in processes) >> 20
    return found


def send_all(client: httpx.Client, requests: Sequence[tuple[str, bytes]]) -> Counter[str]:
    """Return how many answers there were of each kind."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return Counter(pool.map(lambda one: outcome(client, *one), requests))


def main() -> int:
    """Send them, and return 1 if one was answered wrongly or the stack is not sound afterwards."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("--name", default="pdkit", help="of a stack that runs as processes")
    options.add_argument("--requests", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    running = require_stack(Home.from_environ(os.environ), given.name)
    chance = random.Random(given.seed)  # noqa: S311 - the same ones each time
    model = running.prepared.plan.model.served_name
    requests = [body(chance, model) for _ in range(_WARM_UP + given.requests)]
    url = running.stack.front.url
    with httpx.Client(base_url=url, trust_env=False, timeout=120) as client:
        send_all(client, requests[:_WARM_UP])
        before = memory_mib(running)
        found = send_all(client, requests[_WARM_UP:])
        after = memory_mib(running)
    for said, count in sorted(found.items()):
        print(f"{count:6} {said}")
    for name in before:
        print(f"{name}: {before[name]} MiB before, {after[name]} MiB after")
    grown = [name for name in before if after[name] > before[name] + _MAY_GROW_MIB]
    for name in grown:
        print(f"WRONG: {name} grew by more than {_MAY_GROW_MIB} MiB")
    check = (sys.executable, "-m", "deploy", "check", "--quick", "--name", given.name)
    failed = subprocess.run(check, check=False).returncode
    return int(failed > 0 or bool(grown) or any(said.startswith("WRONG") for said in found))


if __name__ == "__main__":
    sys.exit(main())
