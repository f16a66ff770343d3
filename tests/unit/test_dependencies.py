"""What is imported is declared: in each distribution's pyproject.toml, and with the images."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_proof.install import NEEDED

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

REPO = Path(__file__).resolve().parents[2]


def project(folder: str) -> dict[str, Any]:
    """Return the `project` table of a folder's pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((REPO / folder / "pyproject.toml").read_text())["project"]
    return table


PROJECT = project(".")
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# Part of pydantic, which needs one version of it.
PYDANTIC = {"pydantic-core"}
# Modules of what the connector enters, with what that brings.
ENGINES = {
    "vllm", "lmcache", "torch", "transformers", "huggingface_hub", "starlette", "uvicorn",
    "opentelemetry",
}  # fmt: skip


def names(requirements: Iterable[str]) -> set[str]:
    """Return the distributions that requirements name."""
    return {re.split(r"[^\w.-]", line)[0].lower().replace("_", "-") for line in requirements}


def imported(files: Iterable[Path], *, but: set[str]) -> set[str]:
    """Return the distributions that files import, at their top or in functions.

    Args:
        but: modules that are left out.
    """
    known, modules = packages_distributions(), set[str]()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.partition(".")[0])
    others = modules - but - sys.stdlib_module_names
    return {name.lower().replace("_", "-") for m in others for name in known.get(m, [m])[:1]}


def files_of(folder: str, *, but: tuple[str, ...] = ()) -> list[Path]:
    left_out = tuple(REPO / one for one in but)
    found = (REPO / folder).rglob("*.py")
    return [file for file in found if not any(one in file.parents for one in left_out)]


def test_what_the_kit_imports_is_declared() -> None:
    files = files_of("deploy", but=("deploy/connector", "deploy/router"))
    wanted = imported(files, but={"deploy"}) - PYDANTIC - names(EXTRAS["report"])
    assert wanted == names(PROJECT["dependencies"])


@pytest.mark.parametrize(("part", "host"), [("router", set[str]()), ("connector", ENGINES)])
def test_what_enters_the_services_declares_its_own(part: str, host: set[str]) -> None:
    files = files_of(f"deploy/{part}")
    assert imported(files, but={f"pdkit_{part}", *host}) == names(
        project(f"deploy/{part}")["dependencies"]
    )


@pytest.mark.parametrize("file", ["images/cpu/requirements.in", "images/cuda/process.in"])
def test_environments_of_engines_have_what_the_kit_needs(file: str) -> None:
    lines = (REPO / file).read_text().splitlines()
    listed = names(line for line in lines if line and line[0] != "#")
    assert names(PROJECT["dependencies"]) <= listed
    assert names(project("deploy/router")["dependencies"]) <= listed


def test_a_gpu_proof_asks_for_what_the_kit_needs() -> None:
    assert names(PROJECT["dependencies"]) <= set(NEEDED.values())


def test_names_are_read_from_requirements() -> None:
    found = names(["a", "B_c>=1,<2", "x.y==1; python_version < '3.11'", "d[extra]>=1"])
    assert found == {"a", "b-c", "x.y", "d"}
