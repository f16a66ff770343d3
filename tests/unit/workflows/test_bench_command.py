"""`deploy bench` as a command: its envelope, its exit codes, and Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.cli import main as main_module
from deploy.runtime.engine_api import ApiError
from deploy.workflows.bench import passes
from tests.unit.workflows.conftest import Lab

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(served: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr(main_module, "interrupt_once", lambda: None)
    monkeypatch.setattr("deploy.runtime.home.Home.from_environ", lambda: served.home)

    def bench(*options: str) -> tuple[int, str, str]:
        small = ("--input-tokens", "100", "--output-tokens", "2", "--requests", "2")
        code = main_module.main(["bench", *small, *options])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return bench


def test_bench_prints_text_and_progress(run: Run, tmp_path: Path) -> None:
    code, out, err = run("--repeats", "2", "--out", str(tmp_path))
    assert code == 0
    assert f"Result: {tmp_path}" in out
    assert "warming up with 6 requests" in err
    assert "repeat 2 of 2, about " in err


def test_bench_prints_json(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("--repeats", "1", "--slo", "ttft=9s", "--json", "--out", str(tmp_path))
    envelope = json.loads(out)
    assert (code, envelope["command"], envelope["status"]) == (0, "bench", "ok")
    assert envelope["data"]["folder"] == str(tmp_path)
    assert envelope["data"]["result"]["repeats"][0]["within_slo"] == 1


def test_bench_fails_without_answers(
    run: Run, tmp_path: Path, with_faults: Callable[..., None]
) -> None:
    with_faults("consumer:fails")
    code, out, err = run("--warmup", "0", "--repeats", "1", "--out", str(tmp_path))
    assert code == 1
    assert "Failed, 2 requests: HTTP 500" in out
    assert "error: no request was answered: HTTP 500" in err


def test_stack_that_dies_keeps_the_finished_repeats(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, reads = passes.settled_pages, iter(range(1, 10))

    def settled_pages(*args: Any) -> Any:
        if next(reads) == 2:
            raise ApiError(0, "no answer from consumer-0")
        return pages(*args)

    monkeypatch.setattr(passes, "settled_pages", settled_pages)
    code, _, err = run("--out", str(tmp_path))
    assert code == 4
    assert "an engine stopped answering during the benchmark: no answer from consumer-0" in err
    assert f"  | the finished repeats are in {tmp_path}" in err


def interrupted_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Press Ctrl-C in this pass."""
    load, turns = passes.run_load, iter(range(1, 10))

    def run_load(*args: Any, **named: Any) -> Any:
        if "repeat" in named and next(turns) == number:
            raise KeyboardInterrupt
        return load(*args, **named)

    monkeypatch.setattr(passes, "run_load", run_load)


def test_interrupt_names_the_finished_repeats(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_at(monkeypatch, 2)
    code, out, err = run("--out", str(tmp_path))
    assert (code, out) == (130, "")
    assert f"error: interrupted; the finished repeats are in {tmp_path}" in err


def test_interrupt_of_the_first_repeat_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_at(monkeypatch, 1)
    folder = tmp_path / "result"
    code, _, err = run("--out", str(folder))
    assert (code, folder.exists()) == (130, False)
    assert "error: interrupted\n" in err
