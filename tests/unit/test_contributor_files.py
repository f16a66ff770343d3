"""The workflow, the pre-commit hooks and the justfile: valid, and what they run exists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from tests.run import PARTS

REPO = Path(__file__).resolve().parents[2]
WORKFLOW = REPO / ".github" / "workflows" / "test.yml"
AUDIT = WORKFLOW.with_name("audit.yml")
FILES = (WORKFLOW, AUDIT, REPO / ".pre-commit-config.yaml", REPO / "justfile")
# ./scripts/NAME, scripts/NAME.py, or a tool of the virtual environment.
_SCRIPT = re.compile(r"\bscripts/[\w.-]+\w")
_TOOL = re.compile(r"(?:\.venv/bin|\{\{bin\}\})/([\w-]+)")


def missing(text: str) -> list[str]:
    """Return the scripts that do not exist and the tools that no test group installs."""
    installed = {"python", "ruff", "mypy", "mkdocs", "lint-imports"}
    scripts = [path for path in _SCRIPT.findall(text) if not (REPO / path).is_file()]
    return [*scripts, *(set(_TOOL.findall(text)) - installed)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_command_of_the_file_exists(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert _SCRIPT.search(text)
    assert missing(text) == []


def test_a_missing_command_is_found() -> None:
    text = "./scripts/gone {{bin}}/blacker .venv/bin/ruff scripts/test"
    assert missing(text) == ["scripts/gone", "blacker"]


def test_the_hook_watches_every_source_of_the_reference() -> None:
    """The modules that the script and the types of `--json` are made of."""
    config = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text("utf-8"))
    hooks = config["repos"][0]["hooks"]
    (watched,) = (re.compile(hook["files"]) for hook in hooks if hook["id"] == "reference")
    sources = [REPO / "scripts" / "reference.py", *(REPO / "deploy/output/contract").glob("*.py")]
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    modules = set(re.findall(r"^from (deploy\.[\w.]+) import", text, re.MULTILINE))
    assert {"deploy.output.contract.documents", "deploy.workflows.down"} <= modules
    unwatched = {one for one in modules if not watched.search(f"{one.replace('.', '/')}.py")}
    assert unwatched == set()
    assert not watched.search("deploy/router/pdkit_router/app.py")
    assert not watched.search("docs/how-to/images.md")


def test_the_workflow_is_one() -> None:
    schema = get_builtin_schema("vendor.github-workflows")
    validator = jsonschema.validators.validator_for(schema)(schema)
    workflow, audit = (yaml.safe_load(one.read_text("utf-8")) for one in (WORKFLOW, AUDIT))
    assert list(validator.iter_errors(workflow)) == []
    assert list(validator.iter_errors(audit)) == []
    workflow["jobs"]["test"].pop("runs-on")
    assert list(validator.iter_errors(workflow))


def test_the_workflow_runs_every_part_without_a_stack() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text("utf-8"))
    rows = workflow["jobs"]["test"]["strategy"]["matrix"]["parts"]
    with_stacks = {name for name in PARTS if name.startswith("e2e-")} | {"processes", "containers"}
    assert sorted(" ".join(rows).split()) == sorted(PARTS.keys() - with_stacks)


def weaknesses(folder: Path) -> str:
    argv = (Path(sys.executable).with_name("zizmor"), "--offline", "--quiet", folder)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode else ""


def test_a_strangers_action_must_be_pinned_by_commit(tmp_path: Path) -> None:
    """What the lint step finds in the workflow, with its exceptions."""
    folder = shutil.copytree(REPO / ".github", tmp_path / ".github")
    assert weaknesses(folder) == ""
    file = folder / "workflows" / "test.yml"
    file.write_text(file.read_text().replace("actions/checkout@", "somebody/checkout@"))
    assert "unpinned-uses" in weaknesses(folder)


def test_the_workflow_may_write_nothing() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert all("@v" in step["uses"] for step in workflow["jobs"]["test"]["steps"] if "uses" in step)
