"""What an engine runs, by its own configuration, and the name that its keys get by it."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from own_process import last_line
from pdkit_connector.identity import kv_identity
from pdkit_connector.identity.kv_identity import (
    ANY,
    PLANNED,
    ROWS,
    UNKNOWN,
    connector_version,
    facts,
    identified,
    key_name,
    kv_rows,
    take_rows_early,
    warn_of_unplanned,
    with_key_name,
)
from pdkit_connector.identity.variables import changing_kv
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
MLA = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 32,
    "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 32,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
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


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Any:
    return config(tmp_path_factory.mktemp("models") / "m")


def with_overrides(engine: Any, value: Any) -> Any:
    changed = copy.copy(engine)
    changed.model_config = copy.copy(engine.model_config)
    changed.model_config.hf_overrides = value
    return changed


def rows(folder: Path, *args: Any, **given: Any) -> dict[str, str]:
    return kv_rows(config(folder, *args, **given))


def differing(one: Any, other: Any) -> list[str]:
    """Return the rows in which two engines differ."""
    first, second = kv_rows(one), kv_rows(other)
    return [name for name in ROWS if first[name] != second[name]]


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
        "overrides configuration": {"hf_overrides": {"rope_theta": 5.0}},
        "kv_dtype kv_format": {"kv_cache_dtype": "fp8_e5m2"},
        "implementation": {"model_impl": "transformers"},
        "model": {"revision": "another"},
        "additional_config": {"additional_config": {"x": 1}},
        "tensor_parallel": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    }.items(),
)
def test_what_changes_kv_makes_another_name(tmp_path, row, given):
    one, other = rows(tmp_path / "m"), rows(tmp_path / "m", **given)
    assert {name for name in ROWS if one[name] != other[name]} == set(row.split())
    assert key_name(one) != key_name(other)


@pytest.mark.parametrize(("kv_dtype", "counts"), [("fp8", True), ("auto", False)])
def test_the_format_of_fp8_counts_where_kv_is_fp8(tmp_path, monkeypatch, kv_dtype, counts):
    """An MI300X keeps FP8 numbers in another format than an MI350X."""
    import torch
    from vllm.platforms import current_platform

    engine = config(tmp_path / "m", kv_cache_dtype=kv_dtype)
    one = kv_rows(engine)
    monkeypatch.setattr(type(current_platform), "fp8_dtype", lambda: torch.float8_e4m3fnuz)
    other = kv_rows(engine)
    assert (one["kv_format"] != other["kv_format"]) is counts
    assert (key_name(one) != key_name(other)) is counts


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


def test_a_context_that_vllm_chooses_is_not_the_one_that_fits_in_the_end(tmp_path):
    """The model is built for its longest context; then vLLM lowers the number, and no positions."""
    folder = tmp_path / "phi"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **LONG_ROPE}))
    fitted, planned = (config(folder, max_model_len=length) for length in (-1, 1024))
    before = kv_rows(fitted)
    fitted.model_config.max_model_len = 1024
    assert kv_rows(fitted) == before
    assert differing(fitted, planned) == ["context"]


def test_the_configuration_in_use_counts_and_not_where_it_lies(tmp_path):
    """The bytes in the model's folder say nothing of a configuration that lies elsewhere."""
    for name, more in {"alt": {"rope_theta": 5.0}, "same": {}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**CONFIG, **more}))
    own, same, alt = (
        config(tmp_path / "m", hf_config_path=where and str(tmp_path / where))
        for where in (None, "same", "alt")
    )
    assert differing(own, same) == []
    assert differing(own, alt) == ["configuration"]


def test_the_latent_kv_of_an_mla_model_counts(tmp_path):
    folder = tmp_path / "mla"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **MLA}))
    one = config(folder)
    assert UNKNOWN not in kv_rows(one).values()
    assert kv_rows(one)["shape"] == "[4, 48, true]"
    (folder / "config.json").write_text(json.dumps({**CONFIG, **MLA, "kv_lora_rank": 64}))
    assert differing(one, config(folder)) == ["configuration", "shape"]


@pytest.mark.parametrize(
    ("name", "differs"),
    {
        "VLLM_CPU_ATTN_SPLIT_KV": True,
        "VLLM_BATCH_INVARIANT": True,
        "VLLM_OF_A_LATER_RELEASE": True,
        "ONEDNN_DEFAULT_FPMATH_MODE": True,
        "VLLM_PORT": False,
        "VLLM_LOGGING_LEVEL": False,
        "EDITOR": False,
    }.items(),
)
def test_variables_that_change_numbers_count(engine, monkeypatch, name, differs):
    found = []
    for environ in ({}, {name: "1"}):
        monkeypatch.setattr(kv_identity, "AT_START", changing_kv(environ))
        found.append(kv_rows(engine))
    one, other = found
    assert (one != other) is differs
    assert (f'"{name}": "1"' in other["variables"]) is differs


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_X_TOKEN", "hidden"), ("VLLM_X", "https://user:hidden@host")]
)
def test_values_that_may_be_secrets_are_not_shown(name, value):
    (shown,) = changing_kv({name: value}).values()
    assert shown.startswith("sha256:")
    assert changing_kv({name: value + "2"}) != {name: shown}


def test_another_connector_makes_another_name(engine, monkeypatch):
    one = kv_rows(engine)
    monkeypatch.setattr(kv_identity, "connector_version", lambda: "another")
    assert kv_rows(engine) == {**one, "connector": "another"}
    assert key_name(kv_rows(engine)) != key_name(one)


