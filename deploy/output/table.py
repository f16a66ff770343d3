"""Plain tables that fit a terminal and paste well."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from deploy.planning.memory import size


def table(
    header: Sequence[str], rows: Sequence[Sequence[object]], *, right: Collection[str] = ()
) -> str:
    """Return rows under a header, columns padded; numbers and the columns `right` to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    numeric = [
        name in right or (bool(rows) and all(isinstance(row[index], (int, float)) for row in rows))
        for index, name in enumerate(header)
    ]

    def line(row: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join((line(header), line(["-" * width for width in widths]), *map(line, cells)))


def percent(rate: float) -> str:
    """Return a rate as a percentage with one digit, never rounding up to 100."""
    text = f"{100 * rate:.1f} %"
    return "99.9 %" if text == "100.0 %" and rate < 1.0 else text


def duration(seconds: float) -> str:
    """Return seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def told(number: int | None) -> str:
    """Return a number of Redis's; its user may not be allowed to ask."""
    return "?" if number is None else str(number)


def told_size(size_bytes: int | None) -> str:
    """Return a size that a service reports, or a question mark."""
    return "?" if size_bytes is None else size(size_bytes / 2**20)
