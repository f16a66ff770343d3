"""What the source must keep to beside the contracts of imports, which pyproject.toml has.

Read without running it.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "deploy"

# Methods that asyncio and httptools call, which document them.
CALLBACKS = {
    "connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing",
    "on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body",
    "on_message_complete",
}  # fmt: skip

# Types with one name that are one thing, and the parts that have them: documents of `--json` are
# named after what they show, and the connector cannot import the error of the kit.
ONE_THING = {
    "EngineCounts": ["metrics", "output"],
    "EngineFrame": ["metrics", "output"],
    "FixFailed": ["connector", "errors"],
    "Frame": ["metrics", "output"],
    "Plan": ["output", "planning"],
    "RemoteEngine": ["config", "output"],
    "ServiceRecord": ["output", "runtime"],
    "StateFile": ["output", "runtime"],
    "Totals": ["metrics", "output"],
}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = sorted(PACKAGE.rglob("*.py"))
# What enters the services, and so imports nothing of the rest and is imported by nothing of it.
GUESTS = ("connector", "router")
# Imported by the kit as well as inside the services; nothing but the standard library is below it.
SHARED = (
    "deploy.connector.pdkit_connector.identity.model_files",
    "deploy.connector.pdkit_connector.redis_url",
)
OURS = [path for path in MODULES if part_of(path) not in GUESTS]
THEIRS = [path for path in MODULES if part_of(path) in GUESTS]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Return the full name of everything a module imports, wherever in it."""
    found: list[str] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_nothing_imports_what_enters_services(path: Path) -> None:
    """By the folders they are in, which are no packages, so that import-linter knows none."""
    guests = tuple(f"deploy.{folder}." for folder in GUESTS)
    theirs = [name for name in imports(path) if name.startswith(guests)]
    assert not [name for name in theirs if not name.startswith(SHARED)]


def test_what_is_shared_with_services_imports_only_the_standard_library() -> None:
    files = tuple(f"{name.replace('.', '/')}.py" for name in SHARED)
    paths = [one for one in THEIRS if str(one).endswith(files)]
    assert len(paths) == len(SHARED)
    for path in paths:
        assert {name.split(".")[0] for name in imports(path)} <= sys.stdlib_module_names


@pytest.mark.parametrize("path", [p for p in OURS if part_of(p) == "cli"], ids=name_of)
def test_the_boundary_rewrites_no_message_by_patterns(path: Path) -> None:
    """Errors carry the setting and the command as values."""
    assert "re" not in imports(path)
    assert not searched_texts(path)


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_no_message_is_taken_apart(path: Path) -> None:
    assert not messages_taken_apart(path)


def searched_texts(path: Path) -> list[int]:
    """Return the lines that look for words in a text."""
    return [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Compare)
        and isinstance(node.ops[0], (ast.In, ast.NotIn))
        and isinstance(node.left, ast.Constant)
        and " " in str(node.left.value)
    ]


