"""The evidence of a check beside its answers: how engines really run, what they and Redis count."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy.config.compat import judge, options_on
from deploy.config.engine_args import options
from deploy.config.fields import IN_ENGINES
from deploy.metrics.connector import ConnectorReport
from deploy.metrics.lmcache_server import LmcacheServerPressure
from deploy.metrics.page import MetricsPage
from deploy.metrics.store_stats import StoreStats
from deploy.runtime.engine_api import ApiError, EngineApi
from deploy.runtime.observe.host import free_mib
from deploy.runtime.store import Store
from deploy.verify.diagnosis import EngineFacts, Evidence, ServerFacts, StoreFacts
from deploy.verify.findings import Findings
from deploy.verify.report import EngineHealth, StoreUse
from deploy.verify.store_path import StorePath, failed_calls, late_answers
from deploy.workflows.running import PAGE_TIMEOUT_S, RunningStack, answering_pages

# Without this fix, LMCache's layerwise mode looks keys up with tags and stores them without.
LAYERWISE_TAGS = "B16c"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only its free space is read
_ANSWERED = ("applied", "not needed")


@dataclass(frozen=True)
class Readings:
    """Readings before and after a check; None is a Redis that did not answer.

    A page is that of an engine, or of LMCache's server where that answered.
    """

    store_before: StoreStats | None
    store_after: StoreStats | None
    pages_before: Mapping[str, MetricsPage]
    pages_after: Mapping[str, MetricsPage]

    @property
    def store_answered(self) -> bool:
        """Whether Redis answered before and after."""
        return None not in (self.store_before, self.store_after)

    def grown(self, name: str) -> int | None:
        """Return by how much one of Redis' counts grew; None if unknown."""
        if self.store_before is None or self.store_after is None:
            return None
        return self.store_after.grown(name, self.store_before)

    def page(self, service: str) -> MetricsPage:
        """Return a service's counts in between."""
        return self.pages_after[service].since(self.pages_before.get(service, MetricsPage()))

    @property
    def path(self) -> StorePath | None:
        """What all together moved to and from Redis; None if LMCache's own client does that."""
        return StorePath.read(sum(map(self.page, self.pages_after), MetricsPage()).samples)

    def report(self, engine: str) -> ConnectorReport:
        """Return the last report of an engine's connector; the engine may have died since."""
        after = self.pages_after[engine]
        return ConnectorReport.read(after if after.samples else self.pages_before[engine])


def engine_health(running: RunningStack) -> list[EngineHealth]:
    """Ask every engine whether it serves; restarts of other hosts' are not known."""
    records = running.state.services
    return [
        EngineHealth(
            engine.name,
            engine.role,
            running.is_ready(running.stack.service(engine.name), within_s=PAGE_TIMEOUT_S),
            running.launcher.restarts(record) if (record := records.get(engine.name)) else 0,
        )
        for engine in running.prepared.plan.all_engines
    ]


def service_starts(running: RunningStack) -> dict[str, str]:
    """Return service → a value that changes when the service is restarted."""
    launcher = running.launcher
    return {
        name: f"{launcher.restarts(record)} {launcher.pid(record)}"
        for name, record in running.state.services.items()
    }


def is_running(running: RunningStack, name: str) -> bool:
    """Tell whether a service that was started is still running."""
    return running.launcher.state(running.state.services[name]) == "running"


def tags_are_kept(running: RunningStack) -> bool:
    """Tell whether every engine stores a request's KV under its tags, by which it looks it up."""
    if not running.prepared.plan.layerwise:
        return True
    pages = answering_pages(running)
    return all(
        name in pages and ConnectorReport.read(pages[name]).fixes.get(LAYERWISE_TAGS) in _ANSWERED
        for name in _names(running)
    )


def store_use(seen: Readings, removed: int | None) -> StoreUse:
    """Return the use of Redis by the check, as far as Redis answered."""
    before, after = seen.store_before, seen.store_after
    last = after or before
    return StoreUse(
        before.keys if before else None,
        after.keys if after else None,
        last.used_memory_bytes if last else None,
        last.max_memory_bytes if last else None,
        seen.grown("evicted_keys"),
        removed,
    )


