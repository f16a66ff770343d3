"""Direct hand-off: what a prefill prepared reaches one decode, once, and nothing else does."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pdkit_router.handoff import OUTCOMES, Admission, Ticket
from pdkit_router.handoff.direct import DirectHandoff
from pdkit_router.handoff.store import StoreHandoff
from pdkit_router.upstream import Engine

from tests.unit.router import stand_in
from tests.unit.router.conftest import Router, Start, engines_up
from tests.unit.router.stand_in import Connection, StandIn
from tests.unit.router.test_resume import ASKED, CHAT, WHOLE, Model, text_of

Eventually = Callable[..., None]
COMPLETIONS, RESPONSES, MESSAGES = "/v1/completions", "/v1/responses", "/v1/messages"
PARAMS = "kv_transfer_params"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "m", "prompt": "x", "max_tokens": 5},
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    RESPONSES: {"model": "m", "input": "x", "max_output_tokens": 5},
    MESSAGES: {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
}
PREPARES = {"do_remote_decode": True, "do_remote_prefill": False}
TRACED = {"x-pdkit-trace": "1"}


def prepared(seen: stand_in.Seen) -> dict[str, Any]:
    """Return what a producer prepares: it differs for each request."""
    name = seen.headers["x-request-id"]
    blocks = [[7, 9, 11], []]
    return {
        "do_remote_prefill": True, "remote_request_id": name, "remote_block_ids": blocks,
        "remote_host": "10.0.0.1", "expires": 1234567.000001,
    }  # fmt: skip


async def prepares(_: StandIn, to: Connection) -> None:
    asked = to.asked.json.get(PARAMS)
    params = prepared(to.asked) if asked == PREPARES else None
    await to.whole(200, json.dumps({"id": "p", PARAMS: params}).encode())


@pytest.fixture(scope="module")
def one_router(start_router: Start) -> Router:
    """What is left of hand-offs that nobody decodes stays counted, and is in nobody's way."""
    return start_router(
        "--handoff", "direct", "--handoff-lease-s", "3600", "--max-handoffs", "1000"
    )


@pytest.fixture
def direct(router: Router) -> Router:
    for producer in router.producers:
        producer.does = prepares
    return router


def sent(*engines: StandIn) -> list[Any]:
    """Return the parameters that reached engines, None where there were none."""
    return [seen.json.get(PARAMS) for one in engines for seen in one.seen if seen.method == "POST"]


def ids(*engines: StandIn) -> list[str]:
    return [
        seen.headers["x-request-id"]
        for one in engines
        for seen in one.seen
        if seen.method == "POST"
    ]


def outcomes(router: Router) -> dict[str, int]:
    found = {}
    for line in router.metrics().splitlines():
        for outcome in OUTCOMES:
            if line.startswith("pdkit_router_handoffs_total") and f'"{outcome}"' in line:
                found[outcome] = int(line.rpartition(" ")[2])
    return found


