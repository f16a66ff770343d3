"""`deploy status --watch` at the boundary: streams, ends and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.cli.main import main
from deploy.errors import StateError
from deploy.metrics.frame import Frame
from deploy.metrics.watching import next_frame
from tests.conftest import Ended, plain_environ
from tests.unit.metrics.readings import reading, service

Result = tuple[int, str, str]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PDKIT_HOME", str(tmp_path / "home"))

    def call(*arguments: str) -> Result:
        code = main(("status", "--watch", "--interval", "0.2", "--name", "demo", *arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def frames(*conditions: str) -> Iterator[Frame]:
    memory = None
    for second, condition in enumerate(conditions):
        made = service("consumer-0", condition=condition, pid=0)
        memory, frame = next_frame(memory, reading(second, made))
        yield frame


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a watch see these conditions of an engine, one a frame, and then meet an exception."""

    def set_seen(*conditions: str, then: BaseException | None = None) -> None:
        coming = frames(*conditions)

        class Scripted:
            def __init__(self, *_: object) -> None:
                pass

            def frame(self) -> Frame:
                try:
                    return next(coming)
                except StopIteration:
                    raise then or AssertionError("a frame too many") from None

        monkeypatch.setattr("deploy.workflows.watch.StackWatch", Scripted)

    return set_seen


class TestFrames:
    def test_frames_are_printed_one_after_the_other(
        self, run: Callable[..., Result], seen: Callable
    ) -> None:
        seen("ready", "ready")
        code, out, err = run("--count", "2")
        assert (code, err) == (0, "")
        assert out.count("stack 'demo'") == 2
        assert "\x1b" not in out

    def test_the_last_frame_decides_the_exit_code(
        self, run: Callable[..., Result], seen: Callable
    ) -> None:
        seen("ready", "exited")
        code, out, err = run("--count", "2")
        assert code == 4
        assert "consumer-0: has exited" in out
        assert err == "error: not ready: consumer-0\ntry: deploy up --resume --name demo\n"
        seen("exited", "ready")
        assert run("--count", "2")[0] == 0

    def test_ctrl_c_ends_a_watch_with_0(self, run: Callable[..., Result], seen: Callable) -> None:
        seen("exited", then=KeyboardInterrupt())
        code, out, err = run()
        assert (code, err) == (0, "")
        assert "consumer-0  exited" in out

    def test_an_error_in_the_first_frame_ends_the_watch(
        self, run: Callable[..., Result], seen: Callable
    ) -> None:
        seen(then=StateError("it is broken", hint="deploy down"))
        assert run() == (2, "", "error: it is broken\ntry: deploy down\n")


class TestJson:
    def test_each_frame_is_one_json_line(self, run: Callable[..., Result], seen: Callable) -> None:
        seen("ready", "exited")
        code, out, err = run("--count", "2", "--json")
        assert (code, err) == (4, "")
        first, second = map(json.loads, out.splitlines())
        assert (first["command"], first["status"], first["exit_code"]) == ("status", "ok", 0)
        assert first["data"]["events"] == []
        assert (second["status"], second["exit_code"]) == ("error", 4)
        assert second["errors"][0]["code"] == "stack_unhealthy"
        assert second["data"]["events"][0]["kind"] == "exited"

    def test_an_error_is_a_line_as_well(self, run: Callable[..., Result], seen: Callable) -> None:
        seen(then=StateError("it is broken"))
        code, out, _ = run("--json")
        (line,) = out.splitlines()
        assert (code, json.loads(line)["errors"][0]["code"]) == (2, "state")

    def test_ctrl_c_ends_json_output_with_0(
        self, run: Callable[..., Result], seen: Callable
    ) -> None:
        seen("exited", then=KeyboardInterrupt())
        code, out, _ = run("--json")
        assert code == 0
        assert len(out.splitlines()) == 1


class TestOptions:
    @pytest.mark.parametrize("seconds", ["0", "0.1", "-1", "nan", "inf", "3601"])
    def test_an_absurd_interval_is_refused(
        self, run: Callable[..., Result], seen: Callable, seconds: str
    ) -> None:
        seen()
        code, out, err = run("--interval", seconds)
        assert (code, out) == (2, "")
        assert f"--interval {float(seconds):g}" in err
        assert "try: deploy status --watch --interval 2" in err

    def test_a_count_of_zero_is_refused(self, run: Callable[..., Result], seen: Callable) -> None:
        seen()
        code, _, err = run("--count", "0")
        assert code == 2
        assert "--count" in err

    @pytest.mark.usefixtures("run")
    @pytest.mark.parametrize("option", ["--interval", "--count"])
    def test_interval_and_count_need_watch(
        self, option: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(("status", option, "3")) == 2
        assert "--interval and --count need --watch" in capsys.readouterr().err


def test_a_watch_waits_for_a_stack(deploy: Callable[..., Ended], tmp_path: Path) -> None:
    ended = deploy(
        "status", "--watch", "--count", "2", "--interval", "0.2", cwd=tmp_path, home=tmp_path / "h"
    )
    assert (ended.code, ended.stderr) == (0, "")
    assert ended.stdout.count("not up; waiting for it") == 2


def test_a_closed_pipe_ends_a_watch(tmp_path: Path) -> None:
    """As `deploy status --watch --json | head -1` does."""
    with subprocess.Popen(
        (sys.executable, "-m", "deploy", "status", "--watch", "--interval", "0.2", "--json"),
        cwd=tmp_path,
        env=plain_environ(PDKIT_HOME=str(tmp_path / "home")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["data"]["up"] is False
        process.stdout.close()
        assert process.wait(20) == 0
        assert process.stderr.read() == ""
