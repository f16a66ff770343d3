"""Weights replaced in the folder of a running stack's model: no engine is started with them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.config.spec import StackSpec
from deploy.errors import ModelChanged, StackUnhealthy, StateError, SwapFailed
from deploy.runtime.process.sessions import end_sessions
from deploy.tiny_model import ensure_tiny_model
from deploy.workflows import plan_swap, swap
from deploy.workflows.down import stop_stack
from deploy.workflows.drain import DrainOptions
from deploy.workflows.restart import restart_services
from deploy.workflows.running import require_stack
from deploy.workflows.status import stack_status
from deploy.workflows.swap import SwapTo, roll_back, swap_stack
from deploy.workflows.up import bring_up, resumed_spec
from tests.unit.workflows.conftest import Lab

FORCED = DrainOptions(wait_s=20, force=True)
WEIGHTS = "model.safetensors"


@dataclass
class Served:
    """A stack whose model is in a folder."""

    lab: Lab
    folder: Path
    spec: StackSpec

    def up(self) -> None:
        self.lab.up(self.spec, check=True)

    def replace(self, name: str = WEIGHTS) -> None:
        """Replace a file by another of equal size and time, as image layers have them."""
        file = self.folder / name
        new = file.with_name("downloading")
        new.write_bytes(file.read_bytes()[::-1])
        at = file.stat().st_mtime_ns
        os.utime(new, ns=(at, at))
        new.replace(file)

    def pids(self) -> dict[str, int]:
        records = require_stack(self.lab.home, "pdkit").state.services
        return {name: record.pid for name, record in records.items()}

    def seed(self) -> str:
        running = require_stack(self.lab.home, "pdkit")
        record = running.state.services["consumer-0"]
        return running.launcher.environment(record)["PYTHONHASHSEED"]

    def kill(self, name: str) -> None:
        record = require_stack(self.lab.home, "pdkit").state.services[name]
        end_sessions({record.pid: record.start_time}, grace_s=0)

    def restart(self, service: str | None) -> None:
        restart_services(self.lab.home, "pdkit", service, self.lab.lines.append, FORCED)

    def resume(self) -> None:
        spec = resumed_spec(self.lab.home, "pdkit", required=True)
        assert spec is not None
        bring_up(spec, self.lab.home, self.lab.lines.append, check=False, resumed=True)

    def serve_new(self) -> None:
        """Do what the hint says."""
        swap_stack(self.lab.home, "pdkit", SwapTo("cpu"), self.lab.lines.append)

    def refuses(self, act: Callable[[], None], changed: str = f"{WEIGHTS} was replaced") -> None:
        """Check that an act is refused, by name and with the way on, and that nothing changes."""
        before = self.pids()
        with pytest.raises(ModelChanged) as caught:
            act()
        assert str(self.folder) in caught.value.message and changed in caught.value.message
        assert caught.value.hint.startswith("deploy swap cpu --name pdkit")
        assert self.pids() == before
        running = require_stack(self.lab.home, "pdkit")
        assert {one.name for one in running.stopped()} <= {"consumer-0"}


@pytest.fixture
def served(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    folder = tmp_path / "My-Model"
    made = Served(lab, folder, lab.spec(model=str(folder)))
    shutil.copytree(ensure_tiny_model(lab.home.models), folder)
    made.up()
    facts = require_stack(lab.home, "pdkit").prepared.facts
    monkeypatch.setattr(swap, "facts_here", lambda *_: facts)
    yield made
    stop_stack(lab.home, "pdkit", lab.lines.append)


@pytest.fixture
def adapted(lab: Lab, tmp_path: Path) -> Iterator[Served]:
    """The tiny model with an adapter, which is in a folder."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"adapter")
    args = ["--enable-lora", "--lora-modules", f"one={folder}"]
    made = Served(lab, folder, lab.spec(engine={"args": args}))
    made.up()
    yield made
    stop_stack(lab.home, "pdkit", lab.lines.append)


def test_other_files_that_arguments_name_are_refused_and_have_other_keys(adapted: Served) -> None:
    file = adapted.folder / "adapter_model.safetensors"
    adapted.up()
    adapted.restart("consumer-0")
    seed = adapted.seed()
    adapted.replace(file.name)
    replaced = f"files that engine.args names have changed .*{file} was replaced"
    for act in (lambda: adapted.restart(None), adapted.up):
        with pytest.raises(ModelChanged, match=replaced) as caught:
            act()
        assert caught.value.hint.startswith("deploy swap cpu --name pdkit")
    (warning,) = stack_status(adapted.lab.home, "pdkit").warnings
    assert str(file) in warning and "none is started" in warning
    stop_stack(adapted.lab.home, "pdkit", adapted.lab.lines.append)
    adapted.up()
    assert adapted.seed() != seed


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "tokenizer.json"])
def test_a_restart_is_refused_while_the_old_weights_still_serve(served: Served, name: str) -> None:
    served.replace(name)
    served.refuses(lambda: served.restart(None), f"{name} was replaced")
    served.refuses(lambda: served.restart("consumer-0"), f"{name} was replaced")
    served.restart("router")  # which has no weights


