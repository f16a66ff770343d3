"""`deploy doctor`: what would stop `up` or spoil the hit rate, before it is tried.

Where `up` itself refuses something, the same code is asked here, and its error becomes a finding.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from deploy.config.model import Model, with_config
from deploy.config.spec import StackSpec
from deploy.config.vendors import vendor_named
from deploy.doctor.finding import Finding
from deploy.doctor.rules import failed, findings
from deploy.doctor.seen import DockerSeen, HubSeen, Outcome, RedisSeen, Seen, StackSeen
from deploy.errors import ConfigError, MachineError, PdkitError, UsageError
from deploy.planning.gpus import with_assumed_gpus
from deploy.planning.inventory import Inventory
from deploy.planning.redis_url import parse_redis_url
from deploy.planning.topology import gpus_needed, resolve_topology
from deploy.runtime.compose.docker import docker_info, is_rootless, require_compose
from deploy.runtime.detect import detect_inventory, detected_vendor
from deploy.runtime.home import Home
from deploy.runtime.host import available_memory_mib, engine_versions
from deploy.runtime.hub import HubError
from deploy.runtime.lock import is_locked
from deploy.runtime.observe import clock_is_synced
from deploy.runtime.url_store import open_url_store
from deploy.stack.service import Service
from deploy.workflows.brought import require_brought
from deploy.workflows.brought_redis import redis_url
from deploy.workflows.facts import (
    containers_here,
    found_programs,
    named_programs,
    require_gpus,
    stated_facts,
    without_held_gpus,
)
from deploy.workflows.fitness import quick_look, see_code
from deploy.workflows.fixes import require_fixes
from deploy.workflows.hub import ask_hub, hub_of
from deploy.workflows.images import looked_into, refuse_bad_pair, stack_images
from deploy.workflows.prepare import Containers, Facts, Prepared, Report, find_model, prepare
from deploy.workflows.running import RunningStack, find_stack, launcher_for
from deploy.workflows.start import require_host_memory, require_ports
from deploy.workflows.up import same_plan

_DETAIL_LINES = 6
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Examination:
    """What was found, for whom.

    Attributes:
        topology: "" where the spec could not be planned on this machine.
    """

    name: str
    vendor: str
    runtime: str
    topology: str
    findings: Sequence[Finding]

    @property
    def failed(self) -> list[Finding]:
        """The findings with which `up` cannot succeed; what the spec is to blame for first."""
        return failed(self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "vendor": self.vendor,
            "runtime": self.runtime,
            "topology": self.topology,
            "findings": [one.as_dict() for one in self.findings],
        }


@dataclass
class Steps:
    """Steps that `up` takes too, and how each went here."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def take(
        self, step: str, do: Callable[[], _Result], says: Callable[[_Result], str]
    ) -> _Result | None:
        """Do it; whatever goes wrong is its outcome."""
        try:
            result = do()
            self.outcomes[step] = Outcome(says=says(result))
        except PdkitError as exc:
            self.outcomes[step] = Outcome(
                trouble=exc.message,
                mend=exc.hint,
                details=exc.details[:_DETAIL_LINES],
                usage=isinstance(exc, UsageError),
            )
        except Exception as exc:  # noqa: BLE001 - a look that fails is a finding, not the end
            self.outcomes[step] = Outcome(unknown=f"this could not be looked at: {exc!r}")
        else:
            return result
        return None

    def well(self, step: str) -> bool:
        outcome = self.outcomes.get(step)
        return outcome is not None and not outcome.trouble and not outcome.unknown


@dataclass(frozen=True)
class Ground:
    """What a plan is made from here, as far as it could be found; the rest is assumed."""

    facts: Facts
    model: Model | None
    hub: HubSeen | None
    docker: DockerSeen | None
    info: Mapping[str, Any] | None


def examine(spec: StackSpec, home: Home, report: Report) -> Examination:
    """Judge a spec on this machine. Starts, fetches and changes nothing but what it remembers.

    Raises:
        ConfigError: the spec contradicts itself, so that there is nothing to judge.
    """
    steps = Steps()
    ground = _ground(spec, home, steps, report)
    facts = ground.facts
    seen = Seen(spec=spec, inventory=facts.inventory, docker=ground.docker)
    prepared = steps.take(
        "plan",
        lambda: prepare(spec, home, facts, model=ground.model),
        _fits,
    )
    if prepared is None:
        _refuse_contradiction(spec, home, ground)
        found = findings(replace(seen, outcomes=steps.outcomes))
        return Examination(spec.name, facts.vendor, facts.runtime, "", found)
    found = findings(_seen(prepared, home, ground, steps, report))
    topology = str(prepared.plan.topology)
    return Examination(spec.name, facts.vendor, facts.runtime, topology, found)


