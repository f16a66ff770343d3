"""One stack, 1p1d by default, for all modules of this folder; Prometheus watches it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Deploy, running_stack
from tests.ports import free_row

NAME = "one"
PORT = free_row()


@pytest.fixture(scope="package")
def kit(shared_home: Path) -> Deploy:
    return Deploy(shared_home, {"PDKIT_SUPERVISE": "true"})


@pytest.fixture(scope="package", autouse=True)
def up(kit: Deploy) -> Iterator[Any]:
    with running_stack(kit, NAME, PORT, "--topology", "1p1d", "--monitoring") as data:
        yield data
