"""Files of the model that are replaced while vLLM loads them: the engine does not serve."""

from __future__ import annotations

import asyncio
import sys

import pytest
from pdkit_connector.engine_key import FILE_ENV, RequireKey
from pdkit_connector.identity.model_files import (
    DIGEST_VARIABLE,
    difference_to_plan,
    files_digest,
    model_files,
    take_digests,
)


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


@pytest.mark.parametrize(
    ("more", "environ"),
    [
        ((), {"HF_HUB_CACHE": "{}"}),
        (("--revision", "main"), {"HF_HUB_CACHE": "{}"}),
        (("--revision=main", "--revision", "c0ffee"), {"HF_HUB_CACHE": "{}"}),
        (("--download-dir", "{}"), {"HF_HUB_CACHE": "/nowhere"}),
        ((), {"HF_HOME": "{0.parent}"}),
    ],
)
def test_an_offline_engine_knows_its_cached_model_by_the_content(tmp_path, more, environ):
    """Somebody may edit it, or replace a link, under the same commit."""
    cache = tmp_path / "hub"
    folder = cache / "models--owner--name"
    for part in ("snapshots/c0ffee", "blobs", "refs"):
        (folder / part).mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    (folder / "blobs" / "b1").write_text("weights")
    weights = folder / "snapshots" / "c0ffee" / "model.safetensors"
    weights.symlink_to(folder / "blobs" / "b1")
    argv = ("--model", "owner/name", *(one.format(cache) for one in more))
    online = {name: value.format(cache) for name, value in environ.items()}

    def taken(environ):
        found = dict(environ)
        take_digests(argv, found)
        return found

    assert taken(online) == online, "the hub may add files"
    first = taken(online | {"HF_HUB_OFFLINE": "1"})
    assert first[DIGEST_VARIABLE]
    weights.resolve().write_text("WEIGHTS")
    second = taken(online | {"HF_HUB_OFFLINE": "1"})
    assert first[DIGEST_VARIABLE] != second[DIGEST_VARIABLE]
    assert str(weights.parent) in difference_to_plan(argv, first)
    assert not difference_to_plan(argv, second)
