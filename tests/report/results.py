"""The folder of a run's results: JUnit's files, and the logs of stacks whose test failed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FAILED = "failed.txt"
_MARK = ".pdkit-test-results"


def results_folder() -> Path:
    """Return the folder, made where it is missing: `PDKIT_TEST_RESULTS`, or the checkout's."""
    folder = REPO / (os.environ.get("PDKIT_TEST_RESULTS") or "test-results")
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / _MARK).touch()
    return folder


def empty_results() -> None:
    """Remove the last run's results.

    Raises:
        SystemExit: the folder holds something else.
    """
    folder = results_folder()
    files = [path for path in folder.iterdir() if path.name != _MARK]
    if files and not (folder / _MARK).exists():
        raise SystemExit(
            f"error: {folder} holds other files than test results, and would be emptied\n"
            "try: name an empty folder by PDKIT_TEST_RESULTS"
        )
    (folder / _MARK).touch()
    for path in files:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
