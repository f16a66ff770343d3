"""`deploy render`: a stack as one document, or as a folder from which it can be started by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from deploy.errors import ConfigError
from deploy.runtime.compose.project import write_project
from deploy.runtime.home import Home
from deploy.stack.document import document_yaml, stack_document
from deploy.tiny_model import ensure_tiny_model
from deploy.workflows.prepare import Prepared, prepare
from deploy.workflows.user_files import api_key, provide_caches, stack_secrets
from deploy.workflows.user_redis import redis_url

_ANOTHER = "deploy render -o FOLDER, with another folder"


def rendered(prepared: Prepared, home: Home) -> dict[str, Any]:
    """Return the document of a stack: for Compose, or of processes. Reads and writes nothing."""
    if prepared.plan.runtime == "process":
        return stack_document(prepared.stack)
    from deploy.stack.compose import compose_document

    files = home.stack(prepared.stack.name)
    return compose_document(
        prepared.stack,
        root=str(files.root),
        secrets_dir=str(files.secrets_dir),
        stop_s=prepared.spec.timeouts.stop_s,
    )


def write_rendered(prepared: Prepared, home: Home, folder: Path) -> tuple[list[Path], str]:
    """Write a stack's files into a folder; return their paths, and how to start it by hand.

    For Compose that is everything but images: a password is made, the tiny model too.

    Raises:
        ConfigError: the key for clients or the URL of Redis is not there, or nothing can be
            written into the folder.
    """
    api_key(prepared.spec)
    redis_url(prepared)
    _make_folder(folder)
    if prepared.plan.runtime == "process":
        target = folder / "stack.yaml"
        target.write_text(document_yaml(stack_document(prepared.stack)), encoding="utf-8")
        return [target], "deploy up --runtime process, with the same options"
    prepared = prepare(prepared.spec, home.with_stacks_in(folder), prepared.facts)
    files = home.with_stacks_in(folder).stack(prepared.stack.name)
    if prepared.model.source == "tiny":
        ensure_tiny_model(home.models)
    secrets = stack_secrets(prepared, files.secrets_dir)
    provide_caches(prepared)
    written = write_project(prepared.stack, files, secrets, stop_s=prepared.spec.timeouts.stop_s)
    return written, f"docker compose -f {written[0]} up --detach --wait"


def _make_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"-o: '{folder}' is a file", hint=_ANOTHER)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"-o: '{folder}' cannot be created: {exc.strerror}", hint=_ANOTHER
        ) from exc
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"-o: '{folder}' is not writable", hint=_ANOTHER)
