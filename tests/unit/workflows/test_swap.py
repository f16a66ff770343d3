"""Swap and rollback: another plan in the place of a running one, or the old one again.

Vendor 'cuda' here is stand-ins on this machine's processors, as 'cpu' is: what differs between
them is all that differs between plans.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from deploy.document import as_document
from deploy.errors import (
    ConfigError,
    Interrupted,
    MachineUnfit,
    MissingGpus,
    StateError,
    SwapFailed,
)
from deploy.planning import lmcache_server
from deploy.planning.inventory import Inventory
from deploy.runtime.home import Home
from deploy.runtime.interrupts import interrupt_once
from deploy.runtime.process import sessions
from deploy.workflows import plan_swap, swap
from deploy.workflows.check import require_answers
from deploy.workflows.down import stop_stack
from deploy.workflows.drain import engine_views
from deploy.workflows.facts import facts_here
from deploy.workflows.plan_swap import PlanSwap
from deploy.workflows.prepare import Facts, prepare
from deploy.workflows.running import require_stack
from deploy.workflows.saved_state import write_state
from deploy.workflows.software import Programs
from deploy.workflows.status import StackStatus, stack_status
from deploy.workflows.swap import SwapResult, SwapTo, roll_back, swap_stack
from tests.unit.conftest import SOUND_HOST
from tests.unit.stack.cases import machine_with
from tests.unit.workflows.conftest import Lab, opened

ENGINES = {"producer-0", "consumer-0"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Say what `swap` finds on this machine: the programs that are here, and GPUs."""

    def has(inventory: Inventory, **programs: str) -> None:
        def facts(spec: Any, home: Any, report: Any) -> Facts:
            found = facts_here(spec.model_copy(update={"vendor": "cpu"}), home, report)
            software = found.software
            assert isinstance(software, Programs)
            return replace(
                found,
                inventory=inventory,
                vendor=spec.vendor,
                software=replace(software, **programs),
            )

        monkeypatch.setattr(swap, "facts_here", facts)

    has(replace(machine_with("cuda", 0, 1), cpus=2))
    return has


@pytest.fixture
def up(lab: Lab, machine: Callable[..., None]) -> Lab:
    """A lab in which a stack is up, and was checked."""
    lab.up(lab.spec(model="tiny"), check=True)
    return lab


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The same for tests after which the stack serves as before, its engines' pids apart."""
    with opened(tmp_path_factory.mktemp("lasting")) as made:
        made.up(made.spec(model="tiny"), check=True)
        yield made
        stop_stack(made.home, "pdkit", made.lines.append)


def pids(lab: Lab) -> dict[str, int]:
    return {name: rec.pid for name, rec in require_stack(lab.home, "pdkit").state.services.items()}


def seed(lab: Lab) -> str:
    """Return the seed with which a consumer really runs."""
    running = require_stack(lab.home, "pdkit")
    return running.launcher.environment(running.state.services["consumer-0"])["PYTHONHASHSEED"]


def little_shared_memory(lab: Lab) -> Home:
    """The lab's home on a machine with 100 MiB of shared memory."""
    return replace(lab.home, host=replace(SOUND_HOST, shm_free_mib=100))


def keys(lab: Lab) -> set[bytes]:
    files = lab.home.stack("pdkit")
    password = (files.secrets_dir / "redis_password").read_text().strip()
    with redis.Redis(unix_socket_path=f"{files.temp_dir}/redis.sock", password=password) as client:
        return set(client.keys())


def swapped(lab: Lab, report: Callable[[str], None] | None = None) -> SwapResult:
    return swap_stack(lab.home, "pdkit", SwapTo("cuda"), report or lab.lines.append)


def went(lab: Lab) -> list[tuple[str, str, str]]:
    history = stack_status(lab.home, "pdkit").history
    return [(one.action, one.vendor, one.outcome) for one in history]


def serves(lab: Lab, vendor: str) -> StackStatus:
    require_answers(require_stack(lab.home, "pdkit"))  # the router notices what was started
    status = stack_status(lab.home, "pdkit")
    assert status.healthy, [(s.name, s.condition) for s in status.services]
    assert status.vendor == vendor
    return status