def _refuse_contradiction(spec: StackSpec, home: Home, ground: Ground) -> None:
    """Let a ConfigError through: it is the spec's, on any machine."""
    try:
        prepare(spec, home, ground.facts, model=ground.model)
    except MachineError:
        return


def _fits(made: Prepared) -> str:
    tokens = made.plan.max_model_len
    return f"the model fits, with prompts of up to {tokens} tokens" if tokens else "the model fits"


def _ground(spec: StackSpec, home: Home, steps: Steps, report: Report) -> Ground:
    docker, info = _see_docker(spec)
    runtime = "compose" if docker and docker.chosen else "process"
    there = detect_inventory(info) if info is not None else detect_inventory()
    vendor = spec.vendor if spec.vendor != "auto" else detected_vendor(there)
    machine = _machine(spec, vendor, without_held_gpus(there, home, spec.name), steps)
    named = spec.model_copy(update={"vendor": vendor, "runtime": runtime})
    facts = stated_facts(named, machine, runtime=runtime)
    if runtime == "process":
        facts = _with_programs(spec, facts, steps, report)
    elif info is not None:
        facts = _with_images(spec, facts, info, steps, report)
    model, hub = _ask_about_model(spec, home, vendor)
    return Ground(facts, model, hub, docker, info)


def _see_docker(spec: StackSpec) -> tuple[DockerSeen | None, Mapping[str, Any] | None]:
    """Return what is known of Docker, and what it says of itself; None where it is not wanted."""
    if spec.runtime == "process":
        return None, None
    asked = spec.runtime == "compose"
    try:
        version, info = require_compose(), docker_info()
    except MachineError as exc:
        there = shutil.which("docker") is not None
        return DockerSeen(
            chosen=asked, asked=asked, trouble=exc.message, mend=exc.hint, installed=there
        ), None
    return DockerSeen(
        chosen=True,
        asked=asked,
        version=str(info.get("ServerVersion", "")),
        compose=".".join(map(str, version)),
        rootless=is_rootless(info),
        installed=True,
    ), info


def _machine(spec: StackSpec, vendor: str, there: Inventory, steps: Steps) -> Inventory:
    """Return the machine, with assumed GPUs in the place of those that it lacks.

    Raises:
        ConfigError: the spec contradicts itself.
    """
    row, seen = vendor_named(vendor), len(there.gpus_of(vendor))
    needed = gpus_needed(spec, row, resolve_topology(spec, row, seen), seen)
    if not row.has_gpus:
        return there
    names = ", ".join(sorted({gpu.name for gpu in there.gpus_of(vendor)}))
    steps.take(
        "gpus",
        lambda: require_gpus(spec, vendor, there),
        lambda _: f"{seen} seen ({names}), {needed} taken",
    )
    return with_assumed_gpus(there, row, needed)


def _with_programs(spec: StackSpec, facts: Facts, steps: Steps, report: Report) -> Facts:
    programs = steps.take(
        "programs",
        lambda: found_programs(spec, facts.vendor),
        lambda found: f"{found.engine_python}, {found.redis_server or 'your own Redis'}",
    )
    if programs is None:
        return replace(facts, means=named_programs(spec))
    vllm, lmcache = engine_versions(programs.engine_python)
    steps.take(
        "versions",
        lambda: refuse_bad_pair(spec, facts.vendor, vllm, lmcache, report),
        lambda _: f"vLLM {vllm} with LMCache {lmcache}",
    )
    return replace(facts, means=programs)


def _with_images(
    spec: StackSpec, facts: Facts, info: Mapping[str, Any], steps: Steps, report: Report
) -> Facts:
    """Return the facts with the images' contents; those that are missing stay names."""
    wanted = stack_images(spec, facts.vendor)
    means = containers_here(spec, wanted, facts.vendor, info)
    if means.images.engine_id:
        images = steps.take(
            "versions",
            lambda: looked_into(wanted, spec, facts.vendor, report),
            lambda _: f"{wanted.engine.pair} in {wanted.engine.image}",
        )
        means = replace(means, images=images or means.images)
    return replace(facts, means=means)