def test_weights_that_are_gone_or_new_are_named(served: Served) -> None:
    shutil.copy(served.folder / WEIGHTS, served.folder / "consolidated.safetensors")
    served.refuses(lambda: served.restart(None), "consolidated.safetensors is new")
    (served.folder / "consolidated.safetensors").unlink()
    served.restart("consumer-0")
    (served.folder / WEIGHTS).rename(served.folder / "elsewhere")
    served.refuses(lambda: served.restart(None), f"{WEIGHTS} is gone")


def test_what_no_engine_reads_as_weights_may_change(served: Served) -> None:
    (served.folder / "README.md").write_text("new")
    served.replace("generation_config.json")
    (served.folder / "original").mkdir()
    served.restart("consumer-0")


def test_the_same_bytes_may_be_touched_and_put_there_again(served: Served) -> None:
    copy = shutil.copytree(served.folder, served.folder.with_name("copy"))
    shutil.rmtree(served.folder)
    copy.rename(served.folder)
    for file in served.folder.iterdir():
        os.utime(file, (1, 1))
    seed = served.seed()
    served.up()
    served.restart(None)
    assert served.seed() == seed, "and find the KV that they stored"
    assert not stack_status(served.lab.home, "pdkit").warnings


def test_a_file_that_cannot_be_read_any_more_is_named(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Path, *more: int, **others: int) -> int:
        if Path(path).name == WEIGHTS:
            raise OSError(5, "Input/output error")
        return opened(path, *more, **others)

    monkeypatch.setattr(os, "open", refuse)
    served.refuses(lambda: served.restart(None), f"{WEIGHTS} cannot be read: Input/output error")


def test_up_names_the_file_and_does_not_start_what_is_missing(served: Served) -> None:
    served.kill("consumer-0")
    served.replace()
    served.refuses(served.up)
    served.refuses(served.resume)


def test_up_by_a_relative_path_names_the_file_too(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(served.folder.parent)
    served.spec = served.spec.model_copy(update={"model": f"./{served.folder.name}"})
    served.up()
    served.replace()
    served.refuses(served.up)


def test_the_hinted_command_serves_the_new_weights_under_other_keys(served: Served) -> None:
    seed, before = served.seed(), served.pids()
    served.replace()
    (warning,) = stack_status(served.lab.home, "pdkit").warnings
    assert "none is started" in warning
    served.serve_new()
    assert served.seed() != seed
    after = served.pids()
    assert after["redis"] == before["redis"] and after["consumer-0"] != before["consumer-0"]
    status = stack_status(served.lab.home, "pdkit")
    assert status.healthy and not status.warnings
    served.restart("consumer-0")


def test_a_rollback_to_weights_that_are_gone_is_refused(served: Served) -> None:
    served.replace()
    served.serve_new()
    before, seed = served.pids(), served.seed()
    with pytest.raises(ModelChanged, match=f"last good plan .*{WEIGHTS} was replaced") as caught:
        roll_back(served.lab.home, "pdkit", report=served.lab.lines.append)
    assert caught.value.hint.startswith("put the old files back")
    assert "swap" not in caught.value.hint, "the stack serves the new files already"
    assert (served.pids(), served.seed()) == (before, seed)


def test_old_weights_that_are_gone_are_not_restored_after_a_failed_swap(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.replace()

    def fails(*_: object) -> None:
        raise StackUnhealthy("the check failed")

    with monkeypatch.context() as patched:
        patched.setattr(plan_swap, "check_running", fails)
        with pytest.raises(SwapFailed, match="could not be restored either") as caught:
            served.serve_new()
    assert caught.value.hint.startswith("deploy swap cpu --name pdkit")
    lines = served.lab.lines
    (warned,) = (at for at, line in enumerate(lines) if "cannot be restored" in line)
    assert warned < next(at for at, line in enumerate(lines) if line.startswith("stopping"))
    served.serve_new()
    assert stack_status(served.lab.home, "pdkit").healthy


@pytest.mark.parametrize("kept", ["times", "nothing"])
def test_a_stack_of_an_earlier_version_is_restarted_with_the_present_content(
    served: Served, kept: str
) -> None:
    """That version kept times of files, an older one nothing. Engines get new keys, once."""
    file, seed = served.lab.home.stack("pdkit").state_file, served.seed()
    state = json.loads(file.read_text())
    times = [[name, size, 1_700_000_000_000_000_000] for name, size, _ in state["model"]["files"]]
    state["model"]["files"] = times
    if kept == "nothing":
        del state["model"]["files"]
    state["model"]["version"] = state["fingerprint"] = "by an older rule"
    file.write_text(json.dumps(state))
    assert not any("weights" in one for one in stack_status(served.lab.home, "pdkit").warnings)
    with pytest.raises(StateError, match="another version of pdkit"):
        served.up()
    served.restart("consumer-0")
    assert served.seed() == seed, "by content, as the test's own version had it"
    served.replace()
    served.refuses(lambda: served.restart(None))
