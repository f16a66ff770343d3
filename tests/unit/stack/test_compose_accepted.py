"""Compose itself accepts what is rendered: by its specification's schema, and by its plugin.

`docker compose config` needs no Docker engine, only the plugin. That is found as `docker` finds it,
so in the user's own folder too, and run without `docker`: then no setting of the user matters.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from check_jsonschema.builtin_schemas import get_builtin_schema

from deploy.stack.document import document_yaml
from tests.compose_plugin import compose_plugin
from tests.golden_documents import load
from tests.unit.stack.conftest import Case

# No engine, no settings of this machine's user, and no variables that a document could be filled
# in from.
PLAIN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "DOCKER_HOST": "unix:///nonexistent"}


def spoiled(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document with a key that Compose does not know."""
    other = copy.deepcopy(document)
    other["services"]["router"]["restarts"] = "always"
    return other


@pytest.fixture(scope="module")
def problems() -> Callable[[Any], list[str]]:
    """Return what the Compose Specification's schema finds wrong with a document."""
    schema = get_builtin_schema("vendor.compose-spec")
    validator = jsonschema.validators.validator_for(schema)(schema)
    return lambda document: [error.message for error in validator.iter_errors(document)]


@pytest.fixture(scope="module")
def plugin() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the `config` of `docker compose` on the text of a document."""
    program = compose_plugin()
    if program is None:
        assert os.environ.get("CI") != "true", "docker's compose plugin is missing"
        pytest.skip("docker's compose plugin is not installed")

    def run(text: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (program, "-f", "-", "config", *options),
            input=text,
            env=PLAIN,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def config(
    plugin: Callable[..., subprocess.CompletedProcess[str]],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the `config` of `docker compose` on a document."""
    return lambda document, *options: plugin(document_yaml(document), *options)


class TestSchema:
    def test_every_document_fits(
        self, cases: list[Case], problems: Callable[[Any], list[str]]
    ) -> None:
        seen: set[tuple[str, str]] = set()
        for case in cases:
            # The schema judges each service by itself, and half of them are in several documents.
            services = {(name, str(one)): one for name, one in case.services.items()}
            new = {key[0]: one for key, one in services.items() if key not in seen}
            seen |= services.keys()
            assert problems({**case.document, "services": new}) == [], case.name

    def test_an_unknown_key_does_not(
        self, cases: list[Case], problems: Callable[[Any], list[str]]
    ) -> None:
        assert "restarts" in " ".join(problems(spoiled(cases[0].document)))

    def test_the_documents_for_people_fit_as_they_stand(
        self, repo: Path, problems: Callable[[Any], list[str]]
    ) -> None:
        goldens = repo / "tests" / "golden" / "compose"
        for file in sorted([*goldens.glob("*.yaml"), *(repo / "compose").glob("*.yaml")]):
            document = load(file)
            assert problems(document) == [], file.name


class TestPlugin:
    def test_docker_compose_accepts_each_option_and_topology(
        self, cases: list[Case], config: Callable[..., subprocess.CompletedProcess[str]]
    ) -> None:
        chosen = [case for case in cases if " 1p1d " in case.name or case.name.endswith(" plain")]
        assert len(chosen) >= 40
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            ended = list(pool.map(lambda case: config(case.document, "-q"), chosen))
        for case, done in zip(chosen, ended, strict=True):
            assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), case.name

    def test_docker_compose_accepts_the_examples(
        self, repo: Path, plugin: Callable[..., subprocess.CompletedProcess[str]]
    ) -> None:
        files = sorted((repo / "compose").glob("*.yaml"))
        assert len(files) == 3
        for file in files:
            done = plugin(file.read_text(encoding="utf-8"), "-q")
            assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), file.name

    def test_docker_compose_refuses_an_unknown_key(
        self, cases: list[Case], config: Callable[..., subprocess.CompletedProcess[str]]
    ) -> None:
        done = config(spoiled(cases[0].document), "-q")
        assert done.returncode != 0
        assert "restarts" in done.stderr

    def test_nothing_is_filled_in_from_the_environment(
        self,
        contained: Callable[..., Case],
        config: Callable[..., subprocess.CompletedProcess[str]],
    ) -> None:
        made = contained(engine={"env": {"A": "$HOME ${PATH} $$x"}, "args": ["${PATH:-y}"]})
        done = config(made.document, "--format", "json")
        assert (done.returncode, done.stderr) == (0, "")
        engine = json.loads(done.stdout)["services"]["producer-0"]
        assert engine["environment"]["A"] == "$$HOME $${PATH} $$$$x", "doubled again to be read"
        assert engine["command"][-1] == "$${PATH:-y}"
        assert PLAIN["PATH"] not in done.stdout
