"""What a benchmark reads off the engines' pages: only what they counted meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from deploy.metrics.page import MetricsPage, parsed_page
from deploy.workflows.bench.counters import connector_shares, redis_path

ROLES = {"producer-0": "producer", "producer-1": "producer", "consumer-0": "consumer"}


def running() -> Any:
    engines = [SimpleNamespace(name=name, role=role) for name, role in ROLES.items()]
    return SimpleNamespace(prepared=SimpleNamespace(plan=SimpleNamespace(engines=engines)))


def pages(**texts: str) -> dict[str, MetricsPage]:
    return {name: parsed_page(texts.get(name.replace("-", "_"), "")) for name in ROLES}


def steps(connector: float, rest: float) -> str:
    name = "pdkit_store_step_seconds_total"
    return f'{name}{{part="connector"}} {connector}\n{name}{{part="rest"}} {rest}\n'


def test_shares_of_the_connector_are_those_of_all_engines_of_a_role() -> None:
    before = pages(producer_0=steps(100, 100))
    after = pages(
        producer_0=steps(101, 108), producer_1=steps(0, 1), consumer_0=steps(0.5, 1.5)
    )  # fmt: skip
    assert connector_shares(running(), before, after) == {"producer": 0.1, "consumer": 0.25}


def test_engines_without_a_step_have_no_share() -> None:
    before = pages(producer_0=steps(1, 1), consumer_0=steps(1, 1))
    after = pages(producer_0=steps(1, 1), consumer_0=steps(1, 4))
    assert connector_shares(running(), before, after) == {"consumer": 0.0}


def moved(size: float, cpu_s: float) -> str:
    return (
        'pdkit_store_chunks_total{operation="load",result="loaded"} 1\n'
        f'pdkit_store_bytes_total{{operation="load"}} {size}\n'
        f'pdkit_store_cpu_seconds_total{{operation="load"}} {cpu_s}\n'
    )


def test_cpu_time_of_loads_and_stores_is_separate() -> None:
    before, after = pages(consumer_0=moved(1e9, 5)), pages(consumer_0=moved(3e9, 5.5))
    path = redis_path(running(), before, after)
    assert path is not None
    assert (path.loaded_bytes, path.load_cpu_s, path.store_cpu_s) == (2e9, 0.5, None)
    assert redis_path(running(), pages(), pages()) is None
