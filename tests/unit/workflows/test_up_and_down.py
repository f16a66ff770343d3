"""A stack's life: started, repaired, refused, failed, stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from deploy.errors import (
    ConfigError,
    MissingImage,
    MissingModel,
    NotEnoughMemory,
    PortTaken,
    StackUnhealthy,
    StateError,
)
from deploy.planning import plan
from deploy.runtime import host
from deploy.runtime.interrupts import interrupt_once
from deploy.runtime.process import sessions
from deploy.runtime.process.sessions import has_ended
from deploy.runtime.state import read_state_file
from deploy.tiny_model import ensure_tiny_model
from deploy.workflows import up
from deploy.workflows.bench.facts import up_extra_s
from deploy.workflows.down import stop_stack
from deploy.workflows.logs import chosen_services, log_source
from deploy.workflows.running import plans_of_others, require_running, require_stack
from deploy.workflows.start import _batches
from deploy.workflows.status import stack_status
from tests.unit.workflows.conftest import Lab, can_listen, opened

SERVICES = ["redis", "producer-0", "consumer-0", "router"]


def test_a_fresh_start_plans_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check after it works with the same plan, and no other connector is tried out."""
    need, plans = plan.gpu_need, []

    def counted(*args: Any) -> Any:
        plans.append(args)
        return need(*args)

    # What `make_plan` asks first, whoever calls it.
    monkeypatch.setattr(plan, "gpu_need", counted)
    started = lab.up(lab.spec(), check=True)
    assert len(plans) == 1
    assert "connector: lmcache, inside each engine (default)" in lab.lines
    found = require_stack(lab.home, "pdkit")
    assert found.prepared == started.running.prepared, "as any later command finds it"
    assert found.secrets.keys() == started.running.secrets.keys()
    assert len(plans) == 2


def test_a_stack_starts_serves_and_ends(lab: Lab) -> None:
    spec = lab.spec()
    began = time.monotonic()
    first = lab.up(spec)
    assert list(first.started) == SERVICES
    assert 0 < first.slowest_engine_s <= first.seconds <= time.monotonic() - began

    status = stack_status(lab.home, "pdkit")
    assert status.healthy
    assert [service.condition for service in status.services] == ["ready"] * 4
    assert status.store is not None
    assert all(service.pid and service.resident_mib for service in status.services)

    pids = lab.pids()
    again = lab.up(spec)
    assert again.started == {}, "it was up already"
    assert lab.pids() == pids

    ports = list(first.running.prepared.plan.ports)
    assert not can_listen(ports[0])
    down = stop_stack(lab.home, "pdkit", lab.lines.append)
    assert down.was_up
    assert sorted(down.stopped) == sorted(SERVICES)
    assert lab.pids() == []
    assert lab.files() == []
    assert all(can_listen(port) for port in ports)
    assert not lab.home.stack("pdkit").temp_dir.exists()

    assert not stack_status(lab.home, "pdkit").up
    assert not stop_stack(lab.home, "pdkit", lab.lines.append).was_up


