"""One stack, 1p1d by default, for all modules of this folder; Prometheus watches it.

Its model is the tiny one, in a folder of its own whose weights a test may replace.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.tiny_model import ensure_tiny_model
from tests.e2e.conftest import Deploy, running_stack
from tests.ports import free_row

NAME = "one"
PORT = free_row()


@pytest.fixture(scope="package")
def kit(shared_home: Path) -> Deploy:
    folder = shared_home / "pdkit-tiny"  # by whose name clients call the model
    return Deploy(shared_home, {"PDKIT_SUPERVISE": "true", "PDKIT_MODEL": str(folder)})


def model_folder(kit: Deploy) -> Path:
    """Return the folder of the stack's model."""
    return Path(kit.env["PDKIT_MODEL"])


@pytest.fixture(scope="package", autouse=True)
def up(kit: Deploy) -> Iterator[Any]:
    shutil.copytree(ensure_tiny_model(kit.home / "cache" / "models"), model_folder(kit))
    with running_stack(kit, NAME, PORT, "--topology", "1p1d", "--monitoring") as data:
        yield data
