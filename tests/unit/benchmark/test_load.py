"""The generator against a real HTTP server whose clock it shares: exact, on any machine."""

from __future__ import annotations

import threading

import pytest

from deploy.benchmark.load import Load, LoadTarget, run_load, run_routes
from deploy.benchmark.workloads import Conversation, Prompt, Turn
from tests.unit.benchmark.streaming import Stage, event, serving, until


def single(index: int, prompt: Prompt = (1, 2, 3), *, start_s: float = 0.0) -> Conversation:
    return Conversation(index, index, (Turn(prompt, 3),), start_s)


def loaded(
    stage: Stage, *conversations: Conversation, concurrency: int | None = 1, timeout_s: float = 20
) -> Load:
    target = LoadTarget(stage.url, "model", timeout_s)
    return run_load(target, conversations, concurrency=concurrency)


class TestMeasures:
    def test_latencies_are_those_of_the_server(self, stage: Stage) -> None:
        (record,) = loaded(stage, single(0)).records
        assert record.error is None
        assert record.ttft_s == 0.25
        assert record.itl_s == [0.05, 0.5]
        assert record.e2e_s == 0.8
        assert (record.input_tokens, record.output_tokens) == (3, 3)

    def test_a_chats_first_event_is_not_a_token(self, stage: Stage) -> None:
        (record,) = loaded(stage, single(0, [{"role": "user", "content": "Hi"}])).records
        assert stage.paths == ["/v1/chat/completions"]
        assert record.ttft_s == 0.25
        assert record.itl_s == [0.05, 0.5]

    def test_several_tokens_in_a_piece_are_one_gap(self, stage: Stage) -> None:
        stage.gaps = (0.25, 0.5)
        tokens = [stage.token(number, chat=False) for number in range(2)]
        usage = {"prompt_tokens": 3, "completion_tokens": 4}
        stage.events = [*tokens, event({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]
        (record,) = loaded(stage, single(0)).records
        assert record.output_tokens == 4
        assert len(record.itl_s) == 1

    def test_duration_spans_all_requests(self, stage: Stage) -> None:
        found = loaded(stage, single(0), single(1))
        assert found.duration_s == pytest.approx(2 * (0.8 + 9.0))
        assert [record.index for record in found.records] == [0, 1]
        assert found.records[1].arrival_s == pytest.approx(9.8)


class TestLoops:
    def test_closed_loop_keeps_as_many_in_flight(self, stage: Stage) -> None:
        pair = threading.Barrier(2, timeout=20)
        stage.before = lambda: pair.wait() and None
        stage.events = stage.closing({"prompt": [1]})  # without a lockstep of two
        loaded(stage, *(single(index) for index in range(6)), concurrency=2)
        assert len(stage.bodies) == 6  # every request met another one

    def test_open_loop_does_not_wait_for_answers(self, stage: Stage) -> None:
        stage.before = lambda: until(lambda: len(stage.bodies) == 5)
        stage.events = stage.closing({"prompt": [1]})
        found = loaded(stage, *(single(n, start_s=n / 100) for n in range(5)), concurrency=None)
        assert len(found.records) == 5

    def test_open_loop_sends_at_the_given_times(self, stage: Stage) -> None:
        stage.events = stage.closing({"prompt": [1]})
        prompts = {0: 1.0, 1: 0.0, 2: 0.5}
        loaded(stage, *(single(n, (n,), start_s=at) for n, at in prompts.items()), concurrency=None)
        assert [body["prompt"] for body in stage.bodies] == [[1], [2], [0]]


class TestRoutes:
    def test_targets_of_a_route_are_asked_in_turn_and_routes_alternate(self, stage: Stage) -> None:
        with serving(Stage(clock=stage.clock)) as other:
            first, second = (LoadTarget(one.url, "model", 20) for one in (stage, other))
            routes = [[first, second], [second]]
            found = run_routes(routes, [single(n, (n,)) for n in range(3)], concurrency=1)
        assert [body["prompt"] for body in stage.bodies] == [[0], [2]]
        assert [body["prompt"] for body in other.bodies] == [[0], [1], [2]]
        assert len(found.records) == 5
        assert found.duration_s == pytest.approx(5 * 9.8)

    def test_as_many_as_asked_for_are_in_flight(self, stage: Stage) -> None:
        pair = threading.Barrier(2, timeout=20)
        stage.before = lambda: pair.wait() and None
        stage.events = stage.closing({"prompt": [1]})
        target = LoadTarget(stage.url, "model", 20)
        found = run_routes([[target]], [single(n) for n in range(6)], concurrency=2)
        assert len(found.records) == len(stage.bodies) == 6


class TestConversations:
    def test_a_turn_contains_all_earlier_turns(self, stage: Stage) -> None:
        talk = Conversation(7, 0, (Turn((1, 2), 3), Turn((3, 4), 3)))
        found = loaded(stage, talk)
        first, second = stage.bodies
        assert first["prompt"] == [1, 2]
        assert second["prompt"] == [1, 2, 1000, 1001, 1002, 3, 4]
        assert [record.conversation for record in found.records] == [7, 7]

    def test_a_conversation_ends_with_the_first_failure(self, stage: Stage) -> None:
        stage.status = 500
        found = loaded(stage, Conversation(0, 0, (Turn((1,), 3),) * 3))
        assert len(stage.bodies) == 1
        assert [record.error for record in found.records] == [
            "HTTP 500: out of order",
            *["not sent: an earlier turn failed"] * 2,
        ]


class TestFailures:
    def test_an_answer_that_ends_early_is_an_error(self, stage: Stage) -> None:
        stage.gaps = (0.1, 0.1)
        (record,) = loaded(stage, single(0)).records
        assert record.error == "the answer ended early: 2 of 3 tokens"

    def test_a_stream_that_breaks_off_is_an_error(self, stage: Stage) -> None:
        stage.events = [stage.token(0, chat=False)]
        (record,) = loaded(stage, single(0)).records
        assert record.error == "the answer ended early: 0 of 3 tokens"

    def test_an_error_event_in_a_stream_is_an_error(self, stage: Stage) -> None:
        said = "request cmpl-0123456789abcdef died"
        stage.events = [event({"error": {"message": said}})]
        (record,) = loaded(stage, single(0)).records
        assert record.error == "request cmpl-ID died"

    def test_answers_that_are_not_completions_are_errors(self, stage: Stage) -> None:
        stage.events = [b"data: <html>\n\n"]
        (record,) = loaded(stage, single(0)).records
        assert record.error == "not a completion (JSONDecodeError)"

    @pytest.mark.parametrize(
        ("said", "why"),
        [
            (b"[" * 100_000, "RecursionError"),
            (b'{"usage": {"prompt_tokens": 1e999, "completion_tokens": 1}}', "OverflowError"),
        ],
        ids=["levels", "infinity"],
    )
    def test_absurd_answers_are_errors(self, stage: Stage, said: bytes, why: str) -> None:
        stage.events = [b"data: " + said + b"\n\n"]
        (record,) = loaded(stage, single(0)).records
        assert record.error == f"not a completion ({why})"

    def test_a_server_that_never_answers_is_an_error(self, stage: Stage) -> None:
        done = threading.Event()
        stage.before = lambda: done.wait(20) and None
        (record,) = loaded(stage, single(0), timeout_s=0.05).records
        done.set()
        assert record.error == "no complete answer within 0.05 s"
        assert record.ttft_s is None

    def test_a_refused_connection_is_an_error(self) -> None:
        target = LoadTarget("http://127.0.0.1:9", "model", 20)
        (record,) = run_load(target, [single(0)], concurrency=1).records
        assert record.error == "no complete answer (ConnectionRefusedError)"


def test_key_is_sent_and_progress_reported(stage: Stage) -> None:
    headers = {"Authorization": "Bearer key"}
    seen: list[int] = []
    target = LoadTarget(stage.url, "model", 20, headers)
    run_load(target, [single(0), single(1)], concurrency=1, on_done=seen.append)
    assert stage.keys == ["Bearer key"] * 2
    assert seen == [1, 2]
