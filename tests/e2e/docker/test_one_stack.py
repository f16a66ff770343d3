"""A stack of containers: what `up` proves, and what the other commands say of it."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import eventually
from tests.e2e.docker.conftest import (
    ENGINES,
    SERVICES,
    Project,
    complete,
)
from tests.e2e.one_stack.test_watch import Stream, all_answered


@pytest.fixture(scope="module")
def again(stack: Project) -> Any:
    """Run `up` on the running stack; return its data and what it said."""
    before = stack.ids()
    ran = stack.run("up", "--json")
    assert ran.code == 0, ran
    assert stack.ids() == before
    return {**ran.data, "stderr": ran.stderr}


@pytest.mark.quick
class TestUp:
    def test_up_proves_that_kv_is_reused(self, again: Any) -> None:
        check = again["check"]
        assert check["passed"] is True
        assert {(p["producer"], p["consumer"]): p["eligible_rate"] for p in check["pairs"]} == {
            ("producer-0", "consumer-0"): 1.0
        }
        assert check["hit_rate"]["hits"] == check["hit_rate"]["eligible"] > 1000
        assert check["equivalence"]["compared"] >= 2 and check["equivalence"]["mismatched"] == 0
        assert check["redis"]["keys_after"] > 0 and check["redis"]["evicted_keys"] == 0
        assert check["diagnosis"] == []

    def test_a_second_up_starts_nothing(self, stack: Project, again: Any) -> None:
        assert "already up" in again["stderr"]
        assert again["started"] == {}
        assert again["url"] == stack.url("router") and again["name"] == stack.name

    def test_up_with_another_plan_is_refused(self, stack: Project) -> None:
        before = stack.ids()
        ran = stack.run("up", "--topology", "1p2d")
        assert ran.code == 2 and "another plan" in ran.stderr, ran
        assert stack.ids() == before

    def test_check_can_be_repeated(self, stack: Project, again: Any) -> None:
        assert again["check"]["passed"]
        data = stack.ok("check")
        assert data["passed"] and data["hit_rate"]["eligible_rate"] == 1.0

    def test_clients_are_answered(self, stack: Project) -> None:
        assert complete(stack.url("router"), "To be")

    def test_check_fails_when_the_store_is_emptied(self, stack: Project) -> None:
        """Between a store and its load: Redis empties itself the moment that it has stored."""
        with ThreadPoolExecutor(1) as pool, stack.store_held() as check:
            emptied = pool.submit(stack.redis, "FLUSHALL")
            assert eventually(lambda: "flushall" in stack.held())
        assert emptied.result() == ["OK"]
        ran = stack.kit.ended(check)
        assert ran.code == 1, ran
        assert ran.data["diagnosis"][0]["code"] == "keys_lost"
        assert stack.ok("check", "--quick")["passed"]


class TestOtherCommands:
    @pytest.mark.quick
    def test_status_shows_what_runs(self, stack: Project, catalogue: dict[str, Any]) -> None:
        seen: list[Any] = []
        # Docker may be too busy to ask Redis in time.
        assert eventually(lambda: seen.append(stack.ok("status")) or seen[-1]["store"])
        data = seen[-1]
        containers = stack.containers()
        assert (data["healthy"], data["vendor"], data["runtime"]) == (True, "cpu", "compose")
        assert data["image"] == catalogue["cpu"]["image"]
        rows = {row["name"]: row for row in data["services"]}
        assert tuple(rows) == SERVICES
        for service, row in rows.items():
            assert row["condition"] == "ready" and row["restarts"] == 0
            assert row["pid"] == containers[service]["State"]["Pid"]
            assert row["uptime_s"] > 0
        assert rows["redis"]["url"] == "" and rows["router"]["url"] == stack.url("router")
        assert data["store"]["keys"] == int(stack.redis("DBSIZE")[0])
        assert data["external_hit_rate"] > 0.3

    def test_status_counts_memory(self, stack: Project) -> None:
        for row in stack.ok("status")["services"]:
            processes = psutil.Process(row["pid"]).children(recursive=True)
            resident = sum(process.memory_info().rss for process in processes)
            # Pages of files count in one and not in the other.
            assert 0.3 < row["resident_mib"] * 2**20 / resident < 1.3, row["name"]

    def test_watch_counts_answers_and_shows_services(self, stack: Project) -> None:
        process = stack.kit.start("status", "--watch", "--interval", "1", "--json")
        stream = Stream(process)
        frames = stream.until(all_answered)[-1:]
        complete(stack.url("router"), f"{time.time_ns()} ".ljust(700, "x"))
        frames += stream.until(
            lambda frame: (
                all_answered(frame)
                and frame["watch"]["answers"] == 1
                and frame["watch"]["store_path"]["stored_chunks"] >= 2
            )
        )
        frames += stream.until(all_answered)
        process.send_signal(signal.SIGINT)
        assert stack.kit.ended(process).code == 0
        first, last = frames[0], frames[-1]
        assert last["watch"]["answers"] == 1
        assert last["watch"]["external_hits"] == 2 * 256
        assert last["watch"]["store_path"]["stored_chunks"] == 2
        assert last["redis"]["keys"] - first["redis"]["keys"] == 2
        assert last["router"]["engines"] == {"engines": 2, "healthy": 2}
        assert set(last["services"].values()) == {"ready"}
        # A service that answers late on a busy machine is no loss.
        kinds = {event["kind"] for frame in frames for event in frame["events"]}
        assert kinds <= {"not_ready", "ready"}

    def test_logs_shows_the_last_lines_and_refuses_unknown_services(self, stack: Project) -> None:
        ran = stack.run("logs", "router", "-n", "3")
        assert ran.code == 0, ran
        assert 0 < len(ran.stdout.splitlines()) <= 3
        for engine in ENGINES:
            whole = stack.run("logs", engine, "-n", "100000").stdout
            assert "pdkit-connector fix=B17 state=applied" in whole
        unknown = stack.run("logs", "consumer-9")
        assert unknown.code == 2 and "consumer-0" in unknown.stderr

    def test_logs_follow_prints_new_lines(self, stack: Project) -> None:
        process = stack.kit.start("logs", "consumer-0", "-n", "0", "-f")
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()))
        reader.start()
        try:
            assert not any("/v1/nosuch" in line for line in lines)

            def seen() -> bool:
                # Again and again, since it may not follow yet.
                httpx.get(f"{stack.url('consumer-0')}/v1/nosuch", trust_env=False, timeout=60)
                return any("/v1/nosuch" in line for line in lines)

            assert eventually(seen)
        finally:
            process.terminate()
            process.wait(timeout=120)
            reader.join(timeout=120)
        assert process.returncode == 0, "whoever follows a log ends it by hand"
