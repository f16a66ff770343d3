"""Goldens as differences: readable, and nothing of a document is lost in them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.golden_documents import REPO, applied, differences, load

BASE = {
    "services": {
        "producer-0": {
            "command": ["-m", "serve", "--port", "8000", "--eager", "--args", "a", "b"],
            "environment": {"NAME": "producer-0", "SEED": "1"},
            "ports": [{"published": "8010"}, {"published": "8011"}],
        }
    },
    "files": {"/run/producer-0/a.yaml": "one: 1\ntwo: 2\nthree: 3\n"},
}


def changed(**services: Any) -> dict[str, Any]:
    document = copy.deepcopy(BASE)
    document["services"].update(services)
    return document


def producer(**fields: Any) -> dict[str, Any]:
    return {**copy.deepcopy(BASE["services"]["producer-0"]), **fields}


COMMAND = BASE["services"]["producer-0"]["command"]


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (BASE, {}),
        (
            changed(**{"producer-0": producer(environment={"NAME": "producer-0", "SEED": "2"})}),
            {"services": {"producer-0": {"environment": {"SEED": "2"}}}},
        ),
        (
            changed(**{"producer-0": producer(environment={"SEED": "1", "MORE": "x"})}),
            {
                "services": {
                    "producer-0": {"environment": {"MORE": "x", "NAME": {"$removed": True}}}
                }
            },
        ),
        (
            changed(**{"producer-1": producer(environment={"NAME": "producer-1", "SEED": "1"})}),
            {"services": {"producer-1": {"$like": "producer-0"}}},
        ),
        (
            changed(**{"producer-0": producer(command=[*COMMAND[:3], "9000", *COMMAND[4:]])}),
            {"services": {"producer-0": {"command": {"--port": ["9000"]}}}},
        ),
        (
            changed(
                **{"producer-0": producer(command=["-m", "serve", "--new", "1", *COMMAND[2:4]])}
            ),
            {
                "services": {
                    "producer-0": {
                        "command": {
                            "--new": {"$after": "-m", "values": ["1"]},
                            "--eager": {"$removed": True},
                            "--args": {"$removed": True},
                        }
                    }
                }
            },
        ),
        (
            changed(**{"producer-0": producer(ports=[{"published": "1"}, {"published": "8011"}])}),
            {"services": {"producer-0": {"ports": {0: {"published": "1"}}}}},
        ),
        (
            {**BASE, "files": {"/run/producer-0/a.yaml": "one: 1\ntwo: 22\nthree: 3\n"}},
            {"files": {"/run/producer-0/a.yaml": {"line 2": "two: 22"}}},
        ),
    ],
)  # fmt: skip
def test_differences_are_found_and_applied(new: Any, expected: Any) -> None:
    assert differences(BASE, new) == expected
    assert applied(BASE, yaml.safe_load(yaml.safe_dump(expected))) == new


@pytest.mark.parametrize(
    "command",
    [
        ["-m", "serve", "--eager", "--port", "8000", "--args", "a", "b"],
        ["-m", "serve", "--port", "8000", "--port", "9000"],
        ["-m", "serve"],
        ["--port", "8000", "-m", "serve"],
        [],
        ["-m", "serve", "--args", "a", "", "b", "--eager"],
    ],
)
def test_arguments_keep_their_order(command: list[str]) -> None:
    new = changed(**{"producer-0": producer(command=command)})
    assert applied(BASE, differences(BASE, new)) == new


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value that is no mapping or list."""
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(one, (*path, key))
    else:
        yield path


def with_leaf(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(document)
    at = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return made


@pytest.mark.full
def test_a_change_of_any_value_shows() -> None:
    base = load(REPO / "compose" / "cuda-1p1d.yaml")
    document = load(REPO / "tests" / "golden" / "compose" / "cuda-tp2.yaml")
    golden = differences(base, document)
    paths = list(leaves(document))
    assert len(paths) > 300
    for path in paths:
        assert differences(base, with_leaf(document, path, "another")) != golden, path


def test_every_golden_is_small_compared_with_its_document() -> None:
    folder = REPO / "tests" / "golden"
    files = [*folder.glob("compose/*.yaml"), *folder.glob("process/*.yaml")]
    sizes: dict[Path, tuple[int, int]] = {}
    for file in files:
        if "base" in yaml.safe_load(file.read_text(encoding="utf-8")):
            lines = len(file.read_text(encoding="utf-8").splitlines())
            sizes[file] = (lines, len(yaml.safe_dump(load(file)).splitlines()))
    assert len(sizes) >= 20
    assert sum(lines for lines, _ in sizes.values()) < sum(all_ for _, all_ in sizes.values()) / 3


def test_no_golden_is_too_long_to_review() -> None:
    files = [one for one in (REPO / "tests" / "golden").rglob("*") if one.is_file()]
    assert len(files) > 50
    long = [one for one in files if len(one.read_text(encoding="utf-8").splitlines()) > 400]
    assert not long, "store it as differences, or a part in each file of a folder"


def test_a_folder_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "redis.yaml").write_text("redis: {port: 6379}")
    (tmp_path / "router.yaml").write_text("router: {port: 8000}\nurl: x")
    parts = {"redis": {"port": 6379}, "router": {"port": 8000}, "url": "x"}
    assert load(tmp_path) == parts
    (tmp_path / "redis.yaml").unlink()
    assert load(tmp_path) != parts
