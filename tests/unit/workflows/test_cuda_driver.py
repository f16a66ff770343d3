"""A driver for CUDA 12, and engines that are built for CUDA 13: refused before anything starts."""

from __future__ import annotations

import os

import pytest

from deploy.config.spec import StackSpec
from deploy.errors import MachineUnfit
from deploy.workflows import up
from deploy.workflows.running import find_stack
from tests.unit.workflows.conftest import SMALL, Lab

SMI = """#!/bin/sh
case "$1" in
  *memory.total*) echo "0, GPU-0, NVIDIA H100 80GB HBM3, 81559, 9.0, Disabled" ;;
  *memory.used*) echo "0, GPU-0, 400, 570.86.15, 0000:00:00.0" ;;
  *compute-apps*) ;;
  *) echo "CUDA Version: 12.8" ;;
esac
"""


@pytest.fixture(autouse=True)
def older_driver(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = lab.folder / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join((str(lab.folder), os.environ["PATH"])))


def spec(lab: Lab, **engine: object) -> StackSpec:
    return lab.spec(vendor="cuda", gpus=1, model="tiny", engine={**SMALL["engine"], **engine})


def test_up_names_both_and_what_to_do(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    monkeypatch.setattr(up, "require_fixes", lambda *given: tried.append(given))
    with pytest.raises(MachineUnfit) as caught:
        lab.up(spec(lab))
    assert caught.value.message.startswith(
        "NVIDIA driver 570.86.15 runs CUDA up to 12.8, but the engines are built for CUDA 13.0"
    )
    assert caught.value.hint.startswith("install driver 580 or newer")
    assert caught.value.exit_code == 3
    assert not tried, "fixes may fail where no GPU is found"
    assert lab.pids() == []
    assert find_stack(lab.home, "pdkit") is None


def test_compatibility_libraries_are_warned_of(lab: Lab) -> None:
    lab.up(spec(lab, env={"VLLM_ENABLE_CUDA_COMPATIBILITY": "1"}))
    (warning,) = (line for line in lab.lines if "[gpu.driver]" in line)
    assert "NVIDIA's compatibility libraries" in warning
