"""Checks that look back, on stacks of stand-ins: canaries left, found, gone, stale and damaged."""

from __future__ import annotations

import errno
import io
import json
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import redis

from deploy.metrics.engine import CacheCounters
from deploy.output.check_view import check_view
from deploy.runtime.engine_api import ApiError
from deploy.verify.canaries import MOST, Canary, as_record
from deploy.verify.equivalence import Completion
from deploy.verify.findings import Findings
from deploy.verify.report import CheckReport
from deploy.workflows import key_cleanup
from deploy.workflows.check import CheckOptions, canaries, check_stack
from deploy.workflows.check.canaries import Asked, Aviary, identity_of, look_at, recorded_canaries
from deploy.workflows.check.keys import CheckKeys
from deploy.workflows.check.session import Session
from deploy.workflows.down import stop_stack
from deploy.workflows.drain import DrainOptions
from deploy.workflows.evidence import emptying_the_store
from deploy.workflows.restart import restart_services
from deploy.workflows.running import RunningStack, require_stack
from tests.unit.workflows.conftest import SMALL, Lab, opened

DAY = 86400.0
CHUNKS = 2  # of a canary


@pytest.fixture
def up(lab: Lab) -> Iterator[Lab]:
    """A stack without prefix caches, so that each look loads from Redis."""
    engine = {**SMALL["engine"], "args": ["--no-enable-prefix-caching"]}
    lab.up(lab.spec(engine=engine))
    yield lab
    stop_stack(lab.home, "pdkit", lab.lines.append)


def check(lab: Lab, *, quick: bool = True) -> CheckReport:
    return check_stack(lab.home, "pdkit", lab.lines.append, CheckOptions(quick=quick))


def file_of(lab: Lab) -> Path:
    return lab.home.canaries_file("pdkit")


def store(lab: Lab) -> redis.Redis:
    files = lab.home.stack("pdkit")
    password = (files.secrets_dir / "redis_password").read_text().strip()
    return redis.Redis(unix_socket_path=f"{files.temp_dir}/redis.sock", password=password)


