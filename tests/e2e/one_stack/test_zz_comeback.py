"""What dies comes back by itself, and what a command restarts is not missed by a client.

The last module of this stack: it replaces processes that others look at.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deploy.runtime.home import Home
from deploy.runtime.process.front import ask
from deploy.tiny_model.recipe import tensors
from deploy.tiny_model.weights import safetensors_bytes
from deploy.verify.hits import eligible_tokens
from tests.e2e.conftest import Deploy, eventually
from tests.e2e.one_stack.conftest import NAME, PORT, model_folder
from tests.e2e.one_stack.test_one_stack import CONSUMER, counted
from tests.ports import free_row

CHUNK = 256
URL = f"http://127.0.0.1:{PORT}/v1/completions"
BODY = {"model": "pdkit-tiny", "prompt": "x" * 700, "max_tokens": 4, "temperature": 0}


def events(kit: Deploy, service: str) -> list[str]:
    # What is just dead makes the command exit with 4.
    found = kit.run("status", "--name", NAME, "--json").data["events"]
    return [event["kind"] for event in found if event["service"] == service]


def answered() -> bool:
    return httpx.post(URL, json=BODY, timeout=120, trust_env=False).status_code == 200


def test_clients_only_wait_if_the_router_is_killed(kit: Deploy) -> None:
    old = kit.pid(NAME, "router")
    os.kill(old, signal.SIGKILL)
    answers: list[bool] = []
    clients = [threading.Thread(target=lambda: answers.append(answered())) for _ in range(8)]
    for client in clients:
        client.start()  # all of them connect; the port is never closed
    for client in clients:
        client.join(180)
    assert answers == [True] * 8
    assert kit.pid(NAME, "router") != old
    assert eventually(lambda: events(kit, "router") == ["died", "back"])


@pytest.mark.quick
def test_engines_find_the_new_redis_if_the_old_one_is_killed(kit: Deploy) -> None:
    old = kit.pid(NAME, "redis")
    os.kill(old, signal.SIGKILL)
    assert eventually(lambda: events(kit, "redis") == ["died", "back"])
    assert kit.pid(NAME, "redis") != old
    assert answered()
    assert eventually(lambda: kit.run("check", "--quick", "--name", NAME).code == 0)


def test_the_only_consumer_cannot_be_drained(kit: Deploy) -> None:
    for command in ("drain", "restart"):
        ran = kit.run(command, "consumer-0", "--name", NAME)
        assert ran.code == 2, ran
        assert "the only consumer" in ran.stderr and "--force" in ran.stderr
    assert (
        "consumer-0 gets no new requests"
        in kit.run("drain", "consumer-0", "--force", "--name", NAME).stdout
    )
    assert httpx.post(URL, json=BODY, trust_env=False, timeout=60).status_code == 503
    kit.ok("undrain", "consumer-0", "--name", NAME)
    assert eventually(answered)


def test_no_request_fails_if_the_router_is_restarted(kit: Deploy) -> None:
    ended, lost, good = threading.Event(), list[str](), list[int]()

    def client() -> None:
        with httpx.Client(trust_env=False, timeout=120) as http:
            while not ended.wait(0.02):
                try:
                    good.append(http.post(URL, json=BODY).raise_for_status().status_code)
                except httpx.HTTPError as exc:
                    lost.append(repr(exc))

    clients = [threading.Thread(target=client) for _ in range(2)]
    for one in clients:
        one.start()
    assert eventually(lambda: len(good) > 4)
    ran = kit.run("restart", "router", "--name", NAME)
    before = len(good)
    assert eventually(lambda: len(good) > before + 4)
    ended.set()
    for one in clients:
        one.join(120)
    assert ran.code == 0, ran
    assert lost == []


def completion(**fields: object) -> dict[str, Any]:
    answer = httpx.post(URL, json={**BODY, **fields}, timeout=120, trust_env=False)
    return dict(answer.raise_for_status().json())


def asked(**fields: object) -> str:
    """Return an answer of several tokens."""
    return str(completion(max_tokens=16, **fields)["choices"][0]["text"])


def overwrite(weights: Path, content: bytes) -> None:
    """Put other bytes into a file's place, of equal size and time, as image layers have them."""
    at = weights.stat().st_mtime_ns
    download = weights.with_name("download")
    download.write_bytes(content)
    os.utime(download, ns=(at, at))
    assert download.stat().st_size == weights.stat().st_size
    download.replace(weights)


def another_model(seed: str = "another") -> bytes:
    return safetensors_bytes(tensors(), seed=seed)


def stored(kit: Deploy) -> set[bytes]:
    """Return the keys of KV that the producer which runs now could load."""
    seed = psutil.Process(kit.pid(NAME, "producer-0")).environ()["PYTHONHASHSEED"]
    return set(kit.redis(NAME).scan_iter(f"pdkit:{NAME}:{seed}:*"))


