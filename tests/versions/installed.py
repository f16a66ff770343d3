"""The LMCache releases under test, each in a folder of its own, put before the installed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from tests.conftest import REPO

WHEELS = Path(__file__).with_name("wheels.txt")


def pinned() -> dict[str, str]:
    """Return version → its line of wheels.txt, oldest first."""
    lines = WHEELS.read_text(encoding="utf-8").splitlines()
    return {line.partition("==")[2].split()[0]: line for line in lines if "==" in line}


VERSIONS = tuple(pinned())


def cache_folder() -> Path:
    """Return where releases are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pdkit" / "lmcache"


def installed(version: str) -> Path:
    """Return the folder that holds `version` without its dependencies, fetched once."""
    folder = cache_folder() / version
    done = folder / ".complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not done.exists() or done.read_text(encoding="utf-8") != pinned()[version]:
            _install(version, folder)
            done.write_text(pinned()[version], encoding="utf-8")
    return folder


def _install(version: str, folder: Path) -> None:
    command = (
        str(REPO / ".uv" / "bin" / "uv"), "pip", "install", "--quiet", "--python", sys.executable,
        "--target", str(folder), "--no-deps", "--require-hashes", "--only-binary", ":all:",
        "--requirements", "-",
    )  # fmt: skip
    environ = dict(os.environ)
    if "PIP_INDEX_URL" in environ:
        environ.setdefault("UV_DEFAULT_INDEX", environ["PIP_INDEX_URL"])
    subprocess.run(command, input=pinned()[version], text=True, check=True, env=environ)
