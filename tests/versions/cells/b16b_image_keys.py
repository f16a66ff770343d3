"""B16b: one question about two images, and about images that the caller named himself."""

from __future__ import annotations

from typing import Any

from adapter_steps import Vllm
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

PLACEHOLDERS = PlaceholderRange(offset=4, length=12)


def cell() -> None:
    vllm = Vllm()
    for identifier in ("a" * 60 + "1234", "b" * 60 + "1234", "a photo", "another photo"):
        request = vllm.add(identifier, [7] * 30, mm_features=[image(identifier)])
        vllm.step({identifier: 10})
        for _ in range(3):
            vllm.step({identifier: 100})
        vllm.check_attended(request)
    before = len(vllm.store.asked)
    again = vllm.add("again", [7] * 30, mm_features=[image("a photo")])
    assert vllm.scheduler.get_num_new_matched_tokens(again, 0) == 24
    assert len(vllm.store.asked) == before + 1


def image(identifier: str) -> Any:
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=PLACEHOLDERS
    )