def gauge(router: Router, name: str) -> int:
    """Return the sum of a gauge over the engines."""
    lines = router.metrics().splitlines()
    return sum(
        int(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(f"pdkit_router_engine_{name}{{")
    )


@pytest.fixture
def counted(router: Router) -> Callable[[], dict[str, int]]:
    """Return what was counted since, and the blocks that are held more."""

    def now() -> dict[str, int]:
        return {**outcomes(router), **{k: gauge(router, k) for k in ("handoffs", "abandoned")}}

    before = now()

    def since() -> dict[str, int]:
        return {k: v - before[k] for k, v in now().items() if v != before[k]}

    return since


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_what_the_prefill_prepared_is_sent_to_the_decode(
    direct: Router,
    counted: Callable[[], dict[str, int]],
    eventually: Eventually,
    path: str,
    stream: bool,
) -> None:
    answer = direct.client.post(path, json={**BODIES[path], "stream": stream}, headers=TRACED)
    assert answer.status_code == 200
    ((producer, consumer),) = [
        (p, c) for p in direct.producers for c in direct.consumers if p.seen and c.seen
    ]
    (first,), (second,) = producer.seen, consumer.seen
    assert (first.json[PARAMS], first.json["stream"]) == (PREPARES, False)
    assert second.json[PARAMS] == prepared(first), "as it came"
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    assert (first.json[limit], second.json[limit]) == (1, 5)
    assert "handoff=passed" in answer.headers["x-pdkit-trace"]
    held = {"handoffs": 1} if path == RESPONSES and stream else {}
    assert {**held, **counted()} == {"passed": 1, **held}, "perhaps for a second more"
    eventually(lambda: counted() == {"passed": 1})


@pytest.mark.parametrize("path", BODIES)
def test_parameters_of_clients_reach_no_engine(direct: Router, path: str) -> None:
    theirs = {PARAMS: {"do_remote_prefill": True, "remote_host": "evil"}}
    direct.client.post(path, json={**BODIES[path], **theirs, "vllm_xargs": theirs})
    every = [seen.body for engine in direct.engines for seen in engine.seen]
    (first,) = sent(*direct.producers)
    (second,) = sent(*direct.consumers)
    assert first == PREPARES
    assert second["remote_host"] == "10.0.0.1"
    assert [json.loads(body)["vllm_xargs"] for body in every] == [None, None]


ONE_PROMPT = {
    COMPLETIONS: [{"prompt": "x"}, {"prompt": [1, 2]}, {"prompt": ["x"]}, {"prompt": [[1, 2]]},
                  {"n": 1, "best_of": None, "echo": False, "logprobs": 2}],
    CHAT: [{"logprobs": True, "top_logprobs": 2}, {"tools": [{"type": "function"}]}],
    RESPONSES: [{"tools": [{"type": "function"}]}, {"truncation": "disabled"}],
    MESSAGES: [{"tools": [{"name": "look", "input_schema": {}}]}, {"system": "Be brief."}],
}  # fmt: skip
OTHERS = {
    COMPLETIONS: [{"prompt": ["x", "y"]}, {"prompt": [[1], [2]]}, {"n": 2}, {"best_of": 2},
                  {"echo": True}, {"prompt_logprobs": 0}, {"use_beam_search": True},
                  {"prompt_embeds": "x"}, {"truncate_prompt_tokens": -1}],
    CHAT: [{"n": 2}, {"prompt_logprobs": 1}, {"truncate_prompt_tokens": 4}],
    RESPONSES: [{"tools": [{"type": "mcp"}]}, {"background": True}, {"truncation": "auto"},
                {"request_id": "mine"}, {"tools": "x"}],
}  # fmt: skip


@pytest.mark.parametrize(("path", "more"), [(p, one) for p in OTHERS for one in OTHERS[p]])
def test_requests_that_read_the_blocks_twice_or_of_another_prompt_are_not_handed_over(
    direct: Router, counted: Callable[[], dict[str, int]], path: str, more: dict[str, Any]
) -> None:
    assert direct.client.post(path, json={**BODIES[path], **more}).is_success
    assert (sent(*direct.producers), sent(*direct.consumers)) == ([None], [None])
    assert counted() == {"none": 1}


@pytest.mark.parametrize(("path", "more"), [(p, one) for p in ONE_PROMPT for one in ONE_PROMPT[p]])
def test_all_others_are(direct: Router, path: str, more: dict[str, Any]) -> None:
    assert direct.client.post(path, json={**BODIES[path], **more}).is_success
    assert all(sent(*direct.engines))


def test_parameters_that_nobody_asked_for_are_not_passed_on(direct: Router) -> None:
    async def always(_: StandIn, to: Connection) -> None:
        await to.whole(200, json.dumps({PARAMS: prepared(to.asked)}).encode())

    for producer in direct.producers:
        producer.does = always
    assert direct.client.post(COMPLETIONS, json={**BODIES[COMPLETIONS], "n": 2}).is_success
    assert sent(*direct.consumers) == [None]


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"{}", "none"),
        (b'{"kv_transfer_params": null}', "none"),
        (b'{"kv_transfer_params": {}}', "none"),
        (b'{"text": "kv_transfer_params"}', "none"),
        (b'{"kv_transfer_params": [1]}', "dropped"),
        (b'{"kv_transfer_params": {"a": 1}', "dropped"),
        (b'["kv_transfer_params"]', "dropped"),
        (b'{"text": "%b", "kv_transfer_params": {"a": 1}}' % (b"x" * 2**20), "dropped"),
        (b'{"kv_transfer_params": {"a": %b}}' % (b"[" * 20_000 + b"]" * 20_000), "dropped"),
    ],
)
def test_a_prefill_that_prepared_nothing_readable_is_decoded_without(
    direct: Router,
    counted: Callable[[], dict[str, int]],
    answer: bytes,
    outcome: str,
) -> None:
    async def says(_: StandIn, to: Connection) -> None:
        await to.whole(200, answer)

    for producer in direct.producers:
        producer.does = says
    assert direct.client.post(COMPLETIONS, json=BODIES[COMPLETIONS]).is_success
    assert sent(*direct.consumers) == [None]
    held = {"handoffs": 1, "abandoned": 1} if outcome == "dropped" else {}
    assert counted() == {outcome: 1, **held}


