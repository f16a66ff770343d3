"""The built wheel itself: what is in it, and that it works far from any checkout.

A pure wheel is installed by unpacking it, so no pip is needed here; building takes hatchling.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from deploy import __version__
from tests.conftest import Ended, plain_environ

RUN_ENTRY_POINT = """
import sys
from importlib.metadata import entry_points
(command,) = entry_points(group="console_scripts", name="deploy")
raise SystemExit(command.load()(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def run(python_path: Path, cwd: Path, *argv: str) -> Ended:
    """Run Python in a folder, with modules from `python_path`."""
    environ = plain_environ(PDKIT_HOME="/nonexistent/pdkit-home")
    environ["PYTHONPATH"] = str(python_path)
    done = subprocess.run(
        (sys.executable, *argv),
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def test_its_name(wheel: Path) -> None:
    assert wheel.name == f"pdkit-{__version__}-py3-none-any.whl"


@pytest.mark.parametrize("folder", ["compose", "images", "lmcache_configs", "scripts"])
def test_data_folders_are_in_it(folder: str, names: set[str], repo: Path) -> None:
    expected = {
        f"deploy/_data/{path.relative_to(repo)}"
        for path in (repo / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected, f"{folder} is empty in the checkout"
    assert expected <= names


def test_all_modules_are_in_it(names: set[str], repo: Path) -> None:
    modules = {str(path.relative_to(repo)) for path in (repo / "deploy").rglob("*.py")}
    assert "deploy/connector/pdkit_connector/connector.py" in modules
    assert modules <= names


def test_nothing_else_is_in_it(names: set[str]) -> None:
    assert {name.split("/")[0] for name in names} == {"deploy", f"pdkit-{__version__}.dist-info"}
    assert not [
        name for name in names if "cache__" in name or "/." in name or name.endswith(".pyc")
    ]


def test_licence_and_command_are_in_it(site: Path) -> None:
    info = site / f"pdkit-{__version__}.dist-info"
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()
    points = ConfigParser()
    points.read(info / "entry_points.txt")
    assert dict(points["console_scripts"]) == {"deploy": "deploy.cli.main:main"}
    assert "Requires-Python: >=3.10" in (info / "METADATA").read_text()


@pytest.mark.parametrize(
    "command",
    [
        "plan",
        "render",
        *(f"render --runtime compose --vendor {vendor}" for vendor in ("cuda", "rocm", "cpu")),
        "images list",
    ],
)
def test_it_does_what_the_checkout_does(
    command: str, site: Path, repo: Path, tmp_path: Path
) -> None:
    options = () if command.startswith("images") else ("--topology", "1p3d", "--layerwise")
    arguments = (*command.split(), *options)
    installed = run(site, tmp_path, "-c", RUN_ENTRY_POINT, *arguments)
    checkout = run(repo, tmp_path, str(repo / "cli.py"), *arguments)
    assert (installed.code, installed.stderr) == (0, "")
    assert (checkout.code, checkout.stderr) == (0, "")
    assert same_place(installed.stdout, site) == same_place(checkout.stdout, repo)


def same_place(text: str, root: Path) -> str:
    """Take out where the kit lies, and the digests of services that mount its connector."""
    text = text.replace(sys.executable, "PYTHON").replace(str(root), "ROOT")
    # YAML quotes a digest that happens to have no letter, or to look like a number in another way.
    return re.sub(r"(dev.pdkit.service): '?\w+'?", r"\1", text)


@pytest.mark.parametrize("digest", ["24f1655254677010", "'2481655254677010'", "'12345678901234e5'"])
def test_digests_are_taken_out(digest: str, tmp_path: Path) -> None:
    text = f"dev.pdkit.service: {digest}\nimage: {tmp_path}/x\n"
    assert same_place(text, tmp_path) == "dev.pdkit.service\nimage: ROOT/x\n"


def test_it_does_not_lean_on_the_checkout(site: Path, repo: Path, tmp_path: Path) -> None:
    ended = run(site, tmp_path, "-m", "deploy", "render", "--json")
    assert ended.code == 0
    # The interpreter may lie in the checkout; nothing else of it may be named.
    assert str(repo) not in ended.stdout.replace(sys.executable, "python")
    assert f"{site}/deploy/connector" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_command_tells_its_version(site: Path, tmp_path: Path) -> None:
    ended = run(site, tmp_path, "-c", RUN_ENTRY_POINT, "--version")
    assert (ended.code, ended.stdout) == (0, f"pdkit {__version__}\n")
