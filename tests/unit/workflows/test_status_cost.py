"""What commands do without, since it took a good part of their time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.config import compat
from deploy.errors import StackUnhealthy
from deploy.runtime import home as home_module
from deploy.runtime.home import Home
from deploy.runtime.state import ServiceRecord
from deploy.workflows.history import new_state
from deploy.workflows.prepare import Prepared
from deploy.workflows.running import find_stack
from deploy.workflows.saved_state import write_state
from tests.conftest import plain_environ
from tests.ports import free_row
from tests.unit.docker_stand_in import hanging_engine
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
code = main(sys.argv[1:])
print(*sorted(sys.modules), file=sys.stderr)
sys.exit(code)
"""


def run(
    folder: Path, *words: str, code: int = 0, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run `deploy`; stderr ends with the modules that it imported."""
    done = subprocess.run(
        (sys.executable, "-c", PROGRAM, str(home_module._TEMP), *words),
        env=plain_environ(**environ),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
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


def test_containers_cost_no_other_import(prepared: Callable[..., Prepared], tmp_path: Path) -> None:
    """Of a stack of which Redis runs, and takes no command, and the other containers are gone."""
    redis = {
        "Id": "x", "Name": "/pdkit-redis-1", "RestartCount": 0,
        "Config": {"Env": [], "Labels": {"com.docker.compose.service": "redis"}},
        "State": {"Running": True, "Pid": 4711, "StartedAt": "2026-01-01T00:00:00.1Z"},
    }  # fmt: skip
    pages: dict[str, object] = {
        "containers/json": [redis], "x/json": redis, "x/exec": {"Id": "e"}, "e/start": "",
        "x/stats": {"memory_stats": {"usage": 3 << 20}},
    }  # fmt: skip
    state = new_state(prepared(runtime="compose", port=free_row()), "up", boot="")
    state = state.with_service(ServiceRecord("redis"))
    write_state(Home(tmp_path, tmp_path).stack("pdkit").state_file, state)
    answers = {path: json.dumps(page).encode() for path, page in pages.items()}
    with hanging_engine(tmp_path / "s", **answers) as address:
        environ = {"PDKIT_HOME": str(tmp_path), "DOCKER_HOST": address}
        done = run(tmp_path, "status", code=StackUnhealthy.exit_code, **environ)
    assert "not started" in done.stdout
    assert "4711" in done.stdout
    loaded = {name.split(".")[0] for name in done.stderr.split()}
    assert loaded & (HEAVY | {"psutil"}) == set()


def test_a_stack_keeps_the_connector_that_it_was_started_with(
    prepared: Callable[..., Prepared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if a later table of versions would choose another; so nobody reads the table."""
    home = Home(tmp_path, tmp_path)
    state = new_state(prepared(vendor="cuda", machine=None, runtime="compose"), "up", boot="")
    assert state.plan.spec.connector is None, "the versions decided"
    write_state(home.stack("pdkit").state_file, state)
    monkeypatch.setattr(compat, "load_rules", lambda: pytest.fail("the table is read"))
    found = find_stack(home, "pdkit")
    assert found is not None
    assert found.prepared.plan.connector == "lmcache"


def test_rendering_imports_nothing_heavy(tmp_path: Path) -> None:
    """With the catalogue's images, whose versions are judged."""
    done = run(tmp_path, "render", "--vendor", "cpu", "--runtime", "compose")
    assert "vllm" in done.stdout
    loaded = set(done.stderr.split())
    assert "deploy.config.compat" in loaded
    assert {name.split(".")[0] for name in loaded} & (HEAVY | {"psutil"}) == set()
