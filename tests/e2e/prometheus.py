"""What a stack's Prometheus knows, and which metrics a page has."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import httpx

from tests.unit.monitoring.shipped import BOARDS, RECORDED

_NAME = re.compile(r"^((?:vllm:|pdkit_|lmcache_mp_)\w+)[{ ]", re.MULTILINE)


@contextmanager
def prometheus_of(port: int) -> Iterator[httpx.Client]:
    """Open a client for the Prometheus of the stack with this port."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port + 3}", trust_env=False, timeout=30) as one:
        yield one


def found(prometheus: httpx.Client, stack: str, expression: str) -> list[float]:
    """Return the values that an expression has now."""
    asked = expression.replace("$stack", stack).replace("$service", ".+")
    answer = prometheus.get("/api/v1/query", params={"query": asked}).json()
    assert answer["status"] == "success", answer
    values = [float(one["value"][1]) for one in answer["data"]["result"]]
    return [value for value in values if not math.isnan(value)]


def without_data(
    prometheus: httpx.Client, stack: str, boards: Iterable[str]
) -> set[tuple[str, str, str]]:
    """Return the expressions of dashboards that have no value now, with where they are."""
    wanted = {
        (board, panel["title"], target["expr"])
        for board in boards
        for panel in BOARDS[board]["panels"]
        for target in panel["targets"]
    }
    return {one for one in wanted if not found(prometheus, stack, one[2])}


def names_on(page: str) -> set[str]:
    """Return the names of the metrics that rules and dashboards may use."""
    return set(_NAME.findall(page))


def recorded(name: str, names: set[str]) -> set[str]:
    """Return the names that are recorded for a page; UPDATE_GOLDENS records those it has now."""
    file = RECORDED / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDENS"):
        file.write_text("".join(f"{one}\n" for one in sorted(names)))
    return set(file.read_text().split())
