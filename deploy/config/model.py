"""The model that is served, and what planning needs from its config.json."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from deploy.config.kinds import PLAIN, Kind, kind_of, strings
from deploy.config.shape import ModelShape, estimated_shape
from deploy.config.weight_files import reads_checkpoint, weights_in
from deploy.connector.pdkit_connector.identity.model_files import (
    WEIGHTS,
    ModelFile,
    cached_commit,
    cached_model,
    files_digest,
    model_files,
    unreadable_files,
)
from deploy.errors import Changes, ConfigError
from deploy.home_folder import default_hub_cache, expanded

TINY = "tiny"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_GENERATES = re.compile(r"For(CausalLM|ConditionalGeneration)$|LMHeadModel$")
_FOLDER: Changes = {"--model": "FOLDER"}
_WHOLE = "with a folder that holds config.json and the weights"


@dataclass(frozen=True)
class Model:
    """A model as it is passed to vLLM.

    Attributes:
        ref: vLLM's `--model`: a folder or a Hugging Face id.
        source: 'tiny' is generated before the start, 'folder' exists, 'hub' is downloaded before
            the engines start.
        shape: None for a hub model that is not in the local cache, as it is not known yet.
        weight_bytes: size of the weight files that vLLM loads; None if they are not here yet.
        version: distinguishes different contents under the same name; "" if nothing does.
        kind: of its layers, as far as config.json is known.
        files: of a folder, those that `version` is made from: names, sizes and digests. Of the
            hub, those in the cache, if engines may use no others.
        named: the files of other folders, and other files, that arguments of engines name.
    """

    ref: str
    served_name: str
    source: Literal["tiny", "folder", "hub"]
    shape: ModelShape | None
    weight_bytes: int | None = None
    version: str = ""
    kind: Kind = PLAIN
    files: tuple[ModelFile, ...] = ()
    named: tuple[ModelFile, ...] = ()

    @property
    def idle_window(self) -> bool:
        """Whether every layer has a window that no prompt leaves: it is longer than the context."""
        longest = self.shape.max_positions if self.shape else None
        return bool(self.kind.window and longest and self.kind.window >= longest)


# From the default model's config.json, so that it can be planned before it is downloaded.
_KNOWN = {
    "Qwen/Qwen3-0.6B": ModelShape(
        layers=28, attention_heads=16, kv_heads=8, head_dim=128, max_positions=40960
    )
}
_KNOWN_WEIGHT_BYTES = {"Qwen/Qwen3-0.6B": 1_503_300_328}


def resolve_model(  # noqa: PLR0913 - three are where things are, three are vLLM's options
    value: str,
    *,
    tiny_path: Path,
    tiny_config: Mapping[str, Any],
    hub_cache: Path | None = None,
    load_format: str = "auto",
    revision: str = "main",
    overrides: str = "",
) -> Model:
    """Return the model that `value` names: 'tiny', a folder, or a Hugging Face id.

    `load_format` and `revision` are vLLM's options, by which engines choose among the weight files
    and among the versions on the hub; `overrides` is that which changes config.json.

    Raises:
        ConfigError: the folder is missing, or its config.json is missing or unreadable.
    """
    if value == TINY:
        shape, _ = _described(tiny_config, "tiny")
        # Without a kind: its context counts, as that of a model whose positions may depend on it.
        return Model(str(tiny_path), "pdkit-tiny", "tiny", shape, version=tiny_path.name)
    if is_folder(value):
        return _folder(expanded(value), value, load_format, overrides)
    if not _HUB_ID.fullmatch(value):
        raise ConfigError(
            f"'{value}' is neither an existing folder nor a Hugging Face id (owner/name)",
            setting="model",
            retry=({"--model": "./path/to/model"}, {"--model": "owner/name"}),
        )
    cache = hub_cache or default_hub_cache()
    return _hub(value, cache, load_format, revision, overrides)


def is_folder(value: str) -> bool:
    """Tell whether the setting means a folder, which may be missing."""
    return expanded(value).is_dir() or value.startswith((".", "/", "~"))


def with_config(
    model: Model, config: Mapping[str, Any], version: str, overrides: str = ""
) -> Model:
    """Return the model with what its config.json of that version says, as vLLM's option changes it.

    Raises:
        ConfigError: a value in it is not a number.
    """
    shape, kind = _described(_overridden(config, overrides), model.ref)
    return replace(model, shape=shape, version=version, kind=kind)


def cached_models(cache: Path) -> tuple[Model, ...]:
    """Return the models of a Hugging Face cache that generate text and whose weights are there."""
    return tuple(model for folder in sorted(cache.glob("models--*")) if (model := _cached(folder)))


def _hub(
    repo_id: str,
    cache: Path,
    load_format: str = "auto",
    revision: str = "main",
    overrides: str = "",
) -> Model:
    snapshot = _snapshot(repo_id, cache, revision)
    if snapshot is None or not (snapshot / "config.json").is_file():
        return Model(repo_id, repo_id, "hub", _KNOWN.get(repo_id), _KNOWN_WEIGHT_BYTES.get(repo_id))
    config = _overridden(_read_config(snapshot / "config.json"), overrides)
    shape, kind = _described(config, repo_id)
    size = _size(snapshot, weights_in(snapshot, load_format).files) or None
    return Model(repo_id, repo_id, "hub", shape, size, snapshot.name, kind)


def _cached(folder: Path) -> Model | None:
    repo_id = folder.name.removeprefix("models--").replace("--", "/")
    snapshot = _snapshot(repo_id, folder.parent)
    try:
        config = _read_config(snapshot / "config.json") if snapshot else {}
        names = strings(config.get("architectures"))
        model = _hub(repo_id, folder.parent) if any(map(_GENERATES.search, names)) else None
    except (ConfigError, OSError):
        return None
    return model if model and model.version and model.shape and model.weight_bytes else None


def _folder(path: Path, value: str, load_format: str, overrides: str) -> Model:
    if not path.is_dir():
        raise ConfigError(
            f"the folder '{value}' does not exist",
            setting="model",
            retry=(_FOLDER,),
            note=_WHOLE,
        )
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"'{value}' has no config.json, so it is not a model folder",
            setting="model",
            retry=(_FOLDER,),
            note=_WHOLE,
        )
    resolved = path.resolve()
    config = _overridden(_read_config(file), overrides)
    shape, kind = _described(config, value)
    if not any(any(path.glob(pattern)) for pattern in WEIGHTS):
        raise ConfigError(
            f"'{value}' contains no weights ({', '.join(WEIGHTS)})",
            setting="model",
            retry=(_FOLDER,),
            note=_WHOLE,
        )
    loaded = weights_in(path, load_format)
    if reads_checkpoint(load_format) and (loaded.missing or not loaded.files):
        gone = f"{loaded.missing[0]}, which is missing" if loaded.missing else "no file in it"
        raise ConfigError(
            f"the index of the weights in '{value}' names {gone}"
            if loaded.missing or loaded.complete  # without an index, nothing else is complete
            else f"'{value}' contains no weights that --load-format {load_format} reads",
            setting="model",
            retry=(_FOLDER,),
            note=_WHOLE,
        )
    files = model_files(path)
    for name, reason in unreadable_files(files):
        raise ConfigError(
            f"{resolved / name} cannot be read: {reason}",
            setting="model",
            hint=f"chmod a+r {shlex.quote(str(resolved / name))}, or restore the file",
        )
    return Model(
        str(resolved),
        resolved.name,
        "folder",
        shape,
        _size(path, loaded.files) if loaded.files else None,
        files_digest(files),
        kind,
        files,
    )


def _size(folder: Path, names: Iterable[str]) -> int:
    return sum((folder / name).stat().st_size for name in names)


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(
            f"{file} is not valid JSON ({exc})", setting="model", hint=f"restore {file}"
        ) from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is not a JSON object", setting="model", hint=f"restore {file}")
    return config


def _overridden(config: Mapping[str, Any], overrides: str) -> Mapping[str, Any]:
    """Return config.json with the JSON of vLLM's `--hf-overrides`, which refuses what is none."""
    try:
        given = json.loads(overrides or "{}")
    except (ValueError, RecursionError):
        return config
    if not isinstance(given, dict):
        return config
    merged = {**config, **given}
    if "rope_parameters" in given:  # vLLM reads it in place of the older name
        merged.pop("rope_scaling", None)
    nested, changed = config.get("text_config"), given.get("text_config")
    if isinstance(nested, dict) and isinstance(changed, dict):
        merged["text_config"] = {**nested, **changed}
    return merged


def _described(config: Mapping[str, Any], name: str) -> tuple[ModelShape | None, Kind]:
    try:
        return estimated_shape(config), kind_of(config)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as exc:
        raise ConfigError(
            f"a value in config.json of '{name}' cannot be used ({type(exc).__name__}: {exc})",
            setting="model",
            hint=f"restore the config.json of {name}",
        ) from exc


def _snapshot(repo_id: str, cache: Path, revision: str = "main") -> Path | None:
    """Return the folder of a model's revision, a branch or commit, in the Hugging Face cache."""
    folder = cached_model(cache, repo_id)
    if commit := cached_commit(cache, repo_id, revision):
        return folder / "snapshots" / commit
    if revision != "main":
        given = folder / "snapshots" / revision
        return given if given.is_dir() else None
    configs = sorted(folder.glob("snapshots/*/config.json"))
    return configs[0].parent if configs else None
