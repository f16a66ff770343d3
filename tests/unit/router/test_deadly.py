"""A request that ends engines: two of them, in both phases together, and never a third."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from tests.unit.router import stand_in
from tests.unit.router.conftest import Router, Start
from tests.unit.router.stand_in import Connection, StandIn
from tests.unit.router.test_resume import WHOLE, Model, chunks, text_of

COMPLETIONS = "/v1/completions"
DEADLY = {"model": "m", "prompt": "deadly", "max_tokens": 12}
HARMLESS = {**DEADLY, "prompt": "harmless"}
THREE = tuple(f"{role}-{n}" for role in ("producer", "consumer") for n in range(3))
Eventually = Callable[..., None]
Does = Callable[[StandIn, Connection], Awaitable[None]]


def is_deadly(to: Connection) -> bool:
    return bool(to.asked.json.get("prompt") == DEADLY["prompt"])


def by_prompt(deadly: Does) -> Does:
    """Do that to the deadly prompt only."""

    async def does(engine: StandIn, to: Connection) -> None:
        await (deadly if is_deadly(to) else stand_in.answers)(engine, to)

    return does


def first_only(deadly: Does) -> Does:
    """Do that to the deadly prompt once; whoever gets it next answers."""
    times: list[str] = []

    async def does(engine: StandIn, to: Connection) -> None:
        if is_deadly(to):
            times.append(engine.name)
        await (deadly if is_deadly(to) and len(times) == 1 else stand_in.answers)(engine, to)

    return does


def served(*engines: StandIn) -> list[str]:
    """Return who got the deadly prompt, each as often as it did."""
    return [
        engine.name
        for engine in engines
        for seen in engine.seen
        if seen.method == "POST" and seen.json.get("prompt") == DEADLY["prompt"]
    ]


def warm(router: Router) -> None:
    """Have a kept connection to each engine: an end looks there like that of an idle one."""
    for _ in range(9):
        assert router.client.post(COMPLETIONS, json=HARMLESS).status_code == 200


def names_both(message: str, ended: list[str]) -> bool:
    return any(f"{one} and {other} crashed" in message for one, other in (ended, ended[::-1]))


def stopped(answer: httpx.Response, ended: list[str]) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (500, 500, "server_error")
    assert names_both(error["message"], ended), error
    assert "retry-after" not in answer.headers
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("warmed", [True, False])
@pytest.mark.parametrize("does", [stand_in.dies, stand_in.fails_for_good])
@pytest.mark.parametrize("role", ["producers", "consumers"])
def test_a_request_that_ends_two_engines_is_tried_on_no_third(
    start_router: Start, role: str, does: Does, warmed: bool
) -> None:
    router = start_router(names=THREE)
    if warmed:
        warm(router)
    for engine in getattr(router, role):
        engine.does = by_prompt(does)
    answer = router.client.post(COMPLETIONS, json=DEADLY)
    ended = served(*getattr(router, role))
    assert len(set(ended)) == len(ended) == 2
    stopped(answer, ended)
    if role == "producers":
        assert served(*router.consumers) == [], "it would end them, too"
    assert router.count("errors") == 1
    assert router.client.post(COMPLETIONS, json=HARMLESS).status_code == 200


@pytest.mark.parametrize("does", [stand_in.fails, stand_in.breaks_off])
def test_engines_that_are_silent_after_an_error_have_not_crashed(
    start_router: Start, does: Does
) -> None:
    """A busy one answers `/health` late; a client may well try such a request again."""
    router = start_router(names=THREE)
    warm(router)

    async def fails_and_is_busy(engine: StandIn, to: Connection) -> None:
        engine.frozen = True
        await does(engine, to)

    for consumer in router.consumers:
        consumer.does = by_prompt(fails_and_is_busy)
    answer = router.client.post(COMPLETIONS, json=DEADLY)
    assert answer.status_code >= 500
    assert "crashed" not in answer.text
    assert "x-should-retry" not in answer.headers


def test_ends_in_both_phases_count_together(start_router: Start) -> None:
    router = start_router(names=THREE)
    warm(router)
    dead: list[str] = []

    async def dies(engine: StandIn, to: Connection) -> None:
        dead.append(engine.name)
        await stand_in.dies(engine, to)

    first = first_only(dies)
    for producer in router.producers:
        producer.does = first
    for consumer in router.consumers:
        consumer.does = by_prompt(dies)
    answer = router.client.post(COMPLETIONS, json=DEADLY)
    assert len(served(*router.producers)) == 2, "another producer has computed it"
    assert served(*router.consumers) == dead[1:]
    stopped(answer, dead)


@pytest.mark.parametrize("role", ["producers", "consumers"])
@pytest.mark.parametrize("does", [stand_in.dies, stand_in.fails_for_good])
def test_a_request_that_ends_one_engine_is_answered(
    start_router: Start, role: str, does: Does
) -> None:
    router = start_router(names=THREE)
    warm(router)
    first = first_only(does)
    for engine in getattr(router, role):
        engine.does = first
    assert router.client.post(COMPLETIONS, json=DEADLY).status_code == 200
    assert len(served(*getattr(router, role))) == 2


def test_engines_that_refuse_connections_never_had_the_request(start_router: Start) -> None:
    router = start_router(names=(*THREE, "consumer-3"))
    warm(router)
    first = first_only(stand_in.dies)
    for consumer in router.consumers:
        consumer.does = first
    for consumer in router.consumers[:2]:
        consumer.kill()
    assert router.client.post(COMPLETIONS, json=DEADLY).status_code == 200
    assert len(served(*router.consumers)) == 2


def test_engines_that_answer_503_never_had_the_request(start_router: Start) -> None:
    router = start_router(names=THREE)

    async def is_not_ready(engine: StandIn, to: Connection) -> None:
        engine.healthy = False
        await to.whole(503, b'{"error": {"message": "not ready"}}')

    for consumer in router.consumers:
        consumer.does = is_not_ready
    answer = router.client.post(COMPLETIONS, json=DEADLY)
    assert (answer.status_code, answer.headers.get("retry-after")) == (503, "1")
    assert "x-should-retry" not in answer.headers


def test_an_engine_that_came_back_does_not_get_the_request_again(
    start_router: Start, eventually: Eventually
) -> None:
    """As after an idle connection's end, which looks alike."""
    router = start_router(names=("producer-0", "consumer-0", "consumer-1"))
    warm(router)
    ended: list[StandIn] = []

    async def sees(consumers: int) -> None:
        while not await asyncio.to_thread(router.ready, 1, consumers):
            await asyncio.sleep(0.02)

    async def dies_when_the_other_is_back(engine: StandIn, to: Connection) -> None:
        ended.append(engine)
        if len(ended) == 2:
            await sees(1)
            await ended[0]._start()
            await sees(2)
        await engine._kill()

    for consumer in router.consumers:
        consumer.does = by_prompt(dies_when_the_other_is_back)
    answer = router.client.post(COMPLETIONS, json=DEADLY)
    assert {engine.name for engine in ended} == {"consumer-0", "consumer-1"}
    assert len(ended) == 2
    stopped(answer, [engine.name for engine in ended])


