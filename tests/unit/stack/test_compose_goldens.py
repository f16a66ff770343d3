"""Compose documents as wholes, for people to read in a review; one a vendor is in `compose/`.

`UPDATE_GOLDENS=1 python -m pytest tests/unit/stack/test_compose_goldens.py` writes them anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.stack.document import document_yaml
from tests.golden_documents import golden_text
from tests.unit.stack.cases import OPTIONS, VENDORS, machine_with
from tests.unit.stack.conftest import Case

HEAD = """\
# Example: deploy render --vendor {vendor} --topology 1p1d --runtime compose
# It shows what runs where, for a user whose home is /home/user. It holds no secrets:
# @{{redis_password}} is filled in when a stack starts. To start one: deploy up --vendor {vendor}
# To get your own document with all its files: deploy render --vendor {vendor} -o FOLDER
"""
EXAMPLES = ("cpu-1p1d", "cuda-1p1d", "rocm-1p1d")
CASES: dict[str, dict[str, Any]] = {
    "cuda-1p1d": {"vendor": "cuda"},
    "cuda-1p3d-layerwise": {"vendor": "cuda", "topology": "1p3d", **OPTIONS["layerwise"]},
    "cuda-4p4d": {
        "vendor": "cuda", "machine": machine_with("cuda", *range(8)), "gpus": 8,
        "redis": {"shards": 4},
    },
    "cuda-one-redis": {"vendor": "cuda", "redis": {"shards": 1}},
    "cuda-tp2": {"vendor": "cuda", "gpus": 4, "tp": 2},
    "cuda-shared": {"vendor": "cuda", "gpus": 1},
    "cuda-lmcache-mp": {
        "vendor": "cuda", "connector": "lmcache-mp", "machine": machine_with("cuda", 0, 1),
        "gpus": 2,
    },
    "cuda-cdi": {"vendor": "cuda", **OPTIONS["cdi"]},
    "cuda-hub-token-everywhere": {
        "vendor": "cuda", **OPTIONS["hub-token"], **OPTIONS["everywhere"],
    },
    "rocm-1p1d": {"vendor": "rocm"},
    "rocm-2p2d-save-decode-cache": {
        "vendor": "rocm", "topology": "2p2d", **OPTIONS["save-decode-cache"],
    },
    "rocm-tp2": {
        "vendor": "rocm", "machine": machine_with("rocm", 0, 1, 2, 3), "gpus": 4, "tp": 2,
    },
    "rocm-shared-folder": {"vendor": "rocm", "gpus": 1, **OPTIONS["folder"]},
    "cuda-2a-tp2": {"vendor": "cuda", "topology": "2a", "tp": 2},
    "rocm-2a-redis": {"vendor": "rocm", "topology": "2a+redis"},
    "cpu-3a": {"vendor": "cpu", "topology": "3a"},
    "cpu-1p1d": {"vendor": "cpu"},
    "cpu-2p2d-engine": {"vendor": "cpu", "topology": "2p2d", **OPTIONS["engine"]},
    "cpu-own-image": {"vendor": "cpu", **OPTIONS["own-image"]},
    "cpu-key": {"vendor": "cpu", **OPTIONS["key"]},
    "cpu-monitoring": {"vendor": "cpu", **OPTIONS["monitoring"]},
    "cpu-lmcache-mp": {"vendor": "cpu", "connector": "lmcache-mp"},
    "cpu-own-redis": {"vendor": "cpu", **OPTIONS["own-redis"]},
}  # fmt: skip


# First, as the others are written as differences from these.
@pytest.mark.parametrize("case", EXAMPLES)
def test_the_examples_are_what_is_rendered(
    case: str, contained: Callable[..., Case], golden: Callable[[str, str], None]
) -> None:
    made = contained(case, **CASES[case])
    text = HEAD.format(vendor=made.vendor) + document_yaml(made.document)
    golden(f"../../compose/{case}.yaml", text)


@pytest.mark.parametrize("case", sorted(CASES.keys() - set(EXAMPLES)))
def test_each_document_is_as_in_the_golden(
    case: str, contained: Callable[..., Case], golden: Callable[[str, str], None]
) -> None:
    made = contained(case, **CASES[case])
    base = f"compose/{made.vendor}-1p1d.yaml"
    golden(f"compose/{case}.yaml", golden_text(base, made.document))


def test_there_is_an_example_of_each_vendor(repo: Path) -> None:
    assert tuple(sorted(f"{vendor}-1p1d" for vendor in VENDORS)) == EXAMPLES
    assert sorted(file.stem for file in (repo / "compose").glob("*.yaml")) == list(EXAMPLES)


def test_nothing_of_this_machine_is_in_them(repo: Path) -> None:
    files = sorted((repo / "tests" / "golden" / "compose").glob("*.yaml"))
    files += sorted((repo / "compose").glob("*.yaml"))
    assert sorted(file.stem for file in files) == sorted(CASES)
    for file in files:
        text = file.read_text(encoding="utf-8")
        for foreign in (str(repo), "/root", "/tmp/pytest", "/nonexistent"):
            assert foreign not in text, (file.name, foreign)
