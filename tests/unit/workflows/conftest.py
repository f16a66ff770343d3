"""Whole stacks of real processes: a real Redis, and stand-ins for engines and router.

The stand-ins keep one real key a chunk in that Redis and answer by the prompt, so that everything
but the engines themselves is what a user runs. The engines themselves are in tests/e2e.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil
import pytest

from deploy.config.spec import StackSpec
from deploy.metrics.connector import SILENT_WORKERS
from deploy.metrics.page import MetricsPage
from deploy.runtime import home, host, readiness
from deploy.runtime.engine_api import EngineApi
from deploy.runtime.home import Home
from deploy.runtime.process.launcher import MARKER
from deploy.tiny_model import model_folder
from deploy.verify.store_path import Sample
from deploy.workflows import facts, fixes, model_reading, prepare, up
from deploy.workflows.check import session
from deploy.workflows.down import stop_stack
from deploy.workflows.facts import stated_facts
from deploy.workflows.prepare import Prepared
from deploy.workflows.running import require_stack
from deploy.workflows.up import UpResult, bring_up, prepare_here
from tests.ports import free_row
from tests.unit.conftest import MACHINE, SOUND_HOST
from tests.unit.hub_stand_in import Hub, open_hub

STAND_INS = Path(__file__).parent / "stand_ins"
_model_files = functools.cache(model_folder.model_files)  # written anew in every lab
SMALL = {
    "allow_untested": True,  # the stand-ins are of no version
    "engine": {"kv_cache_gib": 0.1, "block_size": 16, "max_model_len": 512},
    "lmcache": {"chunk_size": 64, "staging_gib": 0.1},
    "redis": {"memory_gib": 0.1, "shards": 1},  # as many on every vendor, so that a swap keeps it
    "timeouts": {"ready_s": 120, "stop_s": 5},
    "supervise": False,  # what dies stays dead, except in test_supervise.py
}


@dataclass
class Lab:
    """A home folder in which stacks are started, and what their processes left."""

    folder: Path
    lines: list[str] = field(default_factory=list)

    @property
    def home(self) -> Home:
        return Home(self.folder / "state", self.folder / "cache", host=SOUND_HOST)

    @property
    def faults(self) -> Path:
        return self.folder / "faults"

    def spec(self, **fields: Any) -> StackSpec:
        return StackSpec.model_validate(
            {"port": free_row(), "vendor": "cpu", "runtime": "process", **SMALL, **fields}
        )

    def up(
        self,
        spec: StackSpec,
        report: Callable[[str], None] | None = None,
        *,
        check: bool = False,
    ) -> UpResult:
        return bring_up(spec, self.home, report or self.lines.append, check=check)[0]

    def ask(self) -> None:
        """Send a prompt of three chunks to the stack 'pdkit', as a client does."""
        url = require_stack(self.home, "pdkit").stack.front.url
        body = {"prompt": list(range(200)), "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=body, trust_env=False).raise_for_status()

    def pids(self) -> list[int]:
        """Return every process of any stack of this home, by the mark that it carries."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                marked = process.environ().get(MARKER, "").startswith(str(self.folder))
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def files(self) -> list[str]:
        root = self.home.state
        return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Lab]:
    """Set up a lab, and leave no process of it behind."""
    lab = Lab(folder)
    environ = {
        "PYTHONPATH": str(STAND_INS),
        "STAND_IN_FAULTS": str(lab.faults),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HOME": str(folder / "hub"),
    }
    with (
        # Sockets are below it, whose paths have 107 bytes at most; a test's own folder may be deep.
        tempfile.TemporaryDirectory(prefix="lab-", dir="/tmp") as temp,
        mock.patch.dict(os.environ, environ),
        mock.patch.object(model_folder, "model_files", _model_files),
        mock.patch.object(prepare, "connector_path", lambda: STAND_INS / "connector"),
        mock.patch.object(fixes, "connector_path", lambda: STAND_INS / "connector"),
        mock.patch.object(model_reading, "connector_path", lambda: STAND_INS / "connector"),
        mock.patch.object(fixes, "engine_versions", lambda _: ("0.32.0", "0.5.6")),
        mock.patch.object(home, "_TEMP", Path(temp)),
        mock.patch.object(host, "available_memory_mib", lambda: 1 << 20),
        mock.patch.object(facts, "engine_versions", lambda _: ("0.32.0", "0.5.6")),
        mock.patch.object(readiness, "_POLL_S", 0.05),  # nothing here takes minutes to load
        mock.patch.object(session, "_POLL_S", 0.005),
        mock.patch.object(session, "_STORE_DEADLINE_S", 0.15),
        mock.patch.object(session, "_COUNTER_DEADLINE_S", 0.2),
    ):
        try:
            yield lab
        finally:
            for pid in lab.pids():
                with contextlib.suppress(psutil.Error):
                    psutil.Process(pid).kill()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with opened(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab in which the stack 'pdkit', one producer and two consumers, is up."""
    with opened(tmp_path_factory.mktemp("served")) as made:
        made.up(made.spec(topology="1p2d"))
        yield made
        stop_stack(made.home, "pdkit", made.lines.append)


@pytest.fixture
def with_faults(served: Lab) -> Iterator[Callable[..., None]]:
    """Give the engines of the served stack faults, until the test ends."""
    yield lambda *words: served.faults.write_text(" ".join(words)) and None
    served.faults.unlink(missing_ok=True)


def can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """Return a stand-in for the hub, which is the one that is asked."""
    with open_hub() as made:
        monkeypatch.setenv("HF_ENDPOINT", made.address)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        yield made


@pytest.fixture
def planned(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Prepared]:
    """Return what plans a stack of the hub's model, on a stated machine."""
    monkeypatch.setattr(
        up, "facts_here", lambda spec, *_: stated_facts(spec, MACHINE, runtime="process")
    )

    def make(**fields: object) -> Prepared:
        asked = {"model": "owner/70b", "vendor": "cpu", "runtime": "process", **fields}
        spec = StackSpec.model_validate(asked)
        return prepare_here(spec, Home(tmp_path, tmp_path, host=SOUND_HOST), lambda _: None)

    return make


def silent_at_first(monkeypatch: pytest.MonkeyPatch, pages: int) -> list[EngineApi]:
    """Have each client see these pages without a worker; return clients, one a page."""
    page, asked = EngineApi.metrics, list[EngineApi]()

    def metrics(api: EngineApi) -> MetricsPage:
        asked.append(api)
        late = sum(one is api for one in asked) <= pages
        return MetricsPage((Sample(SILENT_WORKERS, {}, 1),)) if late else page(api)

    monkeypatch.setattr(EngineApi, "metrics", metrics)
    return asked
