"""What the workers count, as Prometheus sees it on the API server's page."""

from __future__ import annotations

import itertools
import os
import socket

import pytest
from pdkit_connector import engine_report, metrics, worker_socket
from pdkit_connector.counters import Counters
from pdkit_connector.engine_report import WorkerReport
from pdkit_connector.metrics import EngineCollector
from pdkit_connector.redis_path import info
from pdkit_connector.registry import Fix, FixOutcome, FixState
from prometheus_client import CollectorRegistry, generate_latest

FIX = Fix("B1", "title", "link", "reason", probe=lambda _: None)
_names = (f"metrics-{os.getpid()}-{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_counts(monkeypatch):
    """This process' own counts are shown, too: they are none of another test's.

    A worker that answers is waited for, however busy the machine is.
    """
    monkeypatch.setattr(metrics, "COUNTERS", Counters())
    monkeypatch.setattr(metrics, "_LIMIT_S", 30)


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
    registry.register(EngineCollector(name))
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


def test_the_page_exists_without_workers():
    registry = CollectorRegistry()
    registry.register(EngineCollector(next(_names)))
    assert b"pdkit_store_chunks" not in generate_latest(registry)


def test_a_silent_workers_counts_are_those_that_it_last_told(monkeypatch):
    """A sum without them would look like a restart."""
    name, counters = next(_names), Counters()
    monkeypatch.setenv(worker_socket.WORKERS_ENV, "2")
    counters.add("chunks", 3, operation="load", result="loaded")
    answers = {(name, worker, metrics.QUESTION): counters.dump() for worker in range(2)}
    monkeypatch.setattr(metrics, "ask_now", lambda *question: answers.get(question[:3]))
    registry = CollectorRegistry()
    registry.register(EngineCollector(name))

    def page():
        return generate_latest(registry).decode()

    loaded = 'pdkit_store_chunks_total{operation="load",result="loaded"}'
    assert f"{loaded} 6.0" in page()
    assert "pdkit_silent_workers 0.0" in page()
    counters.add("chunks", 1, operation="load", result="loaded")
    answers = {(name, 0, metrics.QUESTION): counters.dump()}
    assert f"{loaded} 7.0" in page()
    assert "pdkit_silent_workers 1.0" in page()
    answers[name, 1, metrics.QUESTION] = b""  # of a worker that ends
    assert "pdkit_silent_workers 1.0" in page()
    answers[name, 1, metrics.QUESTION] = counters.dump()
    assert f"{loaded} 8.0" in page()
    assert "pdkit_silent_workers 0.0" in page()


def test_a_silent_workers_report_is_its_last(monkeypatch):
    name, report = next(_names), WorkerReport()
    report.set_kv({"chunk_size": 64})
    answers = {metrics.QUESTION: Counters().dump(), engine_report.QUESTION: report.dump()}
    monkeypatch.setattr(metrics, "ask_now", lambda *question: answers.get(question[2]))
    registry = CollectorRegistry()
    registry.register(EngineCollector(name))
    assert b"pdkit_kv_info{" in generate_latest(registry)
    answers.clear()
    assert b"pdkit_kv_info{" in generate_latest(registry)


def test_a_worker_that_hangs_is_asked_once_a_page(monkeypatch):
    """The API server answers nobody while it waits for it."""
    name = next(_names)
    monkeypatch.setenv(worker_socket.WORKERS_ENV, "2")
    ask = metrics.ask_now
    monkeypatch.setattr(
        metrics,
        "ask_now",
        lambda name, worker, what, limit_s: ask(name, worker, what, limit_s if worker else 0.05),
    )

    async def answer():
        return b'{"0": {"up": 1, "used_memory": 7}}'

    worker_socket.serve(name, 1, {info.QUESTION: answer})
    registry = CollectorRegistry()
    registry.register(EngineCollector(name))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as hanging:
        hanging.bind(worker_socket.address(name, 0))
        hanging.listen()
        hanging.setblocking(False)
        text = generate_latest(registry).decode()
        hanging.accept()[0].close()
        with pytest.raises(BlockingIOError):
            hanging.accept()
    assert 'pdkit_redis_up{shard="0"} 1.0' in text


def test_redis_is_reported_by_one_worker(monkeypatch):
    name = next(_names)
    monkeypatch.setenv(worker_socket.WORKERS_ENV, "2")

    async def answer():
        return b'{"0": {"up": 1, "used_memory": 7}}'

    worker_socket.serve(name, 0, {info.QUESTION: answer})
    registry = CollectorRegistry()
    registry.register(EngineCollector(name))
    text = generate_latest(registry).decode()
    assert 'pdkit_redis_used_memory_bytes{shard="0"} 7.0' in text
    assert 'pdkit_redis_up{shard="0"} 1.0' in text


def test_values_are_summed_over_the_labels_that_are_not_named():
    counters = Counters()
    counters.add("chunks", 2, operation="load", result="loaded")
    counters.add("chunks", 1, operation="load", result="missing")
    counters.add("chunks", 7, operation="store", result="stored")
    assert counters.value("chunks", operation="load") == 3
    assert counters.value("chunks", operation="load", result="missing") == 1
    assert counters.value("bytes") == 0


def reporting(monkeypatch, *reports):
    """Return the page of an engine whose workers have these reports."""
    name = next(_names)
    monkeypatch.setenv(worker_socket.WORKERS_ENV, str(len(reports)))

    def answering(report):
        async def answer():
            return report.dump()

        return answer

    for worker, report in enumerate(reports):
        worker_socket.serve(name, worker, {engine_report.QUESTION: answering(report)})
    registry = CollectorRegistry()
    registry.register(EngineCollector(name))
    return generate_latest(registry).decode()


def test_fixes_and_kv_are_reported_by_one_worker(monkeypatch):
    silent, first, second = WorkerReport(), WorkerReport(), WorkerReport()
    for report in (first, second):
        report.set_fixes([FixOutcome(FIX, FixState.NOT_NEEDED, 'no "bug"\nhere')])
        report.set_kv({"chunk_size": 64, "layerwise": False})
    page = reporting(monkeypatch, silent, first, second)
    assert page.count("pdkit_fix_info{") == page.count("pdkit_kv_info{") == 1
    assert r'pdkit_fix_info{evidence="no \"bug\"\nhere",fix="B1",state="not needed"} 1.0' in page
    assert r'facts="{\"chunk_size\": 64, \"layerwise\": false}"' in page
    assert "pdkit_connector_info{lmcache=" in page


def test_each_workers_number_is_reported(monkeypatch):
    one, other = WorkerReport(), WorkerReport()
    for number, report in enumerate((one, other), 7):
        report.set_kv({"instance": number})
    assert r"\"instances\": [7, 8]" in reporting(monkeypatch, one, other)


def test_the_newest_failure_of_each_kind_is_reported(monkeypatch):
    one, other = WorkerReport(), WorkerReport()
    one.redis_failed("storing", "oom", "first")
    other.redis_failed("storing", "oom", "second")
    one.redis_failed("reading", "unreachable", "Error 111")
    page = reporting(monkeypatch, other, one)
    failures = [line for line in page.splitlines() if line.startswith(engine_report.REDIS_FAILED)]
    assert sorted(line.partition("{")[2].partition("}")[0] for line in failures) == [
        'kind="oom",said="second",way="storing"',
        'kind="unreachable",said="Error 111",way="reading"',
    ]


def test_a_failure_is_reported_without_secrets(monkeypatch):
    report = WorkerReport()
    report.redis_failed("reading", "auth", "redis://u:not-to-be-seen@h:1 refused")
    assert b"not-to-be-seen" not in report.dump()
    assert b"refused" in report.dump()


def test_before_the_workers_are_ready_nothing_is_reported(monkeypatch):
    lines = reporting(monkeypatch, WorkerReport()).splitlines()
    assert [line for line in lines if line.startswith("pdkit_")] == ["pdkit_silent_workers 1.0"]
