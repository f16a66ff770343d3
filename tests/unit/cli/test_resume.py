"""`deploy up --resume` starts without engines of other hosts; `deploy up` does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.config.spec import StackSpec
from deploy.errors import StateError
from deploy.workflows import up
from tests.conftest import Ended


@pytest.mark.parametrize("options", [(), ("--resume", "--no-check")])
def test_resume_allows_missing_user_files(
    deploy_here: Callable[..., Ended],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
) -> None:
    asked: list[bool] = []

    def bring_up(*_: Any, check: bool, resumed: bool) -> None:
        asked.append(resumed)
        raise StateError("no further", hint="none")

    monkeypatch.setattr(up, "bring_up", bring_up)
    monkeypatch.setattr(up, "resumed_spec", lambda *_, **__: StackSpec())
    ended = deploy_here("up", *options, cwd=tmp_path, home=tmp_path / "home")
    assert "no further" in ended.stderr
    assert asked == ["--resume" in options]
