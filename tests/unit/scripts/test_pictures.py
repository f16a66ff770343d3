"""`scripts/pictures.py`: the diagram is current, and pictures load nothing and show no folder."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.unit.scripts.conftest import ROOT

IMAGES = ROOT / "docs" / "images"
NAMES = ("stack", "up", "watch")
MODES = ("light", "dark")


@pytest.fixture(scope="module")
def pictures() -> Any:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts" / "pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown(svg: str) -> str:
    """Return the text of a picture, a line for each of its elements."""
    root = ElementTree.fromstring(svg)  # noqa: S314 - our own file
    texts = (element.text or "" for element in root.iter() if element.tag.endswith("}text"))
    return "\n".join(texts).replace("\xa0", " ")


@pytest.mark.parametrize("mode", MODES)
def test_the_diagram_is_what_the_script_draws(pictures: Any, mode: str) -> None:
    drawn = pictures.diagram(mode)
    assert (IMAGES / f"stack-{mode}.svg").read_text(encoding="utf-8") == drawn
    assert "@" not in drawn
    assert {"client", "router", "producer", "consumer", "Redis"} <= set(shown(drawn).splitlines())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_picture_loads_nothing_and_names_no_folder_of_a_machine(name: str, mode: str) -> None:
    svg = (IMAGES / f"{name}-{mode}.svg").read_text(encoding="utf-8")
    assert not re.search(r"@import|@font-face|href=|url\((?!#)", svg)
    assert not re.search(r"/(?:tmp|root|home|work)\b", shown(svg))


def test_there_are_no_other_pictures() -> None:
    expected = {f"{name}-{mode}.svg" for name in NAMES for mode in MODES}
    assert {file.name for file in IMAGES.iterdir()} == expected


def test_the_terminals_are_those_of_a_stack_that_passed_its_check() -> None:
    for mode in MODES:
        up = shown((IMAGES / f"up-{mode}.svg").read_text(encoding="utf-8"))
        assert "$ deploy up" in up and "check passed in" in up
        watch = shown((IMAGES / f"watch-{mode}.svg").read_text(encoding="utf-8"))
        assert "$ deploy status --watch" in watch and "producer-0  ready" in watch


def test_terminal_output_is_drawn_as_text(
    pictures: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    pictures._picture("up", ("up",), "[  0.1 s] <b> & [bold]5[/bold]\nnext")
    for mode in MODES:
        text = shown((tmp_path / f"up-{mode}.svg").read_text(encoding="utf-8"))
        assert {"[  0.1 s] <b> & [bold]5[/bold]", "next"} <= set(text.splitlines())
