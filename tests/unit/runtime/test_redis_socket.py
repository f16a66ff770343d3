"""Questions to a Redis that answers other than it should."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from deploy.runtime import bounded_redis
from deploy.runtime.measured_socket import MeasuredSocket
from deploy.runtime.redis_socket import RedisError, RedisSocket
from deploy.runtime.secrets import Secret


@contextmanager
def serving(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[RedisSocket]:
    """Serve connections one after another, each until one of the ends has enough."""

    def run() -> None:
        with suppress(OSError):  # when the test is over
            while True:
                taker, _ = listening.accept()
                with taker, suppress(OSError):
                    serve(taker)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        asker = RedisSocket(str(path), None)
        yield asker
        asker.close()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@contextmanager
def answering(path: Path, *answers: bytes) -> Iterator[RedisSocket]:
    """Answer one question after another, of any connection; one that ends so is closed then."""
    left = iter(answers)

    def serve(taker: socket.socket) -> None:
        while taker.recv(4096):
            answer = next(left)
            taker.sendall(answer)
            if answer.endswith(b"bye"):
                return

    with serving(path, serve) as asker:
        yield asker


def test_an_interrupted_question_leaves_no_answer_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    with answering(tmp_path / "s", b"+first\r\n", b"+second\r\n") as asker:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(MeasuredSocket, "recv", interrupted)
            asker.ask("FIRST")
        assert asker.ask("SECOND") == b"second"


@pytest.mark.parametrize(
    ("answer", "meant"),
    [
        (b"+PONG\r\n", b"PONG"),
        (b":42\r\n", 42),
        (b"$6\r\none\r\n2\r\n", b"one\r\n2"),
        (b"$-1\r\n", None),
        (b"*2\r\n$1\r\n0\r\n*2\r\n$1\r\na\r\n$0\r\n\r\n", [b"0", [b"a", b""]]),
    ],
)
def test_answers_of_redis_are_parsed(tmp_path: Path, answer: bytes, meant: object) -> None:
    with answering(tmp_path / "s", answer) as asker:
        assert asker.ask("ANY") == meant


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"$many\r\n",
        b"?1\r\n",
        b"\r\n",
        b"*1\r\n" * 5000,
        b"$9\r\nbye",
        b"*2\r\n$1\r\n0\r\n-ERR inside\r\n",
    ],
)
def test_invalid_answers_are_errors(tmp_path: Path, answer: bytes) -> None:
    with answering(tmp_path / "s", answer) as asker, pytest.raises(OSError, match="Redis"):
        asker.ask("ANY")


def test_a_refusal_keeps_the_connection(tmp_path: Path) -> None:
    with answering(tmp_path / "s", b"-ERR unknown command\r\n", b"+OK\r\n") as asker:
        with pytest.raises(RedisError, match="unknown command"):
            asker.ask("ANY")
        assert asker.ask("ANY") == b"OK"


def test_after_a_failure_it_connects_again(tmp_path: Path) -> None:
    """What was left unread of the failed answer is not taken for the next one."""
    with answering(tmp_path / "s", b"+a\r\n", b"$50\r\n+wrong\r\nbye", b"+right\r\n") as asker:
        assert asker.ask("ANY") == b"a"
        with pytest.raises(OSError, match="closed"):
            asker.ask("ANY")
        assert asker.ask("ANY") == b"right"


@pytest.mark.parametrize("announced", [b"$99000000000\r\n", b"*2000000000\r\n"])
def test_an_endless_answer_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: bytes
) -> None:
    monkeypatch.setattr(bounded_redis, "ANSWER_BYTES", 100_000)
    answer = announced + b":1\r\n" * 100_000
    with answering(tmp_path / "s", answer) as asker, pytest.raises(OSError, match="more than"):
        asker.ask("ANY")


def test_an_answer_byte_by_byte_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_redis, "ANSWER_S", 0.1)
    over = threading.Event()

    def drip(taker: socket.socket) -> None:
        while not over.wait(0.01):
            taker.sendall(b"+")

    with serving(tmp_path / "s", drip) as asker:
        with pytest.raises(TimeoutError):
            asker.ask("ANY")
        over.set()


def test_the_password_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with answering(path, b"-WRONGPASS invalid\r\n", b"+OK\r\n", b"+PONG\r\n"):
        asker = RedisSocket(str(path), Secret("open sesame"))
        with pytest.raises(RedisError, match="WRONGPASS"):
            asker.ask("PING")
        assert asker.ask("PING") == b"PONG", "logged in anew"
        asker.close()