def edited(lab: Lab, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit each recorded canary."""
    raw = json.loads(file_of(lab).read_text())
    for one in raw["canaries"]:
        edit(one)
    file_of(lab).write_text(json.dumps(raw))


def outcomes(report: CheckReport) -> list[str]:
    assert report.canaries is not None
    return [look.outcome for look in report.canaries.looks]


def causes(report: CheckReport) -> list[str]:
    return [cause.code for cause in report.diagnosis]


def test_each_check_leaves_a_canary_and_the_next_ones_look_at_it(up: Lab) -> None:
    first = check(up)
    assert first.passed, first.failures
    assert first.canaries is not None
    assert (first.canaries.known, first.canaries.left) == (0, True)
    assert stat.S_IMODE(file_of(up).stat().st_mode) == 0o600
    second = check(up, quick=False)
    assert second.passed, second.failures
    assert outcomes(second) == ["same"]
    assert second.canaries is not None
    assert second.canaries.looks[0].loaded == CHUNKS * 64
    assert "Canaries: 1, of " in check_view(second)
    data = second.as_dict()["canaries"]
    assert (data["known"], data["same"], data["evicted"], data["left"]) == (1, 1, 0, True)
    assert second.store is not None
    assert second.store.keys_before == CHUNKS
    assert second.store.keys_removed == (second.store.keys_after or 0) - CHUNKS


def test_a_few_stay_the_oldest_among_them_and_their_keys_do_not_pile_up(up: Lab) -> None:
    for _ in range(MOST + 2):
        assert check(up).passed
    kept = recorded_canaries(file_of(up), up.lines.append)
    assert len(kept) == MOST
    assert store(up).dbsize() == MOST * CHUNKS
    report = check(up)
    assert outcomes(report) == ["same"] * MOST
    assert recorded_canaries(file_of(up), up.lines.append)[0] == kept[0]


def test_a_pair_of_each_consumer_looks(served: Lab) -> None:
    assert check(served).passed
    report = check(served)
    assert report.canaries is not None
    assert {look.consumer for look in report.canaries.looks} == {"consumer-0", "consumer-1"}
    again = check(served)
    assert again.passed
    assert again.canaries is not None
    held = [look for look in again.canaries.looks if look.held]
    assert held, "what a consumer has in its own cache it has compared before"
    assert all(look.outcome == "same" for look in held)


def test_kv_that_answers_otherwise_fails_the_check_and_is_named(up: Lab) -> None:
    check(up)
    since = recorded_canaries(file_of(up), up.lines.append)[0].left_at

    def age(one: dict[str, Any]) -> None:
        one["left_at"] = since - 3 * DAY

    edited(up, age)
    report = wrong_only_for_canaries(up)
    assert not report.passed
    assert outcomes(report) == ["damaged"]
    (failure,) = report.failures
    assert "consumer-0 answers from stale KV: a check stored it 3 days ago" in failure
    assert "the stored KV was damaged" in failure
    assert causes(report) == ["stale_kv"]
    assert report.diagnosis[0].hint.startswith("deploy down --name pdkit, then deploy up")
    assert report.items["canaries"] == [failure]
    assert "Canaries: 1, of 3 days ago: 1 answered otherwise" in check_view(report)
    assert report.canaries is not None
    assert not report.canaries.left, "what a failed check computed is nothing to compare with"
    assert len(recorded_canaries(file_of(up), up.lines.append)) == 1, "the next check fails, too"


def test_engines_that_compute_otherwise_than_then_make_it_kv_of_an_older_model(up: Lab) -> None:
    check(up)

    def of_other_weights(one: dict[str, Any]) -> None:
        one["tokens"] = [f"token_id:{300 + step}" for step in range(len(one["tokens"]))]
        one["top_logprobs"] = [{token: -0.1} for token in one["tokens"]]

    edited(up, of_other_weights)
    report = wrong_only_for_canaries(up)
    assert outcomes(report) == ["outdated"]
    assert "KV of an older model or version" in report.failures[0]


def wrong_only_for_canaries(lab: Lab) -> CheckReport:
    """Run a check whose consumers load wrong KV while they are asked for canaries."""
    look = canaries.look_at

    def damaged(*args: Any, **options: Any) -> Iterator[Any]:
        lab.faults.write_text("consumer:wrong-kv")
        yield from look(*args, **options)
        lab.faults.unlink()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(canaries, "look_at", damaged)
        return check(lab)


def test_where_new_kv_is_wrong_too_its_age_is_not_the_cause(up: Lab) -> None:
    check(up)
    up.faults.write_text("consumer:wrong-kv")
    report = check(up)
    assert "kv_differs" in causes(report) and "stale_kv" not in causes(report)
    assert any("stale KV" in failure for failure in report.failures)


def test_evicted_kv_is_no_failure(up: Lab) -> None:
    check(up)
    check(up)
    first = recorded_canaries(file_of(up), up.lines.append)[0]
    client = store(up)
    client.unlink(*client.keys(f"*{first.tag}*"))
    report = check(up)
    assert report.passed, report.failures
    assert outcomes(report) == ["evicted", "same"]
    assert "Canaries: 1, of " in check_view(report)
    assert "1 of 2 evicted" in check_view(report)
    assert first not in recorded_canaries(file_of(up), up.lines.append)
    client.flushall()
    report = check(up)
    assert report.passed, report.failures
    assert outcomes(report) == ["evicted", "evicted"]


def of_another_identity(lab: Lab) -> None:
    def other(one: dict[str, Any]) -> None:
        one["identity"] = "17"

    edited(lab, other)


def test_kv_of_another_identity_that_is_not_found_is_no_failure(up: Lab) -> None:
    check(up)
    of_another_identity(up)
    store(up).flushall()
    report = check(up)
    assert report.passed, report.failures
    assert outcomes(report) == ["other"]
    assert "1 of 1 with KV of another identity" in check_view(report)
    kept = recorded_canaries(file_of(up), up.lines.append)
    assert kept[0].identity == "17", "a rollback may find it again"
    assert kept[0].looked_under == [identity_of(require_stack(up.home, "pdkit"))]


def test_kv_of_another_identity_that_is_loaded_fails_one_check_and_is_removed(up: Lab) -> None:
    check(up)
    of_another_identity(up)
    report = check(up)
    assert outcomes(report) == ["foreign"], "its tokens are loaded all the same"
    assert "another identity" in report.failures[0]
    assert causes(report) == ["stale_kv"]
    assert recorded_canaries(file_of(up), up.lines.append) == []
    assert store(up).keys("*canary-*") == []
    report = check(up)
    assert report.passed, report.failures
    assert outcomes(report) == []


def reporting(key_name: str) -> str:
    facts = json.dumps(json.dumps({"key_name": key_name}))
    return f"pdkit_kv_info{{facts={facts}}} 1"


@pytest.fixture
def restart(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Start engines again with another name of the model in their keys, under the same seed."""

    def again(lab: Lab, key_name: str, service: str | None = None) -> None:
        monkeypatch.setenv("STAND_IN_REPORT", reporting(key_name))
        options = DrainOptions(force=True)
        restart_services(lab.home, "pdkit", service, lab.lines.append, options)

    return again


def test_engines_that_differ_in_their_own_rows_only_have_another_identity(
    up: Lab, restart: Callable[..., None]
) -> None:
    restart(up, "kv-0a")
    assert check(up).passed
    (left,) = recorded_canaries(file_of(up), up.lines.append)
    restart(up, "kv-0b", "consumer-0")
    report = check(up)
    assert not report.passed, "engines that differ find nothing of each other"
    assert report.canaries is None, "and have no identity in common"
    restart(up, "kv-0b")
    report = check(up)
    assert report.passed, report.failures
    assert outcomes(report) == ["other"]
    assert recorded_canaries(file_of(up), up.lines.append)[0].tag == left.tag
    assert len(store(up).keys(f"*{left.tag}*")) == CHUNKS
    restart(up, "kv-0a")
    report = check(up)
    assert report.passed, report.failures
    assert outcomes(report) == ["same", "other"], "the first one is found again"


@pytest.fixture
def both(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """Two engines that load and store, asked one after the other for a canary they do not find."""
    engine = {**SMALL["engine"], "args": ["--no-enable-prefix-caching"]}
    lab.up(lab.spec(topology="2a+redis", engine=engine))
    assert check(lab).passed
    of_another_identity(lab)
    store(lab).flushall()
    counting, turn = canaries.counting, threading.Lock()

    def in_turn(*args: Any, **options: Any) -> Any:
        with turn:
            return counting(*args, **options)

    monkeypatch.setattr(canaries, "counting", in_turn)
    yield lab
    stop_stack(lab.home, "pdkit", lab.lines.append)


def test_what_one_engine_stores_anew_for_another_is_no_kv_of_another_identity(both: Lab) -> None:
    report = check(both)
    assert report.passed, report.failures
    assert outcomes(report) == ["other"], "the first engine computes and stores it"
    report = check(both)
    assert report.passed, report.failures
    assert outcomes(report) == ["same"] * 4, "two engines look at two canaries"


def test_what_an_interrupted_check_had_stored_anew_is_no_kv_of_another_identity(both: Lab) -> None:
    look = canaries.look_at

    def interrupted(*args: Any, **options: Any) -> Iterator[Any]:
        yield from look(*args, **options)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(canaries, "look_at", interrupted)
        check(both)
    report = check(both)
    assert report.passed, report.failures
    assert outcomes(report) == ["same", "same"]


def test_where_nothing_can_be_recorded_nothing_is_stored_anew(
    up: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(up)
    check(up)
    raw = json.loads(file_of(up).read_text())
    raw["canaries"][0]["identity"] = "17"
    file_of(up).write_text(json.dumps(raw))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(canaries, "replace_private", full)
    report = check(up)
    assert report.passed, report.failures
    assert outcomes(report) == ["same"], "only the one of the present identity is asked for"
    assert any("cannot be recorded" in line for line in up.lines)


def test_an_interrupted_check_forgets_no_expired_canary_with_keys(up: Lab) -> None:
    check(up)
    check(up)
    raw = json.loads(file_of(up).read_text())
    raw["canaries"][0]["left_at"] -= 15 * DAY
    raw["canaries"][1]["identity"] = "17"
    file_of(up).write_text(json.dumps(raw))
    with pytest.MonkeyPatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(canaries, "look_at", Mock(side_effect=KeyboardInterrupt))
        check(up)
    kept = [one.tag for one in recorded_canaries(file_of(up), up.lines.append)]
    assert sorted(kept) == sorted(one["tag"] for one in raw["canaries"])


def test_an_expired_canary_is_dropped_with_its_keys(up: Lab) -> None:
    check(up)

    def old(one: dict[str, Any]) -> None:
        one["left_at"] -= 15 * DAY

    edited(up, old)
    (expired,) = recorded_canaries(file_of(up), up.lines.append)
    report = check(up)
    assert report.passed
    assert outcomes(report) == []
    assert store(up).keys(f"*{expired.tag}*") == []
    assert len(store(up).keys("*canary-*")) == CHUNKS


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"format": 7}', "null", "\xff"])
def test_a_damaged_record_is_dropped_with_a_line(up: Lab, text: str) -> None:
    check(up)
    file_of(up).write_bytes(text.encode("latin-1"))
    report = check(up)
    assert report.passed, report.failures
    assert any("the record of canaries is damaged" in line for line in up.lines)
    assert len(recorded_canaries(file_of(up), up.lines.append)) == 1


def test_a_damaged_canary_is_dropped_with_a_line_and_a_record_in_the_way_is_no_trap(
    up: Lab,
) -> None:
    check(up)
    raw = as_record(recorded_canaries(file_of(up), up.lines.append))
    raw["canaries"].append({"tag": "*"})
    file_of(up).write_text(json.dumps(raw))
    assert outcomes(check(up)) == ["same"]
    assert any("1 canaries of" in line and "left out" in line for line in up.lines)
    file_of(up).unlink()
    file_of(up).mkdir()
    before = set(store(up).keys())
    report = check(up)
    assert report.passed
    assert any("cannot be recorded" in line for line in up.lines)
    assert report.canaries is not None
    assert not report.canaries.left
    assert set(store(up).keys()) == before, "nobody would remove them later"


def test_a_prompt_that_the_present_model_cannot_have_is_skipped(up: Lab) -> None:
    check(up)

    def long(one: dict[str, Any]) -> None:
        one["prompt"] *= 10

    edited(up, long)
    report = check(up)
    assert report.passed, report.failures
    assert outcomes(report) == []


def test_a_killed_checks_guard_leaves_canaries(up: Lab) -> None:
    check(up)
    key_cleanup.remove_keys(require_stack(up.home, "pdkit"), "check-")
    assert outcomes(check(up)) == ["same"]


def test_tokens_that_the_present_model_does_not_have_are_skipped(up: Lab) -> None:
    check(up)

    def foreign(one: dict[str, Any]) -> None:
        one["prompt"][0] = 1 << 30

    edited(up, foreign)
    report = check(up)
    assert report.passed, report.failures
    assert outcomes(report) == []


class SideBySide:
    """A session whose engines answer once all expected ones are asked at the same time."""

    limit = 10_000
    at_once = 1
    store: Any = None

    def __init__(self, together: int) -> None:
        self.found = Findings()
        self.keys = CheckKeys()
        self.asked: list[str] = []
        self.busy: set[str] = set()
        self._together = threading.Barrier(together)

    def ask(self, whom: str, prompt: list[int], **_: Any) -> Completion:
        assert whom not in self.busy, "an engine answers one request at a time"
        self.busy.add(whom)
        self._together.wait(60)
        self.busy.remove(whom)
        self.asked.append(whom)
        return Completion(["token_id:1"], [{"token_id:1": -0.1}], len(prompt))

    def cache_counters(self, _: str) -> CacheCounters:
        return CacheCounters()

    def counted_for(self, *_: Any) -> CacheCounters:
        return CacheCounters()


def asked_for(number: int, producer: str, consumer: str) -> Asked:
    then = Completion(["token_id:1"], [{"token_id:1": -0.1}], 2)
    tag = f"canary-{number:012x}"
    return Asked(Canary(tag, 0.0, "17", "", "", "", "", [1, 2], then), producer, [consumer])


def test_engines_work_side_by_side() -> None:
    asked = [asked_for(number, "producer-0", "consumer-0") for number in range(3)]
    session = SideBySide(2)
    looks = list(look_at(cast("Session", session), asked, "17"))
    assert [look.tag for look in looks] == [one.canary.tag for one in asked]
    assert sorted(session.asked) == ["consumer-0"] * 3 + ["producer-0"] * 3


def test_an_engine_that_computes_and_loads_does_one_after_the_other() -> None:
    session = SideBySide(1)
    session.at_once = 8
    asked = [asked_for(number, "both-0", "both-0") for number in range(2)]
    assert len(list(look_at(cast("Session", session), asked, "17"))) == 2
    assert session.asked == ["both-0"] * 4


def test_a_consumer_that_refuses_what_a_producer_computed_is_blamed() -> None:
    class Refused(SideBySide):
        def ask(self, whom: str, prompt: list[int], **options: Any) -> Completion:
            answer = super().ask(whom, prompt, **options)
            if whom == "consumer-0":
                raise ApiError(400, "HTTP 400")
            return answer

    session = Refused(2)
    asked = [asked_for(1, "producer-0", "consumer-0")]
    (look,) = look_at(cast("Session", session), asked, "17")
    assert look.outcome == "silent"
    assert session.found.failed == {"consumer-0": "HTTP 400"}


@pytest.mark.parametrize("identity", ["17", "18"])
def test_lmcaches_server_drops_a_canary_of_before_a_swap_with_its_keys(
    identity: str, tmp_path: Path
) -> None:
    """It stores no tags: the canaries that it stored itself have no key to look for."""
    session = SideBySide(1)
    session.keys = CheckKeys(tagged=False)
    marks: list[str] = []
    session.store = SimpleNamespace(remove_marked=marks.append)
    gone = asked_for(10, "producer-0", "consumer-0").canary
    Aviary(tmp_path / "canaries.json", identity, [], [gone]).close(cast("Session", session))
    assert marks == (["@pdkit%canary-00000000000a"] if identity != gone.identity else [])


def guard_after(lab: Lab, canary: str) -> None:
    """Do what the clean-up of the check that left a canary does if that check is killed."""
    home, run = lab.home, canary.replace("canary-", "check-")
    arguments = ["key_cleanup", str(home.state), str(home.cache), "pdkit", run]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", arguments)
        patched.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        key_cleanup.main()


def test_a_check_killed_between_storing_and_recording_leaves_no_keys(up: Lab) -> None:
    check(up)
    before, record = set(store(up).keys()), file_of(up).read_text()
    check(up)
    second = recorded_canaries(file_of(up), up.lines.append)[1].tag
    guard_after(up, second)
    assert len(store(up).keys("*canary-*")) == 2 * CHUNKS, "what is recorded stays"
    file_of(up).write_text(record)
    guard_after(up, second)
    assert set(store(up).keys()) == before
    assert outcomes(check(up)) == ["same"]


def test_down_forgets_what_its_own_redis_held(up: Lab) -> None:
    check(up)
    stop_stack(up.home, "pdkit", up.lines.append)
    assert not file_of(up).exists()


def test_engines_that_share_no_kv_have_no_canaries(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with opened(tmp_path_factory.mktemp("alone")) as lab:
        lab.up(lab.spec(topology="2a"))
        try:
            report = check(lab)
        finally:
            stop_stack(lab.home, "pdkit", lab.lines.append)
    assert report.canaries is None
    assert report.as_dict()["canaries"] is None


def test_the_commands_of_the_hint_empty_the_store(up: Lab) -> None:
    running = require_stack(up.home, "pdkit")
    assert emptying_the_store(running).startswith("deploy down --name pdkit, then deploy up")

    def with_own_redis(**redis: str) -> RunningStack:
        spec = running.prepared.plan.spec
        own = spec.model_copy(update={"redis": spec.redis.model_copy(update=redis)})
        plan = replace(running.prepared.plan, spec=own, user_redis=True)
        return replace(running, prepared=replace(running.prepared, plan=plan))

    assert emptying_the_store(with_own_redis()).startswith("deploy down --volumes --name pdkit, ")
    assert "FLUSHDB" in emptying_the_store(with_own_redis(client="lmcache"))
