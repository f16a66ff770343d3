"""`scripts/crds.py`: custom resources against the schemas of their definitions."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.scripts.conftest import ROOT

PORT = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
SCHEMA = {
    "type": "object",
    "properties": {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["size"],
            "properties": {
                "size": {"type": "integer"},
                "port": PORT,
                "free": {
                    "type": "object",
                    "properties": {},
                    "x-kubernetes-preserve-unknown-fields": True,
                },
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            },
        },
    },
}
DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "spec": {
        "group": "example.org",
        "names": {"kind": "Crane"},
        "versions": [{"name": "v1", "schema": {"openAPIV3Schema": SCHEMA}}],
    },
}
GOOD = {"size": 1, "port": "http", "free": {"x": 1}, "labels": {"a": "b"}}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    spec = importlib.util.spec_from_file_location("crds", ROOT / "scripts" / "crds.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def made(
        content: dict[str, Any],
        kind: str = "Crane",
        *,
        defined: bool = True,
        crds: Any = DEFINITION,
    ) -> Done:
        (tmp_path / "crd").write_text(f"---\n---\n{yaml.safe_dump(crds)}")
        head = {"apiVersion": "example.org/v1", "kind": kind, "metadata": {"name": "a"}}
        other = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "b"}}
        (tmp_path / "export" / "base").mkdir(parents=True)
        file = tmp_path / "export" / "base" / "all.yaml"
        file.write_text(yaml.safe_dump_all([{**head, "spec": content}, other]))
        code = module.main([str(tmp_path / "export"), str(tmp_path / "crd")][: 1 + defined])
        return Done(code, *capsys.readouterr())

    return made


Run = Callable[..., Done]


def test_an_object_that_fits(run: Run) -> None:
    done = run(GOOD)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[1].split() == ["Crane", "example.org/v1", "1", "0"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"size": "1"}, "base/all.yaml: Crane spec.size: '1' is not of type 'integer'"),
        ({"sise": 1}, "spec: Additional properties are not allowed ('sise' was unexpected)"),
        ({"port": 1.5}, "Crane spec.port: 1.5 is not valid"),
        ({"labels": {"a": 1}}, "Crane spec.labels.a: 1 is not of type 'string'"),
    ],
)
def test_an_object_that_does_not_fit(run: Run, change: dict[str, Any], error: str) -> None:
    done = run({**GOOD, **change})
    assert done.code == 1
    assert error in done.err and len(done.err.splitlines()) == 1


def test_a_field_that_is_missing(run: Run) -> None:
    assert "'size' is a required property" in run({}).err


def test_a_folder_without_such_objects_validates_nothing(run: Run) -> None:
    done = run(GOOD, kind="Other")
    assert done.code == 1 and "has no Crane of these versions" in done.err


def test_definitions_of_a_cluster_come_as_a_list(run: Run) -> None:
    done = run({**GOOD, "size": "1"}, crds={"kind": "List", "items": [DEFINITION]})
    assert done.code == 1 and "spec.size: '1' is not of type 'integer'" in done.err


def test_files_without_a_definition_validate_nothing(run: Run) -> None:
    done = run(GOOD, crds={"kind": "Deployment", "spec": {}})
    assert done.code == 2 and "error: no definition in" in done.err


def test_usage_without_definitions(run: Run) -> None:
    done = run(GOOD, defined=False)
    assert done.code == 2 and "Usage: scripts/crds.py FOLDER" in done.err
