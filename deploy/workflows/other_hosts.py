"""Engines of other hosts that a router uses: whether they fit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deploy.errors import ConfigError, EngineUnreachable, PdkitError
from deploy.metrics.connector import ConnectorReport
from deploy.metrics.page import MetricsPage
from deploy.runtime.secrets import read_secrets
from deploy.stack.layout import ENGINE_KEY
from deploy.stack.namespace import key_prefix
from deploy.stack.service import Service
from deploy.workflows.prepare import Prepared

_ANSWER_S = 5.0
_REFUSED = (401, 403)
_FIELD = "router.engines"


def require_engines(prepared: Prepared, folder: Path) -> None:
    """Check that each engine of other hosts answers, takes the key and stores the same KV.

    Args:
        folder: of the stack's secrets.

    Raises:
        EngineUnreachable: one does not answer.
        ConfigError: one refuses the key, or would never find this host's KV.
    """
    remote = prepared.stack.remote
    if not remote:
        return
    with ThreadPoolExecutor(max_workers=len(remote)) as pool:
        problems = list(pool.map(lambda one: _problem(prepared, folder, one), remote))
    for problem in filter(None, problems):
        raise problem


def _problem(prepared: Prepared, folder: Path, engine: Service) -> PdkitError | None:
    from deploy.runtime.engine_api import ApiError, EngineApi  # with ssl, which `plan` does without

    key = read_secrets(folder, (ENGINE_KEY,)).get(ENGINE_KEY)
    try:
        with EngineApi(engine.url, timeout_s=_ANSWER_S, api_key=key) as api:
            page = api.metrics()
    except ApiError as exc:
        if exc.status in _REFUSED:
            return ConfigError(
                f"the engine at {engine.url} asks for another key",
                setting="engine.key_file",
                hint=f"copy {prepared.spec.engine.key_file} to that host, and run deploy up there",
            )
        return EngineUnreachable(
            f"the engine at {engine.url} cannot be used: {exc}",
            setting=_FIELD,
            hint="deploy up on that host first; its engine.bind must be an address that this host "
            "reaches",
        )
    return _other_kv(prepared, engine, page)


def _other_kv(prepared: Prepared, engine: Service, page: MetricsPage) -> ConfigError | None:
    """Return what is wrong if the engine stores KV under other keys, or is of another role."""
    theirs = ConnectorReport.read(page).kv.get("namespace")
    seed = next(
        one.env["PYTHONHASHSEED"] for one in prepared.stack.services if "PYTHONHASHSEED" in one.env
    )
    ours = key_prefix(prepared.plan.name) + seed
    if theirs in (None, ours):
        return None
    return ConfigError(
        f"the engine at {engine.url} keeps its KV under {theirs}, this host under {ours}: they "
        "would never find each other's",
        setting=_FIELD,
        hint="use the same pdkit version, name, model (and its path), vendor, tp and settings of "
        "engine and lmcache on all hosts; deploy plan on each shows them",
    )
