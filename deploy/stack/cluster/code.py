"""The kit's code as ConfigMaps: an engine image brings vLLM and LMCache, the kit its connector."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deploy.assets import connector_path, router_path
from deploy.stack.cluster.layout import is_engine
from deploy.stack.service import ServiceRole

FOLDER = "code"
TINY_MODEL = "tiny-model"
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class CodeMap:
    """One ConfigMap: `kubectl apply` takes objects of at most 256 KiB, so a folder has its own.

    Attributes:
        files: path where it is mounted → text.
    """

    name: str
    files: dict[str, str]

    @property
    def keys(self) -> dict[str, str]:
        """Path where it is mounted → key, which may have no slash."""
        return {path: path.replace("/", ".") for path in self.files}


def code_of(role: ServiceRole) -> tuple[CodeMap, ...]:
    """Return what the pods of a role get of the kit's code."""
    if is_engine(role):
        return _by_folder("connector", connector_path())
    return _by_folder("router", router_path()) if role == "router" else ()


def tiny_model_code() -> CodeMap:
    """Return what makes the tiny model; Python alone runs it."""
    files = [
        _PACKAGE / "__init__.py",
        _PACKAGE / "errors.py",
        *(_PACKAGE / "tiny_model").glob("*.py"),
    ]
    return CodeMap(TINY_MODEL, _texts(files, _PACKAGE.parent))


def _by_folder(name: str, root: Path) -> tuple[CodeMap, ...]:
    found: dict[Path, list[Path]] = {}
    for file in root.rglob("*.py"):
        found.setdefault(file.parent, []).append(file)
    maps = []
    for folder, files in sorted(found.items()):
        below = folder.relative_to(root).parts[1:]
        full = "-".join((name, *below)).replace("_", "-")
        maps.append(CodeMap(full, _texts(files, root)))
    return tuple(maps)


def _texts(files: list[Path], root: Path) -> dict[str, str]:
    return {
        file.relative_to(root).as_posix(): file.read_text(encoding="utf-8")
        for file in sorted(files)
    }
