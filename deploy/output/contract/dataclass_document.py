"""Documents that print the fields of a dataclass, and some more."""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Any, TypeVar, get_type_hints

from typing_extensions import TypedDict

_Document = TypeVar("_Document", bound=type)
_ATTRIBUTES = "\n\nAttributes:\n"


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
