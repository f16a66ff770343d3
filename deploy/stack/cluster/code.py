"""The kit's code as ConfigMaps: an engine image brings vLLM and LMCache, the kit its connector."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.assets import asset, connector_path, router_path
from deploy.stack.cluster.layout import is_engine
from deploy.stack.service import ServiceRole

FOLDER = "code"
TINY_MODEL = "tiny-model"
_PACKAGE = Path(__file__).resolve().parents[2]
# Of one ConfigMap, so that it can be applied even where each line break takes a byte more.
_MAP_BYTES = 200_000
# What a module imports of the kit, wherever in it; names from a module may be modules.
_IMPORT = re.compile(r"^[ \t]*(?:from|import) (deploy[\w.]*)(?: import (\([^)]*\)|.*))?", re.M)
_WORD = re.compile(r"\w+")
_CHECK_DATA = (("images", "catalog.yaml"), ("images", "compat.yaml"))


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
    """Return the kit's code for the pods of a role."""
    if is_engine(role):
        return _by_folder("connector", connector_path())
    return _by_folder("router", router_path()) if role == "router" else ()


def tiny_model_code() -> CodeMap:
    """Return the code that makes the tiny model, which needs Python only."""
    files = [
        _PACKAGE / "__init__.py",
        _PACKAGE / "errors.py",
        *(_PACKAGE / "tiny_model").glob("*.py"),
    ]
    return CodeMap(TINY_MODEL, _texts(files, _PACKAGE.parent))


def check_code(program: str) -> tuple[CodeMap, ...]:
    """Return a module of the kit with all modules and data that it may ask for."""
    root = _PACKAGE.parent
    modules = {_module(file.relative_to(root)): file for file in _PACKAGE.rglob("*.py")}
    texts = _texts([modules[name] for name in _reached(program, modules)], root)
    data = {"/".join(parts): asset(*parts).read_text(encoding="utf-8") for parts in _CHECK_DATA}
    return _by_size("check-code", {**texts, **data})


def _module(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def _reached(program: str, modules: Mapping[str, Path]) -> set[str]:
    found: set[str] = set()
    waiting = [program]
    while waiting:
        name = waiting.pop()
        if name in found or name not in modules:
            continue
        found.add(name)
        waiting.append(name.rpartition(".")[0])
        for module, names in _IMPORT.findall(modules[name].read_text(encoding="utf-8")):
            waiting += (module, *(f"{module}.{one}" for one in _WORD.findall(names)))
    return found


def _by_size(name: str, texts: Mapping[str, str]) -> tuple[CodeMap, ...]:
    groups: list[dict[str, str]] = [{}]
    room = _MAP_BYTES
    for path, text in sorted(texts.items()):
        size = len(text.encode())
        if size > room:
            groups.append({})
            room = _MAP_BYTES
        groups[-1][path] = text
        room -= size
    return tuple(CodeMap(f"{name}-{number}", one) for number, one in enumerate(groups, 1))


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
