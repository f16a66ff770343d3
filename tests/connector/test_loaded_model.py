"""Files of the model that are replaced while vLLM loads them: the engine does not serve."""

from __future__ import annotations

import asyncio
import sys

import pytest
from pdkit_connector.engine_key import FILE_ENV, RequireKey
from pdkit_connector.model_files import DIGEST_VARIABLE, files_digest, model_files


async def app(_scope, receive, send):
    """Start and stop as vLLM's application does."""
    for step in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{step}.complete"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder of the model that this process was started with."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "model.safetensors").write_text("weights")
    (tmp_path / "key").write_text("key")
    monkeypatch.setenv(FILE_ENV, str(tmp_path / "key"))
    monkeypatch.setenv(DIGEST_VARIABLE, files_digest(model_files(made)))
    monkeypatch.setattr(sys, "argv", ["serve", "--model", str(made)])
    return made


def lifespan():
    """Run one; return what the server gets to hear."""
    sent = []

    async def receive():
        return {"type": "lifespan"}

    async def send(message):
        sent.append(message)

    asyncio.run(RequireKey(app)({"type": "lifespan"}, receive, send))
    return sent


def test_an_engine_serves_the_files_that_it_was_planned_for(folder):
    (folder / "README.md").write_text("new")
    assert [message["type"] for message in lifespan()] == [
        "lifespan.startup.complete",
        "lifespan.shutdown.complete",
    ]


def test_an_engine_does_not_serve_files_that_were_replaced_meanwhile(folder):
    (folder / "model.safetensors").write_text("WEIGHTS")
    failed = lifespan()[0]
    assert failed["type"] == "lifespan.startup.failed"
    assert f"the files in {folder} have changed" in failed["message"]
    assert "deploy restart" in failed["message"]
