"""`deploy doctor`: find what would stop `up` or lower the hit rate, before it starts.

Where `up` itself refuses something, the same code runs here, and its error becomes a finding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from deploy.config.model import Model
from deploy.config.spec import StackSpec
from deploy.connector.pdkit_connector.redis_url import parse_redis_url
from deploy.doctor.finding import Finding
from deploy.doctor.observed import (
    DisksSeen,
    EngineCode,
    HubSeen,
    RedisSeen,
    Seen,
    StackSeen,
    StepOutcome,
)
from deploy.doctor.rules import failed, findings
from deploy.errors import MachineError, PdkitError
from deploy.metrics.connector import ConnectorReport
from deploy.runtime.home import Home
from deploy.runtime.host import available_memory_mib
from deploy.runtime.lock import is_locked
from deploy.runtime.observe import clock_is_synced, place, see_host
from deploy.runtime.url_store import open_url_store
from deploy.verify.diagnosis.engine_causes import rows_apart
from deploy.workflows.facts import NotedSteps, Survey, survey
from deploy.workflows.fixes import require_fixes
from deploy.workflows.hub import ask_about_model
from deploy.workflows.images import looked_into
from deploy.workflows.preflight import quick_look, see_code
from deploy.workflows.prepare import Facts, Prepared, Report, prepare
from deploy.workflows.running import RunningStack, answering_pages, find_stack, launcher_for
from deploy.workflows.software import Containers
from deploy.workflows.stack_images import stack_images
from deploy.workflows.start import require_host_memory, require_ports
from deploy.workflows.up import same_plan
from deploy.workflows.user_files import require_user_files
from deploy.workflows.user_redis import redis_url


@dataclass(frozen=True)
class Examination:
    """What `doctor` found.

    Attributes:
        findings: one for each rule.
        topology: "" if the spec could not be planned on this machine.
    """

    name: str
    vendor: str
    runtime: str
    topology: str
    findings: Sequence[Finding]

    @property
    def failed(self) -> list[Finding]:
        """The findings with which `up` cannot succeed; those about the spec come first."""
        return failed(self.findings)


def examine(spec: StackSpec, home: Home, report: Report) -> Examination:
    """Examine this machine for a spec. Starts and downloads nothing; only results are cached.

    Raises:
        ConfigError: the spec contradicts itself, so that there is nothing to judge.
    """
    steps = NotedSteps()
    here = survey(spec, home, steps, report)
    here = replace(here, facts=_with_image_versions(spec, here.facts, steps, report))
    facts = here.facts
    model, hub = ask_about_model(spec, home, facts.vendor, runtime=facts.runtime)
    prepared = steps.take("plan", lambda: prepare(spec, home, facts, model=model), _fits)
    if prepared is None:
        _refuse_contradiction(spec, home, facts, model)
        found = findings(_seen_without_plan(spec, home, here, steps))
        return Examination(spec.name, facts.vendor, facts.runtime, "", found)
    found = findings(_seen(prepared, home, here, hub, steps, report))
    topology = str(prepared.plan.topology)
    return Examination(spec.name, facts.vendor, facts.runtime, topology, found)


def _with_image_versions(spec: StackSpec, facts: Facts, steps: NotedSteps, report: Report) -> Facts:
    """Return the facts with the contents of an engine image that is on this machine."""
    if not isinstance(facts.software, Containers) or not facts.software.images.engine_id:
        return facts
    wanted = stack_images(spec, facts.vendor)
    images = steps.take(
        "versions",
        lambda: looked_into(wanted, spec, facts.vendor, report),
        lambda _: f"{wanted.engine.pair} in {wanted.engine.image}",
    )
    if images is None:
        return facts
    return replace(facts, software=replace(facts.software, images=images))


def _refuse_contradiction(spec: StackSpec, home: Home, facts: Facts, model: Model | None) -> None:
    """Raise the ConfigError of a spec that is wrong on any machine."""
    try:
        prepare(spec, home, facts, model=model)
    except MachineError:
        return


def _seen_without_plan(spec: StackSpec, home: Home, here: Survey, steps: NotedSteps) -> Seen:
    """Observe this machine without a plan."""
    return Seen(
        spec=spec,
        inventory=here.facts.inventory,
        docker=here.docker,
        host=replace(home.host or see_host(), synced=_synced(home)),
        disks=DisksSeen(state=place(home.state)),
        outcomes=steps.outcomes,
    )


def _synced(home: Home) -> bool | None:
    return home.host.synced if home.host else clock_is_synced()


def _fits(made: Prepared) -> str:
    tokens = made.plan.max_model_len
    return f"the model fits, with prompts of up to {tokens} tokens" if tokens else "the model fits"


def _seen(
    prepared: Prepared,
    home: Home,
    here: Survey,
    hub: HubSeen | None,
    steps: NotedSteps,
    report: Report,
) -> Seen:
    """Return all that can be seen; slow probes run in parallel."""
    has_code = steps.well("versions") and prepared.facts.software.has_code
    with ThreadPoolExecutor(3) as pool:
        trial = pool.submit(_try_fixes, prepared, home, steps, report) if has_code else None
        code = pool.submit(_see_code, prepared, home) if has_code else None
        synced = pool.submit(_synced, home)
        look = quick_look(prepared, home, here.info)
        stack = _see_stack(prepared, home, here, steps)
        _see_room(prepared, home, stack, steps)
        redis = _see_redis(prepared, home, steps)
        host = look.host and replace(look.host, synced=synced.result())
        if trial:
            trial.result()
        return replace(
            look,
            connector=prepared.connector_choice,
            docker=here.docker,
            host=host,
            hub=_joined(look.hub, hub),
            code=code.result() if code else None,
            redis=redis,
            stack=stack,
            outcomes=steps.outcomes,
        )


def _joined(here: HubSeen | None, asked: HubSeen | None) -> HubSeen | None:
    if here is None or asked is None:
        return here
    return replace(
        here,
        address=asked.address,
        asked=asked.asked,
        trouble=asked.trouble,
        refused=asked.refused,
    )


def _try_fixes(prepared: Prepared, home: Home, steps: NotedSteps, report: Report) -> None:
    well = "LMCache's server needs none" if prepared.plan.kv_server else "all needed fixes apply"
    took = steps.take("fixes", lambda: require_fixes(prepared, home, report), lambda _: well)
    if took is False:
        steps.outcomes["fixes"] = StepOutcome(
            unknown="the fixes could not be tried; engines try them when they start"
        )


def _see_code(prepared: Prepared, home: Home) -> EngineCode:
    try:
        return see_code(prepared, home)
    except (PdkitError, OSError) as exc:
        return EngineCode("the engines' interpreter or image", trouble=str(exc))


def _see_stack(prepared: Prepared, home: Home, here: Survey, steps: NotedSteps) -> StackSeen | None:
    """Return the stack of this name; None if only Docker knows and does not answer."""
    if here.docker and here.docker.chosen and here.docker.trouble:
        return None
    spec, files = prepared.spec, home.stack(prepared.spec.name)
    existing = steps.take("state", lambda: find_stack(home, spec.name), lambda _: "")
    up: Sequence[str] = ()
    if existing is not None:
        up = steps.take("state", lambda: _running(existing), lambda _: "") or ()
    if existing is not None and up:
        steps.take("state", lambda: same_plan(spec, home, existing), lambda _: "")
    launcher = launcher_for(prepared.plan.runtime, spec.name, files)
    if isinstance(prepared.facts.software, Containers):
        steps.take("project", launcher.require_own_name, lambda _: "free, or used by this stack")
    services = [service.name for service in prepared.stack.services]
    reports = _reports(existing) if existing is not None and up else {}
    rows = rows_apart(reports)
    return StackSeen(
        running=tuple(up),
        missing=tuple(name for name in services if name not in up),
        left=0 if up else steps.take("marked", launcher.marked, str) or 0,
        locked=is_locked(home.lock_file(spec.name)),
        state=existing is not None,
        reports=len(reports),
        apart=tuple(one.text for one in rows if not one.alike),
        unplanned=tuple(one.text for one in rows if one.alike),
    )


def _reports(existing: RunningStack) -> dict[str, Mapping[str, Any]]:
    """Return the KV report of each engine that answers."""
    pages = answering_pages(existing)
    kv = {name: ConnectorReport.read(page).kv for name, page in pages.items()}
    return {name: facts for name, facts in kv.items() if "rows" in facts}


def _running(existing: RunningStack) -> list[str]:
    """Return the services that run.

    Raises:
        DockerUnavailable: they are containers, and no Docker engine answers.
    """
    services = existing.stack.services
    return [one.name for one in services if existing.service_state(one) == "running"]


def _see_room(prepared: Prepared, home: Home, stack: StackSeen | None, steps: NotedSteps) -> None:
    running = stack.running if stack else ()
    missing = [one for one in prepared.stack.services if one.name not in running]
    own = "the stack has its own"
    ports = ", ".join(map(str, sorted(prepared.plan.ports)))
    steps.take(
        "ports",
        lambda: require_ports(prepared, home, missing),
        lambda _: f"free: {ports}" if missing else own,
    )
    needed = sum(service.memory_mib for service in missing)
    steps.take(
        "memory",
        lambda: require_host_memory(prepared, missing),
        lambda _: f"{needed} of {available_memory_mib()} MiB" if missing else own,
    )


def _see_redis(prepared: Prepared, home: Home, steps: NotedSteps) -> tuple[RedisSeen, ...]:
    """Return the servers of the user's own Redis; none where it is the kit's, or does not answer.

    The user's other files are checked in the same step.
    """
    steps.take(
        "redis",
        lambda: require_user_files(prepared, home.stack(prepared.spec.name).secrets_dir),
        lambda _: f"it accepts the URL in {prepared.spec.redis.url_file}",
    )
    if not steps.well("redis"):
        return ()
    if not prepared.plan.user_redis:
        del steps.outcomes["redis"]
        return ()
    return _settings(prepared)


def _settings(prepared: Prepared) -> tuple[RedisSeen, ...]:
    with (
        suppress(ValueError, PdkitError),  # removed a moment ago
        open_url_store(parse_redis_url(redis_url(prepared) or "")) as store,
        suppress(*store.errors),
    ):
        return store.settings()
    return ()
