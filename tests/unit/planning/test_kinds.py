"""Kinds of models that are refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deploy.config.kinds import Kind
from deploy.config.model import Model, ModelShape
from deploy.config.vendors import vendor_named
from deploy.errors import ConfigError
from deploy.planning.gpus import with_assumed_gpus
from deploy.planning.inventory import Inventory
from deploy.planning.plan import Plan
from tests.unit.conftest import MACHINE

Make = Callable[..., Plan]
SHAPE = ModelShape(layers=4, attention_heads=4, kv_heads=2, head_dim=64, max_positions=4096)
FP8 = ["--kv-cache-dtype", "fp8"]
GPUS = with_assumed_gpus(MACHINE, vendor_named("cuda"), 2)
SLOW = Inventory(4, 65536, fast_bfloat16=False)


def of(**kind: Any) -> Model:
    return Model("/models/m", "m", "folder", SHAPE, kind=Kind(**kind))


@pytest.mark.parametrize(
    ("fields", "words", "hint"),
    [
        ({"model": of(state="layer_types: mamba")}, "layer_types: mamba", "another kind"),
        ({"model": of(window=256)}, "sliding window (256 tokens)", "--disable-sliding-window"),
        ({"model": of(mla=True)}, "m has MLA", "another kind"),
        ({"machine": SLOW, "engine": {"args": FP8}}, "fp8 needs AVX-512", "--kv-cache-dtype"),
        ({"machine": SLOW, "engine": {"args": ["--kv_cache_dtype=fp8_e4m3"]}}, "fp8", "leave"),
    ],
)
def test_unsupported_models_are_refused_by_name(
    plan: Make, fields: dict[str, Any], words: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(**fields)
    assert words in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "fields",
    [
        {"model": of()},
        {"model": of(mla=True), "vendor": "cuda", "gpus": 2, "machine": GPUS},
        {"model": of(window=256), "engine": {"args": ["--disable-sliding-window"]}},
        {"machine": MACHINE, "engine": {"args": FP8}},
        {"machine": SLOW, "engine": {"args": ["--kv-cache-dtype", "auto"]}},
    ],
)
def test_supported_models_are_planned(plan: Make, fields: dict[str, Any]) -> None:
    assert plan(**fields).engines
