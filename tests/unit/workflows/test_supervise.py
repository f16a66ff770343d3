"""Services that die are started again: by whom, when, how often, and when not."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from deploy.config.spec import StackSpec
from deploy.document import as_document
from deploy.errors import MachineError, NotEnoughMemory, PortTaken
from deploy.metrics.page import MetricsPage, parsed_page
from deploy.output.views import status_view
from deploy.runtime import boot
from deploy.runtime import supervisor as runtime_supervisor
from deploy.runtime.events import read_events
from deploy.runtime.home import Home
from deploy.runtime.lock import stack_lock
from deploy.runtime.process import sessions
from deploy.runtime.process.front import Holder, ask, open_door
from deploy.runtime.process.launcher import ProcessLauncher
from deploy.runtime.process.sessions import has_ended
from deploy.stack.service import Service
from deploy.tiny_model import ensure_tiny_model
from deploy.workflows import drain, service_life, start, supervise
from deploy.workflows.down import stop_stack
from deploy.workflows.prepare import Prepared
from deploy.workflows.running import RunningStack, require_stack
from deploy.workflows.service_life import CoreProgress, Liveness, RestartPolicy, waited_for
from deploy.workflows.status import stack_status
from deploy.workflows.supervise import Supervisor
from deploy.workflows.up import come_back_on_boot
from tests.unit.workflows.conftest import SMALL, Lab

Eventually = Callable[..., None]


@dataclass
class Watched:
    """A lab whose supervisor is a thread of this process, which sees the lab's own folders."""

    lab: Lab
    policy: RestartPolicy = field(default_factory=lambda: RestartPolicy(pause_s=0.05))
    supervisor: Supervisor | None = None
    spec: StackSpec | None = None

    def begin(self, home: Home, name: str, front: socket.socket | None) -> None:
        if self.supervisor is None:
            door = open_door(home.stack(name).supervisor_socket)
            self.holder = Holder(door, front.dup() if front else None)
            self.supervisor = Supervisor(home, name, self.holder, self.policy)
            self.thread = threading.Thread(target=self.supervisor.run)
            self.thread.start()

    def end(self) -> None:
        if self.supervisor is not None:
            self.supervisor.ended.set()
            self.thread.join(60)
            assert not self.thread.is_alive()
            self.holder.close()
            self.supervisor = None

    def up(self) -> None:
        self.spec = self.spec or self.lab.spec(supervise=True)
        self.lab.up(self.spec)

    def pid(self, service: str) -> int:
        return require_stack(self.lab.home, "pdkit").state.services[service].pid

    def kill(self, service: str) -> int:
        pid = self.pid(service)
        os.kill(pid, signal.SIGKILL)
        return pid

    def is_back(self, service: str, old: int) -> bool:
        running = require_stack(self.lab.home, "pdkit")
        return self.pid(service) != old and running.is_ready(running.stack.service(service))

    def events(self, service: str = "") -> list[str]:
        found = read_events(self.lab.home.stack("pdkit").events_file)
        return [event.kind for event in found if service in ("", event.service)]