def test_the_connectors_version_is_that_of_its_code(tmp_path, monkeypatch):
    found = []
    for name, text in (("a", "x = 1"), ("b", "x = 2"), ("c", "x = 1")):
        package = tmp_path / name / "fixes"
        package.mkdir(parents=True)
        (package / "one.py").write_text(text)
        (package / "one.pyc").write_text(name)
        file = package.parent / "identity" / "kv_identity.py"
        monkeypatch.setattr(kv_identity, "__file__", str(file))
        found.append(connector_version.__wrapped__())
    assert found[0] == found[2] != found[1]


STARTED = """
import os
os.environ["VLLM_SET_LATER"] = "1"
from pdkit_connector.identity import variables
os.environ["VLLM_SET_LAST"] = "1"
print(sorted(variables.AT_START))
"""


def test_variables_count_that_the_engine_was_started_with():
    """vLLM sets some itself, each release others."""
    found = last_line(STARTED, VLLM_GIVEN="1")
    assert "VLLM_GIVEN" in found and "VLLM_SET_LATER" in found
    assert "VLLM_SET_LAST" not in found


class _Settings:
    def __init__(self, **values: Any) -> None:
        self.__dict__ = values


class _Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"<{self.value} at {hex(id(self))}>"


class _Kind(Enum):
    ONE = 1
    OTHER = 2


def _of_itself(value: int) -> dict[str, Any]:
    held: dict[str, Any] = {"value": value}
    return {**held, "held": [held], "again": held}


@pytest.mark.parametrize(
    "made",
    {
        "functions": lambda n: (lambda: 1) if n == 1 else (lambda: 2),
        "a dictionary with other keys": lambda n: {1: n, "a": n, None: n},
        "a set": lambda n: {"set", n},
        "a kind": _Kind,
        "bytes": lambda n: bytes([n]),
        "an object": lambda n: _Settings(one=_Settings(value=n)),
        "an object without attributes": _Slotted,
        "a class": lambda n: {1: _Settings, 2: _Slotted}[n],
        "nested": lambda n: [{"a": (n, {"b": _Settings(value=[_Kind(n)])})}],
        "the same twice": _of_itself,
    }.values(),
)
def test_no_two_values_look_alike_because_json_does_not_know_them(engine, made):
    """And equal ones look alike in every process, whatever their addresses."""
    one, same, other = (with_overrides(engine, made(number)) for number in (1, 1, 2))
    assert differing(one, same) == []
    assert differing(one, other) == ["overrides"]
    assert kv_rows(one)["overrides"] != UNKNOWN


def test_a_value_that_holds_itself_ends_no_engine(engine):
    held: dict[str, Any] = {"x": 1}
    held["self"] = held
    assert "x" in kv_rows(with_overrides(engine, held))["overrides"]


class TestTakenEarly:
    """Of one engine, all processes have the rows that its API server took."""

    @pytest.fixture
    def lines(self, monkeypatch):
        lines: list[str] = []
        monkeypatch.setattr(kv_identity, "get_logger", lambda: _Lines(lines))
        monkeypatch.setattr(EngineArgs, "create_engine_config", EngineArgs.create_engine_config)
        take_rows_early()
        return lines

    @pytest.mark.usefixtures("lines")
    def test_what_a_worker_changes_makes_no_other_name(self, tmp_path, monkeypatch):
        made = config(tmp_path / "m")
        worker = pickle.loads(pickle.dumps(made))  # noqa: S301 - just made
        worker.model_config.hf_config.rope_parameters["rope_theta"] = 5.0
        worker.model_config.max_model_len = 256
        monkeypatch.setattr(kv_identity, "AT_START", {"VLLM_SET_IN_WORKERS": "1"})
        given, told = identified(worker)
        assert told == identified(made)[1]
        assert given.model_config.model == told["key_name"]
        assert UNKNOWN not in told["rows"].values()

    @pytest.mark.usefixtures("lines")
    def test_another_configuration_of_vllm_is_taken_anew(self, tmp_path):
        one, other = (config(tmp_path / "m", dtype=name) for name in ("bfloat16", "float32"))
        assert identified(one)[1]["rows"]["dtype"] == "bfloat16"
        assert identified(other)[1]["rows"]["dtype"] == "float32"

    @pytest.mark.usefixtures("lines")
    def test_an_engine_without_a_connector_has_none(self, tmp_path):
        config(tmp_path / "m")
        made = EngineArgs(model=str(tmp_path / "m"), skip_tokenizer_init=True, max_model_len=512)
        assert made.create_engine_config().kv_transfer_config is None

    def test_what_is_not_as_planned_is_logged_once_for_an_engine(self, tmp_path, lines):
        made = config(tmp_path / "m", {"dtype": "float32"}, tensor_parallel_size=2,
                      distributed_executor_backend="mp")  # fmt: skip
        for _ in ("the scheduler", "a worker", "another worker"):
            told = identified(pickle.loads(pickle.dumps(made)))[1]  # noqa: S301 - just made
            assert told["unplanned"] == {"dtype": "float32"}
        assert [line for line in lines if "dtype is bfloat16, and float32 was planned" in line]
        assert len(lines) == 1

    def test_without_it_no_row_counts_that_differs_between_processes(self, tmp_path):
        """As where another program than the kit's starts vLLM."""
        scheduler, worker = config(tmp_path / "m"), config(tmp_path / "m")
        worker.model_config.hf_config.rope_parameters["rope_theta"] = 5.0
        assert identified(scheduler)[1] == identified(worker)[1]
        assert identified(scheduler)[1]["rows"]["variables"] == UNKNOWN


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
    warn_of_unplanned(told["rows"], planned)
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
