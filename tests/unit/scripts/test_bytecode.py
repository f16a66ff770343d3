"""`scripts/bytecode.py`: which modules are compiled, and that its entry points are in the lock."""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Iterable
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest

from tests.unit.scripts.conftest import ROOT


@pytest.fixture(scope="module")
def bytecode() -> Any:
    spec = importlib.util.spec_from_file_location("bytecode", ROOT / "scripts" / "bytecode.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Packages: what `kit.main` imports at its top level, and what it does not."""
    sources = {
        "kit/__init__.py": "",
        "kit/main.py": (
            "from __future__ import annotations\n"
            "import plain, other.deep as short\n"
            "from . import sibling\n"
            "from .sub.below import (\n    name,\n    module,\n)\n"
            "from kit.sub import Class\n"
            "if TYPE_CHECKING:\n    import unused\n"
            "def function():\n    import lazy\n"
        ),
        "kit/sibling.py": "from ..escaped import nothing\n",
        "kit/sub/__init__.py": "from .up import up\nclass Class: ...\n",
        "kit/sub/up.py": "from .. import main\n",
        "kit/sub/below/__init__.py": "name = 1\n",
        "kit/sub/below/module.py": "",
        "kit/unused.py": "",
        "plain.py": "",
        "other/__init__.py": "",
        "other/deep.py": "broken = (\n",
        "unused.py": "",
        "lazy.py": "",
    }
    for name, source in sources.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return tmp_path


IMPORTED = {
    *("kit/__init__.py", "kit/main.py", "kit/sibling.py", "kit/sub/__init__.py", "kit/sub/up.py"),
    *("kit/sub/below/__init__.py", "kit/sub/below/module.py"),
    *("plain.py", "other/__init__.py", "other/deep.py"),
}


def names(files: Iterable[Path], folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in files}


def test_imported_files_are_found(bytecode: Any, folder: Path) -> None:
    files = bytecode.imported_files(["kit.main"], [folder])
    assert names(files, folder) == IMPORTED
    assert len(files) == len(IMPORTED)


def test_first_folder_wins(bytecode: Any, folder: Path) -> None:
    (folder / "late").mkdir()
    (folder / "late" / "plain.py").touch()
    found = bytecode.imported_files(["plain"], [folder / "late", folder])
    assert found == [folder / "late" / "plain.py"]


def test_an_entry_point_that_is_gone(bytecode: Any, folder: Path) -> None:
    assert bytecode.imported_files(["kit.gone", "plain"], [folder]) == [folder / "plain.py"]


def test_compiled_but_for_what_does_not(
    bytecode: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    files = [folder / name for name in sorted(IMPORTED)]
    bytecode.compile_files(files)
    compiled = {file for file in files if Path(cache_from_source(str(file))).is_file()}
    assert names(set(files) - compiled, folder) == {"other/deep.py"}
    assert not Path(cache_from_source(str(folder / "unused.py"))).exists()


def test_entry_points_are_installed(bytecode: Any) -> None:
    folders = [Path(sysconfig.get_path("purelib"))]
    gone = [name for name in bytecode.ENTRY_POINTS if not bytecode.module_file(name, folders)]
    assert gone == [], "moved by a new lock file? scripts/bytecode.py names them"
