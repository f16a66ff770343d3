"""What the engines' own vLLM says of a model: asked once for each config.json and version."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deploy.assets import connector_path
from deploy.config.engine_args import options
from deploy.config.model import Model
from deploy.config.shape import read_shape
from deploy.config.spec import StackSpec
from deploy.connector.pdkit_connector.identity.model_files import cached_snapshot
from deploy.errors import Changes, ConfigError, MissingTool
from deploy.home_folder import default_hub_cache
from deploy.runtime.home import Home
from deploy.runtime.model_reader import (
    ReaderImage,
    reading_of_image,
    reading_of_interpreter,
)
from deploy.runtime.own_files import read_json
from deploy.workflows.fixes import FixTarget, place_of, remember
from deploy.workflows.prepare import Prepared, Report, prepare

_ANOTHER: Changes = {"--model": "FOLDER"}


def planned_by_vllm(planned: Prepared, home: Home, report: Report) -> Prepared:
    """Return the plan that follows from what the engines' vLLM says of the model.

    If it cannot be asked here, report that and keep the plan, which rests on the kit's estimate.

    Raises:
        ConfigError: that vLLM does not run the model, or it generates no text.
        NotEnoughMemory: the KV or context that it says does not fit.
    """
    config = _config_of(planned.spec, planned.model, home)
    if config is None:
        return planned
    place, overrides = place_of(planned), _overrides(planned.spec)
    version = planned.facts.versions[0] or place.image_id or "".join(place.identity[:1])
    file = _file(home, config, overrides, version)
    reading = _kept(file)
    if reading is None:
        report(f"asking vLLM in {place.what} about {planned.model.ref}; once per model and version")
        try:
            reading = _asked(place, config, overrides)
        except MissingTool as exc:
            report(f"warning: {exc.message}; KV and context are estimated from config.json")
            return planned
        # A refusal may end with a library that is installed.
        if not reading["trouble"] and not reading.get("unbuilt"):
            remember(file, reading)
    if unbuilt := reading.get("unbuilt"):
        report(f"vLLM does not say how much KV {planned.model.ref} needs: {unbuilt}")
    return _planned_again(planned, reading, home)


def planned_by_kept_answer(planned: Prepared, home: Home) -> Prepared:
    """Return the plan as the engines' version of vLLM once described the model on this machine.

    Raises:
        ConfigError, NotEnoughMemory: as `planned_by_vllm`.
    """
    config, version = _config_of(planned.spec, planned.model, home), planned.facts.versions[0]
    if config is None or version is None:
        return planned
    reading = _kept(_file(home, config, _overrides(planned.spec), version))
    return _planned_again(planned, reading, home) if reading else planned


def keep_config(home: Home, commit: str, config: Mapping[str, Any]) -> None:
    """Keep the config.json of a commit of the hub, until the model itself is here."""
    if commit:
        remember(_hub_config(home, commit), config)


def _config_of(spec: StackSpec, model: Model, home: Home) -> bytes | None:
    """Return the model's config.json; None if it is not here, or of the generated model."""
    if model.source == "tiny":
        return None
    if model.source == "folder":
        files = [Path(model.ref) / "config.json"]
    else:
        cache = spec.hub_cache or default_hub_cache()
        snapshot = cached_snapshot(Path(cache), model.ref, model.version)
        files = [snapshot / "config.json", _hub_config(home, model.version)]
    if model.source == "hub" and not model.version:
        return None
    for file in files:
        with suppress(OSError):
            return file.read_bytes()
    return None


def _hub_config(home: Home, commit: str) -> Path:
    return home.cache / "hub" / f"{commit}.json"


def _overrides(spec: StackSpec) -> str:
    return options(spec.engine.args).get("--hf-overrides") or "{}"


def _file(home: Home, config: bytes, overrides: str, version: str) -> Path:
    program = (connector_path() / "pdkit_connector" / "model_reader.py").read_bytes()
    asked = b"\0".join((config, overrides.encode(), version.encode(), program))
    return home.cache / "readings" / f"{hashlib.sha256(asked).hexdigest()[:32]}.json"


def _kept(file: Path) -> Mapping[str, Any] | None:
    with suppress(OSError, ValueError):
        kept = read_json(file)
        return kept if isinstance(kept, dict) and "trouble" in kept else None
    return None


def _planned_again(planned: Prepared, reading: Mapping[str, Any], home: Home) -> Prepared:
    _require_generates(planned.model, reading)
    was = planned.model
    state = was.kind.state or (f"by vLLM {reading['vllm']}" if reading.get("state") else "")
    kind = replace(was.kind, state=state, mla=was.kind.mla or bool(reading.get("mla")))
    model = replace(was, shape=read_shape(reading) or was.shape, kind=kind)
    if model == was:
        return planned
    return prepare(planned.spec, home, planned.facts, model=model)


def _asked(place: FixTarget, config: bytes, overrides: str) -> Mapping[str, Any]:
    connector = connector_path()
    with TemporaryDirectory(prefix="pdkit-model-") as folder:
        file = Path(folder) / "config.json"
        file.write_bytes(config)
        # A container reads them as another user.
        file.chmod(0o644)
        Path(folder).chmod(0o755)
        if not place.image_id:
            return reading_of_interpreter(
                place.interpreter, connector, Path(folder), overrides, place.environ
            )
        image = ReaderImage(place.image_id, place.interpreter, place.environ, place.devices)
        return reading_of_image(image, connector, Path(folder), overrides)


def _require_generates(model: Model, reading: Mapping[str, Any]) -> None:
    architecture, vllm = reading["architecture"] or "no architecture", f"vLLM {reading['vllm']}"
    if trouble := reading["trouble"]:
        raise ConfigError(
            f"{vllm} does not run {model.served_name} ({architecture}): {trouble}",
            setting="model",
            retry=(_ANOTHER,),
            note="with a model that it runs",
        )
    if not reading["generates"]:
        raise ConfigError(
            f"{model.served_name} is a {architecture}, with which {vllm} generates no text",
            setting="model",
            retry=(_ANOTHER,),
            note="with a model that generates text",
        )
