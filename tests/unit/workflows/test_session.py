"""What a check makes of engines' counters, which others move too, and of engines that hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.metrics.connector import SILENT_WORKERS
from deploy.metrics.engine import CacheCounters
from deploy.metrics.page import MetricsPage
from deploy.runtime.engine_api import ApiError, TimedOut
from deploy.verify.equivalence import Completion
from deploy.verify.findings import failures
from deploy.verify.hits import Hits
from deploy.verify.store_path import Sample
from deploy.workflows.check import session as module
from deploy.workflows.check.keys import CheckKeys
from deploy.workflows.check.probes import compare_beginnings
from deploy.workflows.check.routed import check_burst, check_router, check_turns
from deploy.workflows.check.session import ANSWER_TIMEOUT_S, USERS, CheckReading, Session

CHUNK = 256
EARLIER = CheckReading(10, 10, 5000, CacheCounters(5000, 4000, 5000, 0))


class Api:
    """Stands in for an engine's API; its counters are vLLM's, which counts at admission."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # a burst asks from threads
        self.counters = CacheCounters()
        self.finished = 0
        self.asked = 0
        self.fault: ApiError | None = None
        self.loads: Callable[[int], int] = lambda _: 0
        self.busy, self.most_at_once = 0, 0
        self.caches_prefixes = True
        self.options: list[dict[str, Any]] = []

    def metrics(self) -> MetricsPage:
        told = {"enable_prefix_caching": str(self.caches_prefixes)}
        return MetricsPage((Sample("vllm:cache_config_info", told, 1),))

    def complete(self, _model: str, prompt: Sequence[int], **options: Any) -> Completion:
        self.asked += 1
        self.options.append(options)
        if self.fault:
            raise self.fault
        with self.lock:
            self.busy += 1
            self.most_at_once = max(self.busy, self.most_at_once)
        hits = self.loads(len(prompt))
        self.admit(len(prompt), hits)
        with self.lock:
            self.busy -= 1
            self.finished += 1
        return Completion(("token_id:1",), ({"token_id:1": -0.1},), len(prompt), hits)

    def admit(self, tokens: int, hits: int) -> None:
        with self.lock:
            self.counters += CacheCounters(tokens, hits, tokens, 0)

    def cache_counters(self) -> CacheCounters:
        return self.counters

    def finished_requests(self) -> int:
        return self.finished


class Router(Api):
    """Has a producer prefill and a consumer decode, and somebody else meanwhile."""

    def __init__(self, producer: Api, consumer: Api) -> None:
        super().__init__()
        self.ways = (producer, consumer)
        self.meanwhile: Callable[[], None] = lambda: None

    def complete(self, model: str, prompt: Sequence[int], **options: Any) -> Completion:
        self.asked += 1
        if self.fault:
            raise self.fault
        self.meanwhile()
        return [way.complete(model, prompt, **options) for way in self.ways][-1]


