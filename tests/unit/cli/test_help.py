"""What `--help` says, and what the command line builds and starts for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from typer.main import get_command

from deploy import __version__
from deploy.cli.app import app
from deploy.cli.commands import _MODULES, app_for, whole_app
from deploy.config.spec import VendorChoice
from tests.conftest import Ended, plain_environ
from tests.unit.docker_stand_in import hanging_engine

IMAGES = ("images", "images list", "images build", "images pull")
COMMANDS = (
    "", "up", "plan", "render", "status", "logs", "down", "check", "swap", "rollback", "fixes",
    "restart", "drain", "undrain",
    "doctor", "init", "bench", "bench compare", "bench report", "bench sweep", "export",
    "export kubernetes", *IMAGES,
)  # fmt: skip


@pytest.fixture(scope="module")
def shown(
    deploy_here: Callable[..., Ended], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ended]:
    """Run `deploy COMMAND --help` for every command."""
    folder = tmp_path_factory.mktemp("folder")

    def run(command: str) -> Ended:
        return deploy_here(*command.split(), "--help", cwd=folder, home=folder / "home")

    return {command: run(command) for command in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_as_in_the_golden(
    command: str, shown: dict[str, Ended], golden: Callable[[str, str], None]
) -> None:
    ended = shown[command]
    assert (ended.code, ended.stderr) == (0, "")
    golden(f"help/{command.replace(' ', '-') or 'deploy'}.txt", ended.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_has_no_colours(command: str, shown: dict[str, Ended]) -> None:
    assert max(map(len, shown[command].stdout.splitlines())) <= 80
    assert "\x1b" not in shown[command].stdout


def cut_short(listed: str) -> list[str]:
    """Return the lines of a list of commands that click cut off."""
    return [line for line in listed.partition("Commands:")[2].splitlines() if "..." in line]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_description_of_a_command_is_cut_short(command: str, shown: dict[str, Ended]) -> None:
    assert cut_short(shown[command].stdout) == []


def test_a_description_that_is_cut_short_is_found() -> None:
    group = typer.Typer(rich_markup_mode=None)
    group.command("a", help="Short.")(lambda: None)
    group.command("b", help=f"Too {'long ' * 20}")(lambda: None)
    with typer.Context(get_command(group), terminal_width=80) as context:
        (found,) = cut_short(context.get_help())
    assert found.startswith("  b  Too long")


def test_help_names_every_vendor(shown: dict[str, Ended]) -> None:
    of_vendor = shown["plan"].stdout.partition("--vendor")[2].partition("--runtime")[0]
    assert {one for one in get_args(VendorChoice) if one not in of_vendor} == set()


def test_every_command_is_tested() -> None:
    def names(group: Any, before: str = "") -> Iterator[str]:
        for name, command in getattr(group, "commands", {}).items():
            yield before + name
            yield from names(command, f"{before}{name} ")

    assert set(names(get_command(whole_app()))) == set(COMMANDS) - {""}


def test_a_typed_command_is_built_without_the_others() -> None:
    """Typer inspects the options of all that it is given."""
    narrowed = app_for(["plan", "--json"])
    assert [getattr(one.callback, "__name__", "") for one in narrowed.registered_commands] == [
        "plan"
    ]
    assert len(app.registered_commands) > 1, "which app_for leaves as it is"


def test_a_typed_command_is_imported_without_the_others(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from deploy.cli.commands import app_for\n"
        "app_for(['doctor'])\n"
        "print(*[one for one in sys.modules if 'cli.commands.' in one], file=sys.stderr)"
    )
    assert told_by(program, tmp_path) == "deploy.cli.commands.doctor\n"


def test_each_command_is_in_the_module_that_is_imported_for_it() -> None:
    found = {
        one.callback.__name__: one.callback.__module__.rpartition(".")[2]
        for one in whole_app().registered_commands
        if one.callback
    }
    assert list(found.items()) == list(_MODULES.items()), "and in the order of the help"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["images", "list"], ["bench"], ["plam"]])
def test_other_arguments_build_every_command(arguments: list[str]) -> None:
    assert app_for(arguments) is app


def test_patches_is_another_name_of_fixes(
    deploy: Callable[..., Ended], shown: dict[str, Ended], tmp_path: Path
) -> None:
    assert deploy("patches", "--help", cwd=tmp_path, home=tmp_path / "home") == shown["fixes"]
    ended = deploy("patches", "--image", "none:1", "--json", cwd=tmp_path, home=tmp_path / "home")
    assert '"command": "fixes"' in ended.stdout


def test_help_is_shown_without_a_command(
    deploy: Callable[..., Ended], shown: dict[str, Ended], tmp_path: Path
) -> None:
    ended = deploy(cwd=tmp_path, home=tmp_path / "home")
    assert shown[""].stdout in ended.stdout + ended.stderr, "with its line breaks"
    assert ended.code == 2


def test_version_is_printed(deploy: Callable[..., Ended], tmp_path: Path) -> None:
    ended = deploy("--version", cwd=tmp_path, home=tmp_path / "home")
    assert (ended.code, ended.stdout, ended.stderr) == (0, f"pdkit {__version__}\n", "")


def test_the_compose_plugin_is_asked_once(deploy: Callable[..., Ended], tmp_path: Path) -> None:
    """Its start takes as long as the rest of a plan."""
    plugin, command = tmp_path / "cli-plugins" / "docker-compose", tmp_path / "docker"
    plugin.parent.mkdir()
    plugin.write_text("a plugin")
    command.write_text(f"#!/bin/sh\necho asked >>{tmp_path}/asked\necho 2.26.1\n")
    command.chmod(0o755)
    with hanging_engine(tmp_path / "s", info=b'{"SecurityOptions": []}') as address:
        for _ in range(2):
            ended = deploy(
                "plan",
                "--runtime=auto",
                cwd=tmp_path,
                home=tmp_path / "home",
                DOCKER_HOST=address,
                DOCKER_CONFIG=str(tmp_path),
                PATH=f"{tmp_path}:{os.environ['PATH']}",
            )
            assert ended.code == 0, ended
    assert (tmp_path / "asked").read_text() == "asked\n"


def told_by(program: str, folder: Path) -> str:
    """Run a Python program that must succeed; return what it writes to stderr."""
    done = subprocess.run(
        (sys.executable, "-c", program),
        env=plain_environ(),
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stderr
