"""Starts that cannot succeed, or are interrupted: nothing half-started is left."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from deploy.runtime.home import Home
from deploy.runtime.process.sessions import has_ended
from tests.e2e.conftest import Deploy, eventually
from tests.ports import free_row, taken


def broken_model(deploy: Deploy, folder: Path) -> Path:
    """Return a copy of the tiny model whose weights file ends too early."""
    from deploy.tiny_model import ensure_tiny_model

    shutil.copytree(ensure_tiny_model(deploy.home / "cache" / "models"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    return folder


def first_engine_life(deploy: Deploy, name: str, up: subprocess.Popen[str]) -> tuple[float, float]:
    """Return when the two engines were started, and when the first was seen dead by us and `up`."""
    state = Home(deploy.home, deploy.home).stack(name).state_file
    assert eventually(lambda: state.exists() and "consumer-0" in state.read_text())
    engines = [psutil.Process(deploy.pid(name, e)) for e in ("producer-0", "consumer-0")]
    started = engines[0].create_time()
    while up.poll() is None:
        for engine in engines:
            if not engine.is_running() or has_ended(engine):
                return started, time.time()
        time.sleep(0.02)
    raise AssertionError("up ended before an engine was seen to die")


def test_an_engine_that_dies_at_its_start_is_named(deploy: Deploy, tmp_path: Path) -> None:
    port = free_row()
    model = broken_model(deploy, tmp_path / "model")
    process = deploy.start("up", "--name", "dies", "--port", str(port), "--model", str(model))
    started, died = first_engine_life(deploy, "dies", process)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 4, stdout + stderr
    assert time.time() - died < (died - started) / 2, "`up` waits for what is dead"
    assert stdout == ""
    message = next(line for line in stderr.splitlines() if line.startswith("error: "))
    assert re.search(r"(producer|consumer)-0 died while starting \(exit code 1\)", message)
    log = Path(message.rsplit("log: ", 1)[1])
    assert log.is_file()
    shown = [line[4:] for line in stderr.splitlines() if line.startswith("  | ")]
    assert shown and shown[-1] in log.read_text()
    deploy.assert_nothing_left("dies", port)
    assert deploy.run("logs", "--name", "dies", "-n", "3").code == 0
    assert deploy.run("down", "--name", "dies").code == 0
    assert not log.exists()


def await_engines(deploy: Deploy, name: str) -> None:
    """Wait until a stack that is being started has engines, which say something of themselves."""
    logs = Home(deploy.home, deploy.home).stack(name).logs_dir
    files = [logs / f"{engine}.log" for engine in ("producer-0", "consumer-0")]
    assert eventually(lambda: all(file.exists() and file.stat().st_size for file in files))


def await_processes(deploy: Deploy, name: str) -> None:
    """Wait until a stack that is being started has engines, which have imported nothing yet."""
    state = Home(deploy.home, deploy.home).stack(name).state_file
    assert eventually(lambda: state.exists() and "consumer-0" in deploy.state(name)["services"])


def interrupted_start(
    deploy: Deploy,
    name: str,
    port: int,
    number: signal.Signals,
    await_moment: Callable[[Deploy, str], None],
) -> str:
    process = deploy.start("up", "--name", name, "--port", str(port))
    await_moment(deploy, name)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stdout + stderr
    assert stdout == ""
    return stderr


def test_ctrl_c_stops_the_started_processes(deploy: Deploy) -> None:
    port = free_row()
    stderr = interrupted_start(deploy, "stopped", port, signal.SIGINT, await_engines)
    assert "interrupted" in stderr
    deploy.assert_nothing_left("stopped", port)


def test_sigterm_stops_the_started_processes(deploy: Deploy) -> None:
    port = free_row()
    interrupted_start(deploy, "stopped", port, signal.SIGTERM, await_processes)
    deploy.assert_nothing_left("stopped", port)


def test_killed_start_is_cleaned_up_by_down(deploy: Deploy) -> None:
    port = free_row()
    process = deploy.start("up", "--name", "killed", "--port", str(port))
    await_processes(deploy, "killed")
    process.kill()
    process.communicate()
    assert deploy.processes("killed")
    assert deploy.run("down", "--name", "killed").code == 0
    deploy.assert_nothing_left("killed", port)


def test_down_works_with_a_broken_state_file(deploy: Deploy) -> None:
    port = free_row()
    process = deploy.start("up", "--name", "torn", "--port", str(port))
    await_processes(deploy, "torn")
    process.kill()
    process.communicate()
    state = deploy.home / "stacks" / "torn" / "state.json"
    state.write_text(state.read_text()[:40])
    for command in ("status", "check", "up"):
        ran = deploy.run(command, "--name", "torn")
        assert ran.code == 2, ran
        assert str(state) in ran.stderr and "deploy down --name torn" in ran.stderr
    assert deploy.processes("torn")
    assert deploy.run("down", "--name", "torn").code == 0
    deploy.assert_nothing_left("torn", port)


def test_taken_port_starts_nothing(deploy: Deploy) -> None:
    port = free_row()
    with taken(port + 10):
        ran = deploy.run("up", "--name", "late", "--port", str(port))
    assert ran.code == 3, ran
    assert f"port {port + 10} (for producer-0) is taken" in ran.stderr
    assert deploy.processes("late") == []
    assert deploy.run("status", "--name", "late").stdout.strip() == "the stack 'late' is not up"


def test_second_up_while_the_first_runs_is_refused(deploy: Deploy) -> None:
    port = free_row()
    first = deploy.start("up", "--name", "busy", "--port", str(port))
    try:
        assert eventually(lambda: deploy.processes("busy"))
        first.send_signal(signal.SIGSTOP)  # so that it is not done before the second is refused
        second = deploy.run("up", "--name", "busy", "--port", str(port))
        assert second.code == 3, second
        assert "another deploy command" in second.stderr
    finally:
        first.send_signal(signal.SIGINT)
        first.send_signal(signal.SIGCONT)
        first.communicate(timeout=120)
    deploy.assert_nothing_left("busy", port)
