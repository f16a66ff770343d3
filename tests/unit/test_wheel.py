"""The built wheel itself: what is in it, and that it works far from any checkout.

A pure wheel is installed by unpacking it, so no pip is needed here; building takes hatchling.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from deploy import __version__
from tests.conftest import Ended, build_wheel, plain_environ, run_python
from tests.unit.stack.cases import VENDORS

OPTIONS = ("--topology", "1p3d", "--layerwise")
COMMANDS = {
    "plan": OPTIONS,
    "render": OPTIONS,
    **{f"render --runtime compose --vendor {vendor}": OPTIONS for vendor in VENDORS},
    "export kubernetes -o exported": OPTIONS,
    "images list": (),
}
ENTRY_POINT = """
import sys
from importlib.metadata import entry_points
(point,) = entry_points(group="console_scripts", name="deploy")
command = point.load()
"""
CHECKOUT = "from cli import main as command\n"
RUN_ENTRY_POINT = ENTRY_POINT + "raise SystemExit(command(sys.argv[1:]))"
RUN_ALL = """
import contextlib, io, json, sys
said = []
for argv in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command(argv)
    said.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def run(python_path: Path, cwd: Path, *argv: str) -> Ended:
    """Run Python in a folder, with modules from `python_path`."""
    environ = plain_environ(PDKIT_HOME="/nonexistent/pdkit-home")
    environ["PYTHONPATH"] = str(python_path)
    return run_python(*argv, cwd=cwd, env=environ)


def test_the_wheel_is_named_after_the_version(wheel: Path) -> None:
    assert wheel.name == f"prefill_decode_kit-{__version__}-py3-none-any.whl"


@pytest.mark.parametrize("folder", ["compose", "images", "lmcache_configs", "scripts"])
def test_data_folders_are_in_it(folder: str, names: set[str], repo: Path) -> None:
    expected = {
        f"deploy/_data/{path.relative_to(repo)}"
        for path in (repo / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected, f"{folder} is empty in the checkout"
    assert expected <= names


def test_the_wheel_has_every_module(names: set[str], repo: Path) -> None:
    modules = {str(path.relative_to(repo)) for path in (repo / "deploy").rglob("*.py")}
    assert "deploy/connector/pdkit_connector/connector.py" in modules
    assert modules <= names


def test_nothing_else_is_in_it(names: set[str]) -> None:
    assert {name.split("/")[0] for name in names} == {
        "deploy",
        f"prefill_decode_kit-{__version__}.dist-info",
    }
    assert not [
        name for name in names if "cache__" in name or "/." in name or name.endswith(".pyc")
    ]


def test_licence_and_command_are_in_it(site: Path) -> None:
    info = site / f"prefill_decode_kit-{__version__}.dist-info"
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()
    points = ConfigParser()
    points.read(info / "entry_points.txt")
    assert dict(points["console_scripts"]) == {"deploy": "deploy.cli.main:main"}
    assert "Requires-Python: >=3.10" in (info / "METADATA").read_text()


@pytest.fixture(scope="module")
def all_said(
    site: Path, repo: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Ended, Ended]]:
    """What the wheel and the checkout say to each command, each in one process for all."""
    folder = tmp_path_factory.mktemp("folder")
    installed = run_all(site, folder, ENTRY_POINT)
    checkout = run_all(repo, folder, CHECKOUT)
    return dict(zip(COMMANDS, zip(installed, checkout, strict=True), strict=True))


def run_all(python_path: Path, cwd: Path, command: str) -> list[Ended]:
    """Run all commands in a process that has modules from `python_path`."""
    argvs = [[*words.split(), *options] for words, options in COMMANDS.items()]
    ended = run(python_path, cwd, "-c", command + RUN_ALL, json.dumps(argvs))
    assert ended.code == 0, ended.stderr
    return [Ended(*said) for said in json.loads(ended.stdout)]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_wheel_does_what_the_checkout_does(
    command: str, all_said: dict[str, tuple[Ended, Ended]], site: Path, repo: Path
) -> None:
    installed, checkout = all_said[command]
    assert (installed.code, installed.stderr) == (0, "")
    assert (checkout.code, checkout.stderr) == (0, "")
    assert installed.stdout
    assert same_place(installed.stdout, site) == same_place(checkout.stdout, repo)


@pytest.mark.parametrize("place", ["wheel", "checkout"])
def test_wheel_and_checkout_run_as_programs(
    place: str,
    all_said: dict[str, tuple[Ended, Ended]],
    site: Path,
    repo: Path,
    tmp_path: Path,
) -> None:
    """As users start them: a process a command."""
    argv = ("plan", *OPTIONS)
    if place == "wheel":
        ended, expected = run(site, tmp_path, "-c", RUN_ENTRY_POINT, *argv), all_said["plan"][0]
    else:
        ended, expected = run(repo, tmp_path, str(repo / "cli.py"), *argv), all_said["plan"][1]
    assert ended == expected


def same_place(text: str, root: Path) -> str:
    """Take out where the kit lies, and the digests of services that mount its connector."""
    text = text.replace(sys.executable, "PYTHON").replace(str(root), "ROOT")
    # YAML quotes a digest that happens to have no letter, or to look like a number in another way.
    return re.sub(r"(dev.pdkit.service): '?\w+'?", r"\1", text)


@pytest.mark.parametrize("digest", ["24f1655254677010", "'2481655254677010'", "'12345678901234e5'"])
def test_digests_are_taken_out(digest: str, tmp_path: Path) -> None:
    text = f"dev.pdkit.service: {digest}\nimage: {tmp_path}/x\n"
    assert same_place(text, tmp_path) == "dev.pdkit.service\nimage: ROOT/x\n"


def test_the_wheel_works_without_the_checkout(site: Path, repo: Path, tmp_path: Path) -> None:
    ended = run(site, tmp_path, "-m", "deploy", "render", "--json")
    assert ended.code == 0
    # The interpreter may lie in the checkout; nothing else of it may be named.
    assert str(repo) not in ended.stdout.replace(sys.executable, "python")
    assert f"{site}/deploy/connector" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_command_tells_its_version(site: Path, tmp_path: Path) -> None:
    ended = run(site, tmp_path, "-c", RUN_ENTRY_POINT, "--version")
    assert (ended.code, ended.stdout) == (0, f"pdkit {__version__}\n")


@pytest.mark.parametrize(
    ("part", "argv", "said"),
    [
        ("router", ("-m", "pdkit_router", "--help"), "--producer"),
        ("connector", ("-m", "pdkit_connector", "--help"), "--json"),
    ],
)
def test_what_enters_the_services_is_a_distribution_of_its_own(
    part: str, argv: tuple[str, ...], said: str, repo: Path, tmp_path: Path
) -> None:
    """Its wheel has all of its modules and nothing of the kit, and runs without it."""
    built = build_wheel(repo / "deploy" / part, tmp_path)
    assert built.name == f"prefill_decode_kit_{part}-{__version__}-py3-none-any.whl"
    folder = repo / "deploy" / part
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path / "site")
        in_it = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert in_it == {str(file.relative_to(folder)) for file in folder.rglob("*.py")}
    ended = run(tmp_path / "site", tmp_path, *argv)
    assert ended.code == 0 and said in ended.stdout, ended.stderr