def test_a_swap_to_another_vendor_and_back_keeps_redis_and_router(up: Lab) -> None:
    up.ask()
    before, first_seed, first_keys = pids(up), seed(up), keys(up)
    assert first_keys
    result = swapped(up)
    assert (result.before, result.after) == (("cpu", ""), ("cuda", ""))
    assert result.kept == ("redis", "router")
    assert 0 < result.down_s <= result.seconds
    assert result.check is not None
    assert result.check.passed
    assert json.loads(json.dumps(as_document(result)))["check"]["passed"] is True
    serves(up, "cuda")
    after = pids(up)
    assert {name for name in after if after[name] != before[name]} == ENGINES
    assert went(up) == [("swap", "cuda", "good"), ("up", "cpu", "good")]
    assert seed(up) != first_seed, "it never reads the other vendor's bytes"
    assert first_keys <= keys(up), "which are still there"
    assert all(b"canary-" in key for key in keys(up) - first_keys), "the check's own are not"

    again = swapped(up)
    assert (again.check, again.kept) == (None, ("redis", "producer-0", "consumer-0", "router"))
    assert pids(up) == after, "it ran that already"
    assert not [line for line in up.lines if "already runs" in line], "the answer says so"

    roll_back(up.home, "pdkit", report=up.lines.append)
    serves(up, "cpu")
    assert seed(up) == first_seed, "and finds its own bytes again"
    assert pids(up)["redis"] == before["redis"]
    forth = roll_back(up.home, "pdkit", report=up.lines.append)
    assert (forth.before[0], forth.after[0]) == ("cpu", "cuda")
    serves(up, "cuda")
    assert [vendor for _, vendor, _ in went(up)] == ["cuda", "cpu", "cuda", "cpu"]

    assert stop_stack(up.home, "pdkit", up.lines.append).was_up
    assert up.pids() == []
    assert up.files() == []


@pytest.fixture
def dying_python(tmp_path: Path) -> str:
    """An interpreter in which no engine can be started."""
    file = tmp_path / "python-without-kernels"
    file.write_text("#!/bin/sh\necho 'RuntimeError: no kernel image is available'; exit 1\n")
    file.chmod(0o755)
    return str(file)


def test_an_engine_that_dies_puts_the_old_stack_back(
    lasting: Lab, machine: Callable[..., None], dying_python: str
) -> None:
    before, first_seed, first_keys = pids(lasting), seed(lasting), keys(lasting)
    machine(machine_with("cuda", 0, 1), engine_python=dying_python)
    with pytest.raises(SwapFailed) as caught:
        swapped(lasting)
    error = caught.value
    assert error.exit_code == 4
    assert "cuda failed: " in error.message
    assert "no kernel image is available" in error.message
    assert "the previous stack (cpu) serves again" in error.message
    assert error.details[-1] == "RuntimeError: no kernel image is available"
    assert "deploy status" in error.hint
    status = serves(lasting, "cpu")
    assert went(lasting)[0] == ("swap", "cuda", "failed"), "the latest, though not the present"
    assert "no kernel image" in status.history[0].reason
    assert pids(lasting)["redis"] == before["redis"]
    assert keys(lasting) >= first_keys
    assert seed(lasting) == first_seed
    assert len(lasting.pids()) == 4, "and nothing of the new one is left"
    with pytest.raises(StateError, match="no earlier plan that passed"):
        roll_back(lasting.home, "pdkit", report=lasting.lines.append)


@pytest.mark.usefixtures("machine")
def test_a_check_that_fails_puts_the_old_stack_back(lasting: Lab) -> None:
    lasting.faults.write_text("consumer:wrong-kv")
    with pytest.raises(SwapFailed, match="answers differ"):
        swapped(lasting)
    lasting.faults.unlink()
    serves(lasting, "cpu")
    assert went(lasting)[0] == ("swap", "cuda", "failed"), "the latest, though not the present"


