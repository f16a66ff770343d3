"""Write the generated pages of the reference: `docs/reference/cli.md`, `kv-identity.md`, the tables
of fields in `docs/reference/configuration.md`, the schemas in `docs/reference/schemas`, and
`deploy.example.yaml`.

The first comes from the commands and the errors, the second and the last from the spec, the schemas
from the models of a benchmark result, of a sweep and of what commands print with `--json`, whose
fields `docs/reference/json.md` lists (`deploy/output/contract`). Run from a checkout:
`python scripts/reference.py`. `tests/unit/test_reference.py` fails if one of them is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from typer.main import get_command

from deploy import errors
from deploy.assets import connector_path
from deploy.benchmark.results import Result
from deploy.benchmark.sweep import Sweep
from deploy.cli import options
from deploy.cli.commands import whole_app
from deploy.config.engine_inputs import ARGUMENTS, VARIABLES
from deploy.config.settings import SettingGroup, example_yaml, groups_of, listed
from deploy.config.sources import ENV_FIELDS
from deploy.config.spec import StackSpec
from deploy.connector.pdkit_connector.identity.model_files import NAMING_FILES
from deploy.output.contract.schema import file_names, schema_for
from deploy.output.contract.schema import page as json_page
from deploy.stack import kv_identity

DOCS = Path(__file__).resolve().parents[1] / "docs" / "reference"
EXAMPLE = "../../deploy.example.yaml"
BEGIN, END = "<!-- generated from deploy/config/spec.py: begin -->", "<!-- generated: end -->"
_HEAD = (
    "<!-- Generated from the commands themselves: do not edit, run\n"
    "     python scripts/reference.py -->\n\n# Command line"
)
_ERROR = re.compile(r"[│\s]*[├└]── (?P<name>\w+)\s+(?:\d+\s+)?(?P<meaning>\S.*)")
_KIT_FAULT = "70"


def main() -> None:
    """Write all pages."""
    (DOCS / "schemas" / "commands").mkdir(exist_ok=True)
    for name, text in pages(get_command(whole_app()), StackSpec).items():
        (DOCS / name).write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {DOCS / name}\n")


def pages(root: Any, spec: type[BaseModel]) -> dict[str, str]:
    """Return file name → text of the generated pages, for a command and a spec."""
    written = (DOCS / "configuration.md").read_text(encoding="utf-8")
    return {
        "cli.md": cli_page(root),
        "configuration.md": with_fields(written, spec),
        "schemas/bench.json": json.dumps(Result.model_json_schema(), indent=1) + "\n",
        "schemas/sweep.json": json.dumps(Sweep.model_json_schema(), indent=1) + "\n",
        EXAMPLE: example_yaml(),
        "json.md": json_page(),
        "kv-identity.md": kv_identity_page(),
        **{
            f"schemas/commands/{name}": json.dumps(schema_for(command), indent=1) + "\n"
            for name, command in file_names().items()
        },
    }


def kv_identity_page() -> str:
    """Return the page of what decides the keys of KV, and of what does not."""
    rows = ((f"`{name}`", row.why, row.taken_from) for name, row in kv_identity.ROWS.items())
    parts = [
        _KV_HEAD,
        _table(("row", "why it separates KV", "where it is taken"), rows),
        _KV_ENGINES,
        "## What each engine compares",
        _KV_OF_ENGINES,
        _table(("row", "why it separates KV", "where it is taken"), engine_rows()),
        "## Files that arguments name",
        _KV_FILES,
        _table(("argument", "why the content counts"), _naming_files()),
        "## What does not change KV",
        _KV_LEFT_OUT,
        _table(("why two values mean the same KV", "names"), _unrelated()),
    ]
    return "\n\n".join(parts) + "\n"


_KV_HEAD = """<!-- Generated from deploy/stack/kv_identity.py, deploy/config/engine_inputs.py and
     deploy/connector/pdkit_connector/identity/kv_identity.py: do not edit, run
     python scripts/reference.py -->

# Identity of KV

Engines load KV that other engines stored, so the keys of KV must differ wherever its bytes mean
something else. pdkit makes the identity of a stack's KV from the rows below. Their digest is
the hash seed of the engines (`PYTHONHASHSEED`) and part of every key: `pdkit:NAME:DIGEST:...`.
If a row changes, engines find none of the old KV and compute prompts again; the old KV stays
until Redis drops it, and is found again if the row changes back."""
_KV_ENGINES = """\
All hosts of a stack need the same identity; `deploy up` compares it with the engines of
`router.engines`.

