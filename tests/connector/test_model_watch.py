"""An engine that runs reports that its model's files were replaced."""

from __future__ import annotations

import os
import shutil

import pytest
from pdkit_connector import serve
from pdkit_connector.identity import model_watch
from pdkit_connector.identity.model_files import (
    DIGEST_VARIABLE,
    NAMED_VARIABLE,
    files_digest,
    model_files,
    named_files,
)
from pdkit_connector.identity.model_watch import METRIC, ModelWatch
from prometheus_client import CollectorRegistry
from redis_chunks import Warnings
from redis_servers import eventually


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    for name in ("config.json", "model.safetensors"):
        (made / name).write_text(name)
    return made


@pytest.fixture
def environ(folder):
    return {DIGEST_VARIABLE: files_digest(model_files(folder))}


@pytest.fixture
def watch(folder, environ):
    return ModelWatch(("--model", str(folder), "--port", "8000"), environ)


def shown(watch):
    registry = CollectorRegistry()
    registry.register(watch)
    return registry.get_sample_value(METRIC)


def test_the_planned_files_are_no_change(watch, folder):
    watch.look()
    os.utime(folder / "model.safetensors", (1, 1))
    (folder / "README.md").write_text("new")
    watch.look()
    assert shown(watch) == 0


def test_replaced_files_are_reported_until_the_old_ones_are_back(watch, folder):
    """Of equal size and time, as image layers have them."""
    weights = folder / "model.safetensors"
    planned, at = weights.read_bytes(), weights.stat().st_mtime_ns
    watch.look()
    with Warnings() as told:
        weights.write_bytes(planned[::-1])
        os.utime(weights, ns=(at, at))
        watch.look()
        watch.look()
    assert shown(watch) == 1
    (line,) = told
    assert str(folder) in line and "deploy status" in line
    weights.write_bytes(planned)
    watch.look()
    assert shown(watch) == 0


def test_code_in_a_folder_below_is_watched(folder):
    """vLLM runs it with --trust-remote-code."""
    code = folder / "code" / "layers.py"
    code.parent.mkdir()
    code.write_text("x = 1")
    environ = {DIGEST_VARIABLE: files_digest(model_files(folder))}
    watch = ModelWatch(("--model", str(folder)), environ)
    watch.look()
    assert shown(watch) == 0
    code.write_text("x = 2")
    watch.look()
    assert shown(watch) == 1


def test_what_another_argument_names_is_watched(folder):
    argv = ("--model", "owner/name", "--lora-modules", f"one={folder}")
    watch = ModelWatch(argv, {NAMED_VARIABLE: files_digest(named_files(argv))})
    watch.look()
    assert shown(watch) == 0
    (folder / "model.safetensors").write_text("another")
    watch.look()
    assert shown(watch) == 1


def test_a_folder_that_is_gone_is_reported(watch, folder):
    shutil.rmtree(folder)
    watch.look()
    assert shown(watch) == 1


def test_content_is_read_only_if_an_entry_has_changed(watch, folder, monkeypatch):
    watch.look()
    monkeypatch.setattr(model_watch, "difference_to_plan", lambda *_: "read again")
    watch.look()
    assert shown(watch) == 0
    os.utime(folder / "model.safetensors", (1, 1))
    watch.look()
    assert shown(watch) == 1


def test_a_model_of_a_hub_is_not_watched(folder):
    watch = ModelWatch(("--model", "some/model"), {})
    watch.look()
    assert shown(watch) == 0


def test_an_engine_watches_on_its_own(watch, folder, monkeypatch):
    monkeypatch.setattr(model_watch, "_EVERY_S", 0.01)
    watch.start()
    eventually(lambda: watch._entries, 20)
    (folder / "config.json").write_text("another")
    eventually(lambda: shown(watch) == 1, 20)


def test_the_page_of_an_engine_of_the_kit_has_it(monkeypatch):
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    monkeypatch.setattr(serve, "EngineCollector", lambda _name: NoCollector())
    monkeypatch.setattr(serve, "engine_name", lambda: "")
    serve.publish_counts()
    assert registry.get_sample_value(METRIC) is None
    monkeypatch.setattr(serve, "engine_name", lambda: "consumer-0")
    serve.publish_counts()
    assert registry.get_sample_value(METRIC) == 0


class NoCollector:
    def collect(self):
        return []