def test_a_failed_swap_whose_old_stack_fails_too_says_so(
    up: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_DIES", "consumer")
    with pytest.raises(SwapFailed, match="could not be restored either") as caught:
        swapped(up)
    assert "deploy up" in caught.value.hint
    status = stack_status(up.home, "pdkit")
    assert (status.vendor, status.healthy) == ("cpu", False)
    monkeypatch.delenv("STAND_IN_DIES")
    up.up(require_stack(up.home, "pdkit").prepared.spec, check=True)
    serves(up, "cpu")
    assert len(up.pids()) == 4


@pytest.mark.parametrize("moment", ["stopping", "started producer", "started router"])
def test_an_interrupt_puts_the_old_stack_back(
    lasting: Lab, machine: Callable[..., None], moment: str
) -> None:
    first_seed = seed(lasting)
    coming = [moment]

    def report(line: str) -> None:
        if coming and line.startswith(coming[0]):
            coming.clear()
            raise KeyboardInterrupt

    if moment == "started router":  # which is kept, unless the interpreter is another one
        software = require_stack(lasting.home, "pdkit").prepared.facts.software
        assert isinstance(software, Programs)
        link = lasting.folder / "python"
        link.write_text(f'#!/bin/sh\nexec "{software.engine_python}" "$@"\n')
        link.chmod(0o755)
        machine(machine_with("cuda", 0, 1), engine_python=str(link))
    with pytest.raises(Interrupted, match="the previous stack serves again"):
        swapped(lasting, report)
    status = serves(lasting, "cpu")
    assert seed(lasting) == first_seed
    assert went(lasting)[0] == ("swap", "cuda", "failed"), "the latest, though not the present"
    assert status.history[0].reason == "interrupted"
    assert len(lasting.pids()) == 4


class TestRequestsInFlight:
    @pytest.fixture
    def asked(self, up: Lab, eventually: Callable[..., None]) -> Iterator[Future[int]]:
        """The status of a request that the consumer does not answer for now."""
        running = require_stack(up.home, "pdkit")
        up.faults.write_text("consumer:waits")

        def ask() -> int:
            body = {"prompt": list(range(100)), "max_tokens": 2}
            url = f"{running.stack.front.url}/v1/completions"
            return httpx.post(url, json=body, timeout=60, trust_env=False).status_code

        def has_it() -> bool:
            views = {view.name: view for view in engine_views(running) or ()}
            return bool(views and views["consumer-0"].busy)

        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            eventually(has_it)
            yield asking
            up.faults.unlink(missing_ok=True)

    def test_they_are_answered_first(self, up: Lab, asked: Future[int]) -> None:
        def report(line: str) -> None:
            if line == "consumer-0 is drained; it has 1 requests left":
                up.faults.unlink()

        swapped(up, report)
        assert asked.result(20) == 200
        assert serves(up, "cuda")

    def test_a_swap_does_not_wait_for_them_forever(
        self, up: Lab, asked: Future[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plan_swap, "_DRAIN_S", 0.5)
        told: list[str] = []

        def report(line: str) -> None:
            told.append(line)
            if line.startswith("warning: consumer-0 still has"):
                up.faults.unlink()

        swapped(up, report)
        wanted = "warning: consumer-0 still has 1 requests after 0.5 s; it is stopped anyway"
        assert wanted in told
        assert asked.result(20) in (200, 503)
        assert serves(up, "cuda")


@pytest.mark.usefixtures("machine")
def test_ctrl_c_while_the_old_engines_stop(lasting: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stopped to the end first, or they would be in the way of those put back."""
    real = sessions.end_sessions
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    hit: list[bool] = []

    def interrupted(ended: Any, *, grace_s: float) -> None:
        if not hit:
            hit.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        real(ended, grace_s=grace_s)

    monkeypatch.setattr(sessions, "end_sessions", interrupted)
    interrupt_once()
    try:
        with pytest.raises(Interrupted):
            swapped(lasting)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    serves(lasting, "cpu")
    assert len(lasting.pids()) == 4


@pytest.mark.usefixtures("machine")
class TestKilledInTheMiddle:
    """By signal 9, after which the command puts nothing back."""

    @staticmethod
    def plan_swap(lab: Lab, vendor: str = "cuda") -> PlanSwap:
        running = require_stack(lab.home, "pdkit")
        spec = running.prepared.spec.model_copy(update={"vendor": vendor})
        target = prepare(spec, lab.home, swap.facts_here(spec, lab.home, lab.lines.append))
        return PlanSwap(lab.home, running, target, "swap", lab.lines.append)

    def test_after_the_old_engines_were_stopped(self, lasting: Lab) -> None:
        spec = require_stack(lasting.home, "pdkit").prepared.spec
        first_seed = seed(lasting)
        self.plan_swap(lasting)._stop_old()
        status = stack_status(lasting.home, "pdkit")
        assert (status.vendor, status.healthy) == ("cuda", False)
        by_name = {service.name: service.condition for service in status.services}
        assert by_name == {
            "redis": "ready", "producer-0": "not started", "consumer-0": "not started",
            "router": by_name["router"],
        }  # fmt: skip
        assert went(lasting)[0] == ("swap", "cuda", "unchecked")
        assert ("up", "cpu", "good") in went(lasting)[1:]
        with pytest.raises(StateError) as caught:
            lasting.up(spec)
        assert caught.value.hint == "deploy swap cpu", "`up` does not undo it by itself"
        roll_back(lasting.home, "pdkit", report=lasting.lines.append)
        serves(lasting, "cpu")
        assert seed(lasting) == first_seed
        assert len(lasting.pids()) == 4

    def test_while_the_old_engines_stopped(self, lasting: Lab) -> None:
        """The state still says the old plan, and `up` starts again what is missing of it."""
        running = require_stack(lasting.home, "pdkit")
        records = {name: running.state.services[name] for name in ENGINES}
        running.launcher.stop(records, grace_s=5)
        status = stack_status(lasting.home, "pdkit")
        assert (status.vendor, status.healthy) == ("cpu", False)
        lasting.up(running.prepared.spec)
        serves(lasting, "cpu")

    def test_after_the_new_engines_were_started(self, lasting: Lab) -> None:
        killed = self.plan_swap(lasting)
        killed._stop_old()
        killed._start.run(killed._start.missing())
        serves(lasting, "cuda")
        assert went(lasting)[0] == ("swap", "cuda", "unchecked")
        roll_back(lasting.home, "pdkit", report=lasting.lines.append)
        serves(lasting, "cpu")
        with pytest.raises(StateError, match="no earlier plan that passed"):
            roll_back(lasting.home, "pdkit", report=lasting.lines.append)  # it was never checked


def test_an_impossible_swap_is_refused_before_anything_is_stopped(
    lasting: Lab, machine: Callable[..., None]
) -> None:
    before, past = pids(lasting), went(lasting)
    with pytest.raises(ConfigError, match="--image: the stack runs as processes"):
        swap_stack(lasting.home, "pdkit", SwapTo(image="mine/vllm:1"), lasting.lines.append)
    machine(machine_with("rocm", 0))
    with pytest.raises(MissingGpus, match="--vendor cuda, none found") as caught:
        swapped(lasting)
    assert "deploy up" not in caught.value.hint, "it would be refused: the stack is up"
    assert caught.value.hint.startswith("deploy status --name pdkit")
    assert pids(lasting) == before
    serves(lasting, "cpu")
    assert went(lasting) == past


MP = SwapTo(connector="lmcache-mp")


def test_a_swap_to_another_connector_and_back_keeps_redis(lab: Lab) -> None:
    lab.up(lab.spec(model="tiny"), check=True)
    before, first_seed = pids(lab), seed(lab)
    result = swap_stack(lab.home, "pdkit", MP, lab.lines.append)
    assert result.connectors == ("lmcache", "lmcache-mp")
    assert result.before == result.after == ("cpu", "")
    assert result.kept == ("redis", "router")
    assert result.check is not None
    assert result.check.passed
    assert pids(lab).keys() - before.keys() == {"kv-server"}
    assert seed(lab) != first_seed, "it never reads the other connector's bytes"
    assert [line for line in lab.lines if line.startswith("lmcache.staging_gib is left out")]
    assert serves(lab, "cpu").history[0].ran_on == "cpu, lmcache-mp"

    again = swap_stack(lab.home, "pdkit", MP, lab.lines.append)
    assert (again.check, again.connectors) == (None, ("lmcache-mp", "lmcache-mp"))

    back = swap_stack(lab.home, "pdkit", SwapTo(connector="lmcache"), lab.lines.append)
    assert back.connectors == ("lmcache-mp", "lmcache")
    assert pids(lab).keys() == before.keys(), "the server has gone"
    assert seed(lab) == first_seed
    assert pids(lab)["redis"] == before["redis"]
    back_again = pids(lab)
    with pytest.raises(MachineUnfit, match="/dev/shm has 100"):
        roll_back(little_shared_memory(lab), "pdkit", report=lab.lines.append)
    assert pids(lab) == back_again, "refused before anything is stopped"
    roll_back(lab.home, "pdkit", report=lab.lines.append)
    assert "kv-server" in pids(lab)
    serves(lab, "cpu")


def test_a_connector_that_fails_its_check_puts_the_old_stack_back(lasting: Lab) -> None:
    before, first_seed = pids(lasting), seed(lasting)
    state = require_stack(lasting.home, "pdkit").state
    write_state(lasting.home.stack("pdkit").state_file, replace(state, up_extra_s=1.5))
    lasting.faults.write_text("consumer:wrong-kv")
    try:
        with pytest.raises(
            SwapFailed, match=r"^cpu, lmcache-mp failed: .*answers differ"
        ) as caught:
            swap_stack(lasting.home, "pdkit", MP, lasting.lines.append)
    finally:
        lasting.faults.unlink()
    assert "the previous stack (cpu) serves again" in caught.value.message
    assert pids(lasting).keys() == before.keys()
    assert seed(lasting) == first_seed
    assert len(lasting.pids()) == 4, "the server has gone"
    assert require_stack(lasting.home, "pdkit").state.up_extra_s is None, "engines started again"
    assert serves(lasting, "cpu").history[0].ran_on == "cpu, lmcache-mp"


def test_a_connector_that_cannot_be_is_refused_before_anything_is_stopped(
    lasting: Lab, machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, past = pids(lasting), went(lasting)
    unsupported = (("port", True, "in this test"),)
    with monkeypatch.context() as patched:
        patched.setattr(lmcache_server, "_unsupported", lambda _: unsupported)
        with pytest.raises(ConfigError, match="does not work with lmcache-mp") as refused:
            swap_stack(lasting.home, "pdkit", MP, lasting.lines.append)
    assert refused.value.hint == "deploy status --name pdkit: the stack keeps running unchanged"
    with pytest.raises(MachineUnfit, match="/dev/shm has 100 MiB free"):
        swap_stack(little_shared_memory(lasting), "pdkit", MP, lasting.lines.append)
    assert pids(lasting) == before
    assert went(lasting) == past


def test_a_swap_without_a_stack_is_an_error(lab: Lab) -> None:
    with pytest.raises(StateError, match="no stack 'pdkit'"):
        swapped(lab)
    with pytest.raises(StateError, match="no stack 'pdkit'"):
        roll_back(lab.home, "pdkit", report=lab.lines.append)


def test_rollback_without_a_past(lasting: Lab) -> None:
    before = pids(lasting)
    with pytest.raises(StateError, match="no earlier plan that passed") as caught:
        roll_back(lasting.home, "pdkit", report=lasting.lines.append)
    assert "deploy status" in caught.value.hint
    assert pids(lasting) == before


@pytest.mark.usefixtures("machine")
def test_a_stack_that_was_never_checked_is_not_in_the_history(lab: Lab) -> None:
    lab.up(lab.spec(model="tiny"), check=False)
    swapped(lab)
    with pytest.raises(StateError, match="no earlier plan that passed"):
        roll_back(lab.home, "pdkit", report=lab.lines.append)
    TestKilledInTheMiddle.plan_swap(lab, "cpu")._stop_old()
    assert stop_stack(lab.home, "pdkit", lab.lines.append).was_up
    assert lab.pids() == [], "also what a killed swap left"
    assert lab.files() == []
