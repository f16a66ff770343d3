"""The page's section on KV older than the model, and the weights that it is about."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from bench.check_power import report
from bench.check_power.older import OTHER, UNCHANGED, OlderRow, noisy

ROW = OlderRow("lmcache", "float32", OTHER, 100, 100, 0, (1.5, 2.0, math.inf), 0.4)


def test_other_weights_must_be_noticed_each_time_and_unchanged_ones_never() -> None:
    assert ROW.holds
    assert not replace(ROW, noticed=99).holds
    assert not replace(ROW, looked=0, noticed=0).holds, "nothing was tried"
    assert replace(ROW, change=UNCHANGED, noticed=0).holds
    assert not replace(ROW, change=UNCHANGED, noticed=1).holds
    assert not replace(ROW, change=report.OLD_CHECKS, noticed=1).holds
    assert replace(ROW, change="1 % noise", noticed=3).holds, "no rate is required"


def test_only_its_own_section_of_the_page_is_replaced() -> None:
    page = "# Page\n\ntable\n\n## A model\n\nnumbers\n"
    first = report.with_older(page, [ROW])
    assert first.startswith(
        "# Page\n\ntable\n\n## A model\n\nnumbers\n\n## KV older than the model\n"
    )
    assert "| lmcache, float32 | another seed | 100 of 100 | 1.500 | 2.000 | ∞ | 0.4 |" in first
    more = first + "\n## Last\n\nkept\n"
    again = report.with_older(more, [replace(ROW, noticed=98)])
    assert again.count("## KV older than the model\n") == 1
    assert "98 of 100: **missed**" in again and "| 100 of 100 |" not in again
    assert again.startswith(page.rstrip()) and again.endswith("\n\n## Last\n\nkept\n")


def test_noise_changes_weights_by_its_share_and_nothing_else() -> None:
    header = b"{}" + b" " * 6
    words = np.full(4096, 0x3F80, np.uint16)  # 1.0 in bfloat16
    weights = len(header).to_bytes(8, "little") + header + words.tobytes()
    other = noisy(weights, 0.05, 1)
    assert other[:16] == weights[:16] and len(other) == len(weights)
    values = (np.frombuffer(other[16:], np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert abs(float(values.mean()) - 1) < 0.01
    assert 0.04 < float(values.std()) < 0.06
    assert other == noisy(weights, 0.05, 1)
