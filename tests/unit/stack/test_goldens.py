"""Plan and render, case by case, as whole documents.

`UPDATE_GOLDENS=1 python -m pytest tests/unit/stack/test_goldens.py` writes them anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deploy.assets import connector_path
from deploy.output.views import plan_view
from deploy.stack.document import document_yaml, stack_document
from deploy.tiny_model import model_folder_name
from deploy.workflows.prepare import Prepared

CASES: dict[str, dict[str, Any]] = {
    "1p1d": {},
    "1p3d": {"topology": "1p3d"},
    "2p2d": {"gpus": 4},
    "layerwise": {"layerwise": True},
    "save-decode-cache": {"save_decode_cache": True},
}


def neutral(text: str) -> str:
    """Take out where the checkout lies, and the tiny model's digest, which has its own test."""
    text = text.replace(str(connector_path()), "/opt/pdkit/connector")
    return text.replace(model_folder_name(), "tiny-llama")


@pytest.mark.parametrize("case", CASES)
def test_plan(
    case: str, prepared: Callable[..., Prepared], golden: Callable[[str, str], None]
) -> None:
    golden(f"plan/{case}.txt", neutral(plan_view(prepared(**CASES[case]).plan)) + "\n")


@pytest.mark.parametrize("case", CASES)
def test_render(
    case: str, prepared: Callable[..., Prepared], golden: Callable[[str, str], None]
) -> None:
    document = stack_document(prepared(**CASES[case]).stack)
    golden(f"process/{case}.yaml", neutral(document_yaml(document)))
