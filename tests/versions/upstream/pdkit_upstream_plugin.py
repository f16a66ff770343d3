"""A pytest plug-in: applies the fixes before upstream's tests are imported and logs each outcome.

Loaded by `-p` from PYTHONPATH, since upstream's `tests` package hides this repository's own. Set by
the environment: PDKIT_UPSTREAM_LOG, the file to which it appends one JSON object a line;
PDKIT_UPSTREAM_CONNECTOR, the folder of `pdkit_connector` where the fixes are wanted; and
PDKIT_UPSTREAM_SERVER, where what the kit does to LMCache's server and its engines is wanted, too.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

_log = Path(os.environ["PDKIT_UPSTREAM_LOG"])
_device = pytest.MonkeyPatch()

# All that the fixes touch: a fix must find the same modules in every release's run.
HEAVY = (
    "lmcache.v1.cache_engine",
    "lmcache.v1.storage_backend",
    "lmcache.v1.storage_backend.connector.redis_adapter",
    "lmcache.v1.gpu_connector",
    "lmcache.integration.vllm.vllm_v1_adapter",
)
# The same for LMCache's server and its engines.
SERVER = (
    "lmcache.integration.vllm.lmcache_mp_connector",
    "lmcache.v1.distributed.storage_controllers.store_controller",
    "lmcache.v1.multiprocess.modules.lmcache_driven_transfer",
    "lmcache.v1.multiprocess.modules.lookup",
)


def _write(**entry: Any) -> None:
    with _log.open("a", encoding="utf-8") as log:
        log.write(json.dumps(entry) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Import LMCache, and apply the fixes where they are wanted, before any test does."""
    server = "PDKIT_UPSTREAM_SERVER" in os.environ
    for name in HEAVY + SERVER * server:
        importlib.import_module(name)
    _write(lmcache=sys.modules["lmcache"].__file__)
    if server:
        _collect_as_if_there_was_a_device()
    if folder := os.environ.get("PDKIT_UPSTREAM_CONNECTOR"):
        sys.path.append(folder)
        from pdkit_connector.registry import Registry, Setting, discover

        outcomes = Registry(discover()).apply(Setting(), ())
        _write(fixes={outcome.fix.id: outcome.state.value for outcome in outcomes})
        if server:
            _guard_server()


def _collect_as_if_there_was_a_device() -> None:
    """Keep modules from skipping themselves for want of a GPU that many of them do not use."""
    from lmcache.v1.platform.devices.cpu.stub_cpu_device import StubCPUDevice

    _device.setattr(StubCPUDevice, "is_available", lambda _: True)


def _guard_server() -> None:
    """Do what the kit does to engines and to the server, which keeps its ports."""
    from lmcache.integration.vllm import lmcache_mp_connector, vllm_multi_process_adapter
    from pdkit_connector.lmcache_server import release_ended
    from pdkit_connector.server_connector import GuardedAdapter, GuardedSchedulerAdapter
    from pdkit_connector.server_copies import copy_once
    from pdkit_connector.server_stores import answer_engines

    for module in (lmcache_mp_connector, vllm_multi_process_adapter):
        module.LMCacheMPWorkerAdapter = GuardedAdapter
        module.LMCacheMPSchedulerAdapter = GuardedSchedulerAdapter
    release_ended()
    copy_once()
    answer_engines(str(_log.with_name("requests")))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Log which tests there are, so that none can vanish with a process that dies."""
    _device.undo()
    _write(collected=[item.nodeid for item in session.items])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Log a file that cannot be imported, or that skips itself whole."""
    if report.outcome != "passed":
        _write(test=report.nodeid, outcome=report.outcome, why=_why(report), whole_file=True)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Log which test is running."""
    _write(started=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Log how a test ended, and a set-up or clean-up that did not end well."""
    if report.when == "call" or report.outcome != "passed":
        expected = hasattr(report, "wasxfail")
        outcome = {"skipped": "xfailed", "passed": "xpassed"}[report.outcome] if expected else ""
        _write(test=report.nodeid, outcome=outcome or report.outcome, why=_why(report))


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the last line of a failure, or the reason of a skip."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")[:300]
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr or "")).strip().splitlines()
    return (lines[0 if crash else -1] if lines else "")[:300]
