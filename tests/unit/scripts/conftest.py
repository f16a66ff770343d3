"""A machine of stubs: the commands that scripts call, which write down what was asked of them.

PATH holds nothing else but the plain tools below, so this machine's Docker, apt and Python do not
show, and nothing of it is changed.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

_TOOLS = (
    *("bash", "basename", "cat", "chmod", "cp", "cut", "dirname", "env", "flock", "grep", "head"),
    *(
        "ln",
        "mkdir",
        "mktemp",
        "mv",
        "realpath",
        "rm",
        "sed",
        "setsid",
        "sha256sum",
        "sleep",
        "sort",
    ),
    *("tail", "touch", "uname"),
)
_STUBS = {
    "id": 'case $* in -u) echo "$STUB_UID" ;; -un) echo someone ;; esac',
    "apt-get": (
        'echo "apt-get $*" >>"$STUB_STATE/asked"\n'
        'if [ -e "$STUB_STATE/no-network" ]; then echo "E: no network" >&2; exit 100; fi\n'
        'if [ -e "$STUB_STATE/apt-get" ]; then . "$STUB_STATE/apt-get"; fi'
    ),
}


@dataclass
class Machine:
    """What a script finds: a user, a release, files that stand for what is installed."""

    folder: Path
    uid: int = 0
    release: str = "ID=debian\nVERSION_CODENAME=bookworm\n"
    environ: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("bin", "home", "state", "tmp"):
            (self.folder / name).mkdir()
        for name in _TOOLS:
            found = shutil.which(name)
            assert found, name
            (self.bin / name).symlink_to(found)
        for name, body in _STUBS.items():
            self.command(name, body)

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def command(self, name: str, body: str) -> None:
        """Put a command on PATH."""
        file = self.bin / name
        file.write_text(f"#!/usr/bin/env bash\n{body}\n")
        file.chmod(0o755)

    def run(self, script: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "os-release").write_text(self.release)
        (self.state / "asked").write_text("")
        plain = {
            "PATH": str(self.bin),
            "HOME": str(self.home),
            "TMPDIR": str(self.folder / "tmp"),
            "STUB_UID": str(self.uid),
            "STUB_STATE": str(self.state),
            "PDKIT_OS_RELEASE": str(self.folder / "os-release"),
            "PDKIT_SYSTEM_PYTHON": str(self.folder / "no-python"),
            "PDKIT_DOCKERD_LOG": str(self.folder / "dockerd.log"),
        }
        return subprocess.run(
            (str(script), *args),
            env={**plain, **self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    @property
    def asked(self) -> list[str]:
        """What the last run asked of the stubs, but for `apt-get update`."""
        lines = (self.state / "asked").read_text().splitlines()
        return [line for line in lines if not line.startswith("apt-get update")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)
