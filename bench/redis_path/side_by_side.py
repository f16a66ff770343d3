"""Two stacks of the wide model, side by side: they take turns and are compared round by round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Protocol

from bench.kit import say

Turn = dict[str, float]
# Name of a stack → one turn a round.
Turns = Mapping[str, list[Turn]]


class Side(Protocol):
    """One of the two stacks."""

    @property
    def name(self) -> str:
        """What the stack is called in messages and tables."""

    def turn(self, number: int) -> Turn:
        """Measure the stack once; the number differs from turn to turn."""


def take_turns(sides: Sequence[Side], rounds: int) -> Turns:
    """Return what every stack measured, in an order that changes from round to round."""
    found: dict[str, list[Turn]] = {side.name: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides if number % 2 else sides[::-1]:
            turn = side.turn(number)
            if number:  # the first round warms up
                found[side.name].append(turn)
            say(f"round {number} of {rounds}, {side.name}: {turn}")
    return found


def ratios(found: Turns, base: str, other: str, name: str) -> list[float]:
    """Return the rounds' ratios of one number, the other stack's to the base's."""
    pairs = zip(found[base], found[other], strict=True)
    return [its[name] / ours[name] for ours, its in pairs]


def table(found: Turns, base: str, other: str, shown: Mapping[str, str]) -> str:
    """Return the medians and ratios of what is shown, as Markdown.

    Args:
        shown: the name of a number → its text. A stack may lack one, which then has no ratio.
    """
    rows = [f"| in real engines | {base} | {other} | {other} / {base} | lowest to highest |",
            "|---|---|---|---|---|"]  # fmt: skip
    for name, what in shown.items():
        middles = [_median(found[side], name) for side in (base, other)]
        of = ratios(found, base, other, name) if all(middles) else []
        ratio = f"{statistics.median(of):.2f}" if of else ""
        spread = f"{min(of):.2f} to {max(of):.2f}" if of else ""
        rows.append(f"| {what} | {' | '.join(middles)} | {ratio} | {spread} |")
    return "\n".join(rows)


def _median(turns: Sequence[Turn], name: str) -> str:
    return f"{statistics.median(turn[name] for turn in turns):.2f}" if name in turns[0] else ""