def test_large_parameters_are_passed_on(direct: Router) -> None:
    """A prompt of a million tokens has 62,500 blocks of 16."""
    params = {"remote_block_ids": [list(range(100_000, 162_500))]}

    async def says(_: StandIn, to: Connection) -> None:
        await to.whole(200, json.dumps({PARAMS: params}).encode())

    for producer in direct.producers:
        producer.does = says
    assert direct.client.post(COMPLETIONS, json=BODIES[COMPLETIONS]).is_success
    assert sent(*direct.consumers) == [params]


def test_a_prefill_that_is_refused_is_decoded_without(
    direct: Router, counted: Callable[[], dict[str, int]]
) -> None:
    for producer in direct.producers:
        producer.does = stand_in.refuses
    assert direct.client.post(COMPLETIONS, json=BODIES[COMPLETIONS]).is_success
    assert sent(*direct.consumers) == [None]
    assert counted() == {"none": 1}


@pytest.mark.parametrize("fault", ["fails", "breaks_off", "answers_half"])
@pytest.mark.parametrize("stream", [False, True])
def test_another_consumer_is_not_sent_the_same(
    direct: Router, counted: Callable[[], dict[str, int]], fault: str, stream: bool
) -> None:
    """The first may have read the blocks, which are then another prompt's."""
    for consumer in direct.consumers:
        consumer.does = once(getattr(stand_in, fault), direct)
    answer = direct.client.post(COMPLETIONS, json={**BODIES[COMPLETIONS], "stream": stream})
    assert answer.is_success
    first, second = sent(*direct.consumers)
    assert {bool(first), bool(second)} == {True, False}
    begun = fault == "answers_half"  # so the blocks were read
    assert counted() == ({"passed": 1} if begun else {"lost": 1, "handoffs": 1, "abandoned": 1})


def once(
    fault: Callable[[StandIn, Connection], Any], router: Router
) -> Callable[[StandIn, Connection], Any]:
    """Do it to the first request of all consumers."""

    async def does(engine: StandIn, to: Connection) -> None:
        first = len(sent(*router.consumers)) == 1
        await (fault if first else stand_in.answers)(engine, to)

    return does


def test_a_consumer_that_takes_no_connection_was_not_sent_it(
    start_router: Start, eventually: Eventually
) -> None:
    router = start_router("--handoff", "direct")
    for producer in router.producers:
        producer.does = prepares
    one, other = router.consumers
    one.kill()
    try:
        for _ in range(2):
            assert router.client.post(COMPLETIONS, json=BODIES[COMPLETIONS]).is_success
    finally:
        one.start()
    assert all(sent(other)) and len(sent(other)) == 2
    assert outcomes(router)["passed"] == 2
    eventually(lambda: gauge(router, "handoffs") == 0)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("after", [1, 5])
def test_a_stream_that_goes_on_elsewhere_is_sent_nothing(
    direct: Router, path: str, after: int
) -> None:
    """Neither the rest of it, nor the same request before its first token."""
    model = Model([after])
    for consumer in direct.consumers:
        consumer.does = model
    body = direct.client.post(path, json=ASKED[path]).content
    assert text_of(body) == WHOLE
    (_, first), (_, rest) = model.asked
    assert first.json[PARAMS] and not rest.json.get(PARAMS)


def test_engines_get_ids_of_the_routers_own(direct: Router) -> None:
    """Two clients may give theirs the same id, and an engine a second try."""
    direct.producers[0].does = once_of(stand_in.fails, prepares)
    answers = [
        direct.client.post(
            COMPLETIONS, json=BODIES[COMPLETIONS], headers={"x-request-id": "same", **TRACED}
        )
        for _ in range(4)
    ]
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    found = ids(*direct.engines)
    assert len(found) == 9 == len(set(found))
    assert not any("same" in name for name in found)
    traced = [answer.headers["x-pdkit-trace"].partition("; id=")[2] for answer in answers]
    begins = {name.rpartition("-")[0] for name in found}
    assert {one.partition(";")[0] for one in traced} == begins, "so that they are found in logs"


def once_of(
    first: Callable[..., Any], then: Callable[..., Any]
) -> Callable[[StandIn, Connection], Any]:
    left = iter((first,))

    async def does(engine: StandIn, to: Connection) -> None:
        await next(left, then)(engine, to)

    return does


