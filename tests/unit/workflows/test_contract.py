"""What commands on a stack print with `--json`, and its state file, fit the documented schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import ValidationError
from typer.main import get_command

from deploy.benchmark.report import files
from deploy.benchmark.results import write_result
from deploy.benchmark.sweep import write_sweep
from deploy.cli import main as main_module
from deploy.cli.commands import whole_app
from deploy.output.contract import COMMANDS
from deploy.runtime.home import Home
from deploy.workflows import catalog_images
from tests.conftest import REPO
from tests.contract import SCHEMAS, validate_state, validated
from tests.unit.benchmark.samples import repeat, result
from tests.unit.benchmark.test_compare_sweeps import done
from tests.unit.benchmark.test_sweep import times
from tests.unit.workflows.conftest import Lab

Run = Callable[..., dict[str, Any]]
# Command → the file with the test that validates its success, if not this one.
ELSEWHERE = {
    "init": "tests/unit/cli/test_init.py",
    "export kubernetes": "tests/unit/cli/test_export.py",
    "bench sweep": "tests/unit/cli/test_bench_sweep.py",
    "doctor": "tests/e2e/test_doctor.py",
    "swap": "tests/e2e/docker/test_swap.py",
    "rollback": "tests/e2e/docker/test_swap.py",
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr(main_module, "interrupt_once", lambda: None)

    def command(home: Home, *arguments: str) -> dict[str, Any]:
        monkeypatch.setattr("deploy.runtime.home.Home.from_environ", lambda: home)
        main_module.main([*arguments, "--json"])
        return validated(json.loads(capsys.readouterr().out))

    return command


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("status", "--watch", "--count", "1"),
        ("check",),
        ("check", "--quick", "--repeat", "2"),
        ("logs",),
        ("fixes",),
        ("bench", "--input-tokens", "100", "--output-tokens", "2", "--requests", "2",
         "--repeats", "1"),
    ],
)  # fmt: skip
def test_output_of_a_running_stack_matches_its_schema(
    run: Run,
    served: Lab,
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run(served.home, *arguments)
    assert found["data"] is not None
    assert found["command"] == arguments[0]


def test_output_of_a_failed_check_matches_its_schema(
    run: Run, served: Lab, with_faults: Callable[..., None]
) -> None:
    with_faults("producer:stores-nothing")
    found = run(served.home, "check", "--quick")
    assert found["data"]["diagnosis"] and found["errors"]


def test_output_from_up_to_down_matches_its_schema(run: Run, lab: Lab, tmp_path: Path) -> None:
    spec = lab.spec()
    file = tmp_path / "deploy.yaml"
    file.write_text(spec.model_dump_json(exclude_unset=True, exclude={"name"}))
    assert run(lab.home, "up", "-f", str(file))["data"]["check"]["passed"]
    validate_state(json.loads(lab.home.stack("pdkit").state_file.read_text()))
    assert run(lab.home, "status")["data"]["healthy"]
    assert run(lab.home, "down")["data"]["was_up"]
    assert run(lab.home, "status")["data"]["up"] is False


def test_output_of_drain_and_restart_matches_its_schema(run: Run, served: Lab) -> None:
    assert run(served.home, "drain", "consumer-1")["data"]["drained"] is True
    assert run(served.home, "undrain", "consumer-1")["data"]["drained"] is False
    assert list(run(served.home, "restart", "consumer-1")["data"]["seconds"]) == ["consumer-1"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--vendor", "cpu", "--runtime", "compose"),
        ("render", "--vendor", "cpu", "-o", "out"),
        ("images", "list"),
        ("images", "pull"),
        ("images", "build", "router", "--base", "mine:1"),
    ],
)
def test_output_without_a_stack_matches_its_schema(
    run: Run, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("answering_engine", "pull_image", "build"):
        monkeypatch.setattr(catalog_images, name, lambda *_, **__: None)
    monkeypatch.setattr(catalog_images, "engine_answers", lambda: False)
    found = run(Home(tmp_path, tmp_path), *arguments)
    assert " ".join(arguments).startswith(found["command"])
    assert all(found["data"].values()) or found["command"] == "plan"


def test_output_of_benchmarks_matches_its_schema(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = SimpleNamespace(javascript_bundle=str, vegalite_to_png=lambda *_, **__: b"")
    monkeypatch.setattr(files, "_library", lambda: library)
    home = Home(tmp_path, tmp_path)
    aggregated = _measured(tmp_path / "first", "2a", 2.0, seed=0)
    split = _measured(tmp_path / "second", "1p1d", 3.0, seed=0)
    unlike = _measured(tmp_path / "third", "1p1d", 3.0, seed=1)
    compared = run(home, "bench", "compare", aggregated, unlike, "--anyway")["data"]
    assert compared["unlike"] and compared["points"][0]["metrics"][0]["ratio"]
    report = run(home, "bench", "report", aggregated, split, "-o", str(tmp_path / "out"))["data"]
    assert report["ratio"] and report["files"]


def test_of_two_sweeps(run: Run, tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_sweep(tmp_path / name, done({"2a": times(10), "1p1d": times(9)}))
    folders = (str(tmp_path / "first"), str(tmp_path / "second" / "sweep.json"))
    compared = run(Home(tmp_path, tmp_path), "bench", "compare", *folders)["data"]
    assert [one["topology"] for one in compared["topologies"]] == ["2a", "1p1d"]
    one_run = _measured(tmp_path / "run", "2a", 2.0, seed=0)
    mixed = run(Home(tmp_path, tmp_path), "bench", "compare", one_run, folders[0])
    assert mixed["errors"][0]["message"] == f"{folders[0]} is a sweep, and the other one is not"


def _measured(folder: Path, topology: str, goodput: float, *, seed: int) -> str:
    """Write a result of a topology, and return its folder."""
    repeats = [repeat(at, goodput_per_s=goodput + at / 100) for at in range(6)]
    stack = {**result().stack.model_dump(), "topology": topology, "redis": topology == "1p1d"}
    folder.mkdir()
    write_result(folder, result(repeats=repeats, stack=stack, seed=seed))
    return str(folder)


def _is_run(command: str) -> bool:
    """Tell whether the file that is to test a command names it as tests type it."""
    file = Path(__file__) if command not in ELSEWHERE else REPO / ELSEWHERE[command]
    return '"{}"'.format('", "'.join(command.split())) in file.read_text(encoding="utf-8")


def _commands(group: Any, before: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        if inner is None or command.invoke_without_command:
            yield f"{before}{name}"
        if inner is not None:
            yield from _commands(command, f"{before}{name} ")


class TestSchemas:
    def test_every_command_has_one(self) -> None:
        assert set(_commands(get_command(whole_app()))) == set(COMMANDS)
        wanted = {f"{name.replace(' ', '-')}.json" for name in COMMANDS} | {"state.json"}
        assert {file.name for file in SCHEMAS.iterdir()} == wanted

    def test_a_test_runs_every_command(self) -> None:
        assert [command for command in COMMANDS if not _is_run(command)] == []
        assert ELSEWHERE.keys() <= COMMANDS.keys()
        assert not _is_run("bench of nothing")

    @pytest.mark.parametrize("change", [{"new": 1}, {"services": None}, {"healthy": "yes"}])
    def test_other_documents_do_not_fit(
        self, run: Run, served: Lab, change: dict[str, Any]
    ) -> None:
        found = run(served.home, "status")
        with pytest.raises(ValidationError):
            validated({**found, "data": {**found["data"], **change}})

    def test_a_field_that_is_missing_does_not_fit(self, run: Run, served: Lab) -> None:
        found = run(served.home, "status")
        del found["data"]["warnings"]
        with pytest.raises(ValidationError):
            validated(found)

    def test_a_command_without_a_schema_is_noticed(self) -> None:
        with pytest.raises(AssertionError):
            validated({"command": "brew", "data": {}, "errors": []})
