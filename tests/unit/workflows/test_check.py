"""`check` on a running stack: while all is well, and with one thing after another broken."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from deploy.errors import StateError
from deploy.metrics.connector import KV
from deploy.metrics.store_stats import StoreStats
from deploy.output.check_view import check_view
from deploy.runtime.engine_api import EngineApi, TimedOut, bearer
from deploy.verify.equivalence import LOGPROB_TOLERANCE, Completion
from deploy.verify.report import CheckReport
from deploy.workflows.check import check_stack, session
from deploy.workflows.down import stop_stack
from deploy.workflows.running import require_stack
from deploy.workflows.status import stack_status
from tests.unit.workflows.conftest import SMALL, Lab, opened


def check(lab: Lab) -> CheckReport:
    return check_stack(lab.home, "pdkit", lab.lines.append)


def causes(report: CheckReport) -> list[str]:
    return [cause.code for cause in report.diagnosis]


def test_a_healthy_stack_passes(served: Lab) -> None:
    report = check(served)
    assert report.failures == []
    assert report.passed
    assert causes(report) == []
    assert [(pair.producer, pair.consumer) for pair in report.pairs] == [
        ("producer-0", "consumer-0"), ("producer-0", "consumer-1"),
    ]  # fmt: skip
    assert all(pair.hits.eligible_rate == 1.0 for pair in report.pairs)
    # 4⅓ chunks of 64, and two whole ones of which the last token is computed
    assert report.pairs[0].hits.eligible == 4 * 64 + (2 * 64 - 1)
    assert report.pairs[0].hits.queries == 4 * 64 + 21 + 2 * 64
    assert report.race.hits.hits == report.race.hits.eligible > 0
    assert report.equivalence.compared >= 6
    assert report.equivalence.mismatched == 0
    assert report.store.keys_after > report.store.keys_before
    assert [engine.restarts for engine in report.engines] == [0, 0, 0]


def test_a_repeated_check_passes_and_status_counts_its_hits(served: Lab) -> None:
    assert check(served).passed, "its prompts are new each time"
    status = stack_status(served.home, "pdkit")
    assert 0 < status.external_hit_rate < 1
    assert isinstance(status.store, StoreStats)


@pytest.mark.parametrize(
    ("fault", "cause", "failure"),
    [
        ("producer:stores-nothing", "not_stored", "eligible tokens were loaded"),
        ("consumer:flushes", "keys_lost", "eligible tokens were loaded"),
        ("consumer:wrong-kv", "kv_differs", "answers differ"),
        ("producer:wrong-own-kv", "self_differs", "producer-0 contradicts itself"),
        ("consumer:fails", "request_failed", "consumer-0 did not answer: HTTP 500"),
        ("producer:fails", "request_failed", "producer-0 did not answer: HTTP 500"),
        ("producer:refuses-prefill", "router_bypasses_producers", "reached no producer"),
    ],
)
def test_a_broken_stack_fails_and_the_cause_is_named(
    served: Lab,
    with_faults: Callable[..., None],
    fault: str,
    cause: str,
    failure: str,
) -> None:
    with_faults(fault)
    report = check(served)
    assert not report.passed
    assert causes(report)[0] == cause
    assert any(failure in sentence for sentence in report.failures)


@pytest.fixture(scope="class")  # ended before another lab is used: each patches this process
def without(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab with a stack whose engines have no prefix cache of their own."""
    with opened(tmp_path_factory.mktemp("without")) as lab:
        engine = {**SMALL["engine"], "args": ["--no-enable-prefix-caching"]}
        lab.up(lab.spec(engine=engine))
        yield lab
        stop_stack(lab.home, "pdkit", lab.lines.append)


class TestWithoutPrefixCaching:
    """vLLM then counts no local queries, and loads each beginning of a prompt that it served."""

    def test_a_healthy_stack_passes(self, without: Lab) -> None:
        without.faults.unlink(missing_ok=True)
        report = check(without)
        assert report.failures == []
        (pair,) = report.pairs
        beginnings = sum(4 * [64 * begun for begun in range(4)]) + 64 + 2 * 64 + 3 * 64 + 4 * 64
        assert pair.hits.hits == pair.hits.eligible > 4 * 64 + 127 + beginnings // 2
        assert report.counted.hits == pair.hits.hits, "vLLM counts what its answers say"
        assert (report.counted.local_hits, report.counted.others) == (0, 0)
        assert report.counted.queries == pair.hits.queries
        caches = [one.cache for one in stack_status(without.home, "pdkit").services if one.cache]
        assert [(one.local_queries, one.local_hits) for one in caches] == [(0, 0)] * 2
        assert all(one.prompt_tokens > 0 and one.local_rate is None for one in caches)

    @pytest.mark.parametrize(
        ("fault", "cause"),
        [
            ("producer:stores-nothing", "not_stored"),
            ("consumer:flushes", "keys_lost"),
            ("consumer:wrong-kv", "kv_differs"),
        ],
    )
    def test_a_broken_one_fails(self, without: Lab, fault: str, cause: str) -> None:
        without.faults.write_text(fault)
        report = check(without)
        assert not report.passed
        assert causes(report)[0] == cause


