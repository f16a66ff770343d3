"""The kit's estimate of public models, compared with what vLLM makes of them (tests/atlas)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.config.kinds import kind_of
from deploy.config.shape import estimated_shape, read_shape
from tests.atlas import READINGS, Row, rows
from tests.atlas.page import page

REPO = Path(__file__).resolve().parents[3]
PAGE = REPO / "docs" / "reference" / "models.md"
ROWS = rows()
BFLOAT16 = 2


def each(wanted: list[Row]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", wanted, ids=[row.name for row in wanted])


@each(ROWS)
def test_the_estimate_is_as_vllm_says_or_unknown(row: Row) -> None:
    told, estimated = read_shape(row.reading), estimated_shape(row.config)
    if told is None or estimated is None:
        return
    assert estimated.max_positions in (told.max_positions, None)
    assert estimated.attention_heads == told.attention_heads
    for tp in (1, 2, 4, 8):
        if told.divides(tp):
            of_rank = told.rank_kv_bytes_per_token(BFLOAT16, tp)
            assert estimated.rank_kv_bytes_per_token(BFLOAT16, tp) == of_rank
            assert estimated.divides(tp)


@each(ROWS)
def test_what_generates_no_text_is_told_by_its_name(row: Row) -> None:
    if row.reading["trouble"]:
        return
    silent = bool(kind_of(row.config).not_text)
    # By config.json alone, vLLM would have a decoder generate that was trained for embeddings.
    assert silent is (not row.reading["generates"]) or (silent and row.family == "embeddings")


@each([row for row in ROWS if row.reading.get("state")])
def test_layers_with_a_state_are_seen_in_config_json(row: Row) -> None:
    assert kind_of(row.config).state


@each([row for row in ROWS if row.reading.get("groups") not in (None, 1)])
def test_several_groups_are_seen_in_config_json(row: Row) -> None:
    kind = kind_of(row.config)
    assert kind.groups or kind.state or kind.not_text or estimated_shape(row.config) is None


def test_most_of_the_atlas_is_known_without_engines() -> None:
    generating = [row for row in ROWS if row.reading.get("generates")]
    known = [row for row in generating if estimated_shape(row.config)]
    assert len(known) > 0.8 * len(generating) > 60


def test_the_page_is_current() -> None:
    if os.environ.get("UPDATE_GOLDENS"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page()


@pytest.mark.full
def test_the_installed_vllm_says_what_is_recorded(tmp_path: Path) -> None:
    answers = tmp_path / "readings.json"
    path = os.pathsep.join((str(REPO), str(REPO / "deploy" / "connector")))
    # Code that some models import wants a home in which it can write.
    home = {"HOME": str(tmp_path), "VLLM_CACHE_ROOT": str(tmp_path)}
    environ = {**os.environ, "PYTHONPATH": path, **home}
    command = (sys.executable, "-m", "tests.atlas.read", str(answers))
    subprocess.run(command, env=environ, check=True, capture_output=True, timeout=1200, cwd=REPO)
    if os.environ.get("UPDATE_GOLDENS"):
        READINGS.write_bytes(answers.read_bytes())
    assert json.loads(answers.read_bytes()) == {row.name: dict(row.reading) for row in ROWS}