def _ask_about_model(
    spec: StackSpec, home: Home, vendor: str
) -> tuple[Model | None, HubSeen | None]:
    """Return a hub's model by what the hub says, if it is not here, and what came of asking.

    Raises:
        ConfigError: the model can be none.
    """
    model = find_model(spec, home, vendor)
    if model.source != "hub":
        return None, None
    asked = HubSeen(cached=False, offline=False, cache="", address=hub_of(spec), asked=True)
    if model.version:
        return None, replace(asked, asked=False)
    try:
        answer = ask_hub(spec, model)
        return with_config(model, answer.config, answer.commit), asked
    except HubError as exc:
        return None, replace(asked, trouble=str(exc), refused=exc.refused)
    except ConfigError as exc:
        return None, replace(asked, trouble=exc.message)


def _seen(prepared: Prepared, home: Home, ground: Ground, steps: Steps, report: Report) -> Seen:
    """Return all that is seen; what takes seconds is looked at side by side."""
    means = prepared.facts.means
    has_code = steps.well("versions") and (
        not isinstance(means, Containers) or bool(means.images.engine_id)
    )
    with ThreadPoolExecutor(3) as pool:
        trial = pool.submit(_try_fixes, prepared, home, steps, report) if has_code else None
        code = pool.submit(see_code, prepared, home) if has_code else None
        synced = pool.submit(clock_is_synced)
        look = quick_look(prepared, home, ground.info)
        stack = _see_stack(prepared, home, ground, steps)
        _see_room(prepared, home, stack, steps)
        redis = _see_redis(prepared, home, steps)
        host = look.host and replace(look.host, synced=synced.result())
        if trial:
            trial.result()
        return replace(
            look,
            docker=ground.docker,
            host=host,
            hub=_joined(look.hub, ground.hub),
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


def _try_fixes(prepared: Prepared, home: Home, steps: Steps, report: Report) -> None:
    took = steps.take(
        "fixes", lambda: require_fixes(prepared, home, report), lambda _: "those needed take"
    )
    if took is False:
        steps.outcomes["fixes"] = Outcome(unknown="the fixes could not be tried; engines try them")


def _see_stack(prepared: Prepared, home: Home, ground: Ground, steps: Steps) -> StackSeen | None:
    """Return what there is of this name already; None where Docker would have to tell."""
    if ground.docker and ground.docker.chosen and ground.docker.trouble:
        return None
    spec, files = prepared.spec, home.stack(prepared.spec.name)
    existing = steps.take("state", lambda: _existing(spec, home), lambda _: "")
    launcher = launcher_for(prepared.plan.runtime, spec.name, files)
    steps.take("project", launcher.require_own_name, lambda _: "free, or this stack's own")
    if prepared.plan.runtime != "compose":
        steps.outcomes.pop("project", None)
    up = [one.name for one in existing.stack.services if _runs(existing, one)] if existing else []
    services = [service.name for service in prepared.stack.services]
    return StackSeen(
        running=tuple(up),
        missing=tuple(name for name in services if name not in up),
        left=0 if up else launcher.marked(),
        locked=is_locked(home.lock_file(spec.name)),
        state=existing is not None,
    )


def _existing(spec: StackSpec, home: Home) -> RunningStack | None:
    """Return the stack of that name.

    Raises:
        StateError: it cannot be understood, or is up with another plan.
    """
    existing = find_stack(home, spec.name)
    if existing is not None and existing.any_running():
        same_plan(spec, home, existing)
    return existing


def _runs(existing: RunningStack, service: Service) -> bool:
    return existing.service_state(service) == "running"


def _see_room(prepared: Prepared, home: Home, stack: StackSeen | None, steps: Steps) -> None:
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


def _see_redis(prepared: Prepared, home: Home, steps: Steps) -> tuple[RedisSeen, ...]:
    """Return the servers of the user's own Redis; none where it is the kit's, or does not answer.

    Other things that the user brings are looked at by the same step.
    """
    steps.take(
        "redis",
        lambda: require_brought(prepared, home.stack(prepared.spec.name).secrets_dir),
        lambda _: f"it answers who has the URL in {prepared.spec.redis.url_file}",
    )
    if not steps.well("redis"):
        return ()
    if not prepared.plan.redis_brought:
        del steps.outcomes["redis"]
        return ()
    return _settings(prepared)


def _settings(prepared: Prepared) -> tuple[RedisSeen, ...]:
    try:
        with open_url_store(parse_redis_url(redis_url(prepared) or "")) as store:
            try:
                return store.settings()
            except store.errors:
                return ()
    except (ValueError, PdkitError):  # taken away since it was asked a moment ago
        return ()
