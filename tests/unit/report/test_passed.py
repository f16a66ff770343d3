"""A part of a run is left out only while the files that decide it are those of its last pass."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.report.passed import PARTS, files_of, unchanged, write_down


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small checkout: each path of a part, as a folder with a file in it or as a file."""
    for path in {path for paths in PARTS.values() for path in paths}:
        place = tmp_path / path
        if (REPO / path).is_dir():
            place.mkdir(parents=True, exist_ok=True)
            place /= "one.py"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(path)
    return tmp_path


def left_out(tree: Path) -> frozenset[str]:
    return unchanged(tree, tree / "passed.json")


def passed(tree: Path, *parts: str) -> None:
    write_down(parts, tree, tree / "passed.json")


def test_nothing_is_left_out_without_a_record(tree: Path) -> None:
    assert left_out(tree) == frozenset()


def test_only_parts_that_passed_are_left_out(tree: Path) -> None:
    passed(tree, "versions")
    assert left_out(tree) == {"versions"}
    passed(tree, *PARTS.keys() - {"versions"})
    assert left_out(tree) == set(PARTS)


@pytest.mark.parametrize(
    ("part", "path"), [(part, path) for part, paths in PARTS.items() for path in paths]
)
def test_a_part_runs_again_after_a_change(tree: Path, part: str, path: str) -> None:
    passed(tree, *PARTS)
    place = tree / path
    (place / "one.py" if place.is_dir() else place).write_text("changed")
    assert part not in left_out(tree)


@pytest.mark.parametrize(("old", "new"), [("one.py", None), ("one.py", "two.py"), (None, "more")])
def test_a_part_runs_again_if_a_file_is_new_renamed_or_gone(
    tree: Path, old: str | None, new: str | None
) -> None:
    passed(tree, *PARTS)
    folder = tree / "deploy" / "connector"
    if new:
        shutil.copy(folder / "one.py", folder / new)
    if old:
        (folder / old).unlink()
    assert left_out(tree) == frozenset()


def test_caches_of_tools_do_not_change_the_hash(tree: Path) -> None:
    passed(tree, *PARTS)
    for name in ("__pycache__", ".mypy_cache"):
        (tree / "deploy" / "connector" / name).mkdir()
        (tree / "deploy" / "connector" / name / "x").touch()
    assert left_out(tree) == set(PARTS)


def test_every_path_of_a_part_exists() -> None:
    for paths in PARTS.values():
        assert [path for path in paths if not (REPO / path).exists()] == []


def test_gpu_has_each_module_that_names_a_metric_of_vllm() -> None:
    naming = {
        str(file.relative_to(REPO))
        for file in (REPO / "deploy").rglob("*.py")
        if '"vllm:' in file.read_text(encoding="utf-8")
    }
    assert naming and naming <= set(PARTS["gpu"])


@pytest.mark.parametrize(
    ("part", "imported"),
    [
        ("connector", "tests/hostile_redis.py"),
        ("versions", "bench/redis_server.py"),
        ("gpu", "tests/golden_documents.py"),
        ("podman", "tests/e2e/podman.py"),
        ("lmcache-mp", "bench/store_gate.py"),  # by a module that its tests import
        ("user-redis", "tests/ports.py"),
        ("gpu-proof", "bench/kit.py"),
    ],
)
def test_a_part_has_what_its_tests_import(part: str, imported: str) -> None:
    assert REPO / imported in files_of(part)


def test_a_part_runs_again_if_an_imported_module_changed(tree: Path) -> None:
    for name, text in {
        "tests/versions/one.py": "from tests import first\n",
        "tests/first.py": "from bench.second import (\n    something,\n)\n",
        "bench/second.py": "import tests.of_nobody\n",
    }.items():
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(text)
    passed(tree, *PARTS)
    (tree / "bench/second.py").write_text("changed")
    assert left_out(tree) == PARTS.keys() - {"connector", "versions"}
