"""hiredis in a folder of its own, so that only the contender that is to have it has it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.kit import ROOT, say

HIREDIS = "hiredis==3.5.0"
_OURS = ROOT / ".uv" / "bin" / "uv"


@contextlib.contextmanager
def hiredis_folder() -> Iterator[Path | None]:
    """Return a folder for PYTHONPATH until the context ends, or None if there is no hiredis."""
    uv = str(_OURS) if _OURS.exists() else shutil.which("uv")
    with tempfile.TemporaryDirectory() as name:
        argv = (
            uv or "uv", "pip", "install", "--quiet", "--target", name, "--python", sys.executable,
            "--only-binary", ":all:", HIREDIS,
        )  # fmt: skip
        try:
            subprocess.run(argv, check=True, timeout=120, capture_output=True)
        except (OSError, subprocess.SubprocessError) as exc:
            say(f"{HIREDIS} cannot be had, so it is left out: {exc}")
            yield None
            return
        yield Path(name)