def test_the_same_weights_find_all_their_kv_again(kit: Deploy) -> None:
    """Touched, and a copy in their place: engines start, and nothing is computed again."""
    text, keys = asked(), stored(kit)
    folder = model_folder(kit)
    copy = shutil.copytree(folder, folder.with_name("copy"))
    shutil.rmtree(folder)
    copy.rename(folder)
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    restarted = kit.run("restart", "--force", "--name", NAME)
    assert restarted.code == 0, restarted
    assert stored(kit) == keys
    answer = completion(max_tokens=16)
    assert answer["choices"][0]["text"] == text
    eligible = eligible_tokens(answer["usage"]["prompt_tokens"], CHUNK)
    loaded = counted(kit, CONSUMER, "vllm:external_prefix_cache_hits_total")
    assert loaded == eligible > 0, "the consumer is new, and this was its first prompt"


def test_replaced_weights_never_answer_with_the_old_kv(kit: Deploy) -> None:
    """Refused by commands and by the supervisor, until the hinted command serves the new ones."""
    old_text, old_keys = asked(), stored(kit)
    assert old_keys
    weights = model_folder(kit) / "model.safetensors"
    overwrite(weights, another_model())
    before = kit.state(NAME)["services"]
    refused = kit.run("restart", "--force", "--name", NAME)
    assert refused.code == 2, refused
    changed = f"{weights.parent} have changed since the stack '{NAME}' was started"
    assert f"{changed} (model.safetensors was replaced)" in refused.stderr
    assert kit.state(NAME)["services"] == before and answered()

    died = len(events(kit, "consumer-0"))
    os.kill(kit.pid(NAME, "consumer-0"), signal.SIGKILL)
    assert eventually(lambda: events(kit, "consumer-0")[died:] == ["died", "failed"])
    assert kit.state(NAME)["services"] == before
    hint = next(line for line in refused.stderr.splitlines() if line.startswith("try: "))
    command = hint.removeprefix("try: deploy ").partition(",")[0]
    status = kit.run("status", "--name", NAME, "--json")
    assert any(command in warning for warning in status.data["warnings"])

    served = kit.run(*command.split())
    assert served.code == 0, served
    assert set(kit.redis(NAME).scan_iter("*")) >= old_keys, "the old KV is still there"
    before_asking = stored(kit)
    assert not before_asking & old_keys, "and has other keys"
    new_text = asked()
    assert new_text != old_text
    assert new_text == asked(cache_salt="computed again"), "the answer of the new weights"
    assert stored(kit) > before_asking, "the same prompt was computed and stored again"
    assert kit.run("check", "--quick", "--name", NAME).code == 0


def test_an_engine_does_not_serve_weights_that_are_replaced_while_it_starts(
    kit: Deploy, tmp_path: Path
) -> None:
    process = psutil.Process(kit.pid(NAME, "consumer-0"))
    argv, env, log = process.cmdline(), process.environ(), tmp_path / "log"
    argv[argv.index("--port") + 1] = str(free_row())
    weights = model_folder(kit) / "model.safetensors"
    served = weights.read_bytes()
    try:
        with (
            log.open("w") as file,
            subprocess.Popen(argv, env=env, stdout=file, stderr=subprocess.STDOUT) as engine,
        ):
            try:
                assert eventually(lambda: "Initializing a V1 LLM engine" in log.read_text())
                overwrite(weights, another_model("a third"))
                assert engine.wait(120) == 3, log.read_text()
            finally:
                engine.kill()
    finally:
        overwrite(weights, served)
    assert "have changed since this stack was started, while this engine loaded" in log.read_text()
    assert answered()


def test_an_engine_itself_refuses_weights_that_were_replaced(kit: Deploy) -> None:
    """Docker starts engines again without the kit."""
    record = kit.state(NAME)["services"]["consumer-0"]
    process = psutil.Process(record["pid"])
    argv, env = process.cmdline(), process.environ()
    weights = model_folder(kit) / "model.safetensors"
    served = weights.read_bytes()
    overwrite(weights, served[::-1])
    try:
        done = subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=120, check=False
        )
    finally:
        overwrite(weights, served)
    assert done.returncode == 3, done.stderr
    assert f"the files in {weights.parent} have changed" in done.stdout + done.stderr


def test_down_ends_the_supervisor_too(kit: Deploy) -> None:
    """That it is gone afterwards, the end of this stack looks at."""
    there = ask(Home(kit.home, kit.home).stack(NAME).supervisor_socket)
    assert there is not None
    assert there.front is not None
    there.front.close()
    assert there.pid in {process.pid for process in kit.processes(NAME)}
    keeper = psutil.Process(there.pid)
    workers = keeper.children()
    assert len(workers) == 1
    assert sum(one.memory_info().rss for one in (keeper, *workers)) < 200 * 2**20
