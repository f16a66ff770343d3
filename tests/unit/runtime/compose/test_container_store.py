"""Redis in a container, asked by commands inside it."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from deploy.metrics.store_stats import StoreStats
from deploy.runtime.compose import api
from deploy.runtime.compose.api import DockerRefused
from deploy.runtime.compose.container_store import ContainerStore, open_container_store
from deploy.runtime.compose.containers import FoundContainer
from deploy.runtime.store import Refusal
from tests.unit.runtime.compose.conftest import frame

# As redis-cli prints them: the lines of INFO end with carriage returns.
ANSWER = "\r\n".join(
    (
        "OK", "# Server", "redis_version:6.2.14", "run_id:abc123", "", "# Memory",
        "used_memory:1048576", "maxmemory:1073741824", "# Stats", "evicted_keys:7", "",
        "# Commandstats",
        "cmdstat_get:calls=30,usec=1,usec_per_call=0.10,rejected_calls=0,failed_calls=0",
        "cmdstat_flushall:calls=2,usec=9,usec_per_call=4.50",
        "cmdstat_config|get:calls=1,usec=9",
        "", "42",
    )
) + "\n"  # fmt: skip

Make = Callable[..., ContainerStore]


@pytest.fixture
def store() -> Make:
    def make(answer: str | BaseException) -> ContainerStore:
        def say(_: Any) -> bytes:
            if isinstance(answer, BaseException):
                raise answer
            return answer.encode()

        return ContainerStore(say)

    return make


def test_a_pong_is_an_answer(store: Make) -> None:
    assert store("OK\nPONG\n").ping()


@pytest.mark.parametrize(
    "answer",
    [
        "NOAUTH Authentication required.\n",
        "WRONGPASS invalid username-password pair\n\nNOAUTH Authentication required.\n",
        "",
        "OK\n",
        "OK\nLOADING Redis is loading the dataset in memory\n",
    ],
)
def test_no_pong_is_not_an_answer(store: Make, answer: str) -> None:
    assert not store(answer).ping()


@pytest.mark.parametrize(
    "error", [DockerRefused("POST /x", 409, "it does not run"), TimeoutError()]
)
def test_an_engine_that_fails_is_not_an_answer(store: Make, error: BaseException) -> None:
    assert not store(error).ping()
    assert store(error).stats() is None


def test_stats_are_read(store: Make) -> None:
    assert store(ANSWER).stats() == StoreStats(
        42, 1048576, 1073741824, 7, 2, "abc123", version="6.2.14"
    )


def test_traffic_is_read(store: Make) -> None:
    told = "total_commands_processed:9\r\ntotal_net_input_bytes:20\r\nconnected_clients:3\r\n"
    stats = store(ANSWER.replace("# Stats\r\n", f"# Stats\r\n{told}")).stats()
    assert stats is not None
    assert (stats.commands, stats.received_bytes, stats.clients) == (9, 20, 3)
    assert stats.sent_bytes is None, "what is not told is not zero"


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "NOAUTH Authentication required.\n",
        ANSWER.replace("\r\n42\n", ""),
        ANSWER.replace("maxmemory:", "maxmemory:x"),
        ANSWER.replace("evicted_keys:7", "evicted_keys:many"),
    ],
)
def test_an_incomplete_answer_gives_no_stats(store: Make, answer: str) -> None:
    assert store(answer).stats() is None


@pytest.mark.parametrize(
    "answer",
    ["OK\nERR unknown command\n", "OK\n1\n", "NOAUTH\n", ""],
)
def test_marked_keys_that_are_not_all_told_are_unknown(store: Make, answer: str) -> None:
    assert store(answer).marked_keys("@pdkit%check-1") is None


def test_marked_keys_are_read(store: Make) -> None:
    assert store("OK\n2\na@m\nb@m\n").marked_keys("@m") == {b"a@m", b"b@m"}


@pytest.mark.parametrize(
    ("answer", "count"),
    [("OK\n1\n", 1), ("OK\nERR unknown command\n", None), ("NOAUTH\n", None), ("", None)],
)
def test_removed_keys_are_counted(store: Make, answer: str, count: int | None) -> None:
    assert store(answer).unlink([b"a@m"]) == count


def test_a_redis_that_does_not_run(store: Make) -> None:
    with open_container_store(None) as none:
        assert not none.ping()
        assert none.stats() is None


def test_the_password_is_in_no_argument(tmp_path: Path) -> None:
    """By a real shell, with a program in the place of redis-cli that repeats all it is told."""
    done: list[Sequence[str]] = []
    ContainerStore(lambda command: done.append(command) or b"").stats()
    ((shell, option, script, *asked),) = done
    assert (shell, option) == ("sh", "-c")
    cli = tmp_path / "redis-cli"
    cli.write_text('#!/bin/sh\necho "arguments: $*"\necho "variables: $REDISCLI_AUTH"\ncat\n')
    cli.chmod(0o755)
    (tmp_path / "redis_password").write_text("hunter2\n")
    done = subprocess.run(
        (shell, option, script.replace("/run/secrets", str(tmp_path)), *asked),
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "arguments: ", "variables: ", "AUTH hunter2", "INFO", "INFO commandstats", "DBSIZE",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "said", "denied"),
    [
        ("NOAUTH Authentication required.\n", "NOAUTH Authentication required.", True),
        ("WRONGPASS invalid\n\nNOAUTH Authentication required.\n", "WRONGPASS invalid", True),
        ("OK\nMISCONF it cannot save\n", "MISCONF it cannot save", False),
    ],
)
def test_refusals_are_read(store: Make, answer: str, said: str, denied: bool) -> None:
    assert store(answer).refusal() == Refusal(said, denied)


@pytest.mark.parametrize("answer", ["OK\nPONG\n", ""])
def test_a_redis_that_serves_or_is_silent_refuses_nothing(store: Make, answer: str) -> None:
    assert store(answer).refusal() is None


def test_errors_policy_and_role_are_read(store: Make) -> None:
    more = "errorstat_OOM:count=3\r\nmaxmemory_policy:noeviction\r\nrole:slave\r\n"
    stats = store(ANSWER.replace("# Stats", f"# Stats\r\n{more}")).stats()
    assert stats is not None
    assert (stats.errors, stats.policy, stats.replica) == ({"OOM": 3}, "noeviction", True)


def test_more_keys_than_one_command_takes_are_removed() -> None:
    """A process in the container takes 2 MiB of arguments; a key of LMCache is about 200 bytes."""
    asked: list[int] = []

    def say(command: Sequence[str]) -> bytes:
        keys = [word for word in command if word.startswith("UNLINK ")]
        asked.append(sum(len(word) + 9 for word in keys))  # a pointer and a zero for each
        return b"OK\n" + b"1\n" * len(keys)

    store = ContainerStore(say)
    assert store.unlink([b"%0200d" % number for number in range(20_000)]) == 20_000
    assert max(asked) < 2**20


class OnePieceEngine:
    """A Docker engine of pretence that sends the head of an answer and what follows at once."""

    def __init__(self, listening: socket.socket, output: bytes, status: str = "200 OK") -> None:
        self._listening, self._output, self._status = listening, output, status

    def serve(self) -> None:
        """Answer until the test closes the socket."""
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as reader:
                self._answer(connection, reader)

    def _answer(self, connection: socket.socket, reader: Any) -> None:
        _, path, _ = reader.readline().decode().split()
        head = dict(line.decode().lower().split(": ", 1) for line in iter(reader.readline, b"\r\n"))
        reader.read(int(head.get("content-length", 0)))
        if path.endswith("/start"):
            upgrade = head.get("upgrade", "").startswith("tcp")
            first = (
                "101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp" if upgrade else self._status
            )
            connection.sendall(f"HTTP/1.1 {first}\r\n\r\n".encode() + self._output)
            return
        body = json.dumps({"Id": "e1", "ExitCode": 0}).encode()
        size = f"Content-Length: {len(body)}\r\nConnection: close"
        connection.sendall(f"HTTP/1.1 200 OK\r\n{size}\r\n\r\n".encode() + body)


@pytest.fixture
def container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., FoundContainer]]:
    """A container whose engine is one of pretence."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "docker.sock"))
        listening.listen()

        def make(output: bytes, status: str = "200 OK") -> FoundContainer:
            engine = OnePieceEngine(listening, output, status)
            threading.Thread(target=engine.serve, daemon=True).start()
            address = f"unix://{tmp_path}/docker.sock"
            monkeypatch.setattr(api, "answering_engine", lambda: address)
            return FoundContainer({"Id": "c1"})

        yield make


def test_output_that_comes_in_one_piece_with_the_head_is_not_lost(
    container: Callable[..., FoundContainer],
) -> None:
    """So a busy machine reads it."""
    redis = container(frame(1, b"OK\nPO") + frame(1, b"NG\n"))
    with open_container_store(redis) as store:
        assert store.ping()


@pytest.mark.parametrize("status", ["409 Conflict", "404 Not Found"])
def test_a_container_that_takes_no_command_is_not_an_answer(
    container: Callable[..., FoundContainer], status: str
) -> None:
    with open_container_store(container(b'{"message": "it does not run"}', status)) as store:
        assert not store.ping()
