"""Engines that start beside others need room on their GPUs, as those of a new stack do."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from deploy.config.spec import StackSpec
from deploy.errors import MachineUnfit
from deploy.runtime.process.launcher import ProcessLauncher
from deploy.runtime.process.sessions import has_ended
from deploy.workflows import up
from deploy.workflows.doctor import examine
from deploy.workflows.running import require_stack
from tests.unit.workflows.conftest import Lab

# What is taken of each GPU, in MiB, is read from a file beside it.
SMI = """#!/bin/sh
used() { sed -n "$(($1 + 1))p" "$(dirname "$0")/used"; }
case "$1" in
  *memory.total*) for i in 0 1; do echo "$i, GPU-$i, NVIDIA H100, 81559, 9.0, Disabled"; done ;;
  *memory.used*) for i in 0 1; do echo "$i, GPU-$i, $(used $i), 580.65, 0000:0$i:00.0"; done ;;
  *compute-apps*) ;;
  *) echo "CUDA Version: 13.0" ;;
esac
"""

Use = Callable[[int, int], None]


@pytest.fixture
def use(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Use:
    """Give the machine two GPUs, and say what of each is taken."""
    tool = lab.folder / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join((str(lab.folder), os.environ["PATH"])))

    def take(first_mib: int, second_mib: int) -> None:
        (lab.folder / "used").write_text(f"{first_mib}\n{second_mib}\n")

    take(400, 400)
    return take


@pytest.fixture
def half(lab: Lab, use: Use, eventually: Callable[..., None]) -> StackSpec:
    """Start a stack, end its consumer on GPU 1, and let the producer hold GPU 0."""
    spec = lab.spec(vendor="cuda", gpus=2, model="tiny")  # no hub is asked
    lab.up(spec)
    pid = require_stack(lab.home, "pdkit").state.services["consumer-0"].pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: has_ended(psutil.Process(pid)))
    use(75000, 400)
    return spec


def test_an_engine_is_refused_if_its_gpu_is_in_use(lab: Lab, half: StackSpec, use: Use) -> None:
    before = lab.pids()
    use(75000, 60000)
    with pytest.raises(MachineUnfit, match="GPU 1 has 21559 of 81559 MiB free") as caught:
        lab.up(half)
    assert caught.value.exit_code == 3
    assert lab.pids() == before, "what runs goes on"
    found = examine(half, lab.home, lab.lines.append)
    assert [one.message for one in found.failed] == [caught.value.message.partition(": ")[0]]
    use(75000, 400)
    assert set(lab.up(half).started) == {"consumer-0"}


def test_running_engines_do_not_count_against_themselves(
    lab: Lab, half: StackSpec, use: Use
) -> None:
    assert set(lab.up(half).started) == {"consumer-0"}
    use(75000, 75000)
    assert lab.up(half).started == {}


def test_a_dead_engine_is_cleaned_up_before_its_gpu_is_checked(
    lab: Lab, half: StackSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[object] = []
    stop, look = ProcessLauncher.stop, up.require_gpus_beside

    def stopped(self: ProcessLauncher, records: dict[str, object], *, grace_s: float) -> None:
        steps.append(sorted(records))
        stop(self, records, grace_s=grace_s)

    def looked(*args: object) -> None:
        steps.append("look")
        look(*args)

    monkeypatch.setattr(ProcessLauncher, "stop", stopped)
    monkeypatch.setattr(up, "require_gpus_beside", looked)
    lab.up(half)
    assert steps[:2] == [["consumer-0"], "look"]
