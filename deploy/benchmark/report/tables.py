"""Tables of the report, and numbers as their cells show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from deploy.benchmark.statistics import Estimate

Rows = Iterable[Sequence[str]]


def number(value: float | None) -> str:
    """Return three digits, such as 5.50, and all of those before the point."""
    if value is None:
        return "-"
    if abs(value) >= 100 or not value:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def interval(value: Estimate | None, factor: float = 1.0, unit: str = "") -> str:
    """Return a value times a factor, with its confidence interval where there is one."""
    if value is None:
        return "-"
    text = f"{number(factor * value.value)}{unit}"
    if value.low is None or value.high is None or value.high == value.low:
        return text
    return f"{text} ({number(factor * value.low)} to {number(factor * value.high)})"


def percent(share: float | None) -> str:
    """Return a share of 1 in percent."""
    return "-" if share is None else f"{100 * share:.1f} %"


def short(load: str) -> str:
    """Return a load as a cell has it."""
    return load.replace(" requests/s", "/s")


def table(header: Sequence[str], rows: Rows, kind: str = "") -> str:
    """Return a table that scrolls by itself where the page is narrow."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
