"""The generated pages of the reference are what the commands, errors and fields are now.

`UPDATE_GOLDENS=1 python -m pytest tests/unit/test_reference.py` writes them anew, as
`python scripts/reference.py` does.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import Field, create_model
from typer.main import get_command

from deploy.cli.commands import whole_app
from deploy.config.engine_inputs import ARGUMENTS, VARIABLES
from deploy.config.spec import StackSpec
from deploy.errors import MachineError, PdkitError
from deploy.output.contract.schema import field_meanings, file_names, schema_for
from deploy.stack.kv_identity import ROWS

PAGES = (
    "cli.md", "configuration.md", "json.md", "kv-identity.md",
    "schemas/bench.json", "schemas/sweep.json",
    *(f"schemas/commands/{name}" for name in file_names()), "../../deploy.example.yaml",
)  # fmt: skip


@pytest.fixture(scope="module")
def reference() -> Any:
    file = Path(__file__).resolve().parents[2] / "scripts" / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root() -> Any:
    """The commands, made anew, so that a test may change them."""
    return get_command(whole_app())


@pytest.fixture(scope="module")
def generated(reference: Any) -> dict[str, str]:
    """The pages of what there is, made once for the tests that change nothing."""
    if os.environ.get("UPDATE_GOLDENS"):
        reference.main()
    return dict(reference.pages(get_command(whole_app()), StackSpec))


@pytest.fixture
def is_current(reference: Any, root: Any) -> Callable[..., bool]:
    """Tell whether a page is what is generated."""

    def tell(name: str, spec: Any = StackSpec) -> bool:
        wanted = reference.pages(root, spec)[name]
        return bool((reference.DOCS / name).read_text(encoding="utf-8") == wanted)

    return tell


@pytest.mark.parametrize("name", PAGES)
def test_each_page_is_current(name: str, reference: Any, generated: dict[str, str]) -> None:
    written = (reference.DOCS / name).read_text(encoding="utf-8")
    assert written == generated[name], "if this is meant: python scripts/reference.py"


class TestStalePages:
    """What may change without anybody's thinking of the page makes the test above fail."""

    def test_help_of_an_option(self, root: Any, is_current: Callable[..., bool]) -> None:
        (watch,) = [one for one in root.commands["status"].params if one.name == "watch"]
        watch.help += " Or so."
        assert not is_current("cli.md")

    def test_help_of_a_command(self, root: Any, is_current: Callable[..., bool]) -> None:
        root.commands["images"].commands["pull"].help = "Push them."
        assert not is_current("cli.md")

    def test_default_of_an_option(self, root: Any, is_current: Callable[..., bool]) -> None:
        (lines,) = [one for one in root.commands["logs"].params if one.name == "lines"]
        lines.default = 51
        assert not is_current("cli.md")

    def test_an_option_that_goes(self, root: Any, is_current: Callable[..., bool]) -> None:
        root.commands["down"].params.pop()
        assert not is_current("cli.md")

    def test_default_of_a_field(self, is_current: Callable[..., bool]) -> None:
        changed = create_model("Changed", __base__=StackSpec, tp=(int, Field(2, description="x")))
        assert not is_current("configuration.md", changed)
        assert is_current("cli.md", changed)


class TestCommands:
    def test_a_new_one_needs_no_change_of_the_generator(self, reference: Any, root: Any) -> None:
        fresh = typer.Typer()

        @fresh.command()
        def doctor(deep: bool = typer.Option(False, "--deep", help="Look twice.")) -> None:
            """Say what would stop it."""

        root.commands["doctor"] = get_command(fresh)
        page = reference.cli_page(root)
        assert "## deploy doctor" in page
        assert "| [`deploy doctor`](#deploy-doctor) | Say what would stop it. |" in page
        assert "| `--deep` | Look twice. |" in page

    def test_every_command_has_all_its_options(self, reference: Any, root: Any) -> None:
        sections = dict(_sections(reference.cli_page(root)))
        shared = sections.pop("Stack options")
        assert sections.pop("Exit codes")

        def check(command: Any, name: str) -> None:
            for below, one in getattr(command, "commands", {}).items():
                check(one, f"{name} {below}")
            if hasattr(command, "commands") and not command.invoke_without_command:
                return
            text = sections.pop(name)
            for param in command.params:
                word = param.opts[-1] if param.param_type_name == "option" else param.name.upper()
                assert word in text or ("STACK OPTIONS" in text and word in shared), (name, word)

        check(root, "deploy")
        assert sections == {}, "no section of a command that there is not"

    def test_links_lead_to_sections(self, reference: Any, root: Any) -> None:
        page = reference.cli_page(root)
        anchors = {name.lower().replace(" ", "-") for name, _ in _sections(page)}
        links = re.findall(r"\(#([\w-]+)\)", page)
        assert len(links) > 10
        assert set(links) <= anchors

    def test_defaults_and_ranges_are_there(self, reference: Any, root: Any) -> None:
        (line,) = [row for row in reference.cli_page(root).splitlines() if "--lines" in row]
        assert "[default: 50; x>=0]" in line


