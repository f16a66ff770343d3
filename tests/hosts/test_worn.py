"""That the disguise is really on, as a child process sees it. Fails outside of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.disguises import DISGUISES
from tests.hosts.host import REPO, Host

FACTS = [field.name for field in fields(Host)]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What a child process sees."""
    command = (sys.executable, "-m", "tests.hosts.host")
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("fact", FACTS)
def test_it_is_on(fact: str, seen: dict[str, Any]) -> None:
    disguise = DISGUISES[os.environ["DISGUISE"]]
    assert seen[fact] == asdict(disguise.host)[fact]


def test_nothing_of_the_machine_is_given_to_the_user() -> None:
    """What the disguise mounts is the machine's own, and stays root's."""
    owners = {Path(path).stat().st_uid for path in (sys.base_prefix, REPO, sys.executable)}
    assert os.getuid() not in owners - {0}
