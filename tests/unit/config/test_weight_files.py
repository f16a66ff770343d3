"""Weights in several formats: those that vLLM loads count, and are fetched."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.config.model import resolve_model
from deploy.config.spec import StackSpec
from deploy.config.weight_files import chosen_weights, weights_in
from deploy.errors import ConfigError
from deploy.runtime.home import Home
from deploy.workflows.prepare import Prepared, find_model
from tests.unit.stack.cases import machine_with

GB = 10**9
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

# Files of a repository, what its index names, and what vLLM 0.32 loads of it.
FOLDERS: dict[str, tuple[tuple[str, ...], Mapping[str, tuple[str, ...]], tuple[str, ...]]] = {
    "Mistral's shards and consolidated file": (
        ("consolidated.safetensors", *SHARDS), {INDEX: SHARDS}, ("consolidated.safetensors",),
    ),
    "Mistral's format in several files": (
        ("consolidated-00001-of-00002.safetensors", "consolidated-00002-of-00002.safetensors",
         "consolidated.safetensors"),
        {"consolidated.safetensors.index.json": ("consolidated-00001-of-00002.safetensors",
                                                 "consolidated-00002-of-00002.safetensors")},
        ("consolidated-00001-of-00002.safetensors", "consolidated-00002-of-00002.safetensors"),
    ),
    "Mistral's format alone": (("consolidated.safetensors",), {}, ("consolidated.safetensors",)),
    "safetensors and pickles": (
        ("model.safetensors", "pytorch_model.bin", "model.pt"), {}, ("model.safetensors",),
    ),
    "an index, and a file beside": (
        (*SHARDS, "adapter.safetensors", "model.safetensors"), {INDEX: SHARDS}, SHARDS,
    ),
    "no index": (SHARDS, {}, SHARDS),
    "pickles alone": (
        ("pytorch_model-1.bin", "pytorch_model-2.bin", "training_args.bin", "optimizer.pt"), {},
        ("pytorch_model-1.bin", "pytorch_model-2.bin"),
    ),
    "one of torch's files alone": (("model.pt", "scheduler.pt"), {}, ("model.pt",)),
    "Llama's original": (
        (*SHARDS, "original/consolidated.00.pth", "original/consolidated.safetensors"),
        {INDEX: SHARDS}, SHARDS,
    ),
    "GGUF alone": (("model.gguf",), {}, ("model.gguf",)),
    "nothing": (("tokenizer.json",), {}, ()),
}  # fmt: skip


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_files_are_those_that_vllm_loads(kind: str, tmp_path: Path) -> None:
    names, indices, loaded = FOLDERS[kind]
    there = [*names, *indices]
    assert chosen_weights(there, lambda name: indices[name]).files == loaded
    for name in there:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        weight_map = {str(n): file for n, file in enumerate(indices.get(name, ()))}
        (tmp_path / name).write_text(json.dumps({"weight_map": weight_map}))
    assert weights_in(tmp_path).files == loaded


@pytest.mark.parametrize(
    ("load_format", "loaded"),
    [
        ("auto", "consolidated.safetensors"),
        ("mistral", "consolidated.safetensors"),
        ("hf", "model.safetensors"),
        ("safetensors", "model.safetensors"),
        ("npcache", "pytorch_model.bin"),
        ("pt", "model.pt"),
        ("dummy", "consolidated.safetensors"),
    ],
)
def test_the_users_load_format_chooses(load_format: str, loaded: str) -> None:
    names = [
        "consolidated.safetensors",
        INDEX,
        "model.safetensors",
        "pytorch_model.bin",
        "model.pt",
    ]
    found = chosen_weights(names, lambda _: ["model.safetensors"], load_format)
    assert found.files == (loaded,)


def test_a_shard_that_is_not_there_is_named() -> None:
    found = chosen_weights([INDEX, SHARDS[0]], lambda _: SHARDS)
    assert (found.files, found.missing) == (SHARDS[:1], SHARDS[1:])


MISTRAL_SMALL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 5120,
    "head_dim": 128, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
}  # fmt: skip
MINISTRAL = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
    "text_config": {
        "model_type": "ministral3", "hidden_size": 4096, "head_dim": 128, "num_hidden_layers": 34,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 262144,
        "sliding_window": None,
    },
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip


def model_folder(folder: Path, config: object, files: Mapping[str, int]) -> Path:
    """Write a folder with sparse files of these sizes; the index names those of several."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name, size in files.items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
    shards = [name for name in files if name.startswith("model-")]
    if shards:
        weight_map = {str(number): name for number, name in enumerate(shards)}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def sized(folder: Path, load_format: str = "auto") -> int | None:
    return resolve_model(
        str(folder), tiny_path=Path("/tiny"), tiny_config={}, load_format=load_format
    ).weight_bytes


