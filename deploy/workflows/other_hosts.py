"""Engines of other hosts that a router uses: whether they fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deploy.errors import ConfigError, EngineUnreachable, PdkitError
from deploy.metrics.connector import ConnectorReport
from deploy.runtime.engine_api import REFUSED, ApiError, EngineApi
from deploy.runtime.secrets import Secret, read_secrets
from deploy.runtime.whole_page import whole_page
from deploy.stack.kv_identity import kv_namespace
from deploy.stack.layout import ENGINE_KEY
from deploy.stack.service import Service
from deploy.workflows.prepare import Prepared, Report
from deploy.workflows.running import RunningStack

_ANSWER_S = 5.0
_FIELD = "router.engines"


def require_engines(prepared: Prepared, folder: Path, *, lost: Report | None = None) -> None:
    """Check that engines of other hosts (at least one) answer, take the key and store the same KV.

    Args:
        folder: of the stack's secrets.
        lost: is called for an engine that does not answer; None refuses it.

    Raises:
        EngineUnreachable: one does not answer.
        ConfigError: one refuses the key, runs other versions, or would never find this host's KV.
    """
    remote, versions = prepared.stack.remote, _versions(prepared)
    key = read_secrets(folder, (ENGINE_KEY,)).get(ENGINE_KEY)
    with ThreadPoolExecutor(max_workers=len(remote)) as pool:
        problems = list(pool.map(lambda one: _problem(prepared, versions, key, one), remote))
    for problem in filter(None, problems):
        if lost is None or not isinstance(problem, EngineUnreachable):
            raise problem
        lost(f"warning: {problem.message}; the stack starts without it")


def lost_engines(running: RunningStack) -> list[str]:
    """Return the names of other hosts' engines that do not answer."""
    remote = running.stack.remote
    with ThreadPoolExecutor(max_workers=len(remote) or 1) as pool:
        ready = list(pool.map(running.is_ready, remote))
    return [one.name for one, answers in zip(remote, ready, strict=True) if not answers]


def _problem(
    prepared: Prepared, versions: Mapping[str, str], key: Secret | None, engine: Service
) -> PdkitError | None:
    try:
        with EngineApi(engine.url, timeout_s=_ANSWER_S, api_key=key) as api:
            report = ConnectorReport.read(whole_page(api.metrics))
    except ApiError as exc:
        if exc.status in REFUSED:
            return ConfigError(
                f"the engine at {engine.url} requires a different key",
                setting="engine.key_file",
                hint=f"copy {prepared.spec.engine.key_file} to that host, and run deploy up there",
            )
        return EngineUnreachable(
            f"the engine at {engine.url} cannot be used: {exc}",
            setting=_FIELD,
            hint="deploy up on that host first; its engine.bind must be an address that this host "
            "reaches",
        )
    for said, hint in _differences(prepared, versions, report):
        return ConfigError(f"the engine at {engine.url} {said}", setting=_FIELD, hint=hint)
    return None


def _differences(
    prepared: Prepared, versions: Mapping[str, str], report: ConnectorReport
) -> Iterator[tuple[str, str]]:
    """Yield why an engine would never find this host's KV, or misread it, and a hint."""
    theirs = report.kv.get("namespace")
    if theirs is None:
        yield (
            "reports no KV settings of pdkit; was it started by deploy up?",
            "deploy up on that host; deploy status there shows its engines",
        )
    reported = {
        "vLLM": report.kv.get("vllm"),
        "LMCache": report.lmcache or report.kv.get("lmcache"),
    }
    for package, here in versions.items():
        there = reported[package]
        if there and _release(here) != _release(str(there)):
            yield (
                f"runs {package} {there}, this host {here}: they may not read each other's KV",
                f"install the same {package} on all hosts",
            )
    seed = next(
        one.env["PYTHONHASHSEED"] for one in prepared.stack.services if "PYTHONHASHSEED" in one.env
    )
    ours = kv_namespace(prepared.plan.name, seed)
    if theirs != ours:
        yield (
            f"keeps its KV under {theirs}, this host under {ours}: neither finds "
            "the KV of the other",
            "use the same versions of pdkit, vLLM and LMCache, and the same name, model files, "
            "vendor, tp and settings of engine and lmcache on all hosts; deploy plan on each shows "
            "them (a context that follows from memory can differ: set engine.max_model_len)",
        )


def _versions(prepared: Prepared) -> dict[str, str]:
    """Return this host's versions, as far as they are known."""
    found = zip(("vLLM", "LMCache"), prepared.facts.versions, strict=True)
    return {name: here for name, here in found if here}


def _release(version: str) -> str:
    """Return a version without its local part, which names a build such as +cpu."""
    return version.partition("+")[0]
