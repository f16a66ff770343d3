"""A stack that shares KV through LMCache's server, by stand-ins for it and for its engines."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from deploy.benchmark.results import read_requests
from deploy.benchmark.workloads import TokenRange, WorkloadOptions
from deploy.errors import StackUnhealthy
from deploy.output.check_view import check_view
from deploy.output.views import status_view
from deploy.output.watch_view import watch_view
from deploy.runtime.process import launcher as launcher_module
from deploy.workflows import evidence
from deploy.workflows.bench import BenchOptions, bench_stack
from deploy.workflows.check import CheckOptions, check_stack, probes, run
from deploy.workflows.check.session import Session
from deploy.workflows.down import stop_stack
from deploy.workflows.drain import DrainOptions
from deploy.workflows.fix_states import fixes_of
from deploy.workflows.restart import restart_services
from deploy.workflows.running import require_stack
from deploy.workflows.status import stack_status
from deploy.workflows.watch import StackWatch
from tests.unit.workflows.conftest import SMALL, Lab, opened

MP = {
    "connector": "lmcache-mp",
    "lmcache": {"chunk_size": SMALL["lmcache"]["chunk_size"]},
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with opened(tmp_path_factory.mktemp("mp")) as made:
        made.up(made.spec(**MP))
        yield made
        stop_stack(made.home, "pdkit", made.lines.append)


@pytest.fixture(autouse=True)
def _engines_find_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "HEARTBEAT_S", 0.0)


def kill(lab: Lab, service: str) -> None:
    running = require_stack(lab.home, "pdkit")
    process = psutil.Process(running.state.services[service].pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)


def test_the_start_says_which_connector_was_chosen_and_why(shared: Lab) -> None:
    said = "connector: lmcache-mp, through LMCache's server (asked for)"
    assert [line for line in shared.lines if line.startswith(said)]


def test_a_check_passes_and_names_what_it_left_out(shared: Lab) -> None:
    report = check_stack(shared.home, "pdkit", shared.lines.append)
    assert report.passed, report.failures
    assert report.total.eligible_rate == 1.0
    assert report.store is None
    assert len(report.left_out) == 1
    assert report.second_tier is not None
    assert report.second_tier.hits.hits == report.second_tier.hits.eligible > 0
    assert "from Redis alone" in check_view(report)
    for pair in report.pairs:
        assert pair.tiers is not None
        assert pair.tiers.server == pair.hits.hits
        assert (pair.tiers.asked, pair.tiers.local, pair.tiers.redis) == (pair.hits.queries, 0, 0)
    hits, asked = report.total.hits, report.total.queries
    assert (
        f"The pairs' prompts: {asked} tokens; consumers had {hits} from LMCache's server "
        f"and computed {asked - hits}"
    ) in check_view(report)
    assert report.path is not None, "by the server's page"
    assert report.path.stored_chunks > 0


def test_kv_that_redis_does_not_get_is_named(
    shared: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(probes, "_STORED_WITHIN_S", 0.1)
    shared.faults.write_text("redis:lags")
    try:
        report = check_stack(shared.home, "pdkit", shared.lines.append)
    finally:
        shared.faults.unlink()
    assert report.second_tier is not None
    eligible = report.second_tier.hits.eligible
    assert report.failures == [
        f"from Redis alone: 0 of {eligible} eligible tokens were loaded from the store"
    ]


def test_a_redis_that_dies_behind_the_server_is_the_cause(
    shared: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_STORED_WITHIN_S", 0.1)
    real = run.check_second_tier

    def interrupted(session: Session) -> None:
        kill(shared, "redis")
        shared.faults.write_text("redis:lags")
        real(session)

    monkeypatch.setattr(run, "check_second_tier", interrupted)
    try:
        report = check_stack(shared.home, "pdkit", shared.lines.append)
    finally:
        shared.faults.unlink()
    assert report.total.eligible_rate == 1.0
    assert "redis exited during the check" in report.failures
    assert [cause.code for cause in report.diagnosis] == ["store_unreachable"]
    assert "Redis" in report.diagnosis[0].message
    shared.up(require_stack(shared.home, "pdkit").prepared.spec)


def test_kv_that_the_server_does_not_keep_in_its_memory_is_named(shared: Lab) -> None:
    shared.faults.write_text("server:forgets")
    try:
        report = check_stack(shared.home, "pdkit", shared.lines.append, CheckOptions(quick=True))
    finally:
        shared.faults.unlink()
    assert report.total.eligible_rate == 1.0, "all of it was loaded"
    (pair,) = report.pairs
    assert report.failures == [
        f"{pair.name}: {pair.hits.hits} tokens came from Redis, and not from the memory of "
        "LMCache's server, which had just got them"
    ]


def test_a_quick_check_leaves_the_second_tier_out(shared: Lab) -> None:
    quick = CheckOptions(quick=True)
    report = check_stack(shared.home, "pdkit", shared.lines.append, quick)
    assert report.passed
    assert report.second_tier is None


def test_a_check_that_fails_does_not_speak_of_redis(shared: Lab) -> None:
    shared.faults.write_text("producer:stores-nothing")
    try:
        report = check_stack(shared.home, "pdkit", shared.lines.append)
    finally:
        shared.faults.unlink()
    assert not report.passed
    (cause,) = report.diagnosis
    assert cause.code == "not_found"
    assert "Redis" not in cause.message


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ("server:full", "server_full", "had no room (1024 MiB) for 3 chunks"),
        ("server:silent", "store_unreachable", "LMCache's server does not answer"),
    ],
)
def test_a_server_that_goes_wrong_during_the_check_is_the_cause(
    shared: Lab, monkeypatch: pytest.MonkeyPatch, fault: str, code: str, words: str
) -> None:
    real = run.check_pair

    def interrupted(session: Session, producer: str, consumer: str, *, quick: bool) -> None:
        shared.faults.write_text(f"producer:stores-nothing {fault}")
        real(session, producer, consumer, quick=quick)

    monkeypatch.setattr(run, "check_pair", interrupted)
    try:
        report = check_stack(shared.home, "pdkit", shared.lines.append, CheckOptions(quick=True))
    finally:
        shared.faults.unlink()
    (cause,) = report.diagnosis
    assert cause.code == code
    assert words in cause.message


@pytest.mark.parametrize(("free_mib", "code"), [(10, "shared_memory_full"), (1000, "engine_died")])
def test_an_engine_that_dies_where_shared_memory_is_full(
    shared: Lab, monkeypatch: pytest.MonkeyPatch, free_mib: int, code: str
) -> None:
    real = run.check_pair

    def interrupted(session: Session, producer: str, consumer: str, *, quick: bool) -> None:
        kill(shared, "consumer-0")
        real(session, producer, consumer, quick=quick)

    monkeypatch.setattr(run, "check_pair", interrupted)
    monkeypatch.setattr(evidence, "free_mib", lambda _: free_mib)
    report = check_stack(shared.home, "pdkit", shared.lines.append, CheckOptions(quick=True))
    assert [cause.code for cause in report.diagnosis] == [code]
    shared.up(require_stack(shared.home, "pdkit").prepared.spec)


def test_status_shows_it_and_no_fix_is_missed(shared: Lab) -> None:
    check_stack(shared.home, "pdkit", shared.lines.append)  # which stores something
    status = stack_status(shared.home, "pdkit")
    assert status.healthy
    (server,) = (one for one in status.services if one.role == "kv-server")
    assert server.url.endswith("/kv-pages.sock")
    assert status.store is not None
    assert status.kv_server is not None
    assert server.path is not None
    assert server.path.stored_chunks == status.kv_server.used_bytes
    assert status.kv_server.max_bytes == 2**30
    assert status.kv_server.used_bytes > 0, "chunks, in the stand-in"
    assert re.search(
        r"of 1.0 GiB; engines requested [\d,]+ tokens: [\d.]+ % were in its memory, [\d.]+ % came",
        status_view(status),
    )
    fresh = replace(status, kv_server=replace(status.kv_server, asked_tokens=0))
    assert "of 1.0 GiB; no tokens were requested yet" in status_view(fresh)
    assert re.search(
        r"prompts of all engines: [\d,]+ tokens; [\d.]+ % from their own caches, [\d.]+ % loaded, "
        r"[\d.]+ % computed",
        status_view(status),
    )
    assert not [line for line in status.warnings if "fix" in line]
    assert "LMCache's server" in fixes_of(shared.home, "pdkit", None).not_for


def test_status_watch_shows_the_server(shared: Lab) -> None:
    watch = StackWatch(shared.home, "pdkit")
    watch.frame()
    check_stack(shared.home, "pdkit", shared.lines.append, CheckOptions(quick=True))
    frame = watch.frame()
    tiers = frame.watched.tiers
    assert tiers is not None
    assert tiers.server > 0, "and not from Redis"
    assert tiers.redis == 0
    assert re.search(r"^tiers    local .* %, server .* %, Redis 0.0 %, computed .* %",
                     watch_view(frame, ()), re.MULTILINE)  # fmt: skip
    assert frame.shares_kv, "Redis is shown"
    assert frame.conditions["kv-server"] == "ready"
    assert not frame.sick
    assert frame.conditions["redis"] == "ready"
    watch_view(frame, ())


def test_bench_measures_a_stack_with_the_server(shared: Lab, tmp_path: Path) -> None:
    sizes = WorkloadOptions(input_tokens=TokenRange(200, 200), output_tokens=TokenRange(4, 4))
    options = BenchOptions(
        workload=sizes, requests=4, repeats=1, warmup=1, hop_requests=1, router_requests=4,
        one_user_requests=2,
    )  # fmt: skip
    result = bench_stack(
        shared.home, "pdkit", options, folder=tmp_path, command=[], report=shared.lines.append
    )
    assert result.stack.redis
    assert all(record.error is None for record in read_requests(tmp_path))


def test_a_dead_server_is_named_and_started_again(shared: Lab) -> None:
    kill(shared, "kv-server")
    with pytest.raises(StackUnhealthy, match="not running: kv-server"):
        check_stack(shared.home, "pdkit", shared.lines.append)
    shared.ask()
    again = shared.up(require_stack(shared.home, "pdkit").prepared.spec)
    assert set(again.started) == {"kv-server"}
    assert again.outlived_store
    assert check_stack(shared.home, "pdkit", shared.lines.append).passed


def test_engines_are_asked_until_they_find_one_that_was_restarted(
    shared: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed: list[str] = []
    monkeypatch.setattr(
        "deploy.workflows.restart.renew_store_connections",
        lambda _, running: renewed.append(running.stack.name),
    )
    restart_services(shared.home, "pdkit", "kv-server", shared.lines.append, DrainOptions())
    assert renewed == ["pdkit"]


def test_an_end_during_the_check_is_the_cause(shared: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run.check_pair

    def interrupted(session: Session, producer: str, consumer: str, *, quick: bool) -> None:
        restart_services(shared.home, "pdkit", "kv-server", shared.lines.append, DrainOptions())
        shared.faults.write_text("producer:stores-nothing")
        real(session, producer, consumer, quick=quick)

    monkeypatch.setattr("deploy.workflows.restart.renew_store_connections", lambda *_: None)
    monkeypatch.setattr(run, "check_pair", interrupted)
    try:
        report = check_stack(shared.home, "pdkit", shared.lines.append)
    finally:
        shared.faults.unlink()
    assert "kv-server exited during the check" in report.failures
    assert [cause.code for cause in report.diagnosis] == ["keys_lost"]
    assert report.diagnosis[0].message.startswith("LMCache's server ended")


def test_down_removes_the_shared_memory_of_killed_engines(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launcher_module, "_SHARED_MEMORY", tmp_path)
    lab.up(lab.spec(**MP))
    prefix = lab.home.stack("pdkit").temp_dir.name
    (tmp_path / f"{prefix}-producer-0-7_0").touch()
    (tmp_path / "pdkit-of-another-producer-0-7_0").touch()
    stop_stack(lab.home, "pdkit", lab.lines.append)
    assert [file.name for file in tmp_path.glob("pdkit-*")] == ["pdkit-of-another-producer-0-7_0"]
