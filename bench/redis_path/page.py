"""The page for docs/results: what was measured, on which machine, by which command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from bench.redis_path import report

_PAGE = """# The Redis path, measured

How fast KV moves between an engine's staging memory and Redis: through a plain socket, through
stock LMCache in three configurations, and through the kit's path. `python -m bench.redis_path
--results FILE` wrote this page on {date}.

{machine}

- **raw socket**: a Python socket with `recv_into` into reused memory, one connection, one value
  after the other by GET and SET; no checksum, no staging pool. By TCP, and by a Unix
  socket.
- **stock**: LMCache's `RemoteBackend`, untouched; `redis://` with and without hiredis 3.5.0, and
  `resp://`, its client in C++, which works on CPU when it is called like this.
- **ours**: the kit's storage plug-in, header and checksum (xxh3) of every value included; by a Unix
  socket, as a stack of processes uses it, and by TCP, as containers do. "Must hold" compares with
  a raw socket of the same kind.
- **ours, no checksum**: the same with a dummy checksum.
- **ours, second tier**: the adapter for LMCache's server, by a Unix socket, between memory that
  is there already.
- **first tier**: the memory of LMCache's server, to and from an engine's shared memory, without
  Redis; its CPU includes the server's.
- **a copy in memory**: one copy of the same prompt, by one thread, to memory that is there already.

Each runs in its own process (four for "4 engines") and uses LMCache's real memory objects. They
take turns in each round; numbers are medians of {rounds} rounds, ratios are the medians of the
rounds' ratios, with the lowest and the highest. "ours / it" above 1 means that ours is faster, and
for CPU below 1 that it takes less. CPU s/GB is user and system time of the engines' processes,
Redis s/GB that of redis-server. A store ends when Redis has all of a prompt.

Redis starts every turn empty, so a store includes the time in which Redis allocates memory. Ours
reads values in ranges of half a MiB, which is why it can be faster than GET of values of many MiB.

## Must hold

{targets}

## Measured

{tables}
"""


_STACK_PAGE = """# The Redis path in a real stack

`python -m bench.redis_path --stack --results FILE` wrote this page on {date}.

{machine}

One producer, one consumer and one Redis, as `deploy up --runtime process` starts them, on a Llama
with random weights and 64 KiB of KV a token: a prompt has 176 MiB in 11 chunks, and some tokens
that are computed in any case. A decode is sent as soon as its prefill answers. The barrier's
cost compares a producer with another one that has no barrier; they take turns, with 4 requests in
flight and 12 different prompts of 4 chunks. All engines and Redis share the machine's cores: if the
lowest and the highest cost lie far apart, the median between them says little.
Each engine has 1 GiB for KV and 1 GiB of staging memory.

{targets}

{table}
"""


_CLIENTS_PAGE = """\
# Stock and the kit's Redis path in real engines

`python -m bench.redis_path --clients --results FILE` wrote this page on {date}.

{machine}

Two stacks of one producer and one consumer each are up at once, as `deploy up --runtime process`
starts them, on a Llama with random weights and 64 KiB of KV a token: a prompt has 176 MiB in 11
chunks. Stock is LMCache's own `redis://` connector with the two fixes that CPUs need to move
any KV. In each of {rounds} rounds each prefills a prompt, waits until all of it is in Redis,
and decodes it. A load's rate, as LMCache logs it, is from its first key to the last byte in vLLM's
blocks.

{table}

{path}
"""


_CONNECTORS_PAGE = """\
# The two connectors side by side

`python -m bench.redis_path --connectors --rounds {rounds} --results FILE` wrote this page on
{date}.

{machine}

