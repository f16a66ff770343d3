"""Who may import whom. Read from the source, without running it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "deploy"

# Each part of the package, with the parts it may import; top to bottom, and never up.
MAY_IMPORT: dict[str, set[str]] = {
    "__main__": {"cli"},
    "cli": {
        "__init__", "output", "workflows", "benchmark", "runtime", "stack", "metrics", "verify",
        "config", "errors",
    },
    "output": {
        "__init__", "workflows", "benchmark", "doctor", "metrics", "verify", "planning", "errors",
    },
    "workflows": {
        "__init__", "benchmark", "runtime", "doctor", "stack", "planning", "metrics", "verify",
        "tiny_model", "config", "assets", "home_folder", "errors",
    },
    "benchmark": {"metrics", "verify", "planning", "config", "errors"},
    "runtime": {
        "__init__", "doctor", "stack", "planning", "metrics", "verify", "config", "home_folder",
        "errors",
    },
    "doctor": {"stack", "planning", "config"},
    "stack": {"__init__", "planning", "config", "assets", "errors"},
    "metrics": {"planning", "verify"},
    "planning": {"config", "errors"},
    "verify": set(),
    "tiny_model": {"errors"},
    "config": {"assets", "home_folder", "errors"},
    "assets": {"__init__"},
    "home_folder": {"errors"},
    "errors": set(),
    "__init__": set(),
}  # fmt: skip

PURE = ("config", "planning", "stack", "metrics", "verify", "doctor")
EFFECTS = {
    "os", "subprocess", "socket", "time", "random", "tempfile", "shutil", "signal", "threading",
    "httpx", "psutil", "redis", "filelock", "typer",
}  # fmt: skip

# Methods that asyncio and httptools call, which document them.
CALLBACKS = {
    "connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing",
    "on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body",
    "on_message_complete",
}  # fmt: skip

# Types with one name that are one thing, and the parts that have them: documents of `--json` are
# named after what they show, and the connector cannot import the error of the kit.
ONE_THING = {
    "ComparedTopology": ["benchmark", "output"],
    "Comparison": ["benchmark", "output"],
    "EngineCounts": ["metrics", "output"],
    "EngineFrame": ["metrics", "output"],
    "Equivalence": ["output", "verify"],
    "Examination": ["output", "workflows"],
    "FixFailed": ["connector", "errors"],
    "Frame": ["metrics", "output"],
    "MetricRow": ["benchmark", "output"],
    "OwnPrompt": ["output", "verify"],
    "Patches": ["output", "workflows"],
    "Phase": ["output", "verify"],
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
GUESTS = {"connector": "pdkit_connector", "router": "pdkit_router"}
# Imported by the kit as well as inside the services; nothing but the standard library is below it.
SHARED = (
    "deploy.connector.pdkit_connector.model_files",
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
            assert node.level == 0, f"{path}: relative imports hide the layer"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imported_part(name: str) -> str:
    """Return the part of the package that an import like `deploy.config.spec.X` is of."""
    part = name.split(".")[1]
    return part if part in MAY_IMPORT or part in GUESTS else "__init__"


def test_every_part_has_a_layer() -> None:
    assert {part_of(path) for path in OURS} == set(MAY_IMPORT)


def test_the_table_itself_goes_down_only() -> None:
    order = list(MAY_IMPORT)
    for part, lower in MAY_IMPORT.items():
        assert all(order.index(other) > order.index(part) for other in lower)


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_imports_go_down_only(path: Path) -> None:
    own = part_of(path)
    for name in imports(path):
        if name.split(".")[0] == "deploy" and not name.startswith(SHARED):
            part = imported_part(name)
            assert part == own or part in MAY_IMPORT[own], f"{own} may not import {name}"


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_nothing_imports_what_enters_services(path: Path) -> None:
    for folder, package in GUESTS.items():
        assert not [name for name in imports(path) if name.split(".")[0] == package]
        theirs = [name for name in imports(path) if name.startswith(f"deploy.{folder}")]
        assert not [name for name in theirs if not name.startswith(SHARED)]


def test_what_is_shared_with_services_imports_only_the_standard_library() -> None:
    files = tuple(f"{name.replace('.', '/')}.py" for name in SHARED)
    paths = [one for one in THEIRS if str(one).endswith(files)]
    assert len(paths) == len(SHARED)
    for path in paths:
        assert {name.split(".")[0] for name in imports(path)} <= sys.stdlib_module_names


@pytest.mark.parametrize("path", THEIRS, ids=name_of)
def test_what_enters_services_imports_nothing_of_the_rest(path: Path) -> None:
    assert not [name for name in imports(path) if name.split(".")[0] == "deploy"]


@pytest.mark.parametrize("path", [p for p in OURS if part_of(p) in PURE], ids=name_of)
def test_pure_parts_have_no_effects(path: Path) -> None:
    assert not [name for name in imports(path) if name.split(".")[0] in EFFECTS]


@pytest.mark.parametrize("path", [p for p in OURS if part_of(p) != "cli"], ids=name_of)
def test_only_the_boundary_prints_and_exits(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("print", "exit", "quit", "input"), node.lineno


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


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_processes_are_started_without_a_shell(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.keyword) and node.arg == "shell":
            raise AssertionError(f"{name_of(path)}:{node.value.lineno} uses a shell")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {("os", "system"), ("os", "popen")}


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


class TestTheRulesThemselves:
    """Each rule catches what it is for."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        return tmp_path / "module.py"

    def test_imports_inside_functions_and_types_count(self, source: Path) -> None:
        source.write_text(
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from deploy.cli import main\n"
            "def f():\n    import deploy.output.table\n"
        )
        ours = [name for name in imports(source) if name.startswith("deploy")]
        assert [imported_part(name) for name in ours] == ["cli", "output"]

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

    def test_relative_imports_are_refused(self, source: Path) -> None:
        source.write_text("from . import errors\n")
        with pytest.raises(AssertionError, match="relative"):
            imports(source)

    def test_names_of_the_package_itself_are_its_root(self) -> None:
        assert imported_part("deploy.__version__") == "__init__"