def gather_evidence(
    running: RunningStack, found: Findings, seen: Readings, store: Store, failures: Sequence[str]
) -> Evidence:
    """Collect what the rules of the diagnosis look at."""
    engines = [_engine_facts(running, found, seen, name) for name in _names(running)]
    plan = running.prepared.plan
    return Evidence(
        stack=running.stack.name,
        engines=engines,
        store=_store_facts(running, found, seen, store),
        server=_server_facts(running, seen),
        chunk_size=plan.chunk_size,
        # Unknown counts are no evidence of failed stores.
        stored_chunks=found.expected_chunks
        if found.stored_keys is None
        else min(found.stored_keys // plan.keys_per_chunk, found.expected_chunks),
        expected_chunks=found.expected_chunks,
        vanished=found.vanished,
        failed_requests=found.failed,
        missed=found.missed,
        mismatched=bool(found.mismatched),
        contradicting=tuple(found.noise.contradicting),
        bypassed=bool(found.bypassed),
        too_short=found.too_short,
        refused=found.path.refused if found.path else 0,
        not_loaded=found.path.not_loaded if found.path else 0,
        disabled_by_spec="PDKIT_DISABLE_FIXES" in running.prepared.spec.engine.env,
        bad_pair=_bad_pair(running, engines),
        prompts=found.prompts,
        failures=failures,
        stale=found.canaries.cause if found.canaries else "",
        emptying=emptying_the_store(running),
    )


def emptying_the_store(running: RunningStack) -> str:
    """Return the commands after which a stack's engines begin with an empty store."""
    name, plan = running.stack.name, running.prepared.plan
    if not plan.user_redis:
        return f"deploy down --name {name}, then deploy up --name {name}: its Redis starts empty"
    if plan.spec.redis.client == "lmcache":
        return (
            f"empty that Redis (FLUSHDB), then deploy down --name {name} and "
            f"deploy up --name {name}"
        )
    return (
        f"deploy down --volumes --name {name}, which removes its keys from your Redis, then "
        f"deploy up --name {name}"
    )


def _names(running: RunningStack) -> list[str]:
    return [engine.name for engine in running.prepared.plan.all_engines]


def _engine_facts(running: RunningStack, found: Findings, seen: Readings, name: str) -> EngineFacts:
    record, launcher = running.state.services.get(name), running.launcher
    named, use_native = connector_of(launcher.arguments(record) if record else ())
    report, page = seen.report(name), seen.page(name)
    path = StorePath.read(page.samples)
    failures = failed_calls(page.samples)
    return EngineFacts(
        name=name,
        role=running.stack.service(name).role,
        hash_seed=launcher.environment(record).get("PYTHONHASHSEED", "") if record else None,
        connector=named,
        use_native=use_native,
        fixes=report.fixes,
        kv=report.kv,
        failures=failures,
        left_out=path.left_out if path else 0,
        late=late_answers(page.samples),
        said=report.redis_said(failures or {}),
        ended=name in found.ended,
        restarted=name in found.restarted,
    )


def connector_of(arguments: Sequence[str]) -> tuple[str | None, bool]:
    """Return the connector that an engine's arguments name, and whether it is vLLM's own copy.

    "" if they name none; None if there are no arguments to read.
    """
    if not arguments:
        return None, False
    given = options(arguments).get("--kv-transfer-config")
    if not given:
        return "", False
    try:
        config = dict(json.loads(given))
        extra = dict(config.get("kv_connector_extra_config") or {})
    except (TypeError, ValueError):  # vLLM would not have started on it
        return None, False
    return str(config.get("kv_connector") or ""), bool(extra.get("use_native"))


def _server_facts(running: RunningStack, seen: Readings) -> ServerFacts | None:
    """Return the evidence on LMCache's server; little if it does not answer."""
    server = running.prepared.plan.kv_server
    if server is None:
        return None
    plan = running.prepared.plan
    facts = ServerFacts(
        server.name,
        server.kv_mib,
        shm_free_mib=free_mib(_SHARED_MEMORY) if plan.runtime == "process" else None,
        shm_engine_mib=plan.shared_memory_mib // len(plan.engines),
    )
    if {server.name} <= seen.pages_before.keys() & seen.pages_after.keys():
        pressure = LmcacheServerPressure.read(seen.page(server.name))
        chunks = math.ceil(pressure.no_room / plan.limits.ranks)
        facts = replace(facts, no_room=chunks, evictions=pressure.evictions)
    url = running.stack.service(server.name).url
    with suppress(ApiError), EngineApi(url, timeout_s=PAGE_TIMEOUT_S) as api:
        facts = replace(facts, lmcache=api.lmcache_version().partition("+")[0])
        facts = replace(facts, engines=api.known_engines())
    return facts


def _store_facts(
    running: RunningStack, found: Findings, seen: Readings, store: Store
) -> StoreFacts:
    plan = running.prepared.plan
    server = plan.kv_server
    silent = server is not None and server.name not in seen.pages_after
    anew = server is not None and server.name in (*found.ended, *found.restarted)
    # Between hosts, KV crosses through Redis.
    of_redis = plan.remote or found.only_redis_missed
    if server and (silent or anew or not of_redis):
        return StoreFacts(
            reachable=not silent,
            restarted=anew,
            services=[server.name],
            name="LMCache's server",
        )
    before, after = seen.store_before, seen.store_after
    known, refusal = after or before, store.refusal()
    return StoreFacts(
        reachable=seen.store_answered,
        refusal=refusal.said if refusal else "",
        denied=bool(refusal and refusal.denied),
        restarted=bool(before and after and after.restarted_since(before)),
        flushes=seen.grown("flushes") or 0,
        evicted=seen.grown("evicted_keys") or 0,
        errors=_more(before.errors, after.errors) if before and after else {},
        policy=known.policy if known else None,
        max_memory_bytes=known.max_memory_bytes if known else None,
        user_supplied=running.prepared.plan.user_redis,
        services=[one.name for one in sorted(running.stack.redis, key=running.is_ready)],
    )


def _more(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    more = {code: count - before.get(code, 0) for code, count in after.items()}
    return {code: count for code, count in more.items() if count > 0}


def _bad_pair(running: RunningStack, engines: Sequence[EngineFacts]) -> str:
    plan = running.prepared.plan
    vendor, connector, on = plan.vendor.name, plan.connector, options_on(plan)
    said = (known_against(vendor, engine.kv, connector=connector, on=on) for engine in engines)
    return next(filter(None, said), "")


def known_against(
    vendor: str, kv: Mapping[str, Any], *, connector: str = IN_ENGINES, on: Collection[str] = ()
) -> str:
    """Return why an engine's versions are known to be bad together; "" if they are not."""
    versions = _known(kv, "vllm"), _known(kv, "lmcache")
    verdict = judge(vendor, *versions, connector=connector, on=on)
    if verdict.verdict != "known_bad":
        return ""
    return f"{verdict.pair}: {verdict.reason} ({verdict.link})"


def _known(kv: Mapping[str, Any], name: str) -> str | None:
    value = kv.get(name)
    return str(value) if value and value != "unknown" else None
