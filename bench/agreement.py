"""Compare the latencies that `deploy bench` measures with those of vLLM's own generator.

The measuring code of both asks the same running stack in turns, request by request, so that what
else the machine does meets both. Run with the engines' Python, which has vLLM's benchmarks:
`python -m bench.agreement --name STACK --results FILE`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import aiohttp
import psutil
from vllm.benchmarks.lib.endpoint_request_func import (
    RequestFuncInput,
    async_request_openai_completions,
)

from deploy import __version__
from deploy.benchmark.load import LoadTarget, run_load
from deploy.benchmark.slo import percentile
from deploy.benchmark.workloads import Conversation, PassSource, TokenRange, Turn, WorkloadOptions
from deploy.output.table import table
from deploy.runtime.home import Home
from deploy.workflows.running import RunningStack, require_stack

_LIMIT = 0.10
_PROMPT, _ANSWER = 600, 32
_IDS = range(30, 250)  # letters of the tiny model's tokenizer
# TTFT, gaps and the whole answer of one request, in seconds.
Measured = tuple[float, list[float], float]
Ask = Callable[[str, str, Turn], Measured]


def main() -> int:
    """Ask in turns, and write the page; 1 if the generators disagree."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", default="pdkit")
    parser.add_argument("--requests", type=int, default=300, help="of each generator")
    parser.add_argument("--users", type=int, default=2)
    parser.add_argument("--results", type=Path, required=True)
    asked = parser.parse_args()
    running = require_stack(Home.from_environ(), asked.name)
    with ThreadPoolExecutor(max_workers=asked.users) as pool:
        each = asked.requests // asked.users
        users = [pool.submit(_user, running, each, number) for number in range(asked.users)]
        pairs = [pair for user in users for pair in user.result()]
    text, agree = _page(running, asked.users, pairs)
    asked.results.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0 if agree else 1


def _user(running: RunningStack, count: int, number: int) -> list[tuple[Measured, Measured]]:
    """Ask as one of both, then as the other, with new prompts each time."""
    url, model = running.stack.front.url, running.prepared.plan.model.served_name
    length = TokenRange(_PROMPT, _PROMPT), TokenRange(_ANSWER, _ANSWER)
    made = PassSource(WorkloadOptions("random", *length), _IDS)
    conversations = iter(made.one_pass(2 * count, seed=str(number), rate=None))
    found = []
    for turn in range(count):
        order: Sequence[Ask] = (_ours, _theirs) if (turn + number) % 2 else (_theirs, _ours)
        both = {one: one(url, model, next(conversations).turns[0]) for one in order}
        found.append((both[_ours], both[_theirs]))
    return found


def _ours(url: str, model: str, turn: Turn) -> Measured:
    load = run_load(LoadTarget(url, model, 120), [Conversation(0, 0, (turn,))], concurrency=1)
    (record,) = load.records
    if record.error is not None or record.ttft_s is None:
        raise RuntimeError(f"deploy bench: {record.error}")
    return record.ttft_s, record.itl_s, record.e2e_s


def _theirs(url: str, model: str, turn: Turn) -> Measured:
    asked = RequestFuncInput(
        prompt=list(turn.after(())),  # type: ignore[arg-type]
        api_url=f"{url}/v1/completions",
        prompt_len=_PROMPT,
        output_len=turn.output_tokens,
        model=model,
        ignore_eos=True,
        extra_body={"temperature": 0},
    )

    async def ask() -> Measured:
        async with aiohttp.ClientSession() as session:
            got = await async_request_openai_completions(asked, session)
        if not got.success or got.output_tokens != turn.output_tokens:
            raise RuntimeError(f"vLLM's generator: {got.error}")
        return got.ttft, got.itl, got.latency

    return asyncio.run(ask())


def _page(
    running: RunningStack, users: int, pairs: Sequence[tuple[Measured, Measured]]
) -> tuple[str, bool]:
    plan = running.prepared.plan
    rows, agree = [], True
    sides = list(zip(*pairs, strict=True))
    for name, values in (
        ("TTFT", [[one[0] for one in side] for side in sides]),
        ("ITL", [[gap for one in side for gap in one[1]] for side in sides]),
        ("end to end", [[one[2] for one in side] for side in sides]),
    ):
        ours, theirs = (statistics.median(side) for side in values)
        agree = agree and (name == "end to end" or abs(ours / theirs - 1) <= _LIMIT)
        late = (percentile(side, 90) for side in values)
        shown = (f"{1e3 * one:.2f}" for one in (ours, theirs, *late))
        rows.append((name, *shown, f"{ours / theirs:.3f}"))
    header = ("", "p50 ms, deploy bench", "p50 ms, vLLM", "p90 ms, deploy bench", "p90 ms, vLLM",
              "ratio of p50")  # fmt: skip
    load = f"load average {psutil.getloadavg()[0]:.0f}"
    verdict = "agree within" if agree else "DIFFER by more than"
    text = f"""# `deploy bench` and vLLM's generator on the same stack

`python -m bench.agreement --name STACK --results FILE` wrote this page on {date.today()}.

The stack is {plan.topology} of {plan.model.served_name} on {psutil.cpu_count()} shared cores,
{load} at the end. {users} users send prompts of {_PROMPT} tokens and get answers of
{_ANSWER}, {len(pairs)} requests each by the measuring code of `deploy bench` (pdkit
{__version__}) and of `vllm bench serve`. They take turns request by request, because on a busy
machine two runs one after the other differ by more than the generators do.

```
{table(header, rows, right=header[1:])}
```

The medians of TTFT and ITL {verdict} {100 * _LIMIT:.0f} %.
"""
    return text, agree


if __name__ == "__main__":
    sys.exit(main())
