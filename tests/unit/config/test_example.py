"""The complete deploy.yaml: every setting is in it, and each line is what it claims to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, Field

from deploy.config.settings import example_yaml, flow, groups_of
from deploy.config.sources import load_spec
from deploy.config.spec import StackSpec

_COMMENTED = re.compile(r"^( *)#(\w+:)", re.M)


def paths(spec: type[BaseModel], before: str = "") -> list[str]:
    """Return every setting of a spec by its path, such as 'engine.dtype'."""
    found = []
    for name, field in spec.model_fields.items():
        kind = field.annotation
        below = isinstance(kind, type) and issubclass(kind, BaseModel)
        found += paths(kind, f"{name}.") if below else [before + name]
    return found


def uncommented(text: str) -> str:
    return _COMMENTED.sub(r"\1\2", text)


def test_the_example_has_every_setting_once() -> None:
    document = yaml.safe_load(uncommented(example_yaml()))
    found = [
        f"{name}.{key}" if isinstance(value, dict) else name
        for name, value in document.items()
        for key in (value if isinstance(value, dict) else [""])
    ]
    assert found == sorted(paths(StackSpec), key=lambda path: "." in path)


def test_the_example_shows_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text(uncommented(example_yaml()))
    document = {
        name: {key: one for key, one in value.items() if one is not None}
        if isinstance(value, dict)
        else value
        for name, value in yaml.safe_load(file.read_text()).items()
        if value is not None
    }
    assert StackSpec.model_validate(document) == StackSpec()
    assert load_spec({}, {}, file).spec == StackSpec()


def test_the_unedited_example_sets_nothing(tmp_path: Path) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text(example_yaml())
    source = load_spec({}, {}, file)
    assert source.spec == StackSpec()
    assert (source.origins, source.reaching()) == ({}, ())


def test_only_the_given_settings_are_set(tmp_path: Path) -> None:
    file = tmp_path / "deploy.yaml"
    given = {"vendor": "rocm", "gpus": 8, "model": "yes"}
    file.write_text(
        example_yaml(given, {"model": "in the cache:\nno: really", "": "found\nname: x"})
    )
    source = load_spec({}, {}, file)
    assert source.spec.model_dump(exclude_unset=True) == given
    assert "# in the cache: no: really" in file.read_text()


def test_each_setting_has_its_meaning_value_and_default() -> None:
    text = example_yaml()
    for group in groups_of(StackSpec):
        for one in group.settings:
            block = text[: text.index(f"#{one.name}: ")].rpartition("\n\n")[2]
            assert "value: " in block, one.name
            assert one.default is not None or "default: " in one.meaning, one.name
    assert max(map(len, text.splitlines())) <= 100


def test_a_setting_without_a_description_is_refused() -> None:
    class Silent(BaseModel):
        port: int = Field(1)

    with pytest.raises(LookupError, match="port"):
        groups_of(Silent)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", "a"),
        ("yes", "'yes'"),
        ((), "[]"),
        ({}, "{}"),
        (None, "null"),
        (600.0, "600"),
        (True, "true"),
    ],
)
def test_values_are_written_as_yaml(value: object, expected: str) -> None:
    assert flow(value if value != () else []) == expected


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\u2029", "\0\x1b[2J"])
def test_a_remark_cannot_set_a_setting(end: str) -> None:
    """Remarks name models of a cache that others may write to; these end a line in YAML."""
    text = example_yaml({"port": 9000}, {"": f"a{end}image: b:1", "model": f"a{end}image: b:1"})
    assert yaml.safe_load(text).keys() - {"port"} == yaml.safe_load(example_yaml()).keys()