def test_noise_is_measured_and_judged_by(served: Lab, with_faults: Callable[..., None]) -> None:
    """Engines that compute a prompt's rest a little otherwise, wherever its KV came from."""
    with_faults("producer:noisy", "consumer:noisy")
    report = check(served)
    assert report.passed, report.failures
    same = report.equivalence
    assert LOGPROB_TOLERANCE < same.max_logprob_diff < same.tolerance
    assert 0 < (same.noise_floor or 0) < same.max_logprob_diff
    with_faults("producer:noisy", "consumer:noisy", "consumer:wrong-kv")
    assert causes(check(served)) == ["kv_differs"]


def test_later_parts_are_skipped_if_nothing_is_loaded(
    served: Lab, with_faults: Callable[..., None]
) -> None:
    """Each prompt's KV would be waited for, and the cause is known."""
    with_faults("producer:stores-nothing")
    report = check(served)
    assert report.turns.skipped == report.burst.skipped == "no pair loads anything"
    assert "Left out: burst, because no pair loads anything" in check_view(report)


def test_an_answer_that_was_loaded_is_not_a_reference(
    served: Lab, with_faults: Callable[..., None]
) -> None:
    """Both sides of the comparison would come from the same bytes, right or wrong."""
    with_faults("producer:loads")
    report = check(served)
    assert not report.passed
    assert any("producer-0 loaded from the store" in sentence for sentence in report.failures)


def test_requests_of_others_are_noticed(served: Lab) -> None:
    """Pairs are judged all the same; what only counters tell is not."""
    consumer = find_stack_url(served, "consumer-0")
    with disturbed(
        served, lambda client: client.post(consumer, json={"prompt": [1, 2, 3], "max_tokens": 1})
    ):
        report = check(served)
    assert report.passed, report.failures
    assert report.others > 0
    assert all(pair.complete for pair in report.pairs)
    assert report.race.blurred
    assert "Not judged, because others sent requests" in check_view(report)


def test_clients_that_leave_do_not_disturb_the_counters(served: Lab) -> None:
    """Their hits are counted, and that they finished is not."""
    urls = [find_stack_url(served, name) for name in ("producer-0", "consumer-1")]
    dice = random.Random(0)

    def leave(client: httpx.Client) -> None:
        prompt = dice.choices(range(200), k=150)
        for url in urls:
            client.post(url, json={"prompt": prompt, "max_tokens": 1, "user": "gone"})

    with disturbed(served, leave):
        report = check(served)
    told = sum(pair.hits.hits for pair in report.pairs)
    assert report.counted.hits > told, "or the check shows nothing"
    assert report.passed, report.failures
    assert report.counted.others > 0
    assert report.race.blurred


@pytest.mark.parametrize(
    ("fault", "silent"),
    [
        ("consumer:hangs", {"consumer-0": 1, "consumer-1": 1, "router": 2}),
        ("producer:hangs", {"producer-0": 1}),
    ],
)
def test_an_engine_that_hangs_is_not_waited_for_again_and_again(
    served: Lab,
    with_faults: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    silent: dict[str, int],
) -> None:
    waited: list[str] = []
    complete = EngineApi.complete

    def counting(self: EngineApi, *args: Any, **options: Any) -> Completion:
        try:
            return complete(self, *args, **options)
        except TimedOut as exc:
            waited.append(str(exc))
            raise

    monkeypatch.setattr(EngineApi, "complete", counting)
    # Time enough for engines that do answer.
    monkeypatch.setattr(session, "ANSWER_TIMEOUT_S", 4.0)
    served.lines.clear()
    with_faults(fault)
    report = check(served)
    assert not report.passed
    assert causes(report)[0] == "request_failed"
    for name, times in silent.items():
        url = find_stack_url(served, name).removesuffix(COMPLETIONS)
        told = [line for line in served.lines if line.startswith(f"{name}: no answer from {url} ")]
        assert len(told) == times
        assert told[-1].endswith("it is not asked again")
        assert any(
            f"{name} did not answer" in sentence and "it was not asked again" in sentence
            for sentence in report.failures
        )
    assert len(waited) == sum(silent.values())
    if "router" in silent:
        assert report.turns.skipped == report.burst.skipped == "the router did not answer in time"


