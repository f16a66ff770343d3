"""The short form of the fault proof: each single fault again and again, under load."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from bench.faults.history import Asked, verdict
from tests.unit.router import faults
from tests.unit.router.stand_in import Loop, StandIn, waits

# A router takes half a second of processor time to start, the others next to nothing.
TRIALS = {"router killed": 2, "router restarted": 2, "engine drained and restarted": 5}


@pytest.mark.full
@pytest.mark.parametrize("handoff", faults.HANDOFFS)
@pytest.mark.parametrize("fault", faults.FAULTS)
def test_no_answer_is_lost_or_wrong_under_faults(loop: Loop, fault: str, handoff: str) -> None:
    verdicts, bad = faults.run(loop, fault, TRIALS.get(fault, 100), 7, handoff)
    assert bad == []
    assert verdicts["right"] > 2
    assert handoff == "store" or verdicts["handed over"] > 2
    if "engine killed" not in fault and fault not in ("two engines killed", "connections closed"):
        assert verdicts["ended"] == 0, "only a lost engine ends a stream"


class TestTheEngines:
    """What is judged is the router, so they are right at any moment."""

    def test_two_requests_at_one_moment_get_their_own_answers(self, loop: Loop) -> None:
        engine = StandIn(loop, "consumer-0")
        engine.does = faults.by_prompt
        sent = threading.Event()
        clients = [socket.create_connection(("127.0.0.1", engine.port), 60) for _ in range(8)]
        loop.loop.call_soon_threadsafe(sent.wait)
        for client, prompt in zip(clients, faults.PROMPTS, strict=True):
            body = json.dumps({"prompt": prompt}).encode()
            client.sendall(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        sent.set()
        answers = [client.recv(1000).decode() for client in clients]
        for client in clients:
            client.close()
        engine.kill()
        expected = [faults.answer_to(prompt) for prompt in faults.PROMPTS]
        assert [told in answer for told, answer in zip(expected, answers, strict=True)] == [
            True
        ] * 8

    def test_parameters_that_come_twice_or_with_another_prompt_make_a_wrong_answer(
        self, loop: Loop
    ) -> None:
        one, two = StandIn(loop, "producer-0"), StandIn(loop, "consumer-0")
        one.does = two.does = faults.by_prompt

        def asked(engine: StandIn, prompt: str, params: object, name: str = "") -> Any:
            url = f"http://127.0.0.1:{engine.port}/v1/completions"
            body = {"prompt": prompt, "kv_transfer_params": params}
            answer = httpx.post(url, json=body, headers={"x-request-id": name}, trust_env=False)
            return answer.json()

        def text(prompt: str, params: object) -> str:
            return str(asked(two, prompt, params)["choices"][0]["text"])

        made = [
            asked(one, "prompt 1", {"do_remote_decode": True}, name)["kv_transfer_params"]
            for name in ("a", "b")
        ]
        right = faults.answer_to("prompt 1")
        assert text("prompt 1", made[0]) == right
        assert text("prompt 1", made[0]) != right, "read twice"
        assert text("prompt 2", made[1]) != faults.answer_to("prompt 2"), "another prompt"
        one.kill()
        two.kill()

    def test_no_other_server_gets_the_port_of_a_dead_one(self, loop: Loop) -> None:
        engine = StandIn(loop, "consumer-0")
        engine.kill()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", engine.port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", engine.port), 60)
        engine.start()
        socket.create_connection(("127.0.0.1", engine.port), 60).close()
        engine.kill()

    def test_a_client_whose_connection_is_reset_has_left(
        self, loop: Loop, eventually: Callable[..., None]
    ) -> None:
        engine = StandIn(loop, "consumer-0")
        engine.does = waits
        with socket.create_connection(("127.0.0.1", engine.port), 60) as client:
            client.sendall(b"POST / HTTP/1.1\r\n\r\n")
            eventually(lambda: engine.seen)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        eventually(lambda: engine.left == 1)
        engine.kill()


class TestTheVerdict:
    """Each kind is told from the others."""

    def asked(self, **fields: object) -> Asked:
        made = {"prompt": 0, "sent_s": 0.0, "ended_s": 1.0, "status": 200, "text": "abcd",
                "trouble": "", "stream": True, **fields}  # fmt: skip
        return Asked(**made)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({}, "right"),
            ({"text": "abcx"}, "wrong"),
            ({"text": "abcdabcd"}, "wrong"),
            ({"ended_s": 99.0}, "late"),
            ({"status": 503, "text": "", "trouble": "no engine can answer"}, "lost"),
            ({"status": 0, "text": "", "trouble": "ReadError"}, "lost"),
            ({"status": 503, "text": "abcd"}, "lost"),
            ({"text": "ab", "trouble": "what it said is not complete"}, "ended"),
            ({"text": "xb", "trouble": "what it said is not complete"}, "wrong"),
            ({"text": "ab", "trouble": "the stream ended without an end"}, "lost"),
            ({"text": "ab", "trouble": "is not complete", "stream": False}, "lost"),
        ],
    )
    def test_the_verdict_follows_from_the_answer(
        self, fields: dict[str, object], expected: str
    ) -> None:
        assert verdict(self.asked(**fields), {0: "abcd"}, late_s=10) == expected

    def test_a_router_without_retries_is_detected(
        self, loop: Loop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With every engine broken, no retry can help: the proof has to see the losses."""

        def break_all(bed: faults.Bed, _: object) -> None:
            for engine in bed.engines:
                engine.does = faults.stand_in.fails
            bed.await_requests(faults.CLIENTS + 1)
            for engine in bed.engines:
                engine.does = faults.by_prompt

        monkeypatch.setitem(faults.FAULTS, "engine answers 500", break_all)
        verdicts, bad = faults.run(loop, "engine answers 500", 3, seed=1)
        assert verdicts["lost"] == len(bad) > 0
