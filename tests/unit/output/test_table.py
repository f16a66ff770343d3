"""Tables and numbers for people."""

from __future__ import annotations

import pytest

from deploy.output.table import duration, percent, table
from deploy.planning.memory import size


class TestTable:
    def test_text_to_the_left_and_numbers_to_the_right(self) -> None:
        rows = [("redis", 8001, "1.0 GiB"), ("producer-0", 90, "-")]
        assert table(("service", "port", "memory"), rows) == (
            "service     port  memory\n"
            "----------  ----  -------\n"
            "redis       8001  1.0 GiB\n"
            "producer-0    90  -"
        )

    def test_a_column_with_anything_else_is_text(self) -> None:
        assert table(("n",), [(10,), ("-",)]) == "n\n--\n10\n-"

    def test_columns_that_are_asked_for_go_to_the_right(self) -> None:
        assert table(("n", "m"), [("10", "a"), ("-", "bc")], right=("n",)) == (
            " n  m\n--  --\n10  a\n -  bc"
        )

    def test_the_header_may_be_widest(self) -> None:
        assert table(("number",), [(7,)]) == "number\n------\n     7"

    def test_a_table_without_rows_has_its_head(self) -> None:
        assert table(("a", "bc"), []) == "a  bc\n-  --"

    def test_lines_have_no_trailing_spaces(self) -> None:
        made = table(("a", "b"), [("x", ""), ("longer", "y")])
        assert all(line == line.rstrip() for line in made.splitlines())

    def test_a_row_of_another_length_is_a_mistake(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            table(("a", "b"), [("x",)])


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0.0, "0.0 %"),
        (0.5, "50.0 %"),
        (0.8547, "85.5 %"),
        (0.9994, "99.9 %"),
        (0.9996, "99.9 %"),
        (0.999999999, "99.9 %"),
        (1.0, "100.0 %"),
    ],
)
def test_percent_never_rounds_up_to_100(rate: float, text: str) -> None:
    assert percent(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59.6, "60 s"),
        (89, "89 s"),
        (90, "1 min 30 s"),
        (3599.7, "1 h 0 min"),
        (3600, "1 h 0 min"),
        (90061, "25 h 1 min"),
    ],
)
def test_durations_have_a_fitting_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("mib", "text"),
    [(0, "0 MiB"), (0.4, "0 MiB"), (1023, "1023 MiB"), (1024, "1.0 GiB"), (10240, "10.0 GiB")],
)
def test_sizes_have_a_fitting_unit(mib: float, text: str) -> None:
    assert size(mib) == text
