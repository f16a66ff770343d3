"""Modules in the current folder, which may be anybody's, are not the interpreter's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.assets import connector_path
from deploy.runtime import host
from deploy.runtime.fixes import known_fixes
from deploy.runtime.observe import code_of_interpreter

# What the kit runs an interpreter for, and a module that is then imported.
QUESTIONS: dict[str, tuple[str, Callable[[str], object]]] = {
    "versions": ("json", host.engine_versions),
    "libraries": ("ctypes", lambda python: host.require_libraries(python, {})),
    "code": ("json", lambda python: code_of_interpreter(python, {}, gpus=False)),
    "fixes": ("pdkit_connector", lambda _: known_fixes.__wrapped__(connector_path())),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_modules_in_the_current_folder_are_not_imported(
    question: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, ask = QUESTIONS[question]
    (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    ask(sys.executable)
    assert not (tmp_path / "ran").exists()
