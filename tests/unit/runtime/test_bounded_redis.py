"""The kit's own questions to a Redis that answers too much, or too slowly."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from bench.redis_server import HOST, RedisServer
from deploy.connector.pdkit_connector.redis_url import parse_redis_url
from deploy.runtime import bounded_redis
from deploy.runtime.url_store import UrlStore, open_url_store
from tests.hostile_redis import Hostile, dripping, endless, hostile

# What a socket holds beside what was read from it.
BUFFERS = 16 << 20
Answer = Callable[[Hostile, socket.socket], None]


def after_log_in(then: Answer) -> Answer:
    """Let everybody in, and answer the first question like that."""

    def answer(server: Hostile, taker: socket.socket) -> None:
        for _ in range(3):  # AUTH was read; then two commands that name the client
            server.send(taker, b"+OK\r\n")
            taker.recv(4096)
        then(server, taker)

    return answer


def asked(question: Callable[[UrlStore], object], answer: Answer) -> Hostile:
    with hostile(answer) as server, open_url_store(parse_redis_url(server.url)) as store:
        question(store)
    return server


@pytest.mark.parametrize("announced", [b"$99000000000\r\n", b"*2000000000\r\n$99000000000\r\n"])
@pytest.mark.parametrize("when", [lambda answer: answer, after_log_in])
def test_endless_answers_are_cut_off(announced: bytes, when: Callable[[Answer], Answer]) -> None:
    server = asked(lambda store: store.trouble(), when(endless(announced)))
    assert 0 < server.sent_bytes < bounded_redis.ANSWER_BYTES + BUFFERS


def test_an_answer_byte_by_byte_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte comes in time, and all of them do not."""
    monkeypatch.setattr(bounded_redis, "ANSWER_S", 0.5)
    told: list[str] = []
    server = asked(lambda store: told.append(store.trouble()), after_log_in(dripping(0.02, 1000)))
    assert told[0]
    assert server.sent_bytes < 1000


def test_limits_are_of_one_answer_not_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store with many keys is told in many pages."""
    monkeypatch.setattr(bounded_redis, "ANSWER_BYTES", 150_000)
    with RedisServer(tmp_path) as server, redis.Redis(HOST, server.port) as client:
        for number in range(3000):
            client.set(f"pdkit:{number:090}", "")
        with open_url_store(parse_redis_url(server.url)) as store:
            assert store.count_keys("pdkit:", within_s=60).count == 3000
            with pytest.raises(redis.RedisError):
                store._client(None).keys("*")


def test_a_wait_that_is_short_stays_short() -> None:
    """redis-py looks whether a connection has data, which must not take the limit of a step."""
    one, other = socket.socketpair()
    with one, other:
        measured = bounded_redis.measured(one)
        measured.settimeout(0)
        with pytest.raises(BlockingIOError):
            measured.recv(1)
        measured.settimeout(bounded_redis.STEP_S)
        other.send(b"x")
        assert measured.recv(1) == b"x"


OTHER_ANSWERS = [
    b":5\r\n", b"+OK\r\n", b"*0\r\n", b"*2\r\n$1\r\nx\r\n*0\r\n", b"*2\r\n:0\r\n:0\r\n", b"$-1\r\n",
    b"$1\r\n\xff\r\n", b"*2\r\n$1\r\n0\r\n*1\r\n:5\r\n", b"*2\r\n$1\r\n0\r\n*1\r\n-ERR x\r\n",
]  # fmt: skip
QUESTIONS: dict[str, Callable[[UrlStore], object]] = {
    "trouble": lambda store: store.trouble(),
    "stats": lambda store: store.stats(),
    "count_marked": lambda store: store.count_marked("@m"),
    "remove_marked": lambda store: store.remove_marked("@m"),
    "settings": lambda store: store.settings(),
    "count_keys": lambda store: store.count_keys("pdkit:", within_s=5),
}


@pytest.mark.parametrize("kind", ["redis", "redis-cluster"])
@pytest.mark.parametrize("answer", OTHER_ANSWERS)
def test_answers_that_no_redis_gives(kind: str, answer: bytes) -> None:
    """Each question says that, or that it knows nothing; none fails in another way."""

    def again_and_again(server: Hostile, taker: socket.socket) -> None:
        server.send(taker, answer)
        while taker.recv(4096):
            server.send(taker, answer)

    for question in QUESTIONS.values():
        with hostile(after_log_in(again_and_again)) as server:
            url = parse_redis_url(server.url.replace("redis", kind, 1))
            with open_url_store(url) as store:
                try:
                    question(store)
                except store.errors as error:
                    assert "password" not in store.said(error)


def test_a_server_that_is_not_redis_is_named_in_words() -> None:
    with open_url_store(parse_redis_url("redis://nobody:1")) as store:
        said = store.said(ValueError("not enough values to unpack (expected 2, got 0)"))
        assert said == "it does not answer like a Redis server"