class Stack:
    """A session with one producer, one consumer and a router, none of which is a process."""

    def __init__(self, dtype: str = "bfloat16") -> None:
        self.lines: list[str] = []
        self.producer, self.consumer = Api(), Api()
        self.consumer.loads = lambda tokens: min(tokens // CHUNK * CHUNK, tokens - 1)
        self.router = Router(self.producer, self.consumer)
        one = SimpleNamespace
        plan = one(
            chunk_size=CHUNK,
            dtype=dtype,
            producers=[one(name="producer-0")],
            consumers=[one(name="consumer-0")],
            model=one(served_name="tiny"),
            keys_per_chunk=1,
            aggregated=False,
            limits=one(ranks=1),
        )
        running: Any = one(prepared=one(plan=plan), stack=one(front=one(name="router")))
        self.session = Session(running, CheckKeys(), self.lines.append)
        apis: Any = {
            "producer-0": self.producer, "consumer-0": self.consumer, "router": self.router,
        }  # fmt: skip
        self.session._apis = apis
        self.session._tokens = list(range(100))
        self.session.limit = 4096
        self.session.found.stored_keys = None  # there is no Redis to tell

    @property
    def failed(self) -> list[str]:
        return [item for item, _ in failures(self.session.found, (), store_answers=True)]


@pytest.fixture
def stack() -> Stack:
    return Stack()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COUNTER_DEADLINE_S", 0.05)
    monkeypatch.setattr(module, "_POLL_S", 0.002)


@pytest.mark.parametrize(
    ("finished", "admitted", "others"),
    [
        (1, CacheCounters(1000, 800, 1000, 0), 0),  # our own
        (1, CacheCounters(1000, 900, 1000, 0), 0),  # our own, wrongly counted
        (1, CacheCounters(400, 300, 1000, 600), 0),  # our own, some of it held by the engine
        (1, CacheCounters(1000, 800, 0, 0), 0),  # by an engine without a cache of its own
        (1, CacheCounters(990, 800, 990, 0), 0),  # our own, not all of it admitted
        (3, CacheCounters(1600, 800, 1600, 0), 2),  # others, who are done
        (1, CacheCounters(1600, 1312, 1600, 0), 1),  # others, who are not, or never will be
        (1, CacheCounters(1001, 800, 1001, 0), 1),
        (1, CacheCounters(900, 800, 1100, 200), 1),
        (0, CacheCounters(1600, 800, 1600, 0), 1),  # by a router that left the producer out
    ],
)
def test_whose_the_tokens_are(finished: int, admitted: CacheCounters, others: int) -> None:
    """One prompt of 1000 tokens was sent."""
    now = CheckReading(10 + finished, 11, 6000, EARLIER.tokens + admitted)
    counted = now.since(EARLIER)
    assert counted.others == others
    assert (counted.hits, counted.local_hits) == (admitted.external_hits, admitted.local_hits)


def test_a_quiet_stack_is_judged(stack: Stack) -> None:
    check_router(stack.session)
    race = stack.session.found.race
    assert not race.blurred
    assert race.hits.hits == race.hits.eligible == 2 * 4 * CHUNK
    assert stack.failed == []


@pytest.mark.parametrize("hits", [0, 100, 5 * CHUNK], ids=["lost", "partly", "too many"])
def test_wrong_hit_counts_of_an_idle_stack_fail(stack: Stack, hits: int) -> None:
    stack.consumer.loads = lambda _: hits
    check_router(stack.session)
    assert not stack.session.found.race.blurred
    assert stack.failed == ["router, no gap"]
    assert stack.session.found.missed


def test_hits_of_somebody_whose_answer_is_not_done_are_not_ours(stack: Stack) -> None:
    """Ours are lost, and as many of theirs are counted: nothing was proved."""
    stack.consumer.loads = lambda _: 0
    stack.router.meanwhile = lambda: stack.consumer.admit(4 * CHUNK + 40, 4 * CHUNK)
    check_router(stack.session)
    found = stack.session.found
    assert found.race.blurred
    assert found.race.hits.hits == found.race.hits.eligible, "or they did not hide ours"
    assert stack.router.asked == 6, "each prompt was tried again"


@pytest.mark.parametrize("probe", [check_turns, check_burst])
def test_a_conversation_and_a_burst_have_no_hits_of_others(
    stack: Stack, probe: Callable[[Session], None]
) -> None:
    stack.consumer.loads = lambda _: 0
    stack.router.meanwhile = lambda: stack.consumer.admit(2 * CHUNK, 2 * CHUNK)
    probe(stack.session)
    found = stack.session.found.turns or stack.session.found.burst
    assert found is not None
    assert found.blurred
    assert stack.failed == []


@pytest.mark.parametrize("probe", [check_turns, check_burst])
def test_more_than_a_conversation_or_a_burst_has_is_found(
    stack: Stack, probe: Callable[[Session], None]
) -> None:
    stack.consumer.loads = lambda tokens: tokens // CHUNK * CHUNK + CHUNK
    probe(stack.session)
    assert stack.failed in (["several turns"], ["burst"])


def beginnings(session: Session) -> None:
    """Ask a pair for as many beginnings of a prompt as two batches have."""
    pair, cuts = ("producer-0", "consumer-0"), [[1] * 100] * (2 * USERS)
    compare_beginnings(session, pair, cuts, "")


@pytest.mark.parametrize("loses", [False, True])
def test_a_consumer_without_a_prefix_cache_has_to_load_beginnings(
    stack: Stack, loses: bool
) -> None:
    """They are hits like those of the prompt itself, by vLLM's counters as by its answers."""
    stack.consumer.caches_prefixes = False
    if loses:
        stack.consumer.loads = lambda _: 0
    cuts = [[1] * (CHUNK // 2), [1] * (CHUNK + 8), [1] * (2 * CHUNK + 8)]
    found = compare_beginnings(stack.session, ("producer-0", "consumer-0"), cuts, "tag")
    assert found.eligible == 3 * CHUNK
    assert found.hits == stack.consumer.counters.external_hits == (0 if loses else 3 * CHUNK)


@pytest.mark.parametrize("caches", [True, False])
def test_an_answer_to_compare_with_is_never_a_loaded_one(stack: Stack, caches: bool) -> None:
    """A producer without a prefix cache would load what it stored, and both would be wrong."""
    stack.producer.caches_prefixes = caches
    pair = ("producer-0", "consumer-0")
    found = compare_beginnings(stack.session, pair, [[1] * (CHUNK + 8)], "tag")
    assert found == Hits(), "the consumer holds it"
    (asked,), salt = stack.producer.options, stack.session.keys.run
    assert (asked["tag"], asked["salt"]) == (("tag", "") if caches else ("", salt))


@pytest.mark.parametrize("probe", [check_burst, beginnings])
@pytest.mark.parametrize(("dtype", "at_once"), [("bfloat16", 1), ("float32", USERS)])
def test_prompts_are_asked_at_once_where_a_batch_rounds_alike(
    probe: Callable[[Session], None], dtype: str, at_once: int
) -> None:
    stack = Stack(dtype)
    together = threading.Barrier(at_once)

    def compute(_tokens: int) -> int:
        together.wait(60)
        time.sleep(0.01)  # so that others would be there, too
        return 0

    def references_are_done() -> None:
        stack.producer.loads = lambda _: 0
        seen.append(stack.producer.most_at_once)

    seen: list[int] = []
    stack.producer.loads = compute
    stack.router.meanwhile = references_are_done
    probe(stack.session)
    assert (seen[0] if seen else stack.producer.most_at_once) == at_once
    assert stack.session.found.compared == (USERS if seen else 2 * USERS)
    assert stack.failed == []


def test_a_request_that_failed_may_have_been_admitted_or_not(stack: Stack) -> None:
    """Neither makes it somebody else's."""
    before = stack.session.reading()
    stack.consumer.fault = ApiError(500, "HTTP 500")
    with pytest.raises(ApiError):
        stack.session.ask("consumer-0", [1] * 100)
    assert stack.session.counted_since(before).others == 0
    stack.consumer.admit(100, 0)
    assert stack.session.counted_since(before).others == 0
    stack.consumer.admit(1, 0)
    assert stack.session.counted_since(before).others == 1


class TestSilence:
    @pytest.mark.parametrize(("name", "times"), [("consumer-0", 1), ("router", 2)])
    def test_a_service_that_times_out_is_not_asked_again(
        self, stack: Stack, name: str, times: int
    ) -> None:
        api = {"consumer-0": stack.consumer, "router": stack.router}[name]
        api.fault = TimedOut(0, "no answer from http://there (ReadTimeout)")
        for _ in range(5):
            with pytest.raises(ApiError):
                stack.session.ask(name, [1, 2, 3])
        assert api.asked == times
        assert stack.session.is_given_up(name)
        assert len(stack.lines) == times
        assert stack.lines[-1].endswith("(ReadTimeout); it is not asked again")
        assert stack.session.found.failed[name].endswith("it was not asked again")
        stack.session.ask("producer-0", [1, 2, 3])

    @pytest.mark.parametrize("status", [0, 500])
    def test_a_service_that_refuses_at_once_is_asked_again(self, stack: Stack, status: int) -> None:
        """It costs no time, and an engine that was restarted may answer the next time."""
        stack.consumer.fault = ApiError(status, "ConnectError")
        for _ in range(3):
            with pytest.raises(ApiError):
                stack.session.ask("consumer-0", [1, 2, 3])
        stack.consumer.fault = None
        stack.session.ask("consumer-0", [1, 2, 3])
        assert stack.consumer.asked == 4
        assert stack.lines == []

    def test_nothing_is_sent_through_a_router_that_is_given_up(self, stack: Stack) -> None:
        stack.router.fault = TimedOut(0, "no answer")
        for probe in (check_router, check_turns, check_burst):
            probe(stack.session)
        assert stack.router.asked == 2
        found = stack.session.found
        assert found.race.failed == 2
        assert found.turns is not None
        assert found.burst is not None
        assert found.turns.skipped == found.burst.skipped == "the router did not answer in time"
        assert stack.failed == ["router, no gap", "engines"]

    def test_a_hung_consumer_holds_a_check_up_for_less_than_three_minutes(self) -> None:
        """It is met once itself, and twice behind the router; half a minute is for the rest."""
        assert (1 + module._ROUTER_TIMEOUTS) * ANSWER_TIMEOUT_S + 30 < 3 * 60


def test_counts_of_a_worker_that_answered_too_late_are_read_again(stack: Stack) -> None:
    """Without them, all that it counted since its start would be the check's."""
    whole = MetricsPage((Sample(SILENT_WORKERS, {}, 0), Sample("pdkit_store_chunks_total", {}, 9)))
    pages = [whole, whole, MetricsPage((Sample(SILENT_WORKERS, {}, 1),))]
    engine: Any = stack.producer
    engine.metrics = pages.pop
    stack.consumer.metrics = lambda: whole  # type: ignore[attr-defined]
    assert stack.session.pages() == {"producer-0": whole, "consumer-0": whole}
    assert len(pages) == 1
