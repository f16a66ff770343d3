"""The user's own files: hub token, API key for clients, model cache, URL of a Redis."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from deploy.config.runtimes import RUNTIMES
from deploy.config.spec import StackSpec
from deploy.errors import ConfigError, MachineError
from deploy.home_folder import default_hub_token
from deploy.runtime.secrets import (
    Secret,
    ensure_secrets,
    keep_secret,
    read_secret_file,
    read_secrets,
)
from deploy.stack.layout import API_KEY, ENGINE_KEY, HUB_TOKEN, REDIS_URL
from deploy.workflows.prepare import Prepared, Report
from deploy.workflows.user_redis import is_other_redis, provide_redis_url, require_redis


def provide_secrets(prepared: Prepared, folder: Path) -> None:
    """Write the user's secrets into the stack's folder of secrets, where its services see them.

    A secret whose file was removed since then stays as it was.

    Raises:
        ConfigError: one is not there, and never was.
    """
    _provide(folder / API_KEY, api_key, prepared.spec)
    _provide(folder / ENGINE_KEY, engine_key, prepared.spec)
    provide_redis_url(prepared, folder)
    if prepared.model.source == "hub" and prepared.facts.software.hub_token:
        _provide(folder / HUB_TOKEN, _required_hub_token, prepared.spec)


def stack_secrets(prepared: Prepared, folder: Path) -> dict[str, Secret]:
    """Create missing secrets, and return those that the stack's files contain.

    Raises:
        ConfigError: as `provide_secrets`.
    """
    made = ensure_secrets(folder, prepared.stack.secrets)
    provide_secrets(prepared, folder)
    return {**made, **read_secrets(folder, prepared.stack.user_secrets)}


def require_user_files(prepared: Prepared, folder: Path, *, lost: Report | None = None) -> None:
    """Check the user's own files, before anything is stopped, downloaded or built.

    Args:
        lost: is called for an engine of another host that does not answer; None refuses it.

    Raises:
        ConfigError, MachineError: a secret that is not there, a folder of another user's, or a
            Redis of the user's own, or an engine of another host, that does not answer.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for name in (API_KEY, ENGINE_KEY, REDIS_URL, HUB_TOKEN):
            if (folder / name).is_file():
                keep_secret(Path(scratch), name, (folder / name).read_text(encoding="utf-8"))
        provide_secrets(prepared, Path(scratch))
        require_redis(prepared, Path(scratch))
        if prepared.stack.remote:
            from deploy.workflows.other_hosts import require_engines  # with ssl and psutil

            require_engines(prepared, Path(scratch), lost=lost)
    _require_own_hub_cache(prepared)


def outdated_services(prepared: Prepared, kept: Mapping[str, Secret]) -> set[str]:
    """Return the running services that have an older secret than the user's current one.

    Raises:
        ConfigError: the URL of a Redis that cannot be used.
    """
    plan = prepared.plan
    engines = {engine.name for engine in plan.engines}
    users = {plan.kv_server.name} if plan.kv_server else engines
    router = {"router"} if plan.has_router else set()
    outdated = router if _is_other(API_KEY, api_key, prepared.spec, kept) else set()
    if _is_other(ENGINE_KEY, engine_key, prepared.spec, kept):
        outdated = router | engines
    return outdated | (users if is_other_redis(prepared, kept) else set())


def _is_other(
    name: str,
    read: Callable[[StackSpec], str | None],
    spec: StackSpec,
    kept: Mapping[str, Secret],
) -> bool:
    """Tell whether services have another key than the user's current one."""
    try:
        key = read(spec)
    except ConfigError:
        return False  # its file was removed: the old one stays
    held = kept.get(name)
    return bool(key and held and held.reveal() != key)


def provide_caches(prepared: Prepared) -> None:
    """Make the folders that containers write into, where they are missing.

    Raises:
        MachineError: the models' folder belongs to another user than the one they run as.
    """
    for folder in _written_by_containers(prepared):
        if not folder.exists():
            folder.mkdir(parents=True)
            if os.getuid() == 0:
                os.chown(folder, *prepared.facts.software.owner)
    _require_own_hub_cache(prepared)


def _written_by_containers(prepared: Prepared) -> set[Path]:
    containers = (service.container for service in prepared.stack.services)
    mounts = (mount for one in containers if one for mount in one.mounts)
    return {Path(mount.source) for mount in mounts if mount.source and not mount.read_only}


def _require_own_hub_cache(prepared: Prepared) -> None:
    if RUNTIMES[prepared.plan.runtime].as_user or prepared.model.source != "hub":
        return
    folder, (uid, gid) = prepared.hub_cache, prepared.facts.software.owner
    if folder.exists() and uid not in (0, folder.stat().st_uid):
        raise MachineError(
            f"{folder} belongs to user {folder.stat().st_uid}, and containers run as "
            f"user {uid}, who must write there",
            setting="hub_cache",
            hint=f"sudo chown -R {uid}:{gid} {folder}, or hub_cache: ANOTHER in deploy.yaml",
        )


def _provide(target: Path, read: Callable[[StackSpec], str | None], spec: StackSpec) -> None:
    try:
        value = read(spec)
    except ConfigError:
        if target.is_file():
            return
        raise
    if value:
        keep_secret(target.parent, target.name, value)


def _required_hub_token(spec: StackSpec) -> str:
    token = hub_token(spec)
    if token is None:
        raise ConfigError(
            "the Hugging Face token that the stack was planned with is gone",
            hint="set HF_TOKEN again, or: deploy down; deploy up",
        )
    return token


def hub_token(spec: StackSpec) -> str | None:
    """Return the user's token of the hub: from the named file, HF_TOKEN, or where its client
    keeps it.

    Raises:
        ConfigError: the named file cannot be read.
    """
    if spec.hf_token_file:
        return read_secret_file("hf_token_file", spec.hf_token_file)
    if os.environ.get("HF_TOKEN"):
        return os.environ["HF_TOKEN"]
    file = default_hub_token()
    return (file.read_text(encoding="utf-8").strip() or None) if file.is_file() else None


def api_key(spec: StackSpec) -> str | None:
    """Return the key that clients must bring, or None if they need none."""
    return _key("api_key_file", spec.api_key_file)


def engine_key(spec: StackSpec) -> str | None:
    """Return the key that engines of all hosts ask for; None if one is made."""
    return _key("engine.key_file", spec.engine.key_file)


def _key(setting: str, file: Path | None) -> str | None:
    """Return the key in a file.

    Raises:
        ConfigError: the file cannot be read, or holds no key.
    """
    if file is None:
        return None
    key = read_secret_file(setting, file)
    if not key.isascii() or len(key.split()) != 1:
        raise ConfigError(
            f"{file} does not hold one key of letters and digits",
            setting=setting,
            hint=f"openssl rand -hex 32 > {file}",
        )
    return key
