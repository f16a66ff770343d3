"""`scripts/install`: its steps, what the system has to bring, and where Python 3.11 comes from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tomllib

from tests.unit.scripts.conftest import ROOT, Machine

_PYTHON = """
case $* in
*ensurepip*) [ -e "$STUB_STATE/venv" ] ;;
*libnuma*) [ -e "$STUB_STATE/numa" ] ;;
"-m venv"*) mkdir -p "$3/bin"; cp "$STUB_STATE/python" "$3/bin/python" ;;
"-m pip install"*)
    echo "pip $*" >>"$STUB_STATE/asked"
    cp "$STUB_STATE/uv" .uv/bin/uv
    ;;
-I*) exit "$(cat "$STUB_STATE/kit" 2>/dev/null || echo 0)" ;;
scripts/bytecode.py)
    echo bytecode >>"$STUB_STATE/asked"
    [ ! -e "$STUB_STATE/bytecode-fails" ]
    ;;
esac
"""
_UV = """
if [ "$1" = --version ]; then echo "uv 0.13.8 (stub)"; exit; fi
echo "uv $*" >>"$STUB_STATE/asked"
echo "${UV_PYTHON_DOWNLOADS:-} ${UV_PYTHON_CACHE_DIR:-}" >"$STUB_STATE/uv-$1"
case "$*" in
venv*)
    if [ -e "$STUB_STATE/no-3.11" ]; then echo "error: request failed" >&2; exit 2; fi
    mkdir -p .venv/bin
    cp "$STUB_STATE/python" .venv/bin/python
    ;;
*--editable*) cp "$STUB_STATE/kit-after" "$STUB_STATE/kit" 2>/dev/null || rm -f "$STUB_STATE/kit" ;;
*requirements.lock*)
    rm -f "$STUB_STATE/kit-after"
    case $* in *download.pytorch.org*) exit 0 ;; esac
    if [ -e "$STUB_STATE/no-torch" ]; then echo "no torch" >&2; exit 1; fi
    ;;
esac
"""
_APT = """
case $* in *-venv*) cp "$STUB_STATE/python" "$STUB_BIN/python3"; touch "$STUB_STATE/venv" ;; esac
case $* in *libnuma1*) touch "$STUB_STATE/numa" ;; esac
"""

PYTHON_311 = "uv venv --quiet --allow-existing --python 3.11 .venv"
LOCK = (
    "uv pip install --quiet --python .venv/bin/python --no-deps --require-hashes"
    " -r images/cpu/requirements.lock"
)
KIT = "uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable ."


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the scripts, and lock files of one line."""
    folder = tmp_path / "checkout"
    shutil.copytree(
        ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "images" / "cpu").mkdir(parents=True)
    (folder / "images" / "cpu" / "requirements.lock").write_text("torch==1\n")
    shutil.copy(ROOT / "images" / "cpu" / "uv.txt", folder / "images" / "cpu")
    (folder / "pyproject.toml").write_text("[project]\n")
    return folder


@pytest.fixture
def script(checkout: Path) -> Path:
    return checkout / "scripts" / "install"


@pytest.fixture
def bare(machine: Machine) -> Machine:
    """A machine without Python, whose apt has it."""
    machine.environ["STUB_BIN"] = str(machine.bin)
    for name, body in (("python", _PYTHON), ("uv", _UV)):
        machine.command(name, body)
        (machine.bin / name).rename(machine.state / name)
    (machine.state / "apt-get").write_text(_APT)
    return machine


@pytest.fixture
def ready(bare: Machine) -> Machine:
    """A machine with Python and libnuma."""
    shutil.copy(bare.state / "python", bare.bin / "python3")
    for name in ("venv", "numa"):
        (bare.state / name).touch()
    return bare


def made(checkout: Path) -> set[str]:
    return {path.name for path in checkout.iterdir()} & {".uv", ".venv"}


def test_test_tools_are_locked_as_the_project_pins_them() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert {"include-group": "docs"} in groups["test"]
    locks = {"test": "test-tools.lock", "docs": "test-tools.lock", "audit": "audit.lock"}
    for name, group in groups.items():
        locked = (ROOT / "scripts" / locks[name]).read_text().lower().splitlines()
        wanted = {f"{pin.lower()} \\" for pin in group if isinstance(pin, str)}
        assert wanted and wanted <= set(locked), "run scripts/lock"


