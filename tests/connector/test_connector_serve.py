"""The way into an engine: what it reads of vLLM's arguments, and how it refuses to start."""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pdkit_connector import serve
from pdkit_connector.errors import ConnectorError, FixFailed
from pdkit_connector.worker_socket import NAME_ENV, engine_name


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        ((), {}),
        (("--model", "m", "--kv-transfer-config"), {}),
        (("--kv-transfer-config", "no JSON"), {}),
        (("--kv-transfer-config", "[]"), {}),
        (("--kv-transfer-config", json.dumps({"kv_role": "kv_both"})), {}),
        (
            ("--kv-transfer-config", json.dumps({"kv_connector_extra_config": {"a": 1}})),
            {"a": 1},
        ),
    ],
)
def test_extra_configuration_is_read_from_the_arguments(argv, found):
    assert serve.extra_config(argv) == found


@pytest.mark.parametrize(
    ("argv", "may"),
    [
        ((), False),
        (("--model", "m", "--kv-cache-memory-bytes", "1", "--middleware", "config"), False),
        (("--kv-transfer-config", "{}"), True),
        (("--kv_transfer_config={}",), True),
        (("--kv-transfer-config.kv_role", "kv_both"), True),
        (("--kv-offloading-backend", "lmcache"), True),
        (("--config=engine.yaml",), True),
    ],
)
def test_every_way_to_name_a_connector_is_seen(argv, may):
    assert serve.may_load_connector(argv) is may


@pytest.mark.parametrize(("argv", "fixes"), [((), 0), (("--kv-transfer-config", "{}"), 1)])
def test_only_an_engine_with_a_connector_gets_fixes(monkeypatch, argv, fixes):
    applied = []
    monkeypatch.setattr(serve, "discover", list)
    monkeypatch.setattr(serve.Registry, "apply", lambda *_: applied.append(1))
    serve.check(argv)
    assert len(applied) == fixes


def printed_by(code: str, *argv: str) -> str:
    done = subprocess.run(
        (sys.executable, "-c", code, *argv),
        env={**os.environ, "PYTHONPATH": str(Path(serve.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


CHECK = """
import sys
from pdkit_connector import serve
serve.check(sys.argv[1:])
print("lmcache" in sys.modules)
"""


@pytest.mark.parametrize(("argv", "imported"), [((), "False"), (("--config", "none"), "True")])
def test_only_an_engine_with_a_connector_imports_lmcache(argv, imported):
    assert printed_by(CHECK, *argv) == imported


ORDER = """
import sys
from pdkit_connector import fork_server, serve
fork_server.preload = fork_server.start = lambda: None
if sys.argv[1] == "serve":
    serve.fork_cores_on_cpus()
else:
    import vllm.config
names = list(sys.modules)
print(names.index("transformers.utils.import_utils") < names.index("importlib_metadata"))
"""


@pytest.mark.parametrize(("first", "quick"), [("serve", "True"), ("vllm", "False")])
def test_transformers_looks_at_packages_before_that_becomes_slow(first, quick):
    """vLLM's own order shows what the test would see if `serve` did nothing."""
    assert printed_by(ORDER, first) == quick


COMPILER = """
import importlib, sys
from pdkit_connector import fork_server, serve
fork_server.preload = fork_server.start = lambda: None
serve.fork_cores_on_cpus()
name = "torch._inductor.lowering"
print(name in sys.modules, bool(importlib.import_module(name).FALLBACK_ALLOW_LIST))
"""


@pytest.mark.parametrize(("off", "seen"), [("1", "False True"), ("0", "True True")])
def test_the_compiler_is_imported_only_where_something_may_be_compiled(monkeypatch, off, seen):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", off)
    assert printed_by(COMPILER) == seen


@pytest.fixture
def started(monkeypatch):
    """Note what would be run as the server."""
    servers = []
    monkeypatch.setattr(serve, "fork_cores_on_cpus", lambda: None)
    monkeypatch.setattr(runpy, "run_module", lambda name, **_more: servers.append(name))
    monkeypatch.setattr(sys, "argv", ["serve"])
    return servers


def test_the_server_starts_if_every_fix_applies(monkeypatch, started):
    monkeypatch.setattr(serve, "check", lambda _argv: None)
    serve.main()
    assert started == ["vllm.entrypoints.openai.api_server"]


def test_the_logs_of_its_stack_are_bounded_before_it_serves(monkeypatch, started):
    monkeypatch.setattr(serve, "check", lambda _argv: None)
    monkeypatch.setattr(serve, "bound_logs", lambda: started.append("logs"))
    serve.main()
    assert started == ["logs", "vllm.entrypoints.openai.api_server"]


def test_no_other_process_can_take_its_socket_name_first(monkeypatch, started):
    """Its processes all have it: the fork server, too, which is started first."""
    seen = []
    monkeypatch.setattr(serve, "fork_cores_on_cpus", lambda: seen.append(engine_name()))
    monkeypatch.setattr(serve, "check", lambda _argv: None)
    monkeypatch.setattr(serve, "publish_counts", lambda: seen.append(engine_name()))
    for _ in range(2):
        monkeypatch.setenv(NAME_ENV, "pdkit-producer-0-8001")
        serve.main()
    first, same, second, _ = seen
    assert first == same != second
    assert all(len(name) >= len("pdkit-producer-0-8001-") + 16 for name in seen)


def test_nothing_starts_if_a_fix_does_not_apply(monkeypatch, started):
    def fail(_argv):
        raise FixFailed("fix B99 is needed")

    monkeypatch.setattr(serve, "check", fail)
    with pytest.raises(SystemExit) as ended:
        serve.main()
    assert (ended.value.code, started) == (3, [])


def test_nothing_starts_without_process_numbers(monkeypatch, started):
    def none_left():
        raise ConnectorError("process numbers end")

    monkeypatch.setattr(serve, "take_numbers", none_left)
    with pytest.raises(SystemExit) as ended:
        serve.main()
    assert (ended.value.code, started) == (3, [])


def test_a_broken_vllm_is_reported_as_such(monkeypatch, started):
    monkeypatch.setitem(sys.modules, "vllm.config", ModuleType("vllm.config"))
    with pytest.raises(ImportError, match="VllmConfig"):
        serve.main()
    assert not started


def test_spawned_processes_import_vllm_and_not_the_server(monkeypatch, tmp_path):
    """Each engine core imports the server's main module again."""
    monkeypatch.setattr(serve, "fork_cores_on_cpus", lambda: None)
    monkeypatch.setattr(serve, "check", lambda _argv: None)
    monkeypatch.setattr(serve, "_SERVER", "a_server")
    monkeypatch.setattr(sys, "argv", ["serve"])
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_server.py").write_text(
        "import sys; sys.seen = __name__, sys.modules['__main__']"
    )
    before = sys.modules["__main__"]
    serve.main()
    assert sys.__dict__.pop("seen") == ("__main__", before)

    runpy.run_module("pdkit_connector.serve", run_name="__mp_main__")
    assert "vllm.config" in sys.modules
    assert gc.isenabled()