COMPLETIONS = "/v1/completions"


def find_stack_url(lab: Lab, service: str) -> str:
    return require_stack(lab.home, "pdkit").stack.service(service).url + COMPLETIONS


@contextlib.contextmanager
def disturbed(lab: Lab, ask: Callable[[httpx.Client], object]) -> Iterator[None]:
    """Have somebody else ask after each request of the check, before it reads the counters.

    A thread that asks without a pause may get no turn between two readings.
    """
    running = require_stack(lab.home, "pdkit")
    headers = bearer(running.key(running.stack.service("producer-0")))
    complete = EngineApi.complete

    def followed(api: EngineApi, *args: Any, **options: Any) -> Completion:
        answer = complete(api, *args, **options)
        ask(client)
        return answer

    with (
        httpx.Client(headers=headers, trust_env=False, timeout=30) as client,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setattr(EngineApi, "complete", followed)
        yield


def test_a_check_without_a_stack_is_an_error(lab: Lab) -> None:
    with pytest.raises(StateError, match="no stack 'pdkit'"):
        check(lab)


@pytest.mark.parametrize("planned", ["0.1", None])
def test_a_check_says_what_all_engines_run_otherwise_than_planned(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, planned: str | None
) -> None:
    unplanned = {"vllm": planned} if planned else {}
    kv = json.dumps({"rows": {"vllm": "0.2", "dtype": "x"}, "unplanned": unplanned})
    monkeypatch.setenv("STAND_IN_REPORT", f"{KV}{{facts={json.dumps(kv)}}} 1")
    lab.up(lab.spec())
    report = check(lab)
    assert report.passed, report.failures
    said = [line for line in lab.lines if "do not run what was planned" in line]
    assert len(said) == (1 if planned else 0)
    assert all("consumer-0 0.2 (0.1 was planned)" in line for line in said)


class TestLayerByLayer:
    """A chunk is a key a layer there, which has tags only where fix B16c corrects LMCache."""

    FIXED = 'pdkit_fix_info{fix="B16c",state="applied"} 1'

    @pytest.fixture
    def up(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Lab]]:
        def start(told: str) -> Lab:
            monkeypatch.setenv("STAND_IN_REPORT", told)
            lab.up(lab.spec(layerwise=True))
            return lab

        yield start
        stop_stack(lab.home, "pdkit", lab.lines.append)

    def test_a_layerwise_check_removes_its_keys(self, up: Callable[[str], Lab]) -> None:
        lab = up(self.FIXED)
        for log in lab.home.stack("pdkit").logs_dir.glob("*.log"):
            log.write_bytes(b"")  # as rotation leaves it
        lab.ask()
        report = check(lab)
        assert report.passed, report.failures
        assert report.store.keys_before == 3 * 4, "a client's chunks, a key a layer"
        assert report.store.keys_removed == (report.store.keys_after or 0) - 3 * 4 > 0
        canary = 2 * 4
        assert stack_status(lab.home, "pdkit").store.keys == 3 * 4 + canary
        assert not any(line.startswith("warning") for line in lab.lines)

    @pytest.mark.parametrize("state", ["disabled", "not applicable", "failed"])
    def test_a_layerwise_check_without_the_fix_warns_that_it_has_no_tags(
        self, up: Callable[[str], Lab], state: str
    ) -> None:
        lab = up(self.FIXED.replace("applied", state))
        report = check(lab)
        assert report.passed, report.failures
        assert report.store.keys_removed is None
        assert any("warning: not every engine has fix B16c applied" in line for line in lab.lines)

    def test_a_fix_that_only_says_that_it_took_is_noticed(self, up: Callable[[str], Lab]) -> None:
        lab = up(self.FIXED.replace("applied", "not needed"))
        report = check(lab)
        assert not report.passed
        assert causes(report) == ["not_stored"]

    def test_layers_that_are_missing_are_noticed(self, up: Callable[[str], Lab]) -> None:
        lab = up(self.FIXED)
        lab.faults.write_text("producer:stores-one-layer")
        report = check(lab)
        assert not report.passed
        assert causes(report) == ["not_stored"]
        assert "only 1 of 6 chunks reached Redis" in report.diagnosis[0].message
