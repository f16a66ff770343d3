"""The names of vLLM's arguments and variables, read from its code, which is not run.

`python -m tests.vllm_inputs FOLDER_OF_VLLM VERSION` writes them into the file that tests compare
with `deploy/config/engine_inputs.py`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

NAMES = Path(__file__).parent / "unit" / "config" / "vllm_inputs"
# Where vLLM keeps the parser of its server, the newest first.
_PARSERS = ("common", "launchers", "openai")


def written(version: str) -> frozenset[str]:
    """Return the names of a version as they are in the repository."""
    return frozenset((NAMES / f"{version}.txt").read_text(encoding="utf-8").split())


def read(vllm: Path) -> frozenset[str]:
    """Return the names of arguments, short ones included, and of variables in a folder of vLLM."""
    entrypoints = vllm / "entrypoints"
    parser = next(
        file for name in _PARSERS if (file := entrypoints / name / "cli_args.py").is_file()
    )
    files = (vllm / "engine" / "arg_utils.py", parser)
    options = {name for file in files for name in _options(_tree(file))}
    return frozenset({*options, *_variables(_tree(vllm / "envs.py"))})


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _options(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            names = (one.value for one in node.args if isinstance(one, ast.Constant))
            yield from (name for name in names if str(name).startswith("-"))
        # Of these, the server's parser makes one option a field.
        if isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
            fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
            yield from (f"--{ast.unparse(field).replace('_', '-')}" for field in fields)


def _variables(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "environment_variables":
            assert isinstance(node.value, ast.Dict)
            yield from (ast.literal_eval(key) for key in node.value.keys if key)


if __name__ == "__main__":
    NAMES.mkdir(exist_ok=True)
    text = "\n".join(sorted(read(Path(sys.argv[1])))) + "\n"
    (NAMES / f"{sys.argv[2]}.txt").write_text(text, encoding="utf-8")
