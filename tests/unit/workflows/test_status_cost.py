"""What commands do without, since it took a good part of their time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deploy.runtime import home
from tests.conftest import plain_environ
from tests.unit.workflows.conftest import Lab

HEAVY = {
    "redis", "httpx", "prometheus_client", "opentelemetry", "docker", "requests", "rich", "asyncio",
    "huggingface_hub", "packaging", "numpy", "torch", "filelock",
}  # fmt: skip
# pydantic would search the metadata of all installed packages for plugins.
PROGRAM = """
import importlib.metadata, pathlib, sys
def searched(**_): raise AssertionError("plugins were looked for")
importlib.metadata.entry_points = searched
from deploy.runtime import home
home._TEMP = pathlib.Path(sys.argv.pop(1))
from deploy.cli.main import main
assert main(sys.argv[1:]) == 0
print(*sorted(sys.modules), file=sys.stderr)
"""


def run(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `deploy`; stderr ends with the modules that it imported."""
    done = subprocess.run(
        (sys.executable, "-c", PROGRAM, str(home._TEMP), *words),
        env=plain_environ(**environ),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_nothing_heavy_is_imported(served: Lab) -> None:
    """On a stack that is up, whose engines and Redis are asked."""
    done = run(served.folder, "status", PDKIT_HOME=str(served.home.state))
    assert "consumer-1" in done.stdout
    assert "keys" in done.stdout, "Redis was asked"
    loaded = set(done.stderr.split())
    assert "psutil" in loaded
    assert {name.split(".")[0] for name in loaded} & HEAVY == set()
    assert "deploy.workflows.watch" not in loaded, "that is for --watch"


def test_rendering_imports_nothing_heavy(tmp_path: Path) -> None:
    """With the catalogue's images, whose versions are judged."""
    done = run(tmp_path, "render", "--vendor", "cpu", "--runtime", "compose")
    assert "vllm" in done.stdout
    loaded = set(done.stderr.split())
    assert "deploy.config.compat" in loaded
    assert {name.split(".")[0] for name in loaded} & (HEAVY | {"psutil"}) == set()
