"""Clients that `deploy status` does without: importing them took half of its time."""

from __future__ import annotations

import subprocess
import sys

from deploy.runtime import home
from tests.conftest import plain_environ
from tests.unit.workflows.conftest import Lab

HEAVY = {
    "redis", "httpx", "prometheus_client", "opentelemetry", "docker", "requests", "rich", "asyncio",
    "huggingface_hub", "packaging", "numpy", "torch", "filelock",
}  # fmt: skip
PROGRAM = """
import pathlib, sys
from deploy.runtime import home
home._TEMP = pathlib.Path(sys.argv.pop(1))
from deploy.cli.main import main
assert main(sys.argv[1:]) == 0
print(*sorted(sys.modules), file=sys.stderr)
"""


def test_nothing_heavy_is_imported(served: Lab) -> None:
    """On a stack that is up, whose engines and Redis are asked."""
    done = subprocess.run(
        (sys.executable, "-c", PROGRAM, str(home._TEMP), "status"),
        env=plain_environ(PDKIT_HOME=str(served.home.state)),
        cwd=served.folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "consumer-1" in done.stdout
    assert "keys" in done.stdout, "Redis was asked"
    loaded = set(done.stderr.split())
    assert "psutil" in loaded
    assert {name.split(".")[0] for name in loaded} & HEAVY == set()
    assert "deploy.workflows.watch" not in loaded, "that is for --watch"