class TestIdentity:
    def test_every_row_and_every_exception_is_there(self, reference: Any) -> None:
        page = reference.kv_identity_page()
        for name, row in ROWS.items():
            assert f"| `{name}` | {row.why} | {row.taken_from} |" in page
        engines = page.partition("## What each engine compares")[2]
        for name, why, taken_from in reference.engine_rows():
            assert f"| {name} | {why} | {taken_from} |" in engines
        assert {"`vllm`", "`connector`", "`variables`"} <= {
            name for name, *_ in reference.engine_rows()
        }
        table = page.partition("## What does not change KV")[2]
        for name, row in {**ARGUMENTS, **VARIABLES}.items():
            assert (f"`{name}`" in table) is bool(row.unrelated), name


class TestErrors:
    def test_each_has_its_line(self, reference: Any, root: Any) -> None:
        page = reference.cli_page(root)
        for kind in _below(PdkitError):
            assert re.search(rf"^\| {kind.exit_code} \| `{kind.code}` \| \S", page, re.MULTILINE)

    def test_an_error_without_explanation_is_refused(
        self, reference: Any, root: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tree = reference.errors.__doc__.replace("FixFailed ", "FixFailing ")
        monkeypatch.setattr(reference.errors, "__doc__", tree)
        with pytest.raises(LookupError, match="FixFailed"):
            reference.cli_page(root)
        assert MachineError in set(_below(PdkitError))


class TestFields:
    def test_each_has_its_line(self, reference: Any) -> None:
        (table,) = re.findall(r"begin -->(.*)<!-- generated", _written(reference), re.DOTALL)
        for name, field in StackSpec.model_fields.items():
            nested = getattr(field.annotation, "model_fields", None)
            if nested is None:
                assert f"\n| `{name}` |" in table
                continue
            (section,) = re.findall(rf"### {name}\n(.*?)(?=###|$)", table, re.DOTALL)
            for inner in nested:
                assert f"\n| `{inner}` |" in section

    def test_a_setting_without_a_description_is_refused(self, reference: Any) -> None:
        bare = create_model("Bare", __base__=StackSpec, colour=(str, "red"))
        with pytest.raises(LookupError, match="colour"):
            reference.with_fields(_written(reference), bare)

    @pytest.mark.parametrize(
        ("field", "value", "default"),
        [
            ("gpus", "whole number from 1 to 64", "null"),
            ("port", "whole number from 1024 to 65535", "8000"),
            ("gpu_memory", "number above 0, at most 0.98", "0.9"),
            ("dtype", "`bfloat16`, `float16` or `float32`", "null"),
            ("layerwise", "true or false", "false"),
            ("tls_files", "list of paths", "[]"),
            ("env", "mapping of names to strings", "{}"),
            ("url_file", "path", "null"),
        ],
    )
    def test_values_in_words(self, reference: Any, field: str, value: str, default: str) -> None:
        assert f"| `{field}` | {value} | `{default}` |" in _written(reference)

    def test_text_written_by_hand_stays(self, reference: Any) -> None:
        page = f"# Mine\n{reference.BEGIN}\nold\n{reference.END}\nby hand\n"
        made = reference.with_fields(page, StackSpec)
        assert made.startswith("# Mine\n")
        assert made.endswith("\nby hand\n")
        assert "\nold\n" not in made

    def test_a_page_without_marks_is_refused(self, reference: Any) -> None:
        with pytest.raises(ValueError, match="marks"):
            reference.with_fields("# Mine\n", StackSpec)


def _written(reference: Any) -> str:
    return str((reference.DOCS / "configuration.md").read_text(encoding="utf-8"))


def _sections(page: str) -> Iterator[tuple[str, str]]:
    for part in page.split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        yield title, text


def _below(kind: type[PdkitError]) -> Iterator[type[PdkitError]]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


class TestJsonFields:
    @staticmethod
    def types() -> Iterator[tuple[str, Any]]:
        """Yield every type of every document with its schema; the documents' own are first."""
        for command in file_names().values():
            schema = schema_for(command)
            yield "Envelope" if command else "StateFile", schema
            yield from schema.get("$defs", {}).items()

    def test_every_field_has_a_meaning(self) -> None:
        silent = {
            f"{name}.{field}"
            for name, schema in self.types()
            for field, of in schema.get("properties", {}).items()
            if not of.get("description")
        }
        assert not silent, "give them one in their type's docstring or in contract/meanings.yaml"

    def test_no_described_field_is_gone(self) -> None:
        fields: dict[str, set[str]] = defaultdict(set)
        for name, schema in self.types():
            fields[name] |= schema.get("properties", {}).keys()
        known = field_meanings()
        assert known["shared"].keys() <= set().union(*fields.values())
        assert known["own"].keys() <= fields.keys()
        for name, meanings in known["own"].items():
            assert meanings.keys() <= fields[name], name
