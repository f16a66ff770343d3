"""The workflows, the pre-commit hooks and the justfile: valid, and what they run exists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from deploy import __version__
from tests.run import PARTS

REPO = Path(__file__).resolve().parents[2]
WORKFLOW = REPO / ".github" / "workflows" / "test.yml"
WORKFLOWS = sorted(WORKFLOW.parent.glob("*.yml"))
RELEASE = WORKFLOW.with_name("release.yml")
FILES = (*WORKFLOWS, REPO / ".pre-commit-config.yaml", REPO / "justfile")
# ./scripts/NAME, scripts/NAME.py, or a tool of the virtual environment.
_SCRIPT = re.compile(r"\bscripts/[\w.-]+\w")
_TOOL = re.compile(r"(?:\.venv/bin|\{\{bin\}\})/([\w-]+)")


def missing(text: str) -> list[str]:
    """Return the scripts that do not exist and the tools that no test group installs."""
    installed = {"deploy", "python", "ruff", "mypy", "mkdocs", "lint-imports"}
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


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_fit_the_schema_of_workflows(file: Path) -> None:
    schema = get_builtin_schema("vendor.github-workflows")
    validator = jsonschema.validators.validator_for(schema)(schema)
    workflow = yaml.safe_load(file.read_text("utf-8"))
    assert list(validator.iter_errors(workflow)) == []
    (first, *_) = workflow["jobs"].values()
    first.pop("runs-on", None) or first.pop("uses")
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


def test_actions_must_be_pinned_by_commit(tmp_path: Path) -> None:
    """What the lint step finds in the workflows."""
    folder = shutil.copytree(REPO / ".github", tmp_path / ".github")
    assert weaknesses(folder) == ""
    file = folder / "workflows" / "test.yml"
    file.write_text(re.sub(r"(actions/checkout)@\w+", r"\1@v4", file.read_text()))
    assert "unpinned-uses" in weaknesses(folder)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_only_jobs_that_publish_may_write(file: Path) -> None:
    workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    rights = {name: job.get("permissions", {}) for name, job in workflow["jobs"].items()}
    writing = {name: scopes for name, scopes in rights.items() if "write" in scopes.values()}
    assert writing == (PUBLISHING if file == RELEASE else {})


PUBLISHING = {
    "images": {"contents": "read", "packages": "write"},
    "publish": {"contents": "write"},
    "site": {"id-token": "write", "pages": "write"},
}


def test_nothing_is_published_before_the_tests_have_passed() -> None:
    jobs = yaml.safe_load(RELEASE.read_text(encoding="utf-8"))["jobs"]
    assert jobs["test"]["uses"] == f"./.github/workflows/{WORKFLOW.name}"
    for name in PUBLISHING:
        before = {name}
        while needed := {one for job in before for one in _needs(jobs[job])} - before:
            before |= needed
        assert {"test", "build"} <= before


def _needs(job: dict[str, Any]) -> list[str]:
    needs = job.get("needs", [])
    return [needs] if isinstance(needs, str) else needs


def test_the_wheel_is_tried_on_every_supported_python() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    pythons = jobs["wheel"]["strategy"]["matrix"]["python"]
    project = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    assert pythons == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert f'requires-python = ">={pythons[0]}"' in project


def notes_of(version: str) -> str:
    """Run the command by which the release workflow takes its text from the changelog."""
    steps = yaml.safe_load(RELEASE.read_text(encoding="utf-8"))["jobs"]["build"]["steps"]
    (command,) = (step["run"] for step in steps if "CHANGELOG.md" in step.get("run", ""))
    command = command.partition(" >notes.md")[0]
    environ = {**os.environ, "GITHUB_REF_NAME": f"v{version}"}
    done = subprocess.run(
        ("bash", "-c", command), cwd=REPO, env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_changelog_has_the_text_of_this_version() -> None:
    notes = notes_of(__version__)
    assert "### Added" in notes
    assert "## [" not in notes
    assert notes_of("9.9.9") == ""


def without_a_row(rooms: str) -> list[str]:
    """Return the folders with code that a text does not name, as `deploy/cli/`."""
    # The checkout may belong to another user, as on the machine of `tests.hosts small`.
    git = ("git", "-c", "safe.directory=*", "ls-files", "*.py", "*/Dockerfile", "scripts")
    files = subprocess.run(git, cwd=REPO, capture_output=True, text=True, check=True).stdout
    folders = {Path(file).parent for file in files.splitlines()} - {Path()}
    named = {Path(name) for name in re.findall(r"`([\w/.]+)/`", rooms)}
    named |= {
        Path(room, part)
        for line in rooms.splitlines()
        for room in re.findall(r"^\| `([\w/.]+)/`", line)
        for part in re.findall(r"`(\w+)/`", line.partition(" | ")[2])
    }
    inner = ("tests/unit", "tests/fixtures", "tests/gpu", "images", "tests/versions", "tests/hosts")
    return sorted(
        str(folder)
        for folder in folders - named
        if not any(Path(one) in folder.parents for one in inner)
    )


def test_every_folder_with_code_has_a_row_in_agents() -> None:
    rooms = (REPO / "AGENTS.md").read_text(encoding="utf-8")
    assert without_a_row(rooms) == []
    assert "deploy/runtime/detect" in without_a_row(rooms.replace("runtime/detect", ""))


def test_folders_that_agents_names_exist() -> None:
    rooms = (REPO / "AGENTS.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([\w/.]+)`", rooms, re.MULTILINE)
    assert len(named) > 30
    assert [path for path in named if not (REPO / path).exists()] == []
