"""Which model is meant, and what its config.json says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.config.kinds import Kind
from deploy.config.model import Model, resolve_model, with_config
from deploy.config.shape import ModelShape
from deploy.config.vendors import VENDORS
from deploy.errors import ConfigError
from deploy.home_folder import default_hub_cache, default_hub_token

LLAMA: dict[str, Any] = {
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 2048,
    "max_position_embeddings": 131072,
}
LLAMA_SHAPE = ModelShape(16, 32, 8, 64, 131072)


def resolve(value: str) -> Model:
    return resolve_model(value, tiny_path=Path("/cache/tiny"), tiny_config=LLAMA)


def folder_with(path: Path, config: object) -> str:
    path.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (path / "config.json").write_text(text)
    (path / "model.safetensors").touch()
    return str(path)


def refusal(value: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(value)
    assert value in caught.value.message
    assert caught.value.hint
    return caught.value


class TestTiny:
    def test_the_tiny_model_has_the_path_where_it_will_be_made(self) -> None:
        assert resolve("tiny") == Model(
            "/cache/tiny", "pdkit-tiny", "tiny", LLAMA_SHAPE, version="tiny"
        )


class TestFolder:
    def test_a_model_folder_is_read(self, tmp_path: Path) -> None:
        value = folder_with(tmp_path / "Llama-1B", LLAMA)
        found = resolve(value)
        assert found == Model(
            value, "Llama-1B", "folder", LLAMA_SHAPE, 0, found.version, files=found.files
        )
        assert [name for name, *_ in found.files] == ["config.json", "model.safetensors"]

    def test_a_relative_path_becomes_absolute(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        absolute = folder_with(tmp_path / "models" / "a", LLAMA)
        monkeypatch.chdir(tmp_path)
        for value in ("models/a", "./models/a", "models/../models/a"):
            assert resolve(value).ref == absolute, "engines run in another folder"

    def test_a_path_below_the_home_folder_is_expanded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        absolute = folder_with(tmp_path / "m", LLAMA)
        assert resolve("~/m").ref == absolute

    @pytest.mark.parametrize("value", ["/no/such/folder", "./none", "../none", "~/none"])
    def test_a_missing_folder_is_refused(self, value: str) -> None:
        assert "does not exist" in refusal(value).message

    def test_a_file_is_not_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").touch()
        refusal(str(tmp_path / "model.gguf"))

    def test_a_folder_without_config_is_refused(self, tmp_path: Path) -> None:
        assert "config.json" in refusal(str(tmp_path)).message

    def test_a_folder_without_weights_is_refused(self, tmp_path: Path) -> None:
        """The engine would say so too, and last, and in other words."""
        value = folder_with(tmp_path, LLAMA)
        (tmp_path / "model.safetensors").unlink()
        assert "weights" in refusal(value).message

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[1]", '"text"', "null", "[" * 100_000],
        ids=["empty", "cut", "list", "text", "null", "levels"],
    )
    def test_an_invalid_config_is_refused(self, tmp_path: Path, text: str) -> None:
        assert "config.json" in refusal(folder_with(tmp_path, text)).message

    def test_a_config_that_is_not_text_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_bytes(b"\xff\xfe\xff")
        refusal(str(tmp_path))


class TestWeightsAndVersion:
    """How large a folder's weights are, and what tells them from others of the same name."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder_with(tmp_path / "m", LLAMA)
        (tmp_path / "m" / "model.safetensors").write_bytes(b"x" * 1000)
        return tmp_path / "m"

    def test_only_weight_files_count(self, folder: Path) -> None:
        (folder / "more.safetensors").write_bytes(b"x" * 234)
        (folder / "tokenizer.json").write_bytes(b"x" * 5000)
        assert resolve(str(folder)).weight_bytes == 1234

    def test_the_version_is_stable(self, folder: Path) -> None:
        first = resolve(str(folder)).version
        (folder / "README.md").write_text("{}")
        assert resolve(str(folder)).version == first != ""

    @pytest.mark.parametrize(
        "name",
        [
            "model.safetensors.index.json",
            "params.json",
            "new.bin",
            "modeling_custom.py",
            "tokenizer.json",
            "preprocessor_config.json",
            "processor_config.json",
        ],
    )
    def test_a_new_file_that_engines_may_read_is_another_version(
        self, folder: Path, name: str
    ) -> None:
        first = resolve(str(folder)).version
        index = {"weight_map": {"layer": "model.safetensors"}}
        (folder / name).write_text(json.dumps(index))
        assert resolve(str(folder)).version != first

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
    def test_other_contents_are_another_version(self, folder: Path, name: str) -> None:
        first = resolve(str(folder)).version
        (folder / name).write_text(json.dumps({**LLAMA, "vocab_size": 5}))
        assert resolve(str(folder)).version != first

    def test_modification_times_do_not_count(self, folder: Path) -> None:
        first = resolve(str(folder)).version
        os.utime(folder / "model.safetensors", (1, 1))
        assert resolve(str(folder)).version == first

    def test_other_bytes_of_equal_size_and_time_are_another_version(self, folder: Path) -> None:
        weights = folder / "model.safetensors"
        first, found = resolve(str(folder)).version, weights.stat()
        weights.write_bytes(b"y" * 1000)
        os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns))
        assert resolve(str(folder)).version != first

    def test_a_file_that_cannot_be_read_is_refused(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = os.open

        def refuse(path: Path, *more: int) -> int:
            if Path(path).name == "model.safetensors":
                raise PermissionError(13, "Permission denied")
            return opened(path, *more)

        monkeypatch.setattr(os, "open", refuse)
        error = refusal(str(folder))
        assert "model.safetensors cannot be read: Permission denied" in error.message
        assert error.hint.startswith(f"chmod a+r {folder / 'model.safetensors'}")

    def test_a_hub_models_is_its_commit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        snapshot = tmp_path / "models--owner--name" / "snapshots" / "0a1b"
        folder_with(snapshot, LLAMA)
        (snapshot / "model.safetensors").write_bytes(b"x" * 77)
        found = resolve("owner/name")
        assert (found.version, found.weight_bytes) == ("0a1b", 77)

    def test_the_default_model_of_gpus_is_known_before_it_is_fetched(self) -> None:
        for vendor in ("cuda", "rocm"):
            found = resolve(VENDORS[vendor].default_model)
            assert found.source == "hub"
            assert found.shape is not None
            assert found.weight_bytes is not None
            assert found.shape.kv_heads % 8 == 0, "--tp 8 divides them"


class TestHub:
    def test_a_model_in_a_named_cache_is_found(self, tmp_path: Path) -> None:
        folder_with(tmp_path / "models--owner--name" / "snapshots" / "0a1b", LLAMA)
        found = resolve_model(
            "owner/name", tiny_path=Path("/t"), tiny_config=LLAMA, hub_cache=tmp_path
        )
        assert found.shape == LLAMA_SHAPE

    def test_a_hub_model_that_is_not_cached_has_no_shape(self) -> None:
        value = "meta-llama/Llama-3.2-1B"
        assert resolve(value) == Model(value, value, "hub", None)

    def test_a_model_in_the_local_cache_is_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        folder_with(tmp_path / "models--owner--name" / "snapshots" / "0a1b", LLAMA)
        assert resolve("owner/name") == Model(
            "owner/name", "owner/name", "hub", LLAMA_SHAPE, version="0a1b"
        )
        assert resolve("owner/other").shape is None

    def test_a_model_below_hf_home_is_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        folder_with(tmp_path / "hub" / "models--owner--name" / "snapshots" / "0a1b", LLAMA)
        assert resolve("owner/name").shape == LLAMA_SHAPE

    def test_the_cache_is_read_at_the_commit_that_main_names(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        repository = tmp_path / "models--owner--name"
        folder_with(repository / "snapshots" / "0old", {**LLAMA, "num_hidden_layers": 1})
        folder_with(repository / "snapshots" / "9new", LLAMA)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("9new")
        assert resolve("owner/name").shape == LLAMA_SHAPE

    @pytest.mark.parametrize("value", ["a/b/c", "models/of/mine", "owner/", "a b/c"])
    def test_an_invalid_hub_id_is_refused(self, value: str) -> None:
        refusal(value)


class TestShape:
    def shape(self, tmp_path: Path, config: dict[str, Any]) -> ModelShape | None:
        return resolve(folder_with(tmp_path, config)).shape

    def test_the_shape_of_a_nested_language_model_is_read(self, tmp_path: Path) -> None:
        nested = {"text_config": LLAMA, "vision_config": {"num_hidden_layers": 99}}
        assert self.shape(tmp_path, nested) == LLAMA_SHAPE

    def test_a_nested_config_of_null_counts_as_missing(self, tmp_path: Path) -> None:
        assert self.shape(tmp_path, {**LLAMA, "text_config": None}) == LLAMA_SHAPE

    def test_heads_share_no_kv_unless_said(self, tmp_path: Path) -> None:
        config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
        shape = self.shape(tmp_path, config)
        assert shape is not None
        assert shape.kv_heads == 32

    def test_a_stated_head_dim_wins_over_the_hidden_size(self, tmp_path: Path) -> None:
        shape = self.shape(tmp_path, {**LLAMA, "head_dim": 128})
        assert shape is not None
        assert shape.head_dim == 128

    def test_older_names_of_the_config_are_read(self, tmp_path: Path) -> None:
        gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
        assert self.shape(tmp_path, gpt2) == ModelShape(12, 12, 12, 64, 1024)

    def test_the_shape_is_unknown_if_the_config_lacks_it(self, tmp_path: Path) -> None:
        assert self.shape(tmp_path, {"model_type": "rwkv"}) is None

    @pytest.mark.parametrize("field", sorted(LLAMA))
    def test_a_value_that_is_not_a_number_gives_no_shape(self, tmp_path: Path, field: str) -> None:
        refusal(folder_with(tmp_path, {**LLAMA, field: "many"}))

    def test_kv_bytes_a_token_follow_from_the_shape(self) -> None:
        assert LLAMA_SHAPE.kv_bytes_per_token(2) == 2 * 16 * 8 * 64 * 2
        assert LLAMA_SHAPE.kv_bytes_per_token(4) == 2 * LLAMA_SHAPE.kv_bytes_per_token(2)


YARN = json.dumps(
    {"max_position_embeddings": 524288, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
)


@pytest.mark.parametrize(
    ("overrides", "positions"), [(YARN, 524288), ("", 131072), ("no JSON", 131072), ("[]", 131072)]
)
def test_overrides_of_vllm_change_what_config_json_says(
    tmp_path: Path, overrides: str, positions: int
) -> None:
    value = folder_with(tmp_path / "m", LLAMA)
    found = resolve_model(value, tiny_path=Path("/t"), tiny_config=LLAMA, overrides=overrides)
    changed = with_config(UNKNOWN, LLAMA, "v", overrides)
    for model in (found, changed):
        assert model.shape is not None
        assert model.shape.max_positions == positions


@pytest.mark.parametrize("find", [default_hub_cache, default_hub_token, lambda: resolve("~/model")])
def test_a_missing_home_folder_is_an_error(
    find: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 47123)  # of whom /etc/passwd knows nothing
    with pytest.raises(ConfigError, match=r"~/.*: HOME is not set"):
        find()


def test_the_kind_of_a_folders_layers(tmp_path: Path) -> None:
    value = folder_with(tmp_path / "m", {**LLAMA, "kv_lora_rank": 512})
    (tmp_path / "m" / "model.safetensors").touch()
    assert resolve(value).kind == Kind(mla=True)
    assert with_config(UNKNOWN, {**LLAMA, "ssm_cfg": {"x": 1}}, "v").kind == Kind(state="ssm_cfg")


UNKNOWN = Model("owner/name", "owner/name", "hub", None)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "sliding_window": "abc"},
        {"layer_types": [["a"]], "sliding_window": 5},
        {"model_type": "minicpm3", **LLAMA},
        {**LLAMA, "max_position_embeddings": float("inf")},
        {**LLAMA, "model_type": "gemma3n_text", "num_kv_shared_layers": 16},
        {**LLAMA, "num_hidden_layers": -3},
    ],
)
def test_a_value_that_makes_no_sense_is_an_error_of_the_model(
    config: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"config.json of .* cannot be used"):
        with_config(Model("o/m", "m", "hub", None), config, "")