def test_an_engine_that_dies_takes_all_down_and_leaves_its_log(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_DIES", "consumer")
    began = time.monotonic()
    with pytest.raises(StackUnhealthy, match="consumer-0 died while starting") as caught:
        lab.up(lab.spec())
    assert time.monotonic() - began < 120, "which is what the others may take"
    assert caught.value.details[-1] == "RuntimeError: the weights are corrupt"
    assert lab.pids() == []
    assert not stack_status(lab.home, "pdkit").up
    assert {file for file in lab.files() if "/logs/" not in file} == set()
    source = log_source(lab.home, "pdkit")
    (name,) = chosen_services(source, "pdkit", "consumer-0")
    assert source.log_lines(name, 1) == ("RuntimeError: the weights are corrupt",)
    monkeypatch.delenv("STAND_IN_DIES")
    lab.up(lab.spec())
    assert stack_status(lab.home, "pdkit").healthy, "and the next start is not in its way"


def test_keys_of_the_users_shell_do_not_reach_the_engines(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sk-of-the-shell")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    lab.up(lab.spec(timeouts={"ready_s": 20, "stop_s": 5}))
    lab.ask()
    said = [line for line in lab.lines if "this shell" in line]
    assert said == [
        "VLLM_API_KEY of this shell is not passed on; use --api-key-file instead, for a key that "
        "clients must send",
        "VLLM_LOGGING_LEVEL of this shell is not passed on; to pass it on, set it in engine.env in "
        "deploy.yaml",
    ]
    stop_stack(lab.home, "pdkit", lab.lines.append)


@pytest.mark.parametrize("whom", ["producer", "consumer"])
def test_an_engine_that_refuses_its_stack_is_named_at_once(lab: Lab, whom: str) -> None:
    """It says that it is healthy, and the router would wait for it until `ready_s`."""
    lab.faults.write_text(f"{whom}:own-key")
    with pytest.raises(StackUnhealthy) as caught:
        lab.up(lab.spec())
    assert f"{whom}-0 answers /v1/models with 401" in caught.value.message
    assert caught.value.exit_code == 4
    assert "image" in caught.value.hint
    assert lab.pids() == []


def test_too_little_memory_names_the_setting_that_is_the_cause(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_memory_mib", lambda: 8192)
    with pytest.raises(NotEnoughMemory) as caught:
        lab.up(lab.spec(redis={"memory_gib": 9}))
    assert caught.value.hint == "a smaller redis.memory_gib (it is 9.0)"
    assert not lab.home.stack("pdkit").root.exists()


def test_a_start_that_is_refused_late_leaves_no_folder(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MissingImage("none")

    monkeypatch.setattr(up, "with_images", refuse)
    with pytest.raises(MissingImage):
        lab.up(lab.spec())
    assert not lab.home.stack("pdkit").root.exists()


def test_weights_are_there_before_anything_starts(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[list[int]] = []

    def refuse(*_: object) -> None:
        running.append(lab.pids())
        raise MissingModel("cut off")

    monkeypatch.setattr(up, "fetch_weights", refuse)
    with pytest.raises(MissingModel):
        lab.up(lab.spec())
    assert running == [[]]
    assert not lab.home.stack("pdkit").root.exists()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_start_leaves_nothing(lab: Lab, interrupt: type[BaseException]) -> None:
    def report(line: str) -> None:
        if line.startswith("started producer-0"):
            assert lab.pids()
            raise interrupt

    with pytest.raises(interrupt):
        lab.up(lab.spec(), report)
    assert lab.pids() == []
    assert not stack_status(lab.home, "pdkit").up


def test_only_dead_services_are_started_again(lab: Lab, eventually: Callable[..., None]) -> None:
    spec = lab.spec()
    lab.up(spec)
    before = require_stack(lab.home, "pdkit").state.services
    pid = before["consumer-0"].pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: has_ended(psutil.Process(pid)))
    status = stack_status(lab.home, "pdkit")
    assert not status.healthy
    assert {s.name for s in status.services if s.condition == "exited"} == {"consumer-0"}
    with pytest.raises(StackUnhealthy, match="not running: consumer-0"):
        require_running(require_stack(lab.home, "pdkit"))

    assert set(lab.up(spec).started) == {"consumer-0"}
    after = require_stack(lab.home, "pdkit").state.services
    assert {name for name in after if after[name].pid != before[name].pid} == {"consumer-0"}
    restarts = {s.name: s.restarts for s in stack_status(lab.home, "pdkit").services}
    assert restarts == {"redis": 0, "producer-0": 0, "consumer-0": 1, "router": 0}


def test_the_extra_time_of_up_is_recorded(lab: Lab) -> None:
    """Of the start of all engines: another `up` that finds them changes nothing."""
    spec, began = lab.spec(), time.monotonic()
    first = lab.up(spec, check=True)
    most_s = time.monotonic() - began - first.slowest_engine_s
    kept = require_stack(lab.home, "pdkit")
    extra_s = kept.state.up_extra_s
    assert extra_s is not None
    assert first.seconds - first.slowest_engine_s - 0.01 <= extra_s <= most_s + 0.01
    assert lab.up(spec).started == {}
    again = require_stack(lab.home, "pdkit")
    assert up_extra_s(again) == extra_s
    repaired = again.state.with_service(replace(again.state.services["consumer-0"], starts=2))
    assert up_extra_s(replace(again, state=repaired)) is None


def test_another_plan_under_the_same_name_is_refused(lab: Lab) -> None:
    spec = lab.spec()
    lab.up(spec)
    other = spec.model_copy(update={"topology": "1p2d"})
    with pytest.raises(StateError, match="up with another plan") as caught:
        lab.up(other)
    assert "deploy down" in caught.value.hint
    assert stack_status(lab.home, "pdkit").healthy


def test_two_stacks_side_by_side(lab: Lab) -> None:
    one, two = lab.spec(name="one"), None
    lab.up(one)
    with pytest.raises(PortTaken):
        lab.up(one.model_copy(update={"name": "two"}))
    two = lab.spec(name="two")
    lab.up(two)
    assert lab.home.stacks() == ("one", "two")
    stop_stack(lab.home, "one", lab.lines.append)
    assert stack_status(lab.home, "two").healthy
    assert lab.home.stacks() == ("two",)


def test_down_without_a_readable_state_file_finds_the_processes(lab: Lab) -> None:
    lab.up(lab.spec())
    lab.home.stack("pdkit").state_file.write_text("{")
    with pytest.raises(StateError, match="broken"):
        stack_status(lab.home, "pdkit")
    assert stop_stack(lab.home, "pdkit", lab.lines.append).was_up
    assert lab.pids() == []
    assert lab.files() == []


def test_the_password_is_nowhere_but_in_private_files(lab: Lab) -> None:
    lab.up(lab.spec())
    files = lab.home.stack("pdkit")
    password = (files.secrets_dir / "redis_password").read_text().strip()
    for pid in lab.pids():
        process = psutil.Process(pid)
        assert password not in " ".join(process.cmdline())
        assert password not in " ".join(process.environ().values())
    for path in files.root.rglob("*"):
        if path.is_file() and password in path.read_text(errors="replace"):
            assert path.stat().st_mode & 0o077 == 0
            assert path.suffix != ".log"
    assert password not in " ".join(lab.lines)


def test_state_is_written_while_services_start(lab: Lab) -> None:
    """Whatever happens to this command, `down` knows what it had started."""
    seen: list[int] = []

    def report(line: str) -> None:
        state = read_state_file(lab.home.stack("pdkit").state_file, "pdkit")
        seen.append(len(state.services) if state else 0)

    lab.up(lab.spec(), report)
    assert seen == sorted(seen)
    assert seen[-1] == 4


def test_services_start_together_that_do_not_wait_for_one_another(lab: Lab) -> None:
    from deploy.planning.inventory import Inventory
    from deploy.workflows.facts import stated_facts
    from deploy.workflows.prepare import prepare

    spec = lab.spec(topology="2p1d")
    facts = stated_facts(spec, Inventory(4, 1 << 20), runtime="process")
    stack = prepare(spec, lab.home, facts).stack
    names = [[service.name for service in batch] for batch in _batches(list(stack.services))]
    assert names == [["redis"], ["producer-0", "producer-1", "consumer-0"], ["router"]]
    only = [service for service in stack.services if service.name in ("consumer-0", "router")]
    assert [[s.name for s in batch] for batch in _batches(only)] == [["consumer-0"], ["router"]]


def test_an_interrupt_between_a_start_and_its_record_leaves_nothing(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes right after the process was started, before anything was written down."""
    real = sessions.spawn
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    hangup = signal.getsignal(signal.SIGHUP)

    def spawn_and_interrupt(*args: Any, **kwargs: Any) -> Any:
        process = real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(sessions, "spawn", spawn_and_interrupt)
    interrupt_once()
    try:
        with pytest.raises(KeyboardInterrupt):
            lab.up(lab.spec())
    finally:
        for number, handler in {**before, signal.SIGHUP: hangup}.items():
            signal.signal(number, handler)
    assert lab.pids() == []
    assert not lab.home.stack("pdkit").state_file.exists()


def test_a_report_that_nobody_reads_does_not_stop_the_undo(lab: Lab) -> None:
    spec = lab.spec()

    def broken(line: str) -> None:
        if line.startswith(("started producer", "stopped")):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        lab.up(spec, broken)
    assert lab.pids() == []


def test_another_folder_processors_and_environment_make_no_other_stack(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = lab.spec()
    lab.up(spec)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert lab.up(spec).started == {}


def test_a_stack_whose_model_folder_was_moved_is_still_known(lab: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ensure_tiny_model(lab.home.models), folder)
    lab.up(lab.spec(model=str(folder)))
    folder.rename(tmp_path / "elsewhere")
    assert stack_status(lab.home, "pdkit").healthy
    assert stop_stack(lab.home, "pdkit", lab.lines.append).was_up


def test_a_home_with_a_space(tmp_path: Path) -> None:
    folder = tmp_path / "my home"
    folder.mkdir()
    with opened(folder) as lab:
        lab.up(lab.spec())
        assert stack_status(lab.home, "pdkit").healthy


@pytest.mark.parametrize("text", ["[" * 100_000, '{"runtime": "compose"}', "{}"])
def test_down_ends_what_bears_the_mark_whatever_the_state_says(lab: Lab, text: str) -> None:
    """And nothing else: not another stack, though its files are in the same home."""
    lab.up(lab.spec(name="other"))
    others = lab.pids()
    lab.up(lab.spec())
    lab.home.stack("pdkit").state_file.write_text(text)
    ended = stop_stack(lab.home, "pdkit", lab.lines.append)
    assert ended.was_up
    assert lab.pids() == others
    assert not lab.home.stack("pdkit").root.exists()
    assert any("found by their marks" in line for line in lab.lines)


def test_down_looks_for_processes_though_the_state_names_containers(lab: Lab) -> None:
    lab.up(lab.spec())
    file = lab.home.stack("pdkit").state_file
    values = json.loads(file.read_text())
    values["machine"]["runtime"] = "none"
    file.write_text(json.dumps(values))
    stop_stack(lab.home, "pdkit", lab.lines.append)
    assert lab.pids() == []


def test_down_ends_a_service_whose_mark_cannot_be_seen(lab: Lab) -> None:
    """As of an engine whose program clears its environment and works elsewhere."""
    lab.up(lab.spec())
    file = lab.home.stack("pdkit").state_file
    argv = ("env", "-i", "sleep", "600")
    with subprocess.Popen(argv, cwd="/", start_new_session=True) as hidden:
        values = json.loads(file.read_text())
        began = sessions.start_time(hidden.pid)
        values["services"]["consumer-0"] |= {"pid": hidden.pid, "start_time": began}
        file.write_text(json.dumps(values | {"boot": "another"}))
        shutil.copytree(lab.home.state, lab.folder / "after a reboot")
        elsewhere = replace(lab.home, state=lab.folder / "after a reboot")
        stop_stack(elsewhere, "pdkit", lab.lines.append)
        assert hidden.poll() is None, "a pid of before a reboot is another process's"
        file.write_text(json.dumps(values))
        stop_stack(lab.home, "pdkit", lab.lines.append)
        assert hidden.wait(20) == -signal.SIGTERM
    assert lab.pids() == []


def test_a_stack_that_an_earlier_version_accepted_can_still_be_used(lab: Lab) -> None:
    """Its settings are refused when somebody gives them, and do not hide what runs from others."""
    lab.up(lab.spec())
    file = lab.home.stack("pdkit").state_file
    values = json.loads(file.read_text())
    values["spec"]["engine"]["env"] = {"LMCACHE_LOCAL_CPU": "True"}
    file.write_text(json.dumps(values))
    assert stack_status(lab.home, "pdkit").healthy
    assert [name for name, _ in plans_of_others(lab.home, "mine")] == ["pdkit"]
    with pytest.raises(ConfigError, match="LMCACHE_LOCAL_CPU"):
        lab.up(lab.spec(engine={"env": {"LMCACHE_LOCAL_CPU": "True"}}))


def test_down_of_a_copied_folder_leaves_the_stack_itself_alone(lab: Lab, tmp_path: Path) -> None:
    """Its records name the processes of the stack that was copied."""
    lab.up(lab.spec())
    before = lab.pids()
    shutil.copytree(lab.home.state, tmp_path / "copy")
    copied = replace(lab.home, state=tmp_path / "copy")
    assert stop_stack(copied, "pdkit", lab.lines.append).stopped == ()
    renamed = lab.home.stack("renamed").root
    shutil.copytree(lab.home.stack("pdkit").root, renamed)
    with pytest.raises(StateError, match="the stack 'pdkit'") as caught:
        stack_status(lab.home, "renamed")
    assert "deploy down --name renamed" in caught.value.hint
    stop_stack(lab.home, "renamed", lab.lines.append)
    assert not renamed.exists()
    assert lab.pids() == before


@pytest.mark.parametrize("already_up", [False, True])
def test_an_interrupt_during_the_check_stops_what_this_up_started(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, already_up: bool
) -> None:
    spec = lab.spec()
    if already_up:
        lab.up(spec)
    before = lab.pids()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(up, "check_running", interrupted)
    with pytest.raises(KeyboardInterrupt):
        up.bring_up(spec, lab.home, lab.lines.append, check=True)
    assert lab.pids() == before
    assert stack_status(lab.home, "pdkit").up is already_up


def test_a_port_of_another_stack_is_refused_though_nobody_listens_yet(lab: Lab) -> None:
    """An engine that loads its model does not listen; two of them could later share a port."""
    spec = lab.spec()
    first = lab.up(spec)
    os.kill(first.running.state.services["producer-0"].pid, signal.SIGKILL)
    port = spec.port + 10
    with pytest.raises(PortTaken, match=rf"{port} \(for router\) is taken by the stack 'pdkit'"):
        lab.up(lab.spec(name="other", port=port))