class TestAdmission:
    """One producer, which may have one hand-off at a time."""

    @pytest.fixture
    def narrow(self, start_router: Start) -> Router:
        options = ("--handoff", "direct", "--max-handoffs", "1", "--handoff-lease-s", "0.3")
        router = start_router(*options, names=("producer-0", "consumer-0"))
        router.producers[0].does = prepares
        return router

    @pytest.fixture
    def asks(self, narrow: Router) -> Iterator[Callable[[], threading.Thread]]:
        threads = []

        def asking() -> threading.Thread:
            body = {**BODIES[COMPLETIONS], "stream": True}
            thread = threading.Thread(target=lambda: narrow.client.post(COMPLETIONS, json=body))
            thread.start()
            threads.append(thread)
            return thread

        yield asking
        for thread in threads:
            thread.join(20)

    def test_the_next_prefill_waits_until_the_blocks_were_read(
        self, narrow: Router, asks: Callable[[], threading.Thread], eventually: Eventually
    ) -> None:
        (producer,), (consumer,) = narrow.producers, narrow.consumers
        consumer.does = stand_in.waits
        for number in range(3):
            asks()
            eventually(lambda number=number: narrow.count("requests") == number + 1)
        eventually(lambda: len(sent(consumer)) == 1)
        assert (len(sent(producer)), gauge(narrow, "handoffs")) == (1, 1)
        consumer.go.set()
        eventually(lambda: len(sent(consumer)) == 3)
        eventually(lambda: outcomes(narrow)["passed"] == 3)
        assert gauge(narrow, "handoffs") == 0

    def test_others_go_on_when_a_client_that_waits_leaves(
        self, narrow: Router, asks: Callable[[], threading.Thread], eventually: Eventually
    ) -> None:
        (producer,), (consumer,) = narrow.producers, narrow.consumers
        consumer.does = stand_in.waits
        asks()
        eventually(lambda: len(sent(consumer)) == 1)
        with client_of(narrow):
            eventually(lambda: narrow.count("requests") == 2)
            asks()
            eventually(lambda: narrow.count("requests") == 3)
        eventually(lambda: narrow.count("cancelled") == 1)
        consumer.go.set()
        eventually(lambda: len(sent(consumer)) == 2)
        assert len(sent(producer)) == 2

    def test_a_request_that_is_not_handed_over_does_not_wait(
        self, narrow: Router, asks: Callable[[], threading.Thread], eventually: Eventually
    ) -> None:
        (producer,), (consumer,) = narrow.producers, narrow.consumers
        consumer.does = waits_for_parameters
        asks()
        eventually(lambda: len(sent(consumer)) == 1)
        assert narrow.client.post(COMPLETIONS, json={**BODIES[COMPLETIONS], "n": 2}).is_success
        assert len(sent(producer)) == 2
        consumer.go.set()

    def test_what_nobody_decodes_counts_until_its_lease_ends(
        self, narrow: Router, eventually: Eventually
    ) -> None:
        narrow.consumers[0].kill()
        try:
            assert narrow.client.post(COMPLETIONS, json=BODIES[COMPLETIONS]).status_code == 503
            assert outcomes(narrow)["dropped"] == 1
        finally:
            narrow.consumers[0].start()
        eventually(lambda: narrow.ready(1, 1))
        assert narrow.client.post(COMPLETIONS, json=BODIES[COMPLETIONS]).is_success
        eventually(lambda: gauge(narrow, "abandoned") == gauge(narrow, "handoffs") == 0)

    def test_an_answer_that_comes_whole_does_not_hold_them_to_its_end(
        self, narrow: Router, eventually: Eventually
    ) -> None:
        (consumer,) = narrow.consumers
        consumer.does = stand_in.waits
        thread = threading.Thread(
            target=lambda: narrow.client.post(COMPLETIONS, json=BODIES[COMPLETIONS])
        )
        thread.start()
        eventually(lambda: len(sent(consumer)) == 1)
        eventually(lambda: gauge(narrow, "handoffs") == 0)
        consumer.go.set()
        thread.join(20)
        assert outcomes(narrow)["passed"] == 1


async def waits_for_parameters(engine: StandIn, to: Connection) -> None:
    await (stand_in.waits if to.asked.json.get(PARAMS) else stand_in.answers)(engine, to)


def client_of(router: Router) -> socket.socket:
    """Return a client's connection that has sent a request."""
    body = json.dumps(BODIES[COMPLETIONS]).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", router.port), 60)
    client.sendall(head.encode() + body)
    return client


class Read:
    """An answer of a producer, as far as a protocol looks at it."""

    status = 200

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.ended = asyncio.get_running_loop().create_future()
        self.ended.set_result(None)

    def pass_to(self, sink: Callable[[bytes], None]) -> None:
        sink(self._body)