Engines that run as processes do not inherit variables of your shell that change numbers:
`VLLM_*`, `LMCACHE_*`, and those of the libraries below vLLM, such as `NVIDIA_TF32_OVERRIDE` and
`ONEDNN_DEFAULT_FPMATH_MODE`. `deploy up` names each that it leaves out. To pass one on, set it
in `engine.env`; then it is in the identity."""
_KV_OF_ENGINES = """\
An engine that runs something else than planned, such as another vLLM after an upgrade of its
virtual environment, must not load this KV either. So each engine takes the rows below from vLLM's
own configuration as it starts, and their digest is part of its keys, too: it finds only KV of
engines with equal rows. Its report has the rows, and those that are not as planned: `deploy check`
and `deploy doctor` name them."""
_KV_FILES = """\
Of these arguments, not only the text counts, but also the content of the folders and files that
they name by an absolute path, as that of the model's folder does. Each start compares it, and
`deploy swap` serves another one. In containers and pods, whose files the plan does not see, each
engine takes it at its start, and finds only KV of engines with the same files.

Names on a hub have no files to compare: as `--code-revision`, or the revision of a draft model,
name a commit and not a branch, which may move."""
_KV_LEFT_OUT = """\
These arguments and variables may differ without separating KV, whether the plan or you set
them. Everything else that engines are given separates KV, known to pdkit or not, unless it is
refused. An abbreviated argument counts as unknown."""


def engine_rows() -> list[tuple[str, str, str]]:
    """Return the rows of an engine's identity: name, why, and where they are taken."""
    # The connector imports itself by the name that it has in engines.
    sys.path.insert(0, str(connector_path()))
    try:
        rows = import_module("pdkit_connector.identity.kv_identity").ROWS
    finally:
        sys.path.pop(0)
    return [(f"`{name}`", row.why, row.taken_from) for name, row in rows.items()]


def _naming_files() -> Iterator[tuple[str, str]]:
    return ((f"`{name}`", why) for name, why in NAMING_FILES.items())


def _unrelated() -> Iterator[tuple[str, str]]:
    reasons: dict[str, list[str]] = {}
    for name, row in sorted({**ARGUMENTS, **VARIABLES}.items()):
        if row.unrelated:
            reasons.setdefault(row.unrelated, []).append(f"`{name}`")
    return ((reason, " ".join(names)) for reason, names in sorted(reasons.items()))


def cli_page(root: Any) -> str:
    """Return the page of a command with all commands below it."""
    found = list(_commands_below(root, "deploy"))
    shared, context = _stack_params(found), typer.Context(root)
    parts = [
        _HEAD,
        *_paragraph(root.help),
        "Every command takes `--help`. If an option is not given, its variable is read, then\n"
        "`deploy.yaml` ([configuration](configuration.md)).",
        _table(("command", "does"), ((_link(name), _first(one.help)) for name, one in found)),
        _options_of(root, "deploy", ()),
        "## Stack options",
        f"Options of {_takers(found, shared)}.",
        _table(_OPTION_HEADER, (_option_row(one, context, of_stack=True) for one in shared)),
        *(part for name, command in found for part in _command(name, command, shared)),
    ]
    parts += ["## Exit codes", _exit_codes()]
    return "\n\n".join(part for part in parts if part) + "\n"


_OPTION_HEADER = ("option", "variable", "meaning")


