"""The engines' own vLLM says what a model needs, before its weights are fetched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import ConfigError
from deploy.tiny_model import ensure_tiny_model
from deploy.workflows.model_reading import planned_by_kept_answer, planned_by_vllm
from deploy.workflows.prepare import Prepared
from deploy.workflows.up import prepare_here
from tests.unit.workflows.conftest import Lab

LAYER = {"count": 3, "kind": "full", "heads": 2, "bytes": 512.0, "item_bytes": 2}
READING = {
    "layers": [LAYER], "groups": 1, "max_positions": 4096, "attention_heads": 4, "unbuilt": "",
}  # fmt: skip


@pytest.fixture
def planned(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    folder = tmp_path / "a-model"
    shutil.copytree(ensure_tiny_model(lab.home.models), folder)
    monkeypatch.setenv("STAND_IN_ASKED", str(tmp_path / "asked"))
    return prepare_here(lab.spec(model=str(folder)), lab.home, lambda _: None)


def told(monkeypatch: pytest.MonkeyPatch, **reading: Any) -> None:
    monkeypatch.setenv("STAND_IN_READING", json.dumps({**READING, **reading}))


def asked(tmp_path: Path) -> int:
    file = tmp_path / "asked"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_its_answer_replaces_the_estimate_and_is_kept(
    lab: Lab, planned: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch)
    again = planned_by_vllm(planned, lab.home, lab.lines.append)
    shape = again.model.shape
    assert shape is not None
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (3, 2, 64)
    assert shape.reader == "0.32.0"
    assert again.plan.kv_bytes_per_token != planned.plan.kv_bytes_per_token
    assert lab.lines[0].startswith("asking vLLM in ")
    assert planned_by_vllm(planned, lab.home, lab.lines.append).plan == again.plan
    assert planned_by_kept_answer(planned, lab.home).plan == again.plan
    assert asked(tmp_path) == 1


def test_another_config_or_override_is_asked_about_again(
    lab: Lab, planned: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch)
    planned_by_vllm(planned, lab.home, lab.lines.append)
    file = Path(planned.model.ref) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_theta": 5.0}))
    planned_by_vllm(planned, lab.home, lab.lines.append)
    assert asked(tmp_path) == 2


@pytest.mark.parametrize(
    ("reading", "words"),
    [
        ({"trouble": "unknown architecture"}, "vLLM 0.32.0 does not run a-model"),
        ({"generates": False}, "vLLM 0.32.0 generates no text"),
        ({"groups": 2}, "several groups of blocks"),
        ({"layers": None, "state": True}, "keep a state instead of KV"),
    ],
)
def test_what_it_does_not_run_is_refused_before_anything_starts(
    lab: Lab,
    planned: Prepared,
    monkeypatch: pytest.MonkeyPatch,
    reading: dict[str, Any],
    words: str,
) -> None:
    told(monkeypatch, **reading)
    with pytest.raises(ConfigError) as caught:
        lab.up(planned.spec)
    assert words in caught.value.message
    assert lab.pids() == []


def test_without_an_answer_the_estimate_stays(
    lab: Lab, planned: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_READING", "none")
    assert planned_by_vllm(planned, lab.home, lab.lines.append) is planned
    assert lab.lines[-1].endswith("KV and context are estimated from config.json")


def test_the_generated_model_is_not_asked_about(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_ASKED", str(tmp_path / "asked"))
    made = prepare_here(lab.spec(), lab.home, lambda _: None)
    assert planned_by_vllm(made, lab.home, lab.lines.append) is made
    assert asked(tmp_path) == 0


def test_up_asks_once_even_if_the_answer_is_not_kept(
    lab: Lab, planned: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, layers=None, unbuilt="a library is missing")
    lab.up(planned.spec)
    assert asked(tmp_path) == 1