def messages_taken_apart(path: Path) -> list[int]:
    """Return the lines that compare an error's message or hint, cut it, or call its methods."""
    found = []
    for node in ast.walk(tree(path)):
        used = [node.value] if isinstance(node, (ast.Attribute, ast.Subscript)) else []
        if isinstance(node, ast.Compare):
            used = [node.left, *node.comparators]
        said = [one for one in used if isinstance(one, ast.Attribute)]
        found += [one.lineno for one in said if one.attr in ("message", "hint")]
    return found


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_definitions(node: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    """Yield the classes, functions and methods below a node that are not private."""
    for child in node.body:
        if isinstance(child, Definition) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public_definitions(child)


def methods_of_protocols(node: ast.Module) -> Iterator[str]:
    """Yield what protocols say of a method; classes that have it need not say it again."""
    for found in node.body:
        if isinstance(found, ast.ClassDef) and "Protocol" in map(ast.unparse, found.bases):
            yield from (one.name for one in public_definitions(found) if ast.get_docstring(one))


def undocumented(path: Path, said: Collection[str]) -> list[str]:
    found = public_definitions(tree(path))
    return [one.name for one in found if not ast.get_docstring(one) and one.name not in said]


def test_public_names_are_documented() -> None:
    said = CALLBACKS | {name for path in MODULES for name in methods_of_protocols(tree(path))}
    names = [f"{name_of(path)}: {one}" for path in MODULES for one in undocumented(path, said)]
    assert not names


def public_types(node: ast.stmt) -> list[str]:
    """Return the public class or the aliases that a statement defines, but no option of typer's."""
    if isinstance(node, ast.ClassDef):
        return [] if node.name.startswith("_") else [node.name]
    if not isinstance(node, ast.Assign) or "typer." in ast.unparse(node.value):
        return []
    names = [one.id for one in node.targets if isinstance(one, ast.Name)]
    return [name for name in names if name[0].isupper() and not name.isupper()]


def types_with_one_name(paths: Collection[Path]) -> dict[str, list[Path]]:
    """Return the modules of each public type whose name another type has, too."""
    homes: dict[str, list[Path]] = {}
    for path in paths:
        for node in tree(path).body:
            for name in public_types(node):
                homes.setdefault(name, []).append(path)
    return {name: found for name, found in homes.items() if len(found) > 1}


def test_the_name_of_a_type_has_one_meaning() -> None:
    found = types_with_one_name(MODULES)
    assert {name: sorted(map(part_of, paths)) for name, paths in found.items()} == ONE_THING


_NOT_SOURCE = shutil.ignore_patterns("__pycache__", ".mypy_cache")
_RESULT = re.compile(r"(.+?) ?(KEPT|BROKEN)$", re.MULTILINE)


def contracts(folder: Path) -> dict[str, str]:
    """Return contract → KEPT or BROKEN, of the packages in a folder."""
    done = subprocess.run(
        (Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"),
        env={**os.environ, "PYTHONPATH": "deploy/connector:deploy/router"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    found = dict(_RESULT.findall(done.stdout))
    assert len(found) == 5, done.stdout + done.stderr
    return found


class TestTheRulesThemselves:
    """Each rule catches what it is for."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        return tmp_path / "module.py"

    def test_each_contract_of_imports(self, tmp_path: Path) -> None:
        """The tree keeps them, and with a line that breaks it none is kept."""
        for folder in ("deploy", "compose"):
            shutil.copytree(REPO / folder, tmp_path / folder, ignore=_NOT_SOURCE)
        shutil.copy(REPO / "pyproject.toml", tmp_path)
        assert set(contracts(tmp_path).values()) == {"KEPT"}
        for name, line in {
            "stack/layout.py": "def f():\n    from deploy.workflows import up",
            "config/vendors.py": "import subprocess",
            "planning/memory.py": "if TYPE_CHECKING:\n    from deploy.planning import plan",
            "router/pdkit_router/request.py": "import deploy.errors",
            "connector/pdkit_connector/serve.py": "from pdkit_connector.in_engine import staging",
        }.items():
            with (tmp_path / "deploy" / name).open("a") as file:
                file.write(f"\n{line}\n")
        assert set(contracts(tmp_path).values()) == {"BROKEN"}

    def test_public_names_without_a_docstring_are_found(self, source: Path) -> None:
        source.write_text(
            "class A(Protocol):\n"
            "    def said(self):\n        'Do it.'\n"
            "    def unsaid(self): ...\n"
            "class _B:\n    def hidden(self): ...\n"
            "class C:\n    'One.'\n    def said(self): ...\n    def other(self): ...\n"
            "def free(): ...\n"
        )
        said = list(methods_of_protocols(tree(source)))
        assert said == ["said"]
        assert undocumented(source, said) == ["A", "unsaid", "other", "free"]

    def test_types_with_one_name_are_found(self, source: Path) -> None:
        other = source.with_name("other.py")
        source.write_text(
            "class A: ...\nclass _B: ...\nclass C: ...\nEach = Literal[1]\nMAX = 1\n"
            "Name = Annotated[str, typer.Option()]\n"
        )
        other.write_text(
            "class A: ...\nclass _B: ...\nclass D:\n    class C: ...\nclass Each: ...\nMAX = 2\n"
            "class Name: ...\n"
        )
        both = [source, other]
        assert types_with_one_name(both) == {"A": both, "Each": both}

    @pytest.mark.parametrize(
        "line",
        [
            "exc.message.removeprefix('x')", "exc.hint[1:]", "'x' in exc.message",
            "exc.message == 'x'",
        ],
    )  # fmt: skip
    def test_a_message_that_is_taken_apart_is_found(self, source: Path, line: str) -> None:
        source.write_text(f"show(exc.message, exc.reason)\n{line}\n")
        assert messages_taken_apart(source) == [2]

    def test_words_that_are_looked_for_are_found(self, source: Path) -> None:
        source.write_text("'--json' in given\n'no such command' in line\n")
        assert searched_texts(source) == [2]