class TestSteps:
    def test_install_steps_run_in_order(self, ready: Machine, script: Path) -> None:
        ended = ready.run(script)
        assert ended.returncode == 0, ended.stderr
        pip, *rest = ready.asked
        assert pip.startswith("pip -m pip install") and pip.endswith(
            "--require-hashes -r images/cpu/uv.txt"
        )
        assert rest == [PYTHON_311, LOCK, KIT, "bytecode"]

    def test_a_second_time_nothing(self, ready: Machine, script: Path) -> None:
        ready.run(script)
        assert (ready.run(script).returncode, ready.asked) == (0, [])

    @pytest.mark.parametrize("name", ["images/cpu/requirements.lock", "scripts/bytecode.py"])
    def test_changed_files_install_again(
        self, ready: Machine, script: Path, checkout: Path, name: str
    ) -> None:
        ready.run(script)
        (checkout / name).write_text("other\n")
        assert ready.run(script).returncode == 0
        assert ready.asked == [PYTHON_311, LOCK, KIT, "bytecode"]

    def test_test_tools_come_later(self, ready: Machine, script: Path) -> None:
        ready.run(script)
        ready.run(script, "--test")
        assert ready.asked == [
            "uv pip install --quiet --python .venv/bin/python --no-deps --require-hashes"
            " -r scripts/test-tools.lock"
        ]
        ready.run(script, "--test")
        assert ready.asked == []

    def test_a_copy_of_the_kit_gives_way_to_the_checkout(
        self, ready: Machine, script: Path
    ) -> None:
        """`pip install .` in .venv leaves a copy, which stays when the checkout changes."""
        ready.run(script)
        (ready.state / "kit").write_text("1\n")
        ended = ready.run(script)
        assert (ended.returncode, ready.asked) == (0, [f"{KIT} --reinstall"])
        assert ".venv runs another copy of the kit" in ended.stderr
        assert (ready.run(script).returncode, ready.asked) == (0, [])

    def test_engines_that_do_not_come_back_with_the_kit_are_installed_again(
        self, ready: Machine, script: Path
    ) -> None:
        """Such as after `python3 -m venv .venv` with another Python."""
        ready.run(script)
        for name in ("kit", "kit-after"):
            (ready.state / name).write_text("1\n")
        assert ready.run(script).returncode == 0
        assert ready.asked == [f"{KIT} --reinstall", PYTHON_311, LOCK, KIT, "bytecode"]
        assert (ready.run(script).returncode, ready.asked) == (0, [])

    @pytest.mark.parametrize("kind", ["environment", "link", "file"])
    def test_what_others_made_is_not_deleted(
        self, ready: Machine, script: Path, checkout: Path, kind: str
    ) -> None:
        mine = checkout / ("mine" if kind == "link" else ".venv")
        if kind == "file":
            mine.write_text("mine\n")
        else:
            (mine / "bin").mkdir(parents=True)
            (mine / "bin" / "activate").write_text("mine\n")
        if kind == "link":
            (checkout / ".venv").symlink_to("mine")
        ended = ready.run(script)
        assert (ended.returncode, ready.asked) == (3, [])
        assert "error: .venv exists, and this script did not make it" in ended.stderr
        assert "try: rm -rf .venv, then run this again" in ended.stderr
        kept = mine if kind == "file" else mine / "bin" / "activate"
        assert kept.read_text() == "mine\n"
        if kind == "environment":
            shutil.rmtree(mine)
            assert ready.run(script).returncode == 0

    def test_what_an_interrupted_run_left_is_made_anew(
        self, ready: Machine, script: Path, checkout: Path
    ) -> None:
        (ready.state / "no-torch").touch()
        uv = (ready.state / "uv").read_text()
        (ready.state / "uv").write_text(uv.replace("*download.pytorch.org*) exit 0", "*x*) exit 1"))
        assert ready.run(script).returncode == 3
        (checkout / ".venv" / "left").touch()
        (ready.state / "no-torch").unlink()
        assert ready.run(script).returncode == 0
        assert ready.asked == [PYTHON_311, LOCK, KIT, "bytecode"]
        assert not (checkout / ".venv" / "left").exists()
        assert not list(checkout.glob(".uv/old*"))

    def test_torch_from_its_own_index_where_nobody_else_has_it(
        self, ready: Machine, script: Path
    ) -> None:
        (ready.state / "no-torch").touch()
        assert ready.run(script).returncode == 0
        assert f"{LOCK} --extra-index-url https://download.pytorch.org/whl/cpu" in ready.asked[3]

    def test_a_failure_to_compile_bytecode_is_only_a_warning(
        self, ready: Machine, script: Path
    ) -> None:
        (ready.state / "bytecode-fails").touch()
        ended = ready.run(script)
        assert ended.returncode == 0
        assert "their first start takes longer" in ended.stderr
        assert (ready.run(script).returncode, ready.asked) == (0, [])


