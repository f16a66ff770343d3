"""What commands on a stack print with `--json`, and its state file, fit the documented schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import ValidationError
from typer.main import get_command

from deploy.cli import main as main_module
from deploy.cli.commands import whole_app
from deploy.output.contract import COMMANDS
from deploy.runtime.home import Home
from tests.contract import SCHEMAS, validate_state, validated
from tests.unit.workflows.conftest import Lab

Run = Callable[..., dict[str, Any]]


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
        ("patches",),
        ("bench", "--input-tokens", "100", "--output-tokens", "2", "--requests", "2",
         "--repeats", "1"),
    ],
)  # fmt: skip
def test_on_a_stack_that_is_up(
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


def test_of_a_failed_check(run: Run, served: Lab, with_faults: Callable[..., None]) -> None:
    with_faults("producer:stores-nothing")
    found = run(served.home, "check", "--quick")
    assert found["data"]["diagnosis"] and found["errors"]


def test_from_the_start_to_the_end(run: Run, lab: Lab, tmp_path: Path) -> None:
    spec = lab.spec()
    file = tmp_path / "deploy.yaml"
    file.write_text(spec.model_dump_json(exclude_unset=True, exclude={"name"}))
    assert run(lab.home, "up", "-f", str(file))["data"]["check"]["passed"]
    validate_state(json.loads(lab.home.stack("pdkit").state_file.read_text()))
    assert run(lab.home, "status")["data"]["healthy"]
    assert run(lab.home, "down")["data"]["was_up"]
    assert run(lab.home, "status")["data"]["up"] is False


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
