"""What an engine runs, by its own configuration, and the name that its keys get by it."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from pdkit_connector import kv_identity
from pdkit_connector.kv_identity import (
    ANY,
    PLANNED,
    ROWS,
    UNKNOWN,
    facts,
    key_name,
    kv_rows,
    with_key_name,
)
from vllm.engine.arg_utils import EngineArgs

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LONG_ROPE = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0,
    "original_max_position_embeddings": 2048, "num_key_value_heads": 4,
    "rope_scaling": {
        "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    },
}  # fmt: skip
TRANSFER = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


def config(folder: Path, planned: Any = None, role: str = "kv_both", **given: Any) -> Any:
    """Return vLLM's configuration of an engine, as its API server makes it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.json"
    if not file.exists():
        file.write_text(json.dumps(CONFIG))
    extra = {} if planned is None else {PLANNED: planned}
    transfer = {**TRANSFER, "kv_role": role, "kv_connector_extra_config": extra}
    arguments = {"skip_tokenizer_init": True, "max_model_len": 512, "block_size": 32, **given}
    return EngineArgs(
        model=str(folder), kv_transfer_config=transfer, **arguments
    ).create_engine_config()


def rows(folder: Path, *args: Any, **given: Any) -> dict[str, str]:
    return kv_rows(config(folder, *args, **given))


def test_every_row_is_known_here(tmp_path):
    found = rows(tmp_path / "m")
    assert set(found) == set(ROWS)
    assert UNKNOWN not in found.values()
    assert found["dtype"] == "bfloat16"
    assert found["tensor_parallel"] == "1"
    assert found["context"] == "512"


def test_producers_and_consumers_have_the_same(tmp_path):
    """Neither role, nor memory, nor names make another identity; nor does the way to a worker."""
    one = config(tmp_path / "m", role="kv_producer")
    other = config(
        tmp_path / "m", role="kv_consumer", kv_cache_memory_bytes=2**26, max_num_seqs=3,
        served_model_name="other", seed=3,
    )  # fmt: skip
    assert kv_rows(one) == kv_rows(other)
    assert kv_rows(pickle.loads(pickle.dumps(one))) == kv_rows(one)  # noqa: S301 - just made


@pytest.mark.parametrize(
    ("row", "given"),
    {
        "dtype": {"dtype": "float32"},
        "context": {"max_model_len": 1024},
        "overrides": {"hf_overrides": {"rope_theta": 5.0}},
        "kv_dtype": {"kv_cache_dtype": "fp8_e5m2"},
        "configuration": {"model_impl": "transformers"},
        "model": {"revision": "another"},
    }.items(),
)
def test_what_changes_kv_makes_another_name(tmp_path, row, given):
    one, other = rows(tmp_path / "m"), rows(tmp_path / "m", **given)
    assert [name for name in ROWS if one[name] != other[name]] == [row]
    assert key_name(one) != key_name(other)


def test_another_release_makes_another_name(tmp_path, monkeypatch):
    one = config(tmp_path / "m")
    before = kv_rows(one)
    monkeypatch.setattr(kv_identity, "installed_vllm", lambda: "0.99.0")
    assert kv_rows(one)["vllm"] == "0.99.0"
    assert key_name(kv_rows(one)) != key_name(before)


def test_the_longest_context_counts_unless_the_plan_knows_better(tmp_path):
    """The plan says for which models it does not; with LongRoPE it always counts."""
    folder = tmp_path / "phi"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **LONG_ROPE}))
    short, long = (rows(folder, max_model_len=length) for length in (2048, 4096))
    assert (short["context"], long["context"]) == ("2048", "4096")
    free = {"context": ANY}
    one, other = (rows(tmp_path / "m", free, max_model_len=length) for length in (256, 512))
    assert one == other
    assert one["context"] == ANY


def test_a_folder_is_known_by_its_content_wherever_it_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("PDKIT_MODEL_FILES", "abc")
    one, other = rows(tmp_path / "here" / "m"), rows(tmp_path / "there" / "other-name")
    assert one == other
    monkeypatch.setenv("PDKIT_MODEL_FILES", "def")
    assert rows(tmp_path / "here" / "m")["model"] == "def"


def test_the_content_that_other_arguments_name_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("PDKIT_NAMED_FILES", "abc")
    one = rows(tmp_path / "m")
    monkeypatch.setenv("PDKIT_NAMED_FILES", "def")
    other = rows(tmp_path / "m")
    assert [name for name in ROWS if one[name] != other[name]] == ["files"]


def test_what_cannot_be_told_is_unknown_and_ends_no_engine(tmp_path):
    broken = copy.copy(config(tmp_path / "m"))
    del broken.cache_config
    found = kv_rows(broken)
    assert found["kv_dtype"] == found["sliding_window"] == UNKNOWN
    assert found["dtype"] == "bfloat16"
    assert key_name(found)


def test_lmcache_gets_the_name_and_vllm_keeps_its_own(tmp_path):
    own = config(tmp_path / "m")
    given = with_key_name(own, "kv-1")
    assert (given.model_config.model, own.model_config.model) == ("kv-1", str(tmp_path / "m"))
    assert given.cache_config is own.cache_config
    assert given.kv_transfer_config is own.kv_transfer_config
    assert given.model_config.get_head_size() == own.model_config.get_head_size()


def test_what_is_not_as_planned_is_reported_and_logged(tmp_path, monkeypatch):
    planned = {"dtype": "float32", "context": "512", "vllm": "0.1", "of another kit": "x"}
    one = config(tmp_path / "m", planned)
    lines: list[str] = []
    monkeypatch.setattr(kv_identity, "get_logger", lambda: _Lines(lines))
    told = facts(kv_rows(one), one)
    assert told["unplanned"] == {"dtype": "float32", "vllm": "0.1"}
    assert told["key_name"] == key_name(told["rows"])
    assert any("dtype is bfloat16, and float32 was planned" in line for line in lines)


@pytest.mark.parametrize("planned", [None, {}, "foreign", ["dtype"]])
def test_without_a_plan_nothing_is_unplanned(tmp_path, planned):
    one = config(tmp_path / "m", planned)
    assert facts(kv_rows(one), one)["unplanned"] == {}


class _Lines(logging.Logger):
    def __init__(self, lines: list[str]) -> None:
        super().__init__("lines")
        self._told = lines

    def warning(self, text: Any, *values: Any, **_: Any) -> None:
        self._told.append(str(text) % values)
