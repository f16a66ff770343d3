"""The kit's own questions to a Redis that answers too much, or too slowly."""

from __future__ import annotations

import errno
import re
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest
import redis

from bench.redis_server import HOST, RedisServer
from deploy.connector.pdkit_connector.redis_url import parse_redis_url
from deploy.runtime import redis_client
from deploy.runtime import store as store_module
from deploy.runtime.measured_socket import MeasuredSocket
from deploy.runtime.secrets import Secret
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
    assert 0 < server.sent_bytes < redis_client.ANSWER_BYTES + BUFFERS


def test_an_answer_byte_by_byte_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte comes in time, and all of them do not."""
    monkeypatch.setattr(redis_client, "ANSWER_S", 0.5)
    told: list[str] = []
    server = asked(lambda store: told.append(store.trouble()), after_log_in(dripping(0.02, 1000)))
    assert told[0]
    assert server.sent_bytes < 1000


def test_limits_are_of_one_answer_not_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store with many keys is told in many pages."""
    monkeypatch.setattr(redis_client, "ANSWER_BYTES", 150_000)
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
        measured = redis_client.measured(one)
        measured.settimeout(0)
        with pytest.raises(BlockingIOError):
            measured.recv(1)
        measured.settimeout(redis_client.STEP_S)
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


@contextmanager
def serving(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[Any]:
    """Serve connections one after another; yield a client that asks."""

    def run() -> None:
        with suppress(OSError):  # when the test is over
            while True:
                taker, _ = listening.accept()
                with taker, suppress(OSError, StopIteration):
                    serve(taker)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        with closing(redis_client.client_at(str(path), None)) as client:
            yield client
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@contextmanager
def answering(path: Path, answers: Iterable[bytes]) -> Iterator[Any]:
    """Answer one question after another, of any connection; one that ends so is closed then."""
    left = iter(answers)

    def serve(taker: socket.socket) -> None:
        while said := taker.recv(1 << 16):
            for _ in range(said.count(b"SETINFO")):  # in which the client names itself
                taker.sendall(b"+OK\r\n")
            for _ in range(len(re.findall(rb"(?m)^\*\d", said)) - said.count(b"SETINFO")):
                answer = next(left)
                taker.sendall(answer)
                if answer.endswith(b"bye"):
                    return

    with serving(path, serve) as client:
        yield client


def test_an_interrupted_question_leaves_no_answer_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(measured: MeasuredSocket, *_: object) -> None:
        # Without a wait, the client looks before its question whether the connection is still good.
        raise KeyboardInterrupt if measured._wanted_s else BlockingIOError(errno.EAGAIN, "")

    with answering(tmp_path / "s", [b"+zero\r\n", b"+first\r\n", b"+second\r\n"]) as client:
        assert client.execute_command("ZERO") == b"zero"
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(MeasuredSocket, "recv", interrupted)
            patched.setattr(MeasuredSocket, "recv_into", interrupted)
            client.execute_command("FIRST")
        assert client.execute_command("SECOND") == b"second"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n", b"$many\r\n", b"?1\r\n", b"\r\n", b"*1\r\n" * 5000,
        b"$9\r\nbye",
    ],
)  # fmt: skip
def test_invalid_answers_are_errors(tmp_path: Path, answer: bytes) -> None:
    with answering(tmp_path / "s", [answer]) as client, pytest.raises(redis_client.errors()):
        client.execute_command("ANY")


def test_a_refusal_keeps_the_connection(tmp_path: Path) -> None:
    with answering(tmp_path / "s", [b"-ERR unknown command\r\n", b"+OK\r\n"]) as client:
        with pytest.raises(redis.ResponseError, match="unknown command"):
            client.execute_command("ANY")
        assert client.execute_command("ANY") == b"OK"


def test_after_a_failure_it_connects_again(tmp_path: Path) -> None:
    """What was left unread of the failed answer is not taken for the next one."""
    with answering(tmp_path / "s", [b"+a\r\n", b"$50\r\n+wrong\r\nbye", b"+right\r\n"]) as client:
        assert client.execute_command("ANY") == b"a"
        with pytest.raises(redis.ConnectionError, match="closed"):
            client.execute_command("ANY")
        assert client.execute_command("ANY") == b"right"


def test_the_password_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with (
        answering(path, [b"-WRONGPASS invalid\r\n", b"+OK\r\n", b"+PONG\r\n"]),
        closing(redis_client.client_at(str(path), Secret("open sesame"))) as client,
    ):
        with pytest.raises(redis.AuthenticationError):
            client.ping()
        assert client.ping() is True, "logged in anew"


class TestAServerThatIsNoRedis:
    """It speaks the protocol, and says what Redis does not."""

    @pytest.mark.parametrize(
        "answer",
        [
            None, b"x", [], [b"0"], [b"x", [b"k"]], [b"9" * 5000, []], [5, 5], [b"0", [5]],
            [b"0", [None]], [b"0", None], [b"0", [], []], b"used_memory:x\r\nmaxmemory:1\r\n",
            b"\xff",
        ],
    )  # fmt: skip
    def test_invalid_answers_are_no_stats(self, tmp_path: Path, answer: object) -> None:
        with answering(tmp_path / "s", repeat(_resp(answer))), _store(tmp_path / "s") as store:
            assert store.ping() is False
            assert store.stats() is None
            assert store.marked_keys("@m") is None
            assert store.unlink([b"k"]) is None

    def test_a_number_is_how_many_were_removed(self, tmp_path: Path) -> None:
        with answering(tmp_path / "s", repeat(b":3\r\n")), _store(tmp_path / "s") as store:
            assert store.unlink([b"k"]) == 3
            assert store.stats() is None
            assert store.marked_keys("@m") is None

    def test_keys_without_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_module, "_MOST_MARKED", 1000)
        numbers = count()
        pages = (_resp([b"1", [b"%d" % number]]) for number in numbers)
        with answering(tmp_path / "s", pages), _store(tmp_path / "s") as store:
            assert store.marked_keys("@m") is None
        assert next(numbers) == 1001

    def test_pages_without_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_module, "_SCAN_S", 0.0)
        with answering(tmp_path / "s", repeat(_resp([b"1", []]))), _store(tmp_path / "s") as store:
            assert store.marked_keys("@m") is None

    def test_a_reading_ends_with_the_first_question_that_has_no_answer(
        self, tmp_path: Path
    ) -> None:
        asked = []

        def serve(taker: socket.socket) -> None:
            while said := taker.recv(1 << 16):
                if b"SETINFO" not in said:
                    asked.append(said)
                    return
                taker.sendall(b"+OK\r\n" * said.count(b"SETINFO"))

        with serving(tmp_path / "s", serve), _store(tmp_path / "s") as store:
            assert store.stats() is None
        assert asked == [b"*1\r\n$4\r\nINFO\r\n"]


def _store(path: Path) -> AbstractContextManager[redis_client.SocketStore]:
    return redis_client.open_store(str(path), None)


def _resp(answer: object) -> bytes:
    """Return an answer as Redis writes it."""
    match answer:
        case None:
            return b"$-1\r\n"
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(answer), answer)
        case list():
            return b"*%d\r\n" % len(answer) + b"".join(map(_resp, answer))
    return b":%d\r\n" % answer