@pytest.fixture
def watched(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    made = Watched(lab)
    monkeypatch.setattr(start, "start_supervisor", made.begin)
    monkeypatch.setattr(ProcessLauncher, "poll_s", 0.02)
    monkeypatch.setattr(supervise, "_CALM_S", 0.02)
    monkeypatch.setattr(supervise, "_LOCKED_S", 0.05)
    yield made
    made.end()


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], threading.Event]:
    """Keep a service from being ready until the event is set."""

    def hold(name: str) -> threading.Event:
        loaded, real = threading.Event(), RunningStack.is_ready

        def is_ready(self: RunningStack, service: Service, **limit: float) -> bool:
            return (service.name != name or loaded.is_set()) and real(self, service, **limit)

        monkeypatch.setattr(RunningStack, "is_ready", is_ready)
        return loaded

    return hold


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of services whose leftovers are ended, each time that they are."""
    names: list[str] = []
    real = ProcessLauncher.stop

    def stop(self: ProcessLauncher, records: Mapping[str, Any], **grace: float) -> None:
        names.extend(records)
        real(self, records, **grace)

    monkeypatch.setattr(ProcessLauncher, "stop", stop)
    return names


@pytest.mark.parametrize("service", ["consumer-0", "redis", "router"])
def test_a_service_that_is_killed_comes_back(
    watched: Watched, stopped: list[str], service: str, eventually: Eventually
) -> None:
    watched.up()
    others = {name: watched.pid(name) for name in ("redis", "producer-0", "consumer-0", "router")}
    old = watched.kill(service)
    eventually(lambda: watched.is_back(service, old))
    eventually(lambda: watched.events() == ["died", "back"])
    assert all(watched.pid(name) == pid for name, pid in others.items() if name != service)
    assert stopped == [service], "its leftovers are ended once"
    running = require_stack(watched.lab.home, "pdkit")
    assert running.launcher.restarts(running.state.services[service]) == 1
    eventually(lambda: running.is_ready(running.stack.front))
    watched.lab.ask()


def test_clients_wait_while_the_router_is_started_again(
    watched: Watched, eventually: Eventually
) -> None:
    watched.up()
    url = require_stack(watched.lab.home, "pdkit").stack.front.url
    with stack_lock(watched.lab.home.lock_file("pdkit"), "pdkit"):
        old = watched.kill("router")
        answers: list[int] = []
        asking = [
            threading.Thread(
                target=lambda: answers.append(
                    httpx.get(f"{url}/liveness", trust_env=False, timeout=60).status_code
                )
            )
            for _ in range(4)
        ]
        for thread in asking:
            thread.start()  # nobody is there to answer, nor to start one
    for thread in asking:
        thread.join(60)
    assert answers == [200] * 4
    eventually(lambda: watched.is_back("router", old))


def test_engine_and_redis_that_die_together_come_back_in_order(
    watched: Watched, eventually: Eventually
) -> None:
    watched.up()
    old = {name: watched.kill(name) for name in ("producer-0", "redis")}
    eventually(lambda: all(watched.is_back(name, pid) for name, pid in old.items()))
    assert watched.events("producer-0")[:1] == ["died"]
    assert "crash_loop" not in watched.events()


def test_a_crash_loop_is_reported_and_ended_and_a_person_can_start_it_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    watched.policy = RestartPolicy(deaths=2, pause_s=0.05)
    watched.up()
    monkeypatch.setenv("STAND_IN_DIES", "consumer")
    watched.kill("consumer-0")
    eventually(lambda: watched.events("consumer-0")[-1:] == ["crash_loop"])
    assert watched.events("consumer-0") == ["died", "died", "crash_loop"]
    texts = [event.text for event in read_events(watched.lab.home.stack("pdkit").events_file)]
    assert "exit code 1" in texts[1]
    assert "deploy logs consumer-0" in texts[2]
    monkeypatch.delenv("STAND_IN_DIES")
    watched.up()
    running = require_stack(watched.lab.home, "pdkit")
    assert running.is_ready(running.stack.service("consumer-0"))
    old = watched.kill("consumer-0")
    eventually(lambda: watched.is_back("consumer-0", old))


def test_pauses_grow_and_have_an_end() -> None:
    policy = RestartPolicy()
    assert [policy.pause_before(start) for start in (1, 2, 3, 4, 5)] == [0, 1, 2, 4, 8]
    assert policy.pause_before(50) == 60


def test_a_service_that_served_for_long_has_all_its_starts_again(
    watched: Watched, eventually: Eventually
) -> None:
    watched.policy = RestartPolicy(deaths=1, calm_s=0.0, pause_s=0.05)
    watched.up()
    for _ in range(3):
        old = watched.kill("router")
        eventually(lambda old=old: watched.is_back("router", old))
        eventually(lambda: watched.events("router")[-1] == "back")
        assert watched.supervisor is not None
        eventually(lambda: watched.supervisor._lives["router"].deaths == 0)


def test_up_waits_for_what_is_being_started_again(
    watched: Watched, held_back: Callable[[str], threading.Event], eventually: Eventually
) -> None:
    watched.up()
    loaded = held_back("consumer-0")
    old = watched.kill("consumer-0")
    eventually(lambda: watched.pid("consumer-0") != old)
    said = "the supervisor started consumer-0; waiting"

    def load() -> None:
        eventually(lambda: said in watched.lab.lines)
        loaded.set()

    threading.Thread(target=load).start()
    watched.up()
    assert loaded.is_set()
    assert said in watched.lab.lines


def test_up_does_not_wait_for_a_router_that_lacks_an_engine(
    watched: Watched, eventually: Eventually
) -> None:
    """It is not ready before `up` has started the engine."""
    watched.up()
    old = watched.kill("router")
    eventually(lambda: watched.is_back("router", old))
    watched.end()
    watched.kill("consumer-0")
    running = require_stack(watched.lab.home, "pdkit")
    eventually(lambda: not running.is_ready(running.stack.front))
    watched.up()
    assert not [line for line in watched.lab.lines if line.endswith("waiting")]


def test_a_service_that_others_need_is_restarted_first(
    watched: Watched, held_back: Callable[[str], threading.Event], eventually: Eventually
) -> None:
    """An engine is not started before its Redis serves."""
    watched.up()
    loaded = held_back("redis")
    store, old = watched.kill("redis"), watched.kill("consumer-0")  # in this order: no race
    eventually(lambda: watched.pid("redis") != store)
    time.sleep(0.3)  # fifteen looks at it
    assert watched.pid("consumer-0") == old
    loaded.set()
    eventually(lambda: watched.is_back("consumer-0", old))


def test_a_full_disk_ends_nothing(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    watched.up()
    full, real = threading.Event(), start.write_state
    full.set()

    def write(*arguments: Any) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(start, "write_state", write)
    monkeypatch.setattr(supervise, "LONGEST_PAUSE_S", 0.1)
    old = watched.kill("router")
    eventually(lambda: "failed" in watched.events("router"))
    assert watched.pid("router") == old
    full.clear()
    eventually(lambda: watched.is_back("router", old))


def test_no_engine_is_started_with_weights_that_were_replaced(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """Nobody is there who could answer: it says how to go on, and tries again."""
    folder = tmp_path / "model"
    shutil.copytree(ensure_tiny_model(watched.lab.home.models), folder)
    watched.spec = watched.lab.spec(supervise=True, model=str(folder))
    watched.policy = RestartPolicy(deaths=2, pause_s=0.05)
    watched.up()
    refused: list[str] = []
    real = start.require_same_model

    def require_same_model(prepared: Prepared) -> None:
        refused.append("")
        real(prepared)
        refused.clear()

    monkeypatch.setattr(start, "require_same_model", require_same_model)
    monkeypatch.setattr(supervise, "LONGEST_PAUSE_S", 0.05)
    weights = folder / "model.safetensors"
    planned = weights.read_bytes()
    weights.write_bytes(planned[::-1])
    old = watched.kill("consumer-0")
    eventually(lambda: len(refused) > 5)
    assert watched.pid("consumer-0") == old
    assert watched.events("consumer-0") == ["died", "failed"], "said once, and not given up"
    text = read_events(watched.lab.home.stack("pdkit").events_file)[-1].text
    assert "model.safetensors was replaced" in text and "deploy swap cpu --name pdkit" in text
    of_stack, of_consumer = stack_status(watched.lab.home, "pdkit").warnings
    for warning in (of_stack, of_consumer):
        assert str(folder) in warning and "deploy swap cpu --name pdkit" in warning
    weights.write_bytes(planned)
    eventually(lambda: watched.is_back("consumer-0", old))


class TestTooLittleRoom:
    """What the machine lacks at the moment is no fault of the service."""

    @pytest.fixture
    def few(self, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> Watched:
        watched.policy = RestartPolicy(deaths=2, pause_s=0.02)
        monkeypatch.setattr(supervise, "LONGEST_PAUSE_S", 0.05)
        watched.up()
        return watched

    def await_tries(self, few: Watched, eventually: Eventually) -> None:
        def tries() -> int:
            # Before its first look the supervisor knows no service.
            life = few.supervisor._lives.get("consumer-0") if few.supervisor else None
            return life.tries if life else 0

        eventually(lambda: tries() > 3 * few.policy.deaths)
        assert few.events("consumer-0") == ["died", "failed"], "it is noted once, and no death"

    @pytest.mark.parametrize(
        "error", [NotEnoughMemory("3 GiB are needed"), PortTaken("taken"), OSError(28, "No space")]
    )
    def test_a_start_is_tried_again_for_as_long_as_it_lasts(
        self,
        few: Watched,
        monkeypatch: pytest.MonkeyPatch,
        eventually: Eventually,
        error: Exception,
    ) -> None:
        def refuse(*_: object) -> None:
            raise error

        with monkeypatch.context() as short:
            short.setattr(start, "require_host_memory", refuse)
            old = few.kill("consumer-0")
            self.await_tries(few, eventually)
            found = stack_status(few.lab.home, "pdkit")
            (told,) = [one for one in found.warnings if one.startswith("consumer-0, since ")]
            assert str(error) in told and "as long as this lasts" in told
        eventually(lambda: few.is_back("consumer-0", old))
        eventually(lambda: few.events("consumer-0") == ["died", "failed", "back"])
        assert not stack_status(few.lab.home, "pdkit").warnings

    @pytest.mark.parametrize("code", [errno.ENOMEM, errno.EAGAIN])
    def test_a_process_that_the_kernel_cannot_make(
        self, few: Watched, monkeypatch: pytest.MonkeyPatch, eventually: Eventually, code: int
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as short:
            short.setattr(sessions, "spawn", refuse)
            old = few.kill("consumer-0")
            self.await_tries(few, eventually)
        eventually(lambda: few.is_back("consumer-0", old))

    @pytest.mark.parametrize(
        "last",
        [
            "OSError: [Errno 12] Cannot allocate memory",
            "ImportError: libsqlite3.so.0: failed to map segment from shared object",
            "(pid={pid}) ValueError: Free memory on device cuda:0 (1/80 GiB) is less than desired",
        ],
    )
    def test_an_engine_that_dies_of_too_little_memory_while_it_starts(
        self,
        few: Watched,
        monkeypatch: pytest.MonkeyPatch,
        eventually: Eventually,
        last: str,
    ) -> None:
        with monkeypatch.context() as short:
            short.setenv("STAND_IN_DIES", "consumer")
            short.setenv("STAND_IN_DIES_OF", last)
            old = few.kill("consumer-0")
            self.await_tries(few, eventually)
        eventually(lambda: few.is_back("consumer-0", old))

    def test_a_start_by_a_command_ends_the_warning(
        self, few: Watched, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
    ) -> None:
        def refuse(*_: object) -> None:
            raise NotEnoughMemory("3 GiB are needed")

        with monkeypatch.context() as short:
            short.setattr(start, "require_host_memory", refuse)
            few.kill("consumer-0")
            self.await_tries(few, eventually)
            few.end()
        few.lab.up(few.spec)
        assert few.events("consumer-0")[-1] == "failed", "no command notes that one is back"
        assert not [w for w in stack_status(few.lab.home, "pdkit").warnings if "since" in w]

    def test_one_that_cannot_be_started_for_another_reason_is_given_up(
        self, few: Watched, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")

        monkeypatch.setattr(sessions, "spawn", refuse)
        few.kill("consumer-0")
        eventually(lambda: few.events("consumer-0")[-1:] == ["crash_loop"])


def test_status_shows_events_and_that_nobody_watches(
    watched: Watched, eventually: Eventually
) -> None:
    watched.up()
    assert not stack_status(watched.lab.home, "pdkit").warnings
    watched.kill("router")
    eventually(lambda: watched.events() == ["died", "back"])
    watched.end()
    found = stack_status(watched.lab.home, "pdkit")
    assert [event["kind"] for event in as_document(found)["events"]] == ["died", "back"]
    assert "supervisor does not run" in found.warnings[0]
    text = status_view(found)
    assert "router died; started again now" in text
    assert "router serves again after" in text


def test_a_reboot_is_seen_to_until_down(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(boot, "_RUNS", tmp_path)
    result = lab.up(lab.spec())
    come_back_on_boot(result.running, lab.home, lab.lines.append)
    file = boot.unit_file(lab.home, "pdkit")
    assert file.is_file()
    assert str(file) in "\n".join(lab.lines)
    stop_stack(lab.home, "pdkit", lab.lines.append)
    assert [path for path in (tmp_path / "config").rglob("*") if not path.is_dir()] == []


class TestTheSupervisorItself:
    """Processes, as users have them."""

    @pytest.fixture
    def supervised(self, lab: Lab) -> Iterator[Lab]:
        lab.up(lab.spec(supervise=True))
        yield lab
        stop_stack(lab.home, "pdkit", lab.lines.append)
        assert lab.pids() == []

    def keeper(self, lab: Lab) -> psutil.Process:
        there = ask(lab.home.stack("pdkit").supervisor_socket)
        assert there is not None
        if there.front:
            there.front.close()
        return psutil.Process(there.pid)

    def test_is_started_again_when_it_is_killed(
        self, supervised: Lab, eventually: Eventually
    ) -> None:
        keeper = self.keeper(supervised)
        (worker,) = keeper.children()
        worker.kill()
        eventually(lambda: [one.pid for one in keeper.children()] not in ([], [worker.pid]))
        assert self.keeper(supervised) == keeper, "the new one answers"
        (event,) = read_events(supervised.home.stack("pdkit").events_file)
        assert (event.service, event.kind) == ("supervisor", "died")
        assert "killed by signal 9" in event.text
        running = require_stack(supervised.home, "pdkit")
        old = running.state.services["router"].pid
        os.kill(old, signal.SIGKILL)

        def back() -> bool:
            running = require_stack(supervised.home, "pdkit")
            return running.state.services["router"].pid != old and running.is_ready(
                running.stack.front
            )

        eventually(back)

    def test_a_supervisor_of_another_version_hands_over_its_socket(
        self, supervised: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old, spec = self.keeper(supervised), require_stack(supervised.home, "pdkit").prepared.spec
        supervised.up(spec)
        assert self.keeper(supervised) == old, "one of this version goes on"
        monkeypatch.setattr(runtime_supervisor, "__version__", "99.0")
        supervised.up(spec)
        there = ask(supervised.home.stack("pdkit").supervisor_socket)
        assert there and there.front and there.pid != old.pid
        with there.front:
            assert there.front.getsockname()[1] == spec.port
            assert there.front.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        supervised.ask()

    def test_whole_is_reported_and_brought_back_by_up(
        self, supervised: Lab, eventually: Eventually
    ) -> None:
        keeper = self.keeper(supervised)
        whole = (keeper, *keeper.children())
        for process in whole:
            process.kill()
        eventually(lambda: all(map(has_ended, whole)))
        (warning,) = stack_status(supervised.home, "pdkit").warnings
        assert "the supervisor does not run" in warning
        assert "deploy up --resume --name pdkit" in warning
        supervised.up(require_stack(supervised.home, "pdkit").prepared.spec)
        assert self.keeper(supervised) != keeper
        assert not stack_status(supervised.home, "pdkit").warnings


class TestAnEngineThatHangs:
    @pytest.fixture
    def quick(self, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> Watched:
        monkeypatch.setattr(service_life, "_EVERY_S", 0.1)
        monkeypatch.setattr(
            RunningStack, "is_ready", partialmethod(RunningStack.is_ready, within_s=1.0)
        )
        timeouts = {**SMALL["timeouts"], "hung_s": 0.45}
        watched.spec = watched.lab.spec(supervise=True, timeouts=timeouts)
        watched.up()
        return watched

    def answers(self, watched: Watched) -> bool:
        """Tell whether the supervisor has seen the consumer answer."""
        assert watched.supervisor is not None
        life = watched.supervisor._lives.get("consumer-0")
        return life is not None and life.liveness._answered

    def test_is_ended_and_comes_back(self, quick: Watched, eventually: Eventually) -> None:
        eventually(lambda: self.answers(quick))
        old = quick.pid("consumer-0")
        os.kill(old, signal.SIGSTOP)
        eventually(lambda: quick.is_back("consumer-0", old))
        eventually(lambda: quick.events() == ["hung", "died", "back"])
        (hung, died, _) = read_events(quick.lab.home.stack("pdkit").events_file)
        assert hung.text.startswith("has failed its health checks for 0.")
        assert died.text == "died; started again now"
        running = require_stack(quick.lab.home, "pdkit")
        assert running.launcher.restarts(running.state.services["consumer-0"]) == 1

    def test_an_engine_that_cannot_be_ended_does_not_block_other_restarts(
        self, quick: Watched, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
    ) -> None:
        real = ProcessLauncher.stop

        def stop(self: ProcessLauncher, records: Any, **how: Any) -> None:
            if "consumer-0" in records:
                raise MachineError("it is in the way", hint="none")
            real(self, records, **how)

        eventually(lambda: self.answers(quick))
        with monkeypatch.context() as patched:
            patched.setattr(ProcessLauncher, "stop", stop)
            os.kill(quick.pid("consumer-0"), signal.SIGSTOP)
            eventually(lambda: "failed" in quick.events("consumer-0"))
            old = quick.kill("router")  # behind it in the order of services
            eventually(lambda: quick.pid("router") != old)

    def test_lmcaches_server_is_ended_too(
        self, watched: Watched, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
    ) -> None:
        monkeypatch.setattr(service_life, "_EVERY_S", 0.1)
        monkeypatch.setattr(
            RunningStack, "is_ready", partialmethod(RunningStack.is_ready, within_s=1.0)
        )
        renewed: list[str] = []
        monkeypatch.setattr(
            supervise, "renew_store_connections", lambda *_: renewed.append("kv-server")
        )
        timeouts = {**SMALL["timeouts"], "hung_s": 0.45}
        lmcache = {"chunk_size": SMALL["lmcache"]["chunk_size"]}
        watched.spec = watched.lab.spec(
            supervise=True, timeouts=timeouts, connector="lmcache-mp", redis={}, lmcache=lmcache
        )
        watched.up()
        supervisor = watched.supervisor
        assert supervisor is not None
        eventually(lambda: (life := supervisor._lives.get("kv-server")) and life.liveness._answered)
        old = watched.pid("kv-server")
        os.kill(old, signal.SIGSTOP)
        eventually(lambda: watched.is_back("kv-server", old))
        eventually(lambda: watched.events() == ["hung", "died", "back"])
        eventually(lambda: renewed)

    def test_another_process_does_not_inherit_its_silence(
        self, quick: Watched, eventually: Eventually
    ) -> None:
        """As when Docker restarted it before the supervisor looked: it loads its model again."""
        eventually(lambda: self.answers(quick))
        assert quick.supervisor is not None
        life = quick.supervisor._lives["consumer-0"]
        before, life.pid = life.liveness, -1
        eventually(lambda: life.liveness is not before)

    def test_is_left_alone_while_a_command_works(
        self, quick: Watched, eventually: Eventually
    ) -> None:
        eventually(lambda: self.answers(quick))
        with stack_lock(quick.lab.home.lock_file("pdkit"), "pdkit"):
            old = quick.pid("consumer-0")
            os.kill(old, signal.SIGSTOP)
            assert quick.supervisor is not None
            seen = quick.supervisor._lives["consumer-0"].liveness
            eventually(lambda: seen.silent_s > 0.55)
            assert quick.events() == []
            os.kill(old, signal.SIGCONT)
            eventually(lambda: seen.silent_s == 0)
        assert quick.pid("consumer-0") == old


class TestLiveness:
    """By hand: each question is answered at once, five seconds apart."""

    def seen(self, answers: str, *, loaded: bool = False) -> float:
        """Return the silence after these answers: `+` is one, `-` is none."""
        left = iter(answers)

        def submit(_: Callable[[], bool]) -> Future[bool]:
            asked: Future[bool] = Future()
            asked.set_result(next(left) == "+")
            return asked

        made = Liveness(submit)
        for look in range(len(answers)):
            made.probe(lambda: True, look * 5.0, lambda: loaded)
        made._due_s = float("inf")  # only the last answer is taken
        made.probe(lambda: True, 0.0, lambda: loaded)
        return made.silent_s

    @pytest.mark.parametrize(
        ("answers", "silent_s"), [("+---", 15), ("+--+", 0), ("+--+-", 5), ("----", 0), ("--+-", 5)]
    )
    def test_silence_is_counted_after_an_answer(self, answers: str, silent_s: float) -> None:
        assert self.seen(answers) == silent_s

    def test_a_loaded_engine_needs_no_first_answer_to_be_judged(self) -> None:
        """As when the supervisor is the one that was restarted."""
        assert self.seen("---", loaded=True) == 15

    def test_a_question_without_an_answer_yet_is_not_asked_again(self) -> None:
        asked: list[Future[bool]] = []

        def submit(_: Callable[[], bool]) -> Future[bool]:
            asked.append(Future())
            return asked[-1]

        made = Liveness(submit)
        for look in range(100):
            made.probe(lambda: True, look * 5.0, lambda: True)
        assert len(asked) == 1
        assert made.silent_s == 0, "whoever asks was held up"


# An engine's page, by what its core counts: in the middle of a long prompt, a step gives no token.
PAGE = """\
vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="tiny"}} 0.0
vllm:kv_cache_usage_perc{{engine="0",model_name="tiny"}} {usage}
vllm:prefix_cache_queries_total{{engine="0",model_name="tiny"}} 512.0
vllm:prompt_tokens_total{{engine="0",model_name="tiny"}} 512.0
vllm:generation_tokens_total{{engine="0",model_name="tiny"}} {tokens}
vllm:iteration_tokens_total_count{{engine="0",model_name="tiny"}} {tokens}
http_requests_total{{handler="/metrics",method="GET"}} {scrapes}
"""
ROUTER_PAGE = """\
pdkit_router_engine_healthy{{engine="consumer-0",role="consumer"}} 1
pdkit_router_engine_busy{{engine="consumer-0",role="consumer"}} 1
pdkit_router_engine_awaited{{engine="consumer-0",role="consumer"}} {awaited}
pdkit_router_engine_healthy{{engine="producer-0",role="producer"}} 1
pdkit_router_engine_awaited{{engine="producer-0",role="producer"}} 1
"""


class TestWork:
    """An engine whose core has stopped still answers."""

    def still(self, *seen: tuple[float, ...]) -> float:
        """Return how long nothing was computed, after looks that saw these counts."""
        left = iter(seen)

        def submit(_: Callable[[], tuple[float, ...]]) -> Future[tuple[float, ...]]:
            asked: Future[tuple[float, ...]] = Future()
            asked.set_result(next(left))
            return asked

        made = CoreProgress(submit)
        for look in range(len(seen)):
            made.probe(tuple, look * 30.0)
        made._due_s = float("inf")  # only the last answer is taken
        made.probe(tuple, 0.0)
        return made.still_s

    @pytest.mark.parametrize(
        ("seen", "still_s"),
        [
            (((1,), (1,), (1,)), 60),
            (((1,), (2,), (3,)), 0),
            (((1,), (1,), (2,)), 0),
            (((1,), (1,), (), (1,)), 0),
            (((1,), (), (1,), (1,)), 30),
            (((), (), ()), 0),
        ],
    )
    def test_an_engine_is_still_for_the_time_without_a_change(
        self, seen: tuple[tuple[float, ...], ...], still_s: float
    ) -> None:
        assert self.still(*seen) == still_s

    def test_a_look_without_an_answer_yet_is_not_repeated(self) -> None:
        asked: list[Future[tuple[float, ...]]] = []

        def submit(_: Callable[[], tuple[float, ...]]) -> Future[tuple[float, ...]]:
            asked.append(Future())
            return asked[-1]

        made = CoreProgress(submit)
        for look in range(100):
            made.probe(tuple, look * 30.0)
        assert (len(asked), made.still_s) == (1, 0)

    def counts(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        awaited: int = 1,
        page: str = PAGE,
        **page_of: float,
    ) -> tuple[float, ...]:
        """Return what is seen of consumer-0, by the router's page and its own."""
        values = {"running": 1, "usage": 0.25, "tokens": 9, "scrapes": 5, **page_of}
        pages = {
            "router": parsed_page(ROUTER_PAGE.format(awaited=awaited)),
            "consumer-0": parsed_page(page.format(**values)),
        }

        def served(_: Any, service: Any, **__: Any) -> MetricsPage:
            return pages[service.name]

        monkeypatch.setattr(service_life, "metrics_page", served)
        monkeypatch.setattr(drain, "metrics_page", served)
        stack = SimpleNamespace(front=SimpleNamespace(name="router"), has_front=True)
        running: Any = SimpleNamespace(stack=stack)
        consumer: Any = SimpleNamespace(name="consumer-0")
        return waited_for(running, consumer)

    def test_each_step_changes_what_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first = self.counts(monkeypatch)
        assert first
        assert self.counts(monkeypatch, usage=0.28) != first, "a step of a long prompt"
        assert self.counts(monkeypatch, tokens=10) != first
        assert self.counts(monkeypatch, running=2) != first
        assert self.counts(monkeypatch, scrapes=6) == first, (
            "its API server's count, not its core's"
        )

    def test_nothing_is_judged_without_requests_or_counters(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.counts(monkeypatch, awaited=0) == ()
        no_usage = PAGE.replace("vllm:kv_cache_usage_perc", "vllm:renamed")
        assert self.counts(monkeypatch, page=no_usage) == ()

    @pytest.fixture
    def stuck(self, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> Watched:
        monkeypatch.setattr(service_life, "_WORK_EVERY_S", 0.1)
        timeouts = {**SMALL["timeouts"], "stuck_s": 0.45}
        watched.spec = watched.lab.spec(supervise=True, timeouts=timeouts)
        return watched

    def test_a_core_that_hangs_is_ended_with_its_engine(
        self, stuck: Watched, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
    ) -> None:
        hangs = {"consumer-0"}
        monkeypatch.setattr(
            supervise, "waited_for", lambda _, service: (1.0,) if service.name in hangs else ()
        )
        stuck.up()
        old = stuck.pid("consumer-0")
        eventually(lambda: "hung" in stuck.events("consumer-0"))
        hangs.clear()
        eventually(lambda: stuck.is_back("consumer-0", old))
        hung = read_events(stuck.lab.home.stack("pdkit").events_file)[0]
        assert hung.text.startswith("has requests and has computed nothing for 0.")

    def test_an_engine_that_computes_is_not_restarted(
        self, stuck: Watched, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
    ) -> None:
        looks: list[float] = []

        def computes(*_: Any) -> tuple[float, ...]:
            looks.append(0.0)
            return (float(len(looks)),)

        monkeypatch.setattr(supervise, "waited_for", computes)
        stuck.up()
        eventually(lambda: len(looks) > 40)  # of two engines, each for twice the limit
        assert stuck.events() == []


class TestWhileACommandWorks:
    def test_nothing_is_started_until_it_has_ended(
        self, watched: Watched, eventually: Eventually
    ) -> None:
        watched.up()
        with stack_lock(watched.lab.home.lock_file("pdkit"), "pdkit"):
            old = watched.kill("router")
            time.sleep(0.5)  # twenty-five looks at it
            assert watched.pid("router") == old
            assert watched.events() == []
        eventually(lambda: watched.is_back("router", old))

    def test_a_command_waits_for_a_start_that_has_begun(
        self, watched: Watched, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watched.up()
        began, may_end = threading.Event(), threading.Event()
        real = start.StackStart.start_again

        def slow(self: start.StackStart, service: Any) -> Any:
            began.set()
            assert may_end.wait(20)
            return real(self, service)

        monkeypatch.setattr(start.StackStart, "start_again", slow)
        old = watched.kill("router")
        assert began.wait(20)
        threading.Timer(0.3, may_end.set).start()
        with stack_lock(watched.lab.home.lock_file("pdkit"), "pdkit"):
            assert may_end.is_set()
            assert watched.pid("router") != old

    def test_down_ends_the_supervisor_first(self, watched: Watched) -> None:
        """Here it is this process; that a real one is ended, tests/e2e shows."""
        watched.up()
        home = watched.lab.home
        there = ask(home.stack("pdkit").supervisor_socket)
        assert there is not None and there.pid == os.getpid()
        assert there.front is not None
        there.front.close()
        watched.end()
        assert stop_stack(home, "pdkit", watched.lab.lines.append).was_up
        assert watched.lab.files() == []
        assert watched.lab.pids() == []
