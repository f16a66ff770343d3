"""`deploy status --watch` beside a real stack: requests in its numbers, deaths in its events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from deploy.runtime.home import Home
from deploy.runtime.lock import stack_lock
from tests.e2e.conftest import Deploy, eventually
from tests.e2e.one_stack.conftest import NAME, PORT

REQUESTS = 4
PROMPT = 700  # characters, each of them a token of the tiny model
ANSWER = 16


class Stream:
    """The frames that a watch prints, read one by one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def frame(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        envelope = json.loads(self.process.stdout.readline())
        assert envelope["command"] == "status"
        return envelope["data"]

    def until(
        self, condition: Callable[[dict[str, Any]], bool], *, within_s: float = 300.0
    ) -> list[dict[str, Any]]:
        """Return the frames up to the first that has what is waited for."""
        seen, deadline = [], time.monotonic() + within_s
        while time.monotonic() < deadline:
            seen.append(self.frame())
            if condition(seen[-1]):
                return seen
        pytest.fail(f"not seen in {len(seen)} frames, the last: {seen[-1]}")


@pytest.fixture
def stream(kit: Deploy) -> Iterator[Stream]:
    process = kit.start("status", "--watch", "--interval", "0.5", "--json", "--name", NAME)
    yield Stream(process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")


def ask(seed: int) -> int:
    body = {
        "model": "pdkit-tiny",
        "prompt": f"{seed:04d} " + "x" * (PROMPT - 5),
        "max_tokens": ANSWER,
        "ignore_eos": True,
    }
    url = f"http://127.0.0.1:{PORT}/v1/completions"
    return httpx.post(url, json=body, timeout=60, trust_env=False).status_code


def engine(frame: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in frame["engines"] if one["name"] == name)


def all_answered(frame: dict[str, Any]) -> bool:
    """Whether no service was too late for this frame, as one may be on a busy machine."""
    parts = frame["healthy"], frame["redis"], frame["router"]
    return all((*parts, *(one["load"] for one in frame["engines"])))


def told(frames: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(event["kind"], event["about"]) for frame in frames for event in frame["events"]}


def test_requests_are_counted(stream: Stream) -> None:
    first = stream.until(all_answered)[-1]
    assert first["interval"]["answers"] == first["watch"]["answers"] == 0
    assert [ask(seed) for seed in range(REQUESTS)] == [200] * REQUESTS
    # Two whole chunks of 256 tokens of a prompt cross. Some of it is counted after the answer.
    chunks = 2 * REQUESTS
    frames = stream.until(
        lambda frame: (
            all_answered(frame)
            and frame["watch"]["answers"] == frame["router"]["watch"]["requests"] == REQUESTS
            and frame["watch"]["store_path"]["waits"] >= REQUESTS
            and frame["watch"]["store_path"]["stored_chunks"] >= chunks
            and frame["watch"]["store_path"]["loaded_chunks"] >= chunks
            and engine(frame, "consumer-0")["watch"]["generation_tokens"] >= REQUESTS * ANSWER
        )
    )
    frames += stream.until(all_answered)

    last, prompt = frames[-1], REQUESTS * (PROMPT + 1)  # and the token that texts begin with
    for name in ("producer-0", "consumer-0"):
        watch = engine(last, name)["watch"]
        assert watch["prompt_tokens"] == pytest.approx(prompt, abs=REQUESTS)
        assert watch["first_token_mean_s"] > 0
        assert watch["first_token_p95_within_s"] >= watch["first_token_mean_s"] / 10
    assert engine(last, "consumer-0")["watch"]["generation_tokens"] == REQUESTS * ANSWER
    assert last["watch"]["external_hits"] == 256 * chunks
    path = last["watch"]["store_path"]
    assert (path["stored_chunks"], path["loaded_chunks"]) == (chunks, chunks)
    assert path["waits"] >= REQUESTS
    assert last["redis"]["keys"] - first["redis"]["keys"] == chunks
    received = sum(one["redis"]["interval"]["received_bytes"] for one in frames if one["redis"])
    assert path["stored_bytes"] < received < 1.2 * path["stored_bytes"] + 100_000
    assert last["router"]["watch"] == {"requests": REQUESTS, "errors": 0}
    assert last["router"]["engines"] == {"engines": 2, "healthy": 2}
    # The intervals of the frames are those of the watch, none twice and none left out.
    intervals = [engine(frame, "consumer-0")["interval"] for frame in frames]
    for name in ("prompt_tokens", "generation_tokens", "answers"):
        parts = [one[name] for one in intervals if one]
        assert sum(parts) == engine(last, "consumer-0")["watch"][name]
    # A service that answers late on a busy machine is no loss.
    assert {kind for kind, _ in told([first, *frames])} <= {"not_ready", "ready"}


def test_an_idle_stack_is_reported_as_idle(stream: Stream) -> None:
    """The same numbers stay zero where nothing is sent: they are not the engines' whole lives."""
    last = [stream.until(all_answered)[-1] for _ in range(4)][-1]
    assert last["watch"]["answers"] == 0
    assert last["watch"]["external_hit_rate"] is None
    assert engine(last, "consumer-0")["interval"]["prompt_tokens_s"] == 0


def test_a_killed_engine_and_its_restart_are_events(kit: Deploy, stream: Stream) -> None:
    """By itself, once no command is at work on the stack."""
    stream.until(all_answered)
    with stack_lock(Home(kit.home, kit.home).lock_file(NAME), NAME):
        os.kill(kit.pid(NAME, "consumer-0"), signal.SIGKILL)
        frames = stream.until(lambda frame: ("exited", "consumer-0") in told([frame]))
        assert frames[-1]["healthy"] is False
        assert frames[-1]["services"]["consumer-0"] == "exited"
        assert engine(frames[-1], "consumer-0")["load"] is None

        assert ask(1000) >= 500
        frames = stream.until(lambda frame: frame["router"]["watch"]["errors"] > 0)

    frames = stream.until(lambda frame: ("restarted", "consumer-0") in told([frame]))
    # The router has yet to notice that it is back, and to send it the first request.
    assert eventually(lambda: ask(2000) == 200)
    frames += stream.until(lambda frame: frame["watch"]["answers"] == 2)
    assert ("ready", "consumer-0") in told(frames)
    assert 0 < engine(frames[-1], "consumer-0")["watch"]["prompt_tokens"] < 2 * PROMPT


def test_a_watch_with_a_count_has_the_exit_code_of_status(kit: Deploy) -> None:
    ran = kit.run("status", "--watch", "--count", "2", "--interval", "0.5", "--name", NAME)
    assert ran.code == 0, ran
    assert ran.stdout.count(f"stack '{NAME}': 1p1d") == 2
    assert max(map(len, ran.stdout.splitlines())) <= 80
