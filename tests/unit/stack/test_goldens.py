"""Plan and render, case by case, as whole documents.

`UPDATE_GOLDENS=1 python -m pytest tests/unit/stack/test_goldens.py` writes them anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deploy.output.plan_view import plan_view
from deploy.planning.inventory import GpuVendor
from deploy.stack.document import document_yaml, stack_document
from deploy.workflows.prepare import Prepared
from tests.golden_documents import golden_text
from tests.unit.stack.cases import machine_with

ONE_REDIS = {"redis": {"shards": 1}}
CASES: dict[str, dict[str, Any]] = {
    "1p1d": {},
    "1p3d": {"topology": "1p3d"},
    "2p2d": {"gpus": 4},
    "layerwise": {"layerwise": True},
    "save-decode-cache": {"save_decode_cache": True},
    "shards": {"redis": {"shards": 2}},
    "3a": {"topology": "3a"},
    "2a-redis": {"topology": "2a+redis"},
    "monitoring": {"monitoring": True},
    "lmcache-mp": {"connector": "lmcache-mp"},
    "own-redis": {"redis": {"url_file": "/home/user/redis-url"}},
}
GPU_VENDORS: tuple[GpuVendor, ...] = ("cuda", "rocm")
ON_GPUS: dict[str, dict[str, Any]] = {
    "cuda-1p1d": {"vendor": "cuda", "machine": machine_with("cuda", 0, 1), **ONE_REDIS},
    "rocm-1p1d": {"vendor": "rocm", "machine": machine_with("rocm", 0, 1), **ONE_REDIS},
    "cuda-2a": {"vendor": "cuda", "machine": machine_with("cuda", 0, 1), "topology": "2a"},
    **{
        f"{vendor}-lmcache-mp": {
            "vendor": vendor, "machine": machine_with(vendor, 0, 1), "connector": "lmcache-mp",
            **ONE_REDIS,
        }
        for vendor in GPU_VENDORS
    },
}  # fmt: skip
FOLDER = "tests/golden/process"
# The one whole document, and the golden that those on GPUs differ from.
WHOLE, FOR_GPUS = "1p1d", "cuda-1p1d"


@pytest.mark.parametrize("case", CASES)
def test_each_plan_is_as_in_the_golden(
    case: str, prepared: Callable[..., Prepared], golden: Callable[[str, str], None]
) -> None:
    golden(f"plan/{case}.txt", plan_view(prepared(**CASES[case])) + "\n")


@pytest.mark.parametrize("case", [*CASES, *ON_GPUS])
def test_each_document_is_as_in_the_golden(
    case: str, prepared: Callable[..., Prepared], golden: Callable[[str, str], None]
) -> None:
    document = stack_document(prepared(**{**CASES, **ON_GPUS}[case]).stack)
    base = FOR_GPUS if case in ON_GPUS.keys() - {FOR_GPUS} else WHOLE
    whole = case == WHOLE
    text = document_yaml(document) if whole else golden_text(f"{FOLDER}/{base}.yaml", document)
    golden(f"process/{case}.yaml", text)
