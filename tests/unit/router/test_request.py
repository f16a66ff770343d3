"""What engines are sent for a body, and when another engine is given up."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from typing import Any

import pytest
from pdkit_router import upstream
from pdkit_router.request import Refused, Request
from pdkit_router.route import Budget, Group, work
from pdkit_router.upstream import Engine, EngineLost, HealthChecker

from tests.unit.router.conftest import engines_up
from tests.unit.router.stand_in import Loop, StandIn, waits


def sent(path: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    """Return what a producer and a consumer read."""
    todo = work(Request("POST", path, (), bytearray(json.dumps(fields).encode())), others=False)
    return json.loads(bytes(todo.prefill or b"null")), json.loads(bytes(todo.body))


@pytest.mark.parametrize(
    ("path", "fields", "prefill"),
    [
        ("/v1/completions", {}, {"max_tokens": 1}),
        ("/v1/completions", {"max_tokens": 9, "n": 3, "min_tokens": 4, "seed": 1},
         {"max_tokens": 1, "n": 1, "min_tokens": 0, "seed": 1}),
        ("/v1/chat/completions", {"max_completion_tokens": 9, "stream": True, "tools": []},
         {"max_tokens": 1, "max_completion_tokens": 1, "stream": False, "tools": []}),
        ("/v1/responses", {"input": "x", "background": True, "store": True, "stream": True},
         {"input": "x", "background": False, "store": False, "stream": False,
          "max_output_tokens": 1}),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 2048}, "system": "x"},
         {"max_tokens": 1, "thinking": None, "system": "x"}),
        ("/v1/messages", {"thinking": {"type": "disabled"}, "max_tokens": 9, "stream": True},
         {"max_tokens": 1, "thinking": {"type": "disabled"}, "stream": False}),
    ],
)  # fmt: skip
def test_a_prefill_asks_for_one_token(
    path: str, fields: dict[str, Any], prefill: dict[str, Any]
) -> None:
    assert sent(path, fields) == (prefill, fields)


def test_other_paths_need_no_prefill() -> None:
    assert sent("/v1/embeddings", {"input": "x"}) == (None, {"input": "x"})


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_clients_do_not_steer_how_kv_moves(name: str) -> None:
    prefill, body = sent("/v1/completions", {name: {"lmcache.tag.x": "y"}, "prompt": "p"})
    assert prefill[name] is None
    assert body[name] is None
    assert body["prompt"] == "p"
    prefill, body = sent("/v1/chat/completions", {"vllm_xargs": {name: "x", "other": 1}})
    assert prefill["vllm_xargs"] is None
    assert body["vllm_xargs"] is None


def test_other_arguments_of_vllm_are_the_clients() -> None:
    assert sent("/v1/completions", {"vllm_xargs": {"a": 1}})[1] == {"vllm_xargs": {"a": 1}}


def test_a_name_that_is_given_twice_counts_as_engines_read_it() -> None:
    raw = b'{"stream": true, "kv_transfer_params": {"a": 1}, "stream": false} \n'
    todo = work(Request("POST", "/v1/completions", (), bytearray(raw)), others=False)
    assert json.loads(bytes(todo.body)) == {"stream": False, "kv_transfer_params": None}


@pytest.mark.parametrize(
    ("path", "name"),
    [("/v1/completions", "prompt"), ("/v1/embeddings", "input"), ("/detokenize", "tokens")],
)
@pytest.mark.parametrize("value", [list(range(100_000)), [list(range(50_000))] * 2])
def test_token_ids_are_the_one_long_list(path: str, name: str, value: Any) -> None:
    assert sent(path, {name: value})[1] == {name: value}
    with pytest.raises(Refused, match="more than 8192 values"):
        sent(path, {"other": value})


class TestTurns:
    @pytest.fixture
    def four(self) -> list[Engine]:
        return engines_up(4)

    def test_nobody_is_left_out(self, four: list[Engine]) -> None:
        for slips in (False, True):
            group = Group(four, slips=slips)
            chosen = [group.choose(()) for _ in range(4)]
            assert set(chosen) == set(four)

    def test_silent_ones_come_last_and_others_never(self, four: list[Engine]) -> None:
        four[0].state = four[1].state = "down"
        four[2].state = "silent"
        group = Group(four)
        assert {group.choose(()) for _ in range(8)} == {four[3]}
        assert group.choose({four[3]}) is four[2]
        assert group.choose(set(four[2:])) is None


class TestSilence:
    """A process that is stopped keeps its connections, and answers nothing."""

    @pytest.mark.parametrize("begun", [False, True])
    def test_a_request_without_an_answer_is_sent_elsewhere(
        self, loop: Loop, monkeypatch: pytest.MonkeyPatch, begun: bool
    ) -> None:
        monkeypatch.setattr(upstream, "_SILENT_S", 0.2)
        monkeypatch.setattr(upstream, "_EVERY_S", 0.02)
        monkeypatch.setattr(upstream, "_ANSWER_S", 0.1)
        stand_in = StandIn(loop, "c")
        loop.run(self._silent(stand_in, begun))
        stand_in.go.set()

    async def _silent(self, stand_in: StandIn, begun: bool) -> None:
        stand_in.does = _begins if begun else waits
        engine = Engine("c", "127.0.0.1", stand_in.port)
        watching = asyncio.create_task(HealthChecker([engine], lambda _: None).run())
        while engine.state != "up":
            await asyncio.sleep(0.01)
        request = engine.request("POST", "/v1/completions", (), b"{}")
        states = set()
        stand_in.frozen = True
        connection = await engine.connections.get()
        exchange = connection.start(request)
        for _ in range(2000):
            states.add(engine.state)
            if engine.state == "down":
                break
            await asyncio.sleep(0.005)
        assert states == {"up", "silent", "down"}
        if begun:
            assert not exchange.ended.done(), "it may go on"
            connection.abandon()
        else:
            with pytest.raises(EngineLost):
                await exchange.started
        watching.cancel()

    def test_a_router_that_was_held_up_blames_no_engine(
        self, loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(upstream, "_SILENT_S", 0.3)
        monkeypatch.setattr(upstream, "_EVERY_S", 0.01)
        monkeypatch.setattr(upstream, "_ANSWER_S", 0.1)
        stand_in = StandIn(loop, "c")
        asyncio.run(self._held_up(stand_in))

    async def _held_up(self, stand_in: StandIn) -> None:
        engine = Engine("c", "127.0.0.1", stand_in.port)
        watching = asyncio.create_task(HealthChecker([engine], lambda _: None).run())
        while engine.state != "up":
            await asyncio.sleep(0.01)
        while not engine.connections.open:
            await asyncio.sleep(0)
        connection = await engine.connections.get()
        stand_in.does = waits
        exchange = connection.start(engine.request("POST", "/v1/completions", (), b"{}"))
        stand_in.frozen = True
        await asyncio.sleep(0.05)  # an answer is awaited when the hold-up begins
        time.sleep(1.0)
        stand_in.frozen = False
        for _ in range(20):
            assert engine.state != "down"
            await asyncio.sleep(0.01)
        assert not exchange.started.done(), "it is still waited for"
        stand_in.go.set()
        watching.cancel()

    def test_a_router_that_is_always_busy_does_not_blame_engines(
        self, loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Large bodies, one after the other, each of which takes longer than an answer may."""
        monkeypatch.setattr(upstream, "_EVERY_S", 0.001)
        monkeypatch.setattr(upstream, "_ANSWER_S", 0.02)
        asyncio.run(self._always_held_up(StandIn(loop, "c")))

    async def _always_held_up(self, stand_in: StandIn) -> None:
        engine = Engine("c", "127.0.0.1", stand_in.port)
        watching = asyncio.create_task(HealthChecker([engine], lambda _: None).run())
        while engine.state != "up":
            await asyncio.sleep(0.01)
        for _ in range(25):
            time.sleep(0.05)
            await asyncio.sleep(0)
            assert engine.state == "up"
        watching.cancel()


async def _begins(engine: StandIn, to: Any) -> None:
    await to.begin()
    await to.piece(b"data: 1\n\n")
    await engine.told()


def test_the_budget_of_further_tries() -> None:
    async def spend() -> None:
        budget = Budget(size=3.0, a_second=0.0, left=3.0)
        assert [budget.take() for _ in range(5)] == [True, True, True, False, False]
        budget.a_second, budget.at = 1.0, asyncio.get_running_loop().time() - 2.5
        assert [budget.take() for _ in range(3)] == [True, True, False]

    asyncio.run(spend())


def test_the_memory_of_a_request_is_in_proportion_to_its_body() -> None:
    """Not its token ids, of which each is an object."""
    body = bytearray(json.dumps({"prompt": list(range(1000, 101_000))}).encode())
    size = len(body)
    tracemalloc.start()
    try:
        todo = work(Request("POST", "/v1/completions", (), body), others=False)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(bytes(todo.body)) < kept < 1.5 * size
    assert not body, "a second copy"
