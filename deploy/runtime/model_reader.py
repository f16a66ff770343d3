"""Ask the engines' own vLLM what it makes of a config.json, before any weights are fetched."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.errors import MissingTool
from deploy.runtime.compose.docker import last_line, run_docker
from deploy.runtime.fixes import device_options
from deploy.runtime.host import run_python
from deploy.stack.layout import CONNECTOR
from deploy.stack.service import DeviceAccess

_MODULE = ("-m", "pdkit_connector.model_reader")
_FOLDER = "/pdkit/model"
_TIMEOUT_S = 300


@dataclass(frozen=True)
class ReaderImage:
    """An image that engines run in, with their variables and the GPUs of one."""

    id: str
    interpreter: str
    environ: Mapping[str, str]
    devices: DeviceAccess | None


def reading_of_interpreter(
    python: str, connector: Path, folder: Path, overrides: str, environ: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return what the vLLM of an interpreter makes of the config.json in a folder.

    `overrides` is the JSON of vLLM's `--hf-overrides`; `environ` is set on top of this process'
    own.

    Raises:
        MissingTool: it gives no answer.
    """
    path = ":".join(filter(None, [str(connector), environ.get("PYTHONPATH")]))
    variables = {**environ, "PYTHONPATH": path}
    asked = (*_MODULE, str(folder), "--hf-overrides", overrides)
    try:
        done = run_python(python, *asked, environ=variables, timeout_s=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise MissingTool(f"{python} does not answer ({exc})") from exc
    return _parsed(done, python)


def reading_of_image(
    image: ReaderImage, connector: Path, folder: Path, overrides: str
) -> Mapping[str, Any]:
    """Return what the vLLM of an image makes of it, in a container without a network.

    Raises:
        MissingTool: it gives no answer.
        DockerUnavailable: no Docker engine answers.
    """
    path = ":".join(filter(None, [CONNECTOR, image.environ.get("PYTHONPATH")]))
    variables = {**image.environ, "PYTHONPATH": path}
    arguments = (
        "run", "--rm", "--network", "none", "--cap-drop", "ALL",
        "--volume", f"{connector}:{CONNECTOR}:ro", "--volume", f"{folder}:{_FOLDER}:ro",
        *(part for name, value in variables.items() for part in ("--env", f"{name}={value}")),
        *(device_options(image.devices) if image.devices else ()),
        "--entrypoint", image.interpreter, image.id, *_MODULE, _FOLDER,
        "--hf-overrides", overrides,
    )  # fmt: skip
    return _parsed(run_docker(arguments, timeout_s=_TIMEOUT_S, check=False), image.id)


def _parsed(done: subprocess.CompletedProcess[str], where: str) -> Mapping[str, Any]:
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise MissingTool(f"{where} does not answer: {last_line(done.stderr)}") from None
    if not isinstance(answer, dict) or "trouble" not in answer:
        raise MissingTool(f"{where} does not answer with a model's properties")
    return answer
