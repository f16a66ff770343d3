"""Documents that `--json` printed, against the schemas that the docs ship."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).resolve().parents[1] / "docs" / "reference" / "schemas" / "commands"


def validated(document: dict[str, Any]) -> dict[str, Any]:
    """Return an envelope that fits its command's schema; it fails the test if it does not."""
    file = f"{document['command'].replace(' ', '-')}.json"
    if (SCHEMAS / file).exists():
        _validator(file).validate(document)
    else:  # a command that is unknown, or not yet known
        assert document["data"] is None and document["errors"]
    return document


def validate_state(document: dict[str, Any]) -> None:
    _validator("state.json").validate(document)


@cache
def _validator(file: str) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads((SCHEMAS / file).read_text(encoding="utf-8")))
