"""The unit that brings a stack up after a reboot: where it is, what is in it, and that it goes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.errors import MachineError
from deploy.runtime import boot
from deploy.runtime.boot import boot_unit, remove_unit, require_systemd, unit_file, write_unit
from deploy.runtime.home import Home


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PDKIT_HOME", str(tmp_path / "of mine"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return Home.from_environ()


def test_a_unit_is_written_enabled_and_removed(home: Home) -> None:
    file = write_unit(home, "demo")
    assert write_unit(home, "demo") == file, "again changes nothing"
    link = file.parent / "default.target.wants" / file.name
    assert link.resolve() == file
    text = file.read_text()
    assert f'ExecStart="{sys.executable}" "-m" "deploy" "up" "--resume" "--no-check"' in text
    assert f'Environment="PDKIT_HOME={home.state}"' in text
    assert "hf_secret" not in text
    remove_unit(home, "demo")
    remove_unit(home, "demo")
    assert not file.exists() and not link.is_symlink()


def test_another_homes_stack_has_another_unit(home: Home, tmp_path: Path) -> None:
    other = Home(tmp_path / "other", tmp_path / "cache")
    assert unit_file(home, "demo") != unit_file(other, "demo")


def test_words_are_read_back_as_they_were() -> None:
    text = boot_unit("x", ('/a b/"py"', "100%", "$HOME", "back\\slash"), {"A": "50%"})
    assert 'ExecStart="/a b/\\"py\\"" "100%%" "$$HOME" "back\\\\slash"\n' in text
    assert 'Environment="A=50%%"\n' in text


@pytest.mark.parametrize(("end", "written"), [("\n", "\\x0a"), ("\r", "\\x0d")])
def test_line_breaks_in_arguments_are_escaped(end: str, written: str) -> None:
    """Systemd ends a line at either."""
    forged = f"/a{end}ExecStartPre=/bin/evil"
    text = boot_unit("x", (forged,), {"PATH": forged})
    assert f'ExecStart="/a{written}ExecStartPre=/bin/evil"\n' in text
    assert f'Environment="PATH=/a{written}ExecStartPre=/bin/evil"\n' in text
    assert not [line for line in text.splitlines() if line.startswith("ExecStartPre")]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = write_unit(home, "demo")
    done = subprocess.run(
        ("systemd-analyze", "--user", "verify", str(file)),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    # Of other units it says what this folder, in place of the user's own, has to do with them.
    assert done.returncode == 0
    assert not [line for line in done.stderr.splitlines() if file.name in line]


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(boot, "_LINGER", tmp_path)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000)
    assert not boot.starts_without_login()


def test_a_unit_is_refused_without_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot, "_RUNS", tmp_path)
    require_systemd()
    monkeypatch.setattr(boot, "_RUNS", tmp_path / "none")
    with pytest.raises(MachineError, match="systemd does not manage") as caught:
        require_systemd()
    assert "deploy up --resume" in caught.value.hint
