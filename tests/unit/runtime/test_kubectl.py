"""The `kubectl` command: what it may say, and how long it may take."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from deploy.errors import MachineError, PdkitError
from deploy.runtime import kubectl as module
from deploy.runtime.kubectl import Kubectl

MIB = 1 << 20


@pytest.fixture
def plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Kubectl]:
    """Return what puts a program in the place of kubectl."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def put(program: str) -> Kubectl:
        (tmp_path / "kubectl").write_text(f"#!{sys.executable} -IS\n{program}")
        (tmp_path / "kubectl").chmod(0o755)
        return Kubectl()

    return put


def test_kubectl_gets_input_and_returns_output(plays: Callable[[str], Kubectl]) -> None:
    echo = plays("import sys\nsys.stdout.write(sys.stdin.read())")
    assert echo.run("apply", text="é" * MIB) == "é" * MIB


def test_input_that_is_not_read_is_not_an_error(plays: Callable[[str], Kubectl]) -> None:
    assert plays("print('done')").run("apply", text="x" * MIB) == "done\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_the_output_of_kubectl_is_limited(stream: str, plays: Callable[[str], Kubectl]) -> None:
    endless = plays(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)")
    with pytest.raises(MachineError, match="kubectl exec was stopped: it printed more than 1 MiB"):
        endless.run("exec", most_bytes=MIB)


def test_a_kubectl_that_hangs_is_ended_with_its_children(
    plays: Callable[[str], Kubectl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LIMIT_S", 0.2)
    waits = plays("import subprocess\nsubprocess.run(('sleep', '1000'))")
    with pytest.raises(MachineError, match=r"kubectl get was stopped: it timed out after 0\.2 s"):
        waits.run("get")


def test_an_error_of_kubectl_is_one_short_line(plays: Callable[[str], Kubectl]) -> None:
    fails = plays("import sys\nsys.exit('x\\n' + 'context ' * 100_000)")
    with pytest.raises(PdkitError) as caught:
        fails.run("exec")
    assert len(caught.value.message) < 600
    assert caught.value.details == ("x",)


def test_a_line_without_end_comes_in_pieces(
    plays: Callable[[str], Kubectl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", MIB)
    lines = plays("while True: print('x' * 1000, end='')").lines("logs", within_s=60)
    assert next(lines) == "x" * MIB
    lines.close()


def test_lines_end_with_their_time(
    plays: Callable[[str], Kubectl], monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = mock.Mock()
    monkeypatch.setattr(module.threading, "Timer", timer)
    waits = plays("import time\nprint('one', flush=True)\ntime.sleep(1000)")
    lines = waits.lines("logs", within_s=5)
    assert next(lines) == "one"
    within_s, end, given = timer.call_args.args
    end(*given)  # as the timer does
    assert (within_s, list(lines)) == (5, [])


def test_lines_of_a_command_that_fails(plays: Callable[[str], Kubectl]) -> None:
    lines = plays("import sys\nprint('one')\nsys.exit('a riddle')").lines("logs", within_s=60)
    assert next(lines) == "one"
    with pytest.raises(PdkitError, match="kubectl logs: a riddle"):
        next(lines)
