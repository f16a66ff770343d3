"""The runtime table."""

from __future__ import annotations

from typing import get_args

from deploy.config.fields import RuntimeChoice
from deploy.config.runtimes import RUNTIMES


def test_every_runtime_has_a_row() -> None:
    assert {*RUNTIMES, "auto"} == set(get_args(RuntimeChoice))
