"""Run against the LMCache and torch of the interpreter in use; both must be importable."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from own_process import CONNECTOR

# Test modules import torch and vLLM, which make no garbage: to look for some takes a fifth of that.
gc.disable()

sys.path.insert(0, str(CONNECTOR))

from pdkit_connector.redis_path.settings import Limits  # noqa: E402
from pdkit_connector.redis_path.transfer import Client  # noqa: E402
from redis_chunks import client  # noqa: E402
from redis_kinds import certificates, cluster, sentinel, tls  # noqa: E402, F401 - fixtures
from redis_servers import Server, Servers  # noqa: E402


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that notes attributes which a fix replaces; they are put back after."""

    def note(owner: object, *names: str) -> None:
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))

    yield note


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    """Return what starts real Redis servers, which end with the test."""
    with Servers(tmp_path) as started:
        yield started


@pytest.fixture
def server(servers: Servers) -> Server:
    """Return a real Redis of the test's own."""
    return servers.start()


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Callable[..., Client]:
    """Return `client` with the module's limits, and close all that it makes after the test."""

    def made(url: str, limits: Limits = request.module.LIMITS) -> Client:
        one = client(url, limits)
        request.addfinalizer(one.close)
        return one

    return made
