"""Which model is served, and what its config.json says that planning needs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deploy.errors import ConfigError

TINY = "tiny"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_FOLDER_HINT = "deploy plan --model FOLDER, with a folder that holds config.json and the weights"
_HEADS = ("num_attention_heads", "n_head")
_LAYERS = ("num_hidden_layers", "n_layer")


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a config.json that decide KV size and which splits are possible."""

    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int | None

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of K and V that one token takes over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True)
class Model:
    """A model as vLLM is told of it.

    Attributes:
        ref: what `--model` of vLLM gets: a folder or a hub id.
        source: 'tiny' is made on the spot before the start, 'folder' is there, 'hub' is fetched by
            the engine.
        shape: None for a hub model that is not in the local cache, since nothing says it yet.
    """

    ref: str
    served_name: str
    source: Literal["tiny", "folder", "hub"]
    shape: ModelShape | None


def resolve_model(value: str, *, tiny_path: Path, tiny_config: Mapping[str, Any]) -> Model:
    """Return the model that `value` names: 'tiny', a folder, or a hub id.

    Raises:
        ConfigError: a folder that is missing, has no config.json, or one that cannot be read.
    """
    if value == TINY:
        return Model(str(tiny_path), "pdkit-tiny", "tiny", _shape(tiny_config, "tiny"))
    path = Path(value).expanduser()
    if path.is_dir() or value.startswith((".", "/", "~")):
        return _folder(path, value)
    if not _HUB_ID.fullmatch(value):
        raise ConfigError(
            f"--model: '{value}' is neither a folder that exists nor a hub id (owner/name)",
            hint="deploy plan --model ./path/to/model, or --model owner/name",
        )
    config = _cached_hub_config(value)
    return Model(value, value, "hub", _shape(config, value) if config else None)


def _folder(path: Path, value: str) -> Model:
    if not path.is_dir():
        raise ConfigError(
            f"--model: the folder '{value}' does not exist",
            hint=_FOLDER_HINT,
        )
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"--model: '{value}' has no config.json, so it is not a model folder",
            hint=_FOLDER_HINT,
        )
    resolved = path.resolve()
    shape = _shape(_read_config(file), value)
    if not any(file for pattern in _WEIGHTS for file in path.glob(pattern)):
        raise ConfigError(
            f"--model: '{value}' holds no weights ({', '.join(_WEIGHTS)})",
            hint=_FOLDER_HINT,
        )
    return Model(str(resolved), resolved.name, "folder", shape)


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"--model: {file} cannot be read as JSON ({exc})", hint="restore that file"
        ) from exc
    if not isinstance(config, dict):
        raise ConfigError(f"--model: {file} holds no JSON object", hint="restore that file")
    return config


def _shape(config: Mapping[str, Any], name: str) -> ModelShape | None:
    # Multimodal models nest the numbers of their language model.
    text = config.get("text_config") or config
    try:
        heads = _first(text, _HEADS)
        layers = _first(text, _LAYERS)
        hidden = text.get("hidden_size") or text.get("n_embd")
        if not (heads and layers and hidden):
            return None
        return ModelShape(
            layers=int(layers),
            attention_heads=int(heads),
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            max_positions=_first(text, ("max_position_embeddings", "n_positions")),
        )
    except (TypeError, ValueError) as exc:
        raise ConfigError(
            f"--model: config.json of '{name}' has a number that is none ({exc})",
            hint="restore that file",
        ) from exc


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        if config.get(name):
            return int(config[name])
    return None


def _cached_hub_config(repo_id: str) -> Mapping[str, Any] | None:
    """Read config.json from the hub cache's layout, if the model was fetched before."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = cache / f"models--{repo_id.replace('/', '--')}" / "snapshots"
    try:
        commit = (snapshots.parent / "refs" / "main").read_text(encoding="utf-8").strip()
        file = snapshots / commit / "config.json"
    except OSError:
        file = next(iter(sorted(snapshots.glob("*/config.json"))), snapshots / "none")
    return _read_config(file) if file.is_file() else None