def test_the_same_weights_in_two_formats_count_once(tmp_path: Path) -> None:
    small = {"consolidated.safetensors": 47 * GB, SHARDS[0]: 24 * GB, SHARDS[1]: 23 * GB}
    assert sized(model_folder(tmp_path / "mistral", MISTRAL_SMALL, small)) == 47 * GB
    twins = {"model.safetensors": 5 * GB, "pytorch_model.bin": 6 * GB}
    assert sized(model_folder(tmp_path / "twins", MISTRAL_SMALL, twins)) == 5 * GB
    stray = {**dict.fromkeys(SHARDS, GB), "adapter.safetensors": 7 * GB}
    assert sized(model_folder(tmp_path / "stray", MISTRAL_SMALL, stray)) == 2 * GB


def test_a_folder_without_a_shard_of_its_index_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", MISTRAL_SMALL, dict.fromkeys(SHARDS, GB))
    (folder / SHARDS[1]).unlink()
    with pytest.raises(ConfigError) as caught:
        sized(folder)
    assert SHARDS[1] in caught.value.message and str(folder) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("load_format", ["auto", "hf", "safetensors", "runai_streamer"])
def test_loaders_of_a_checkpoint_need_every_shard(tmp_path: Path, load_format: str) -> None:
    folder = model_folder(tmp_path / "m", MISTRAL_SMALL, dict.fromkeys(SHARDS, GB))
    (folder / SHARDS[1]).unlink()
    with pytest.raises(ConfigError, match=SHARDS[1]):
        sized(folder, load_format)


@pytest.mark.parametrize(
    ("load_format", "size"),
    [("sharded_state", 4 * GB), ("runai_streamer_sharded", 4 * GB), ("tensorizer", None)],
)
def test_loaders_of_other_files_do_not_read_the_index(
    tmp_path: Path, load_format: str, size: int | None
) -> None:
    """It was copied from the checkpoint, without the shards that it names."""
    ranks = {f"model-rank-{rank}-part-0.safetensors": 2 * GB for rank in (0, 1)}
    folder = model_folder(tmp_path / "m", MISTRAL_SMALL, ranks)
    weight_map = {str(number): name for number, name in enumerate(SHARDS)}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert sized(folder, load_format) == size


def test_the_size_is_of_the_format_that_is_loaded(tmp_path: Path) -> None:
    both = {"consolidated.safetensors": 3 * GB, "model-00001-of-00001.safetensors": 2 * GB}
    folder = model_folder(tmp_path / "m", MISTRAL_SMALL, both)
    home = Home(tmp_path / "state", tmp_path / "cache")
    for load_format, size in (("auto", 3 * GB), ("hf", 2 * GB)):
        fields = {"model": str(folder), "engine": {"args": [f"--load-format={load_format}"]}}
        assert find_model(StackSpec.model_validate(fields), home, "cpu").weight_bytes == size


def test_a_format_of_which_there_are_no_files_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", MISTRAL_SMALL, {"model.safetensors": GB})
    with pytest.raises(ConfigError, match="no weights that --load-format npcache reads"):
        sized(folder, "npcache")


def test_an_index_without_weights_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m", MISTRAL_SMALL, dict.fromkeys(SHARDS, GB))
    (folder / INDEX).write_text("[]")
    with pytest.raises(ConfigError, match="no file"):
        sized(folder)


@dataclass(frozen=True)
class Fits:
    """A model with its weights in two formats, and the context that a machine has for it."""

    config: object
    weight_gb: float
    gpu_mib: int
    context: int
    fields: Mapping[str, Any]


@pytest.mark.parametrize(
    "case",
    [
        Fits(MISTRAL_SMALL, 47.14, 81559, 32768, {"gpus": 2}),
        Fits(MINISTRAL, 10.4, 24564, 61779, {"topology": "1a"}),
    ],
    ids=["Mistral-Small-24B on two of 80 GB", "Ministral-3-8B on one of 24 GB"],
)
def test_a_model_that_fits_is_planned(
    prepared: Callable[..., Prepared], tmp_path: Path, case: Fits
) -> None:
    """Refused while both formats were added up."""
    size = int(case.weight_gb * GB)
    files = {"consolidated.safetensors": size, "model-00001-of-00001.safetensors": size}
    folder = model_folder(tmp_path / "model", case.config, files)
    machine = machine_with("cuda", 0, 1, memory_mib=case.gpu_mib)
    made = prepared(vendor="cuda", model=str(folder), machine=machine, **case.fields)
    assert made.plan.max_model_len == case.context
