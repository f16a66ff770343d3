"""What the workers count, as Prometheus sees it on the API server's page."""

from __future__ import annotations

import itertools
import os

import pytest
from pdkit_connector import metrics, worker_socket
from pdkit_connector.counters import Counters
from pdkit_connector.metrics import StoreCollector
from prometheus_client import CollectorRegistry, generate_latest

_names = (f"metrics-{os.getpid()}-{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_counts(monkeypatch):
    """This process' own counts are shown, too: they are none of another test's."""
    monkeypatch.setattr(metrics, "COUNTERS", Counters())


@pytest.fixture
def counted(monkeypatch):
    """Return a worker's counters and what the page shows of them."""
    name, counters = next(_names), Counters()
    monkeypatch.setenv(worker_socket.WORKERS_ENV, "2")

    async def answer():
        return counters.dump()

    for worker in range(2):
        worker_socket.serve(name, worker, {metrics.QUESTION: answer})
    registry = CollectorRegistry()
    registry.register(StoreCollector(name))
    return counters, lambda: generate_latest(registry).decode()


def test_counts_are_summed_over_the_workers(counted):
    counters, page = counted
    counters.add("chunks", 3, operation="load", result="loaded")
    counters.add("bytes", 10.5, operation="load")
    text = page()
    assert 'pdkit_store_chunks_total{operation="load",result="loaded"} 6.0' in text
    assert 'pdkit_store_bytes_total{operation="load"} 21.0' in text
    counters.add("chunks", operation="load", result="loaded")
    assert 'pdkit_store_chunks_total{operation="load",result="loaded"} 8.0' in page()


def test_counts_of_one_name_may_have_different_labels(counted):
    counters, page = counted
    counters.add("failures", kind="timeout")
    counters.add("failures")
    assert 'pdkit_store_failures_total{kind="timeout"} 2.0' in page()
    assert 'pdkit_store_failures_total{kind=""} 2.0' in page()


def test_without_workers_the_page_is_there():
    registry = CollectorRegistry()
    registry.register(StoreCollector(next(_names)))
    assert b"pdkit_store_chunks" not in generate_latest(registry)


def test_values_are_summed_over_the_labels_that_are_not_named():
    counters = Counters()
    counters.add("chunks", 2, operation="load", result="loaded")
    counters.add("chunks", 1, operation="load", result="missing")
    counters.add("chunks", 7, operation="store", result="stored")
    assert counters.value("chunks", operation="load") == 3
    assert counters.value("chunks", operation="load", result="missing") == 1
    assert counters.value("bytes") == 0
