"""Two stacks side by side: who takes turns when, and what the table shows."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.redis_path.side_by_side import Turn, ratios, table, take_turns


@dataclass
class Side:
    """A stack that takes a second more in each turn."""

    name: str
    took_s: float
    order: list[str]
    numbers: list[int] = field(default_factory=list)

    def turn(self, number: int) -> Turn:
        self.order.append(self.name)
        self.numbers.append(number)
        return {"s": self.took_s + number, **({"own": 5.0} if self.name == "b" else {})}


def sides() -> tuple[Side, Side, list[str]]:
    order: list[str] = []
    return Side("a", 1, order), Side("b", 3, order), order


def test_sides_swap_their_order_and_the_first_round_warms_up() -> None:
    one, other, order = sides()
    found = take_turns((one, other), 2)
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert one.numbers == [0, 1, 2]
    assert [turn["s"] for turn in found["a"]] == [2, 3]


def test_ratios_are_of_the_same_round() -> None:
    found = take_turns(sides()[:2], 2)
    assert ratios(found, "a", "b", "s") == [4 / 2, 5 / 3]


def test_a_number_that_one_side_lacks_has_no_ratio() -> None:
    found = take_turns(sides()[:2], 2)
    assert table(found, "a", "b", {"s": "time, s", "own": "its own"}).splitlines() == [
        "| in real engines | a | b | b / a | lowest to highest |",
        "|---|---|---|---|---|",
        "| time, s | 2.50 | 4.50 | 1.83 | 1.67 to 2.00 |",
        "| its own |  | 5.00 |  |  |",
    ]