class TestStreams:
    def streamed(self, router: Router, model: Model) -> httpx.Response:
        """Have each engine that streams end in it, after as many events as the model says."""

        async def does(engine: StandIn, to: Connection) -> None:
            if to.asked.json.get("stream"):
                engine.healthy = False
            await model(engine, to)

        for engine in router.consumers:
            engine.does = does
        body = {"model": "m", "prompt": [10, 11, 12], "max_tokens": 12, "stream": True}
        return router.client.post(COMPLETIONS, json=body)

    @pytest.mark.parametrize("code", [0, 500])
    def test_a_stream_that_ended_two_engines_ends_with_that(
        self, start_router: Start, code: int
    ) -> None:
        router = start_router(names=THREE)
        model = Model(losses=(6, 6, 6), code=code)
        *came, last = chunks(self.streamed(router, model).content)
        ended = [name for name, _ in model.asked]
        assert len(set(ended)) == len(ended) == 2
        assert len(came) > 6, "it was continued once"
        assert last["error"]["code"] == 500
        assert names_both(last["error"]["message"], ended)
        assert "not complete" in last["error"]["message"]
        assert router.count("errors") == 1

    def test_a_stream_that_ended_two_engines_before_its_first_event(
        self, start_router: Start
    ) -> None:
        router = start_router(names=THREE)
        model = Model(losses=(-1, -1, -1))
        answer = self.streamed(router, model)
        stopped(answer, [name for name, _ in model.asked])

    def test_a_stream_after_a_producer_that_ended(self, start_router: Start) -> None:
        router = start_router(names=THREE)
        dead: list[str] = []

        async def dies_once(engine: StandIn, to: Connection) -> None:
            if dead:
                await stand_in.answers(engine, to)
            else:
                dead.append(engine.name)
                await engine._kill()

        for producer in router.producers:
            producer.does = dies_once
        model = Model(losses=(6,))
        error = chunks(self.streamed(router, model).content)[-1]["error"]
        assert error["code"] == 500
        assert names_both(error["message"], [*dead, *(name for name, _ in model.asked)])
        assert len(model.asked) == 1

    def test_a_stream_that_ended_one_engine_continues(self, start_router: Start) -> None:
        router = start_router(names=THREE)
        model = Model(losses=(6,))
        assert text_of(self.streamed(router, model).content) == WHOLE
        assert len(model.asked) == 2