Two stacks of one producer and one consumer each are up at once, as `deploy up --runtime process`
starts them, on a Llama with random weights and 64 KiB of KV a token: a prompt has 176 MiB in 11
chunks. Engines of the one share KV through Redis (`lmcache`), those of the other through LMCache's
server (`lmcache-mp`). In each round each stack prefills a prompt, decodes it as soon as the prefill
answers, and once more with another end, from the engine's own prefix cache: that is what both
connectors compute in any case, and no first token can come sooner. With the server another prompt
is prefilled, dropped from the server's memory once Redis has it, and decoded. The memory is that of
all the stack's processes, engines' KV space included, with what they share counted once.

{targets}

{table}
"""


_LOOKUPS_PAGE = """\
# Lookups in Redis, measured

`python -m bench.redis_path --lookups --rounds {rounds} --results FILE` wrote this page on {date}.

{machine}

How long it takes to ask Redis which chunks of a prompt it has: through the kit's client, which
builds the keys and counts the answers, and through a plain socket, which sends the same commands
and reads the answers. They take turns, 20 times in each round; numbers are medians of the rounds,
ratios the medians of the rounds' ratios. CPU is user and system time of the engine's process and of
Redis; on a busy machine, times depend mostly on the other work.

{targets}

{tables}
"""


_LONG_PAGE = """\
# A prompt larger than staging memory

`python -m bench.redis_path --long --results FILE` wrote this page on {date}.

{machine}

One producer, one consumer and one Redis, as `deploy up --runtime process` starts them, on a Llama
with random weights and 64 KiB of KV a token. One prompt of 32,800 tokens has 2 GiB of KV in 128
whole chunks; each engine has 1 GiB of staging memory. The producer computes it, the consumer loads
it. The answers may differ by as much as the check tolerates; the producer's own noise is measured.

{targets}
"""


def today() -> datetime.date:
    """Return the date that stands on a page."""
    return datetime.datetime.now(tz=datetime.timezone.utc).date()


def clients_page(table: str, rounds: int, path: str) -> str:
    """Return the page of what stock and ours did in engines, as Markdown."""
    return _CLIENTS_PAGE.format(
        date=today(),
        machine=machine("as installed"),
        rounds=rounds,
        table=table,
        path=path,
    )


def connectors_page(table: str, judged: Sequence[report.Target], rounds: int) -> str:
    """Return the page of both connectors, as Markdown."""
    return _CONNECTORS_PAGE.format(
        date=today(),
        machine=machine("as installed"),
        rounds=rounds,
        targets=report.target_table(judged),
        table=table,
    )


def stack_page(table: str, judged: Sequence[report.Target]) -> str:
    """Return the page of what a stack did, as Markdown."""
    return _STACK_PAGE.format(
        date=today(),
        machine=machine("as installed"),
        targets=report.target_table(judged),
        table=table,
    )


def lookups_page(
    found: Sequence[report.Row], judged: Sequence[report.Target], redis_version: str
) -> str:
    """Return the page of lookups alone, as Markdown."""
    return _measured(_LOOKUPS_PAGE, found, judged, redis_version)


def long_page(targets: str) -> str:
    """Return the page of a prompt larger than staging memory, as Markdown."""
    return _LONG_PAGE.format(date=today(), machine=machine("as installed"), targets=targets)


def page(found: Sequence[report.Row], judged: Sequence[report.Target], redis_version: str) -> str:
    """Return the page as Markdown."""
    return _measured(_PAGE, found, judged, redis_version)


def _measured(
    template: str,
    found: Sequence[report.Row],
    judged: Sequence[report.Target],
    redis_version: str,
) -> str:
    return template.format(
        date=today(),
        machine=machine(redis_version),
        rounds=found[-1].rounds,
        targets=report.target_table(judged),
        tables=report.tables(found),
    )


def machine(redis_version: str) -> str:
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("lmcache", "redis", "xxhash")
    )
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"Machine: {os.cpu_count()} cores of a shared virtual machine ({_cpu()}), {gib:.0f} GiB, "
        f"{platform.system()}; Redis {redis_version}; "
        f"Python {platform.python_version()}; {versions}. Load averages at the end, 1, 5 and 15 "
        f"minutes: {load}."
    )


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
