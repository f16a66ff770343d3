"""Released wheels under test, each in a folder of its own that is put before what is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from tests.conftest import REPO


def cache_folder() -> Path:
    """Return where wheels are kept unpacked between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pdkit"


def unpacked(requirements: str, folder: Path, *, without: str = "") -> Path:
    """Return the folder that holds pinned wheels without their dependencies, fetched once.

    `without` is a pattern of files that are not kept. Wheels come from the package index, or from
    the folder that PDKIT_WHEELHOUSE names.
    """
    done = folder / ".complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not done.exists() or done.read_text(encoding="utf-8") != requirements:
            shutil.rmtree(folder, ignore_errors=True)
            _install(requirements, folder, cached=not without)
            for file in folder.glob(without) if without else ():
                if file.is_file():
                    file.unlink()
            done.write_text(requirements, encoding="utf-8")
    return folder


def _install(requirements: str, folder: Path, *, cached: bool) -> None:
    command = (
        str(REPO / ".uv" / "bin" / "uv"), "pip", "install", "--quiet", "--python", sys.executable,
        "--target", str(folder), "--no-deps", "--require-hashes", "--only-binary", ":all:",
        *(() if cached else ("--no-cache",)), *_from(), "--requirements", "-",
    )  # fmt: skip
    environ = dict(os.environ)
    if "PIP_INDEX_URL" in environ:
        environ.setdefault("UV_DEFAULT_INDEX", environ["PIP_INDEX_URL"])
    subprocess.run(command, input=requirements, text=True, check=True, env=environ)


def _from() -> tuple[str, ...]:
    wheelhouse = os.environ.get("PDKIT_WHEELHOUSE")
    return ("--offline", "--no-index", "--find-links", wheelhouse) if wheelhouse else ()