class TestSystemPackages:
    def test_root_gets_them(self, bare: Machine, script: Path) -> None:
        ended = bare.run(script)
        assert ended.returncode == 0, ended.stderr
        wanted = "apt-get install -y -qq --no-install-recommends python3-venv libnuma1"
        assert bare.asked[0] == wanted
        assert bare.asked[2:] == [PYTHON_311, LOCK, KIT, "bytecode"]

    @pytest.mark.parametrize(("gone", "package"), [("venv", "python3-venv"), ("numa", "libnuma1")])
    def test_only_missing_packages_are_installed(
        self, ready: Machine, script: Path, gone: str, package: str
    ) -> None:
        (ready.state / gone).unlink()
        assert ready.run(script).returncode == 0
        assert ready.asked[0] == f"apt-get install -y -qq --no-install-recommends {package}"

    def test_python_3_11_comes_first(self, ready: Machine, script: Path) -> None:
        (ready.bin / "python3").rename(ready.bin / "python3.11")
        assert ready.run(script).returncode == 0
        assert "apt-get" not in ready.asked[0]

    def test_another_python_where_3_11_makes_no_environments(
        self, ready: Machine, script: Path
    ) -> None:
        ready.command("python3.11", "exit 1")
        assert ready.run(script).returncode == 0
        assert "apt-get" not in ready.asked[0]

    def test_a_user_sees_which_packages(self, bare: Machine, script: Path, checkout: Path) -> None:
        bare.uid = 1000
        ended = bare.run(script)
        assert (ended.returncode, bare.asked, made(checkout)) == (3, [], set())
        assert "try: sudo apt-get install python3-venv libnuma1, then run this" in ended.stderr

    def test_nothing_is_fetched_with_a_wheelhouse(
        self, bare: Machine, script: Path, checkout: Path
    ) -> None:
        ended = bare.run(script, PDKIT_WHEELHOUSE=str(bare.folder))
        assert (ended.returncode, bare.asked, made(checkout)) == (3, [], set())

    def test_a_missing_network_is_an_error(
        self, bare: Machine, script: Path, checkout: Path
    ) -> None:
        (bare.state / "no-network").touch()
        ended = bare.run(script)
        assert (ended.returncode, bare.asked, made(checkout)) == (3, [], set())
        assert "error: apt-get update failed" in ended.stderr


class TestPython311:
    def test_uv_may_download_it(self, ready: Machine, script: Path) -> None:
        assert ready.run(script).returncode == 0
        assert (ready.state / "uv-venv").read_text().split() == []

    def test_the_distributions_own_comes_first(self, ready: Machine, script: Path) -> None:
        ready.command("system-python", "")
        system = str(ready.bin / "system-python")
        assert ready.run(script, PDKIT_SYSTEM_PYTHON=system).returncode == 0
        assert PYTHON_311.replace("3.11", system) in ready.asked

    def test_a_missing_python_3_11_is_an_error(self, ready: Machine, script: Path) -> None:
        (ready.state / "no-3.11").touch()
        for _ in range(2):
            ended = ready.run(script)
            assert ended.returncode == 3
            assert "error: there is no Python 3.11" in ended.stderr
            assert "try: UV_PYTHON_INSTALL_MIRROR=URL" in ended.stderr
            assert LOCK not in ready.asked

    def test_wheelhouse_without_one(self, ready: Machine, script: Path) -> None:
        assert ready.run(script, PDKIT_WHEELHOUSE=str(ready.folder)).returncode == 0
        assert (ready.state / "uv-venv").read_text().split() == ["never"]

    def test_wheelhouse_with_one(self, ready: Machine, script: Path) -> None:
        (ready.folder / "python").mkdir()
        assert ready.run(script, PDKIT_WHEELHOUSE=str(ready.folder)).returncode == 0
        wanted = ["automatic", str(ready.folder / "python")]
        assert (ready.state / "uv-venv").read_text().split() == wanted


class TestQuickstart:
    @pytest.mark.parametrize("inherited", [{}, {"PYTHONDONTWRITEBYTECODE": "1"}])
    def test_installs_then_starts(
        self, ready: Machine, script: Path, checkout: Path, inherited: dict[str, str]
    ) -> None:
        assert ready.run(script).returncode == 0
        ready.command(
            "deploy", 'echo "deploy $* ${PYTHONDONTWRITEBYTECODE-unset}" >>"$STUB_STATE/asked"'
        )
        (ready.bin / "deploy").rename(checkout / ".venv" / "bin" / "deploy")
        ended = ready.run(checkout / "scripts" / "quickstart", "--port", "9000", **inherited)
        assert ended.returncode == 0, ended.stderr
        assert ready.asked == ["deploy up --runtime process --vendor cpu --port 9000 unset"]

    def test_starts_nothing_where_nothing_could_be_installed(
        self, bare: Machine, checkout: Path
    ) -> None:
        bare.uid = 1000
        assert bare.run(checkout / "scripts" / "quickstart").returncode == 3
        assert bare.asked == []
