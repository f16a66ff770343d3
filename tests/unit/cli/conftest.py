"""The command line in this process: most of the time of `python -m deploy` is the start of it."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from deploy.cli import main as main_module
from deploy.runtime.home import Home
from tests.conftest import Ended, plain_environ
from tests.contract import validated
from tests.unit.conftest import SOUND_HOST
from tests.unit.kubectl_stand_in import Player, player

_FROM_ENVIRON = Home.from_environ


def _home() -> Home:
    """Return the home of the environment, on a host of which no rule warns."""
    return replace(_FROM_ENVIRON(), host=SOUND_HOST)


@pytest.fixture(scope="session")
def deploy_here() -> Callable[..., Ended]:
    """Do what the fixture `deploy` does, without a process."""

    def run(*arguments: str, cwd: Path, home: Path, **environ: str) -> Ended:
        stdout, stderr = io.StringIO(), io.StringIO()
        plain = plain_environ(PDKIT_HOME=str(home), **environ)
        with (
            mock.patch.dict(os.environ, plain, clear=True),
            mock.patch.object(main_module, "interrupt_once", lambda: None),
            mock.patch.object(Home, "from_environ", _home),
            contextlib.chdir(cwd),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
        ):
            code = main_module.main(list(arguments))
        if "--json" in arguments:
            frames = "--watch" in arguments  # each is a line
            said = stdout.getvalue()
            for document in said.splitlines() if frames else [said]:
                validated(json.loads(document))
        return Ended(code, stdout.getvalue(), stderr.getvalue())

    return run


@pytest.fixture
def kubectl(tmp_path: Path) -> Player:
    return player(tmp_path / "bin")


@pytest.fixture
def in_cluster(
    kubectl: Player, deploy_here: Callable[..., Ended], tmp_path: Path
) -> Callable[..., Ended]:
    """Run a command with --kubernetes, where that kubectl is the first on PATH."""

    def run(command: str, *options: str) -> Ended:
        told = (command, "--kubernetes", *options)
        return deploy_here(*told, cwd=tmp_path, home=tmp_path / "home", PATH=kubectl.path)

    return run
