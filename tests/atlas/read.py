"""Ask the installed vLLM about every model of the atlas: python -m tests.atlas.read FILE.

Writes what it answers as JSON; the test in tests/unit/config/test_atlas.py compares it with the
recorded answers. In a process of its own, which imports vLLM without torchvision: the engines' lean
environment has none, multimodal models import it, and no KV depends on it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from tests.atlas import rows


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module wherever code imports one of torchvision's."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the interface's
        target: types.ModuleType | None = None,  # noqa: ARG002 - the interface's
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock(name=name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: it has whatever is asked of it."""


def main() -> None:
    """Write the readings."""
    warnings.filterwarnings("ignore")
    from pdkit_connector.model_reader import _QUIET, read_model

    os.environ.update(_QUIET)
    logging.disable(logging.ERROR)
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.insert(0, _Absent())
    readings: dict[str, Any] = {}
    only = sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        for row in rows():
            if only and row.name not in only:
                continue
            at = Path(folder) / row.name.replace("/", "--")
            at.mkdir()
            (at / "config.json").write_text(json.dumps(row.config), encoding="utf-8")
            readings[row.name] = read_model(at)
            lines = [f"{json.dumps(one)}: {json.dumps(it)}" for one, it in readings.items()]
            text = "{\n" + ",\n".join(lines) + "\n}\n"
            Path(sys.argv[1]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
