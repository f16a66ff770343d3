"""What a check looks up beside its prompts: the engines' environment and fixes, the store's use."""

from __future__ import annotations

from deploy.metrics.store import StoreStats
from deploy.verify.diagnosis import Evidence
from deploy.verify.findings import Findings
from deploy.verify.report import EngineHealth, StoreUse
from deploy.workflows.patches import engine_fixes
from deploy.workflows.running import RunningStack


def engine_health(running: RunningStack) -> list[EngineHealth]:
    """Ask every engine whether it serves."""
    return [
        EngineHealth(
            engine.name,
            engine.role,
            running.is_ready(running.stack.service(engine.name)),
            running.launcher.restarts(running.state.services[engine.name]),
        )
        for engine in running.prepared.plan.engines
    ]


def service_starts(running: RunningStack) -> dict[str, str]:
    """Return what changes for a service when it is started anew, by the services' names."""
    launcher = running.launcher
    return {
        name: f"{launcher.restarts(record)} {launcher.pid(record)}"
        for name, record in running.state.services.items()
    }


def store_use(before: StoreStats | None, after: StoreStats | None, removed: int | None) -> StoreUse:
    """Return how the check filled Redis; zeros where it did not answer."""
    if before is None or after is None:
        return StoreUse()
    return StoreUse(
        before.keys,
        after.keys,
        after.used_memory_bytes,
        after.max_memory_bytes,
        _grown(before.evicted_keys, after.evicted_keys),
        removed,
    )


def gather_evidence(
    running: RunningStack,
    found: Findings,
    before: StoreStats | None,
    after: StoreStats | None,
) -> Evidence:
    """Return what the rules of the diagnosis look at."""
    engines = [engine.name for engine in running.prepared.plan.engines]
    return Evidence(
        stack=running.stack.name,
        hash_seeds={name: _hash_seed(running, name) for name in engines},
        fixes={name: engine_fixes(running, name).states for name in engines},
        store_reachable=before is not None and after is not None,
        # Where nobody tells, nothing speaks for stores that failed.
        stored_chunks=found.expected_chunks
        if found.stored_keys is None
        else min(found.stored_keys, found.expected_chunks),
        expected_chunks=found.expected_chunks,
        flushes=(before and after and _grown(before.flushes, after.flushes)) or 0,
        evicted=(before and after and _grown(before.evicted_keys, after.evicted_keys)) or 0,
        store_restarted=bool(before and after and before.run_id != after.run_id),
        failed_requests=found.failed,
        missed=found.missed,
        mismatched=bool(found.mismatched),
        bypassed=bool(found.bypassed),
        too_short=found.too_short,
        restarted=found.restarted,
        path=found.path,
        redis_brought=running.prepared.plan.redis_brought,
        disabled_by_spec="PDKIT_DISABLE_FIXES" in running.prepared.spec.engine.env,
    )


def _grown(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _hash_seed(running: RunningStack, engine: str) -> str:
    record = running.state.services[engine]
    return running.launcher.environment(record).get("PYTHONHASHSEED", "")
