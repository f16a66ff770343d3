"""What a benchmark reads off the engines' pages: only what they counted meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from deploy.metrics.page import MetricsPage, parsed_page
from deploy.workflows.bench.counters import connector_shares, redis_path, stages

ROLES = {"producer-0": "producer", "producer-1": "producer", "consumer-0": "consumer"}


def running(ranks: int = 1, kv_server: object = None) -> Any:
    engines = [SimpleNamespace(name=name, role=role) for name, role in ROLES.items()]
    limits = SimpleNamespace(ranks=ranks)
    plan = SimpleNamespace(engines=engines, limits=limits, kv_server=kv_server)
    return SimpleNamespace(prepared=SimpleNamespace(plan=plan))


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
    path = redis_path(running(ranks=2), before, after)
    assert path is not None and path.ranks == 2
    assert (path.loaded_bytes, path.load_cpu_s, path.store_cpu_s) == (2e9, 0.5, None)
    assert redis_path(running(), pages(), pages()) is None


def test_lmcaches_server_moves_what_its_engines_share() -> None:
    before, after = pages(), pages()
    before["kv-server"], after["kv-server"] = parsed_page(moved(1, 1)), parsed_page(moved(4, 1))
    served = running(ranks=2, kv_server="kv-server")
    path = redis_path(served, before, after)
    assert path is not None
    assert (path.loaded_bytes, path.ranks, path.by_server) == (3, 1, True)
    del before["kv-server"]
    assert redis_path(served, before, after) is None, "not all that it ever counted"


def timed(requests: int, *, lookup: float, load: float, barrier: float) -> str:
    """Return a page on which each request waited 0.1 s in the queue, and computed for 0.2 s."""
    names = {"queue": 0.1, "prefill": 0.2}
    engine = "".join(
        f"vllm:request_{stage}_time_seconds_sum {each * requests}\n"
        f"vllm:request_{stage}_time_seconds_count {requests}\n"
        for stage, each in names.items()
    )
    return (
        f'{engine}pdkit_store_seconds_total{{operation="lookup"}} {lookup}\n'
        f'pdkit_store_seconds_total{{operation="load"}} {load}\n'
        f'pdkit_store_seconds_total{{operation="store"}} 1000\n'
        f"pdkit_store_barrier_seconds_total {barrier}\n"
    )


def test_stages_are_means_over_all_requests_of_a_role() -> None:
    """Also over those that looked nothing up; what was counted before the pass is not in them."""
    before = pages(producer_0=timed(5, lookup=50, load=50, barrier=50))
    after = pages(
        producer_0=timed(8, lookup=50.3, load=50.6, barrier=51),
        producer_1=timed(1, lookup=0.1, load=0, barrier=0.2),
    )
    assert stages(running(), before, after) == {
        "producer": {"queue": 0.1, "prefill": 0.2, "lookup": 0.1, "load": 0.15, "store": 0.3}
    }


def test_ranks_look_up_and_load_side_by_side_behind_one_barrier() -> None:
    after = pages(consumer_0=timed(2, lookup=0.4, load=0.8, barrier=0.6))
    assert stages(running(ranks=2), pages(), after)["consumer"] == {
        "queue": 0.1, "prefill": 0.2, "lookup": 0.1, "load": 0.2, "store": 0.3,
    }  # fmt: skip


def test_no_stage_of_the_store_without_one_or_without_a_request() -> None:
    plain = timed(2, lookup=0, load=0, barrier=0).partition("pdkit_")[0]
    assert stages(running(), pages(), pages(consumer_0=plain)) == {
        "consumer": {"queue": 0.1, "prefill": 0.2}
    }
    idle = pages(consumer_0=timed(2, lookup=1, load=1, barrier=1))
    assert stages(running(), idle, idle) == {}