class TestTicket:
    """What is counted of a producer's blocks."""

    async def ready(self, counts: Counter[str], producer: Engine, lease_s: float = 9.0) -> Ticket:
        asks = {PARAMS: PREPARES}
        ticket = Ticket(DirectHandoff(), Admission(1, lease_s), counts, asks)
        ticket.begin()
        ticket.ask(producer)
        await ticket.take(Read(b'{"kv_transfer_params": {"a": 1}}'))  # type: ignore[arg-type]
        return ticket

    def test_a_client_that_leaves_between_the_phases_leaves_the_blocks(self) -> None:
        async def leaves() -> None:
            counts, (producer,) = Counter[str](), engines_up(1)
            ticket = await self.ready(counts, producer, lease_s=0.01)
            ticket.settle()
            assert counts == {"handoffs_dropped": 1}
            assert (producer.handoffs, producer.abandoned) == (1, 1)
            async with asyncio.timeout(60):
                while producer.handoffs:
                    await asyncio.sleep(0.01)
            assert producer.abandoned == 0

        asyncio.run(leaves())

    def test_a_producer_that_was_restarted_has_no_blocks_of_before(self) -> None:
        async def restarts() -> None:
            (producer,) = engines_up(1)
            (await self.ready(Counter(), producer, lease_s=0.0)).settle()
            late = await self.ready(Counter(), producer)
            assert (producer.handoffs, producer.abandoned) == (2, 1)
            producer.restarted()
            assert (producer.handoffs, producer.abandoned) == (1, 0)
            await asyncio.sleep(0.01)  # the lease, which is not counted twice
            late.settle()
            assert (producer.handoffs, producer.abandoned) == (0, 0)

        asyncio.run(restarts())

    def test_a_stream_that_begins_at_once_says_nothing_of_the_blocks(self) -> None:
        async def begins() -> None:
            counts, (producer,) = Counter[str](), engines_up(1)
            ticket = await self.ready(counts, producer)
            ticket.offer()
            ticket.send(streams=False)
            ticket.settle(read=False)
            assert (counts, producer.handoffs) == ({"handoffs_passed": 1}, 1)
            async with asyncio.timeout(60):
                while producer.handoffs:
                    await asyncio.sleep(0.01)
            assert producer.abandoned == 0

        asyncio.run(begins())

    def test_parameters_are_sent_once(self) -> None:
        async def sends() -> None:
            (producer,) = engines_up(1)
            ticket = await self.ready(Counter(), producer)
            assert ticket.offer() == {PARAMS: {"a": 1}}
            ticket.lose()  # it took no connection
            assert ticket.offer() == {PARAMS: {"a": 1}}
            ticket.send(streams=True)
            ticket.lose()
            assert ticket.offer() == {}
            ticket.send(streams=True)
            ticket.settle()
            assert (ticket.outcome, producer.abandoned) == ("lost", 1)

        asyncio.run(sends())

    def test_a_client_that_leaves_before_the_consumer_takes_a_connection_leaves_the_blocks(
        self,
    ) -> None:
        async def leaves() -> None:
            (producer,) = engines_up(1)
            ticket = await self.ready(Counter(), producer)
            ticket.offer()
            ticket.settle()
            assert (ticket.outcome, producer.abandoned) == ("dropped", 1)

        asyncio.run(leaves())

    def test_a_store_serves_the_next_consumer_too(self) -> None:
        async def sends() -> None:
            counts, (producer,) = Counter[str](), engines_up(1)
            ticket = Ticket(StoreHandoff(), Admission(1, 9.0), counts, {})
            ticket.begin()
            ticket.ask(producer)
            await ticket.take(Read(b"{}"))  # type: ignore[arg-type]
            for _ in range(2):
                assert ticket.offer() == {}
                ticket.send(streams=True)
                ticket.lose()
            ticket.offer()
            ticket.send(streams=True)
            ticket.settle()
            assert (counts, producer.handoffs) == ({"handoffs_passed": 1}, 0)

        asyncio.run(sends())


def test_hand_offs_through_the_store_are_counted(start_router: Start) -> None:
    router = start_router()
    client = {"x-request-id": "mine"}
    for _ in range(3):
        router.client.post(COMPLETIONS, json=BODIES[COMPLETIONS], headers=client)
    for producer in router.producers:
        producer.does = stand_in.refuses
    router.client.post(COMPLETIONS, json=BODIES[COMPLETIONS], headers=client)
    router.client.post("/v1/embeddings", json={"model": "m", "input": "x"}, headers=client)
    assert outcomes(router) == {"passed": 3, "none": 1, "dropped": 0, "lost": 0}
    assert 'handoffs_total{protocol="store",outcome="passed"} 3' in router.metrics()
    assert set(ids(*router.engines)) == {"mine"}
    assert gauge(router, "handoffs") == 0
