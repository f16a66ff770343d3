"""What is looked up for known vulnerabilities, and that a failure is one."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
# Notes what it is asked, and fails where a package is in the list.
STAND_IN = """#!/bin/sh
for last; do :; done
echo "$@" >> "$SEEN"; cat "$last" >> "$SEEN"
! grep -q "^${BAD:-nothing}==" "$last"
"""


def audit(folder: Path, bad: str = "nothing") -> tuple[int, str]:
    """Run the script with a stand-in; return its exit code and what was asked."""
    tool, seen = folder / "pip-audit", folder / "seen"
    tool.write_text(STAND_IN)
    tool.chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "SEEN": str(seen), "BAD": bad}
    done = subprocess.run(
        (REPO / "scripts" / "audit",), env=environ, capture_output=True, timeout=60, check=False
    )
    return done.returncode, seen.read_text()


def test_every_list_is_looked_up_strictly(tmp_path: Path) -> None:
    code, seen = audit(tmp_path)
    assert code == 0
    asked = [line for line in seen.splitlines() if line.startswith("-")]
    files = [*REPO.glob("images/*/*.lock"), *REPO.glob("images/*/*.txt")]
    lists = [file for file in files if re.search(r"^\S+==", file.read_text(), re.MULTILINE)]
    assert len(asked) == len(lists) + 2
    assert all("--strict" in line for line in asked)
    packages = set(seen.splitlines()) - set(asked)
    assert {line.partition("==")[0] for line in packages} >= {"vllm", "lmcache", "torch", "ruff"}
    assert not [line for line in packages if line.count("==") != 1 or set(line) & set("+ ;\\")]


@pytest.mark.parametrize("package", ["httptools", "torch", "zizmor"])
def test_one_vulnerability_in_any_list_fails(tmp_path: Path, package: str) -> None:
    assert audit(tmp_path, package)[0] == 1


def test_a_missing_tool_is_an_error_with_the_way_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    done = subprocess.run(
        ("/bin/bash", REPO / "scripts" / "audit"),
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "pip install --require-hashes -r scripts/audit.lock" in done.stderr