def _commands_below(group: Any, before: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            if command.invoke_without_command:
                yield f"{before} {name}", command
            yield from _commands_below(command, f"{before} {name}")
        elif not command.hidden:
            yield f"{before} {name}", command


def _stack_params(found: Sequence[tuple[str, Any]]) -> list[Any]:
    """Return the options that all commands have which take those of the stack."""
    names = list(options.stack_option_names())
    for _, command in found:
        params = {param.name: param for param in command.params}
        if set(names) <= params.keys():
            return [params[name] for name in names]
    raise LookupError("no command takes the stack options")


def _takes(command: Any, shared: Sequence[Any]) -> bool:
    return {one.name for one in shared} <= {param.name for param in command.params}


def _takers(found: Sequence[tuple[str, Any]], shared: Sequence[Any]) -> str:
    return listed([f"`{name}`" for name, one in found if _takes(one, shared)], last="and")


def _command(name: str, command: Any, shared: Sequence[Any]) -> list[str]:
    all_of = _takes(command, shared)
    left = {param.name for param in shared} if all_of else set()
    stack = " [STACK OPTIONS]" if all_of else ""
    arguments = "".join(
        f" [{param.name.upper()}]" if not param.required else f" {param.name.upper()}"
        for param in command.params
        if param.param_type_name == "argument"
    )
    return [
        f"## {name}",
        f"`{name}{arguments}{stack} [OPTIONS]`",
        *_paragraph(command.help),
        _options_of(command, name, left),
    ]


def _options_of(command: Any, name: str, left: Iterable[str]) -> str:
    context = typer.Context(command, info_name=name)
    params = [
        param
        for param in command.get_params(context)
        if param.name not in {*left, "help"} and not getattr(param, "hidden", False)
    ]
    rows = (_option_row(param, context, of_stack=False) for param in params)
    return _table(_OPTION_HEADER, rows) if params else ""


def _option_row(param: Any, context: typer.Context, *, of_stack: bool) -> tuple[str, ...]:
    """Return how an option is written and what it means, as `--help` has both."""
    shown, meaning = param.get_help_record(context)
    # Of commands on a stack that is up, its name is all that a variable gives.
    has_variable = param.name in ENV_FIELDS if of_stack else param.name == "name"
    return (
        f"`{shown}`",
        f"`PDKIT_{param.name.upper()}`" if has_variable else "",
        " ".join(meaning.split()),
    )


def _exit_codes() -> str:
    meanings = _error_meanings(errors.__doc__ or "")
    rows = [("0", "", 'done, or nothing to do, as with "already up"')]
    for kind in sorted(_errors_below(errors.PdkitError), key=lambda kind: kind.exit_code):
        if kind.__name__ not in meanings:
            raise LookupError(f"the tree in deploy/errors.py does not say what {kind.__name__} is")
        rows.append((str(kind.exit_code), f"`{kind.code}`", meanings[kind.__name__]))
    rows.append((_KIT_FAULT, "`error`", "a bug of pdkit itself"))
    rows.sort(key=lambda row: int(row[0]))
    return _table(("exit code", "`errors[].code`", "meaning"), rows)


def _errors_below(kind: type[errors.PdkitError]) -> Iterator[type[errors.PdkitError]]:
    for one in kind.__subclasses__():
        yield one
        yield from _errors_below(one)


def _error_meanings(tree: str) -> Mapping[str, str]:
    """Return class → meaning from the tree that the docstring of the errors draws."""
    found = (_ERROR.fullmatch(line) for line in tree.splitlines())
    return {match["name"]: match["meaning"] for match in found if match}


def with_fields(page: str, spec: type[BaseModel]) -> str:
    """Return a page in which what lies between the marks is the tables of a spec's fields.

    Raises:
        ValueError: the page has no such marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError("the page lacks the marks between which the fields are written")
    return f"{before}{BEGIN}\n\n{_fields(spec)}\n\n{END}{after}"


def _fields(spec: type[BaseModel]) -> str:
    top, *groups = groups_of(spec)
    parts = [_table(("field", "value", "default", "also", "meaning"), _field_rows(top))]
    for group in groups:
        header = ("field", "value", "default", "meaning")
        parts += [f"### {group.name}", *_paragraph(group.meaning)]
        parts.append(_table(header, _field_rows(group)))
    return "\n\n".join(parts)


def _field_rows(group: SettingGroup) -> Iterator[tuple[str, ...]]:
    flags = set(options.stack_option_names())
    for one in group.settings:
        also = [f"`--{one.name.replace('_', '-')}`"] if one.name in flags else []
        also += [f"`PDKIT_{one.name.upper()}`"] if one.name in ENV_FIELDS else []
        yield (
            f"`{one.name}`",
            one.value,
            f"`{one.default_text}`",
            *([] if group.name else [" ".join(also)]),
            one.meaning,
        )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; columns in which nothing stands are left out."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    kept = [at for at in range(len(header)) if any(row[at] for row in cells)]
    lines = [[header[at] for at in kept], ["---"] * len(kept)]
    lines += [[row[at] for at in kept] for row in cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _link(name: str) -> str:
    return f"[`{name}`](#{name.replace(' ', '-')})"


def _paragraph(text: str | None) -> list[str]:
    return [" ".join(text.split())] if text else []


def _first(text: str | None) -> str:
    return (text or "").strip().partition("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    main()
