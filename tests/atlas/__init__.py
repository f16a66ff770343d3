"""Public models' config.json: what decides a model's needs, and what vLLM makes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
READINGS = FOLDER / "readings.json"


@dataclass(frozen=True)
class Row:
    """A model of the atlas.

    Attributes:
        name: its id on the hub.
        reading: what vLLM makes of it (pdkit_connector.model_reader).
    """

    name: str
    family: str
    config: Mapping[str, Any]
    reading: Mapping[str, Any]


def rows() -> list[Row]:
    """Return the models with their recorded readings."""
    readings = json.loads(READINGS.read_text(encoding="utf-8")) if READINGS.exists() else {}
    table = yaml.safe_load((FOLDER / "models.yaml").read_text(encoding="utf-8"))
    return [
        Row(name, row["family"], _expanded(row["config"]), readings.get(name, {}))
        for name, row in table.items()
    ]


def _expanded(value: Any) -> Any:
    """Return a value with its repetitions written out."""
    if isinstance(value, dict) and set(value) == {"repeated"}:
        count, period = value["repeated"]
        return [period[at % len(period)] for at in range(count)]
    if isinstance(value, dict):
        return {key: _expanded(one) for key, one in value.items()}
    return value
