"""The simulated machines of tests/hosts: a run on one fails where it is not wholly that one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.hosts import __main__ as runner
from tests.hosts import dress
from tests.hosts.disguises import DISGUISES

# Not the one in which this very test may run.
OTHER = next(name for name in DISGUISES if name != os.environ.get("DISGUISE"))


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (sys.executable, "-m", *arguments),
        env={**os.environ, **environ},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_they_differ_in_every_fact() -> None:
    """So each fact is seen to be changed in at least one of them, whatever the machine is."""
    small, large = (asdict(disguise.shows) for disguise in DISGUISES.values())
    assert [fact for fact in small if small[fact] == large[fact]] == []


def test_the_test_of_a_simulated_machine_fails_without_it() -> None:
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = run("pytest", *options, "tests/hosts/test_worn.py", DISGUISE=OTHER)
    assert done.returncode == 1
    for fact in ("cores", "memory_mib", "utc_offset_s", "locale"):
        assert f"test_it_is_on[{fact}]" in done.stdout


def test_a_failed_mount_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "mount").write_text("#!/bin/sh\necho no mounts here >&2; exit 32\n")
    (tmp_path / "mount").chmod(0o755)
    path = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
    done = run("tests.hosts", "small", "--version", PATH=path)
    assert done.returncode not in (0, 5)
    printed = done.stdout + done.stderr
    assert "no mounts here" in printed or "run as root" in printed
    assert "pytest 9" not in printed


def test_nothing_is_mounted_for_the_whole_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted: list[object] = []
    monkeypatch.setattr(dress, "_mount", lambda *arguments: mounted.append(arguments))
    monkeypatch.setattr(Path, "readlink", lambda _: Path("mnt:[1]"))
    with pytest.raises(SystemExit, match="not in a namespace"):
        dress.main("large", tmp_path, "true")
    assert mounted == []


def test_a_user_who_is_not_root_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert runner.main("small") == 3
    assert "run as root" in capsys.readouterr().err


def test_a_checkout_that_others_cannot_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(runner, "TOOLS", ())
    monkeypatch.setattr(runner, "REPO", tmp_path)
    tmp_path.chmod(0o750)
    assert runner.main("small") == 3
    assert f"{tmp_path} is not readable by others" in capsys.readouterr().err


def test_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main("huge") == 3
    assert "no such machine: huge; there are small, large" in capsys.readouterr().err
