"""What is said of the costs before and after: only what the rounds show."""

from __future__ import annotations

import pytest

from bench.before_after import table


@pytest.mark.parametrize(
    ("after", "limits", "said"),
    [
        ([1.0, 1.02] * 10, "1.000 to 1.020", "yes"),
        ([1.04, 1.06] * 10, "1.040 to 1.060", "NO"),
        ([0.9, 1.1] * 10, "0.900 to 1.100", "not shown"),
        ([1.0, 5.0] + [1.0] * 18, "1.000 to 1.000", "yes"),  # one round is no cost
        ([1.0] * 19, "1.000 to 1.000", "too few rounds"),
    ],
)
def test_the_verdict_follows_from_the_limits(after: list[float], limits: str, said: str) -> None:
    # A machine that becomes slower in the middle is so to both sides.
    slow = [3.0 if at > 10 else 1.0 for at in range(len(after))]
    spent = {
        "after": [one * by for one, by in zip(after, slow, strict=True)],
        "before": slow,
    }
    *_, row = table({"router": spent}).splitlines()
    assert [cell.strip() for cell in row.strip("|").split("|")][3:] == [limits, said]
