"""Results as JSON: a dataclass is what a command computes, what `--json` prints, and the schema.

`as_document` prints the fields of a dataclass and its computed fields, by pydantic, which makes the
schema of the same types. What a field means stands in the docstring of its class or property.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from inspect import cleandoc
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import Field, PlainSerializer, TypeAdapter
from typing_extensions import TypedDict

_Document = TypeVar("_Document", bound=type)
_ATTRIBUTES = "\n\nAttributes:\n"


def _rounded(value: float, digits: int) -> float:
    return round(value, digits)


def _finite(value: float | None, digits: int) -> float | None:
    return None if value is None or math.isinf(value) else round(value, digits)


Rounded = Annotated[float, PlainSerializer(partial(_rounded, digits=6), return_type=float)]
Rounded2 = Annotated[float, PlainSerializer(partial(_rounded, digits=2), return_type=float)]
Rounded1 = Annotated[float, PlainSerializer(partial(_rounded, digits=1), return_type=float)]
# JSON has no word for infinity.
FINITE = PlainSerializer(partial(_finite, digits=6), return_type=float | None)
Finite = Annotated[float, FINITE]
HIDDEN = Field(exclude=True)  # a field that is not printed
# A field that is printed only if it is known.
OPTIONAL = Field(exclude_if=lambda value: value is None, json_schema_extra={"optional": True})


def as_document(value: Any) -> dict[str, Any]:
    """Return a dataclass as JSON has it."""
    kind: Any = type(value)
    document: dict[str, Any] = _adapter(kind).dump_python(
        value, mode="json", by_alias=True, warnings=False
    )
    return document


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def with_fields_of(made: type, *, but: str = "") -> Callable[[_Document], _Document]:
    """Give a TypedDict the fields of a dataclass, and what it says of them.

    What the TypedDict itself says of a field goes before.

    Args:
        but: a field that is not printed.
    """

    def completed(document: _Document) -> _Document:
        fields = {**get_type_hints(made), **get_type_hints(document)}
        fields.pop(but, None)
        whole: Any = TypedDict(document.__name__, fields)  # type: ignore[misc]
        (_, theirs), (summary, own) = _parts(made), _parts(document)
        attributes = "\n".join(filter(None, (theirs, own)))
        whole.__doc__ = f"{summary}{_ATTRIBUTES}{attributes}" if attributes else summary
        whole.__module__ = document.__module__
        return whole  # type: ignore[return-value]  # a TypedDict is built, too

    return completed


def _parts(described: type) -> tuple[str, str]:
    """Return a docstring's summary, and what it says of attributes."""
    summary, _, attributes = cleandoc(described.__doc__ or "").partition(_ATTRIBUTES)
    return summary, attributes
