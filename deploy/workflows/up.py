"""`deploy up`: start a stack, wait until it serves, check it; stop it again if a start fails."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deploy.config.catalog import reference
from deploy.config.model import Model
from deploy.config.runtimes import RUNTIMES
from deploy.config.spec import StackSpec
from deploy.document import Rounded2
from deploy.errors import StateError
from deploy.runtime.boot import require_systemd, starts_without_login, write_unit
from deploy.runtime.home import Home
from deploy.runtime.lock import planning_lock
from deploy.runtime.state import boot_id
from deploy.stack.service import Service
from deploy.verify.report import CheckReport
from deploy.workflows.check import (
    CheckOptions,
    check_running,
    renew_store_connections,
    require_answers,
)
from deploy.workflows.facts import facts_here, with_images
from deploy.workflows.fixes import require_fixes
from deploy.workflows.hub import described_model, fetch_weights
from deploy.workflows.model_files import model_changed, serving_new
from deploy.workflows.model_reading import planned_by_vllm
from deploy.workflows.other_hosts import lost_engines
from deploy.workflows.preflight import require_code, require_fit, require_gpus_beside
from deploy.workflows.prepare import Facts, Prepared, Report, find_model, prepare
from deploy.workflows.running import RunningStack, find_stack, require_stack
from deploy.workflows.saved_state import StackState, following, new_state, with_outcome
from deploy.workflows.software import Containers
from deploy.workflows.stack_images import stack_images
from deploy.workflows.start import ABORT_GRACE_S, StackStart
from deploy.workflows.user_files import outdated_services, require_user_files

_POLL_S = 0.25


@dataclass(frozen=True)
class Up:
    """A start.

    Attributes:
        url: the address for clients.
        started: service → seconds until it was ready; empty if all ran already.
        slowest_engine_s: seconds of the slowest engine's start.
        check: null with `--no-check`.
        warnings: why supervisor or monitoring do not run, if they should.
    """

    name: str
    url: str
    model: str
    started: Mapping[str, Rounded2]
    slowest_engine_s: Rounded2
    ready_s: Rounded2
    total_s: Rounded2
    check: CheckReport | None
    warnings: Sequence[str]


@dataclass(frozen=True)
class UpResult:
    """What `up` did.

    Attributes:
        started: seconds from each started service's own start to its readiness; empty if all ran.
        seconds: from the command's start until the stack served.
        warnings: why supervisor or monitoring do not run, if they should.
    """

    running: RunningStack
    started: dict[str, float]
    seconds: float
    warnings: tuple[str, ...] = ()

    @property
    def slowest_engine_s(self) -> float:
        """Seconds that the slowest engine took to start; 0.0 if none was started."""
        return max((self.started.get(name, 0.0) for name in self._engines), default=0.0)

    @property
    def started_all_engines(self) -> bool:
        """Whether all engines were started, none of which ran."""
        return self._engines <= self.started.keys()

    @property
    def outlived_store(self) -> bool:
        """Whether a store was started and an engine was not, which holds dead connections then."""
        stores = {service.name for service in self.running.stack.stores}
        return bool(stores & self.started.keys()) and not self.started_all_engines

    @property
    def _engines(self) -> set[str]:
        return {engine.name for engine in self.running.prepared.plan.engines}


def prepare_here(spec: StackSpec, home: Home, report: Report) -> Prepared:
    """Plan a spec for this machine, with what is found on it. Changes nothing.

    Raises:
        ConfigError, MachineError: the spec is wrong, or something is missing.
    """
    facts = facts_here(spec, home, report)
    model = described_model(spec, home, facts.vendor, report, runtime=facts.runtime)
    return prepare(spec, home, facts, model=model)


def provided(planned: Prepared, home: Home, report: Report) -> Prepared:
    """Get the images that a plan needs, and return it with their contents' ids, as their vLLM
    describes the model.

    Raises:
        ConfigError, MissingImage: one cannot be had, or holds what does not belong together.
        MachineUnfit: what the engines would import does not run on these GPUs.
        FixFailed: a fix of the connector does not apply to it.
        ConfigError, NotEnoughMemory: by their vLLM, the model does not run or does not fit.
    """
    facts = with_images(planned.facts, planned.spec, report)
    complete = planned if facts == planned.facts else planned.with_facts(facts, home)
    # First, since without a suitable driver all fixes fail.
    require_code(complete, home, report)
    require_fixes(complete, home, report)
    return planned_by_vllm(complete, home, report)


def bring_up(
    spec: StackSpec, home: Home, report: Report, *, check: bool, resumed: bool = False
) -> tuple[UpResult, CheckReport | None]:
    """Start a stack, or the missing services of a running one, and check it.

    The caller holds its lock. After a failed check the stack keeps running, to be inspected;
    an interrupt at any time stops what this call started.

    Args:
        resumed: start again what was up, without engines of other hosts that do not answer. The
            check is left out then.

    Raises:
        StateError: the stack is up with another plan.
        MachineError: this machine lacks something; nothing was started.
        StackUnhealthy: a service died or was too slow, and what this call started was stopped; or
            the stack stopped answering during the check.
    """
    began = time.monotonic()
    existing = find_stack(home, spec.name)
    if existing is not None and existing.any_running():
        start = StackStart(same_plan(spec, home, existing), existing.state, home, report)
        start.alone = resumed
        _await_comeback(existing, report)
        _stop_outdated(start, existing)
        _require_gpus(start, report)
    else:
        start = _claimed(spec, existing, home, report, alone=resumed)
    with start.undone_on((KeyboardInterrupt,)):
        took = _start_missing(start, report)
        seconds = time.monotonic() - began
        result = UpResult(start.running(), took, seconds, start.warnings())
        if resumed and (lost := lost_engines(result.running)):
            said = f"{', '.join(lost)} of another host: no answer"
            said += "; the stack was not checked" if check else ""
            return replace(result, warnings=(*result.warnings, said)), None
        checked = _checked(result, home, report) if check else None
        if checked is None and took:  # a router that went on running has to notice what was started
            require_answers(result.running)
        state = start.state
        if result.started_all_engines:
            extra_s = time.monotonic() - began - result.slowest_engine_s
            state = replace(state, up_extra_s=round(extra_s, 2))
        if checked and checked.passed:
            state = with_outcome(state, "good")
        if state != start.state:
            start.save(state)
        return result, checked


def _checked(result: UpResult, home: Home, report: Report) -> CheckReport | None:
    """Check the stack that was started; None if it has no router to send prompts to."""
    if not result.running.stack.has_front:
        return None
    if result.outlived_store:
        renew_store_connections(home, result.running)
    return check_running(home, result.running, report, CheckOptions(quick=True))


def come_back_on_boot(running: RunningStack, home: Home, report: Report) -> None:
    """Have systemd bring the stack up after a reboot. Containers come back with Docker.

    Raises:
        MachineError: it has processes, and systemd does not manage this machine.
    """
    if RUNTIMES[running.prepared.plan.runtime].survives_reboot:
        report("--on-boot: Docker restarts containers after a reboot; there is nothing to set up")
        return
    require_systemd()
    report(f"after a reboot, systemd starts the stack by {write_unit(home, running.stack.name)}")
    if not starts_without_login():
        report("it waits for your next login; to start it at boot: loginctl enable-linger")


def resumed_spec(home: Home, name: str, *, required: bool) -> StackSpec | None:
    """Return the spec by which a stack was started, or None if there is no such stack.

    Raises:
        StateError: there is none, and one is `required`.
    """
    existing = require_stack(home, name) if required else find_stack(home, name)
    return existing.prepared.spec if existing else None


def _claimed(
    spec: StackSpec, existing: RunningStack | None, home: Home, report: Report, *, alone: bool
) -> StackStart:
    """Return the start of a stack of which nothing runs, with its images.

    From here on its GPUs and ports are reserved: the state file names them, and no other command
    plans meanwhile. Leftovers of an earlier run are removed.
    """
    with planning_lock(home.planning_lock_file):
        planned = prepare_here(spec, home, report)
        lost = report if alone else None
        require_user_files(planned, home.stack(spec.name).secrets_dir, lost=lost)
        require_fit(planned, home, report)
        before = existing.state if existing else None
        start = StackStart(planned, _first_state(planned, before), home, report, before=before)
        start.alone = alone
        start.require_room(start.missing())
        if existing is not None:
            existing.launcher.stop(existing.state.services, grace_s=ABORT_GRACE_S)
            existing.launcher.stop_marked(grace_s=ABORT_GRACE_S)
        # Helpers of services that died, and processes of a state file that is gone.
        start.launcher.stop_marked(grace_s=ABORT_GRACE_S)
        start.save(start.state)
    with start.undone_on((BaseException,)):
        start.prepared = provided(planned, home, report)
        described = start.prepared.model.shape
        start.prepared = fetch_weights(start.prepared, home, report)
        if start.prepared.model.shape != described:  # config.json was not here for vLLM to read
            start.prepared = planned_by_vllm(start.prepared, home, report)
        start.save(_first_state(start.prepared, before))
    return start


def _first_state(prepared: Prepared, before: StackState | None) -> StackState:
    """Return the state of a stack that is about to be started, with its history."""
    fresh = new_state(prepared, "up", boot=boot_id())
    if before is None:
        return fresh
    if before.plan.fingerprint == fresh.plan.fingerprint:
        return replace(before, services={}, boot=fresh.boot, up_extra_s=None)
    return following(before, fresh)


def _await_comeback(existing: RunningStack, report: Report) -> None:
    """Wait for services that the supervisor started again and that do not serve yet."""
    told: set[str] = set()
    while back := {one.name for one in existing.stack.services if _comes_back(existing, one)}:
        if back - told:
            report(f"the supervisor started {', '.join(sorted(back - told))}; waiting")
            told |= back
        time.sleep(_POLL_S)


def _comes_back(existing: RunningStack, service: Service) -> bool:
    record = existing.state.services.get(service.name)
    return (
        record is not None
        and service.role != "router"  # it is waiting for the engines itself
        and record.starts > 1
        and existing.launcher.state(record) == "running"
        and existing.launcher.uptime_s(record) < service.ready_s
        and not existing.is_ready(service)
    )


def _stop_outdated(start: StackStart, existing: RunningStack) -> None:
    """Stop services that have an older secret than the user's, so that they are started again."""
    outdated = outdated_services(existing.prepared, existing.secrets)
    records = {name: rec for name, rec in start.state.services.items() if name in outdated}
    if records:
        start.require_redis()
        start.launcher.stop(records, grace_s=ABORT_GRACE_S)


def _require_gpus(start: StackStart, report: Report) -> None:
    """Check that GPUs have room for engines that do not run, beside those that do.

    Leftovers of dead engines are stopped first: helpers may outlive an engine and hold its memory.
    """
    missing = {service.name for service in start.missing()}
    engines = [engine.name for engine in start.prepared.plan.engines]
    records = {name: start.state.services.get(name) for name in engines if name in missing}
    if records:
        left = {name: record for name, record in records.items() if record}
        start.launcher.stop(left, grace_s=ABORT_GRACE_S)
        running = [name for name in engines if name not in missing]
        require_gpus_beside(start.prepared, running, report)


def _start_missing(start: StackStart, report: Report) -> dict[str, float]:
    """Start what is missing and wait for it; undo everything on any failure or interrupt."""
    missing = start.missing()
    if not missing:
        report(f"the stack '{start.prepared.stack.name}' is already up")
        start.keep_up()
        return {}
    with start.undone_on((BaseException,)):
        start.require_room(missing)
        start.require_redis()
        return start.run(missing)


def same_plan(spec: StackSpec, home: Home, existing: RunningStack) -> Prepared:
    """Return the running stack's own plan, if it is the requested one.

    Both are planned for the machine and the model of the original start, so that a shell with fewer
    processors, or a model downloaded since then, makes no difference; changed weights do.

    Raises:
        StateError: services of another plan are running under this name.
        ModelChanged: it is the requested one, and its model's folder has other files by now.
    """
    was = existing.prepared
    found = find_model(spec, home, was.facts.vendor, runtime=was.facts.runtime)
    if found.ref == was.model.ref:  # as by a relative path; the saved one is absolute
        spec = spec.model_copy(update={"model": was.spec.model})
    if _same_software(spec, was.facts):
        same_model = found.ref == was.model.ref and not _other_files(found, was.model)
        model = was.model if same_model else found
        asked = prepare(spec, home, was.facts, model=model)
        if existing.state.plan.fingerprint == asked.stack.fingerprint() and _unseen(
            spec
        ) == _unseen(was.spec):
            return was
    name = existing.stack.name
    changed = list(_changed(was.spec.model_dump(), spec.model_dump()))
    if not changed and (error := model_changed(was)):
        raise error
    way_on = _way_on(spec, was.spec, name)
    # A folder's files were compared; those that an older pdkit served are not known.
    if not changed and was.model.source != "folder" and _other_files(found, was.model):
        changed, way_on = ["the model's files"], serving_new(was)
    raise StateError(
        f"the stack '{name}' is up with another plan; "
        + (
            f"different: {', '.join(changed)}"
            if changed
            else "it was started by another version of pdkit"
        ),
        hint=way_on,
    )


def _unseen(spec: StackSpec) -> tuple[object, ...]:
    """Return the settings that change a stack, but not its fingerprint."""
    return (
        spec.engine.python,
        spec.engine.key_file,
        spec.redis.server,
        spec.redis.url_file,
        spec.supervise,
    )


def _other_files(model: Model, was: Model) -> bool:
    """Tell whether the model's files differ from those that are served; False if unknown."""
    for one, other in ((model.version, was.version), (model.files, was.files)):
        if one and other and one != other:
            return True
    return model.named != was.named


def _same_software(spec: StackSpec, facts: Facts) -> bool:
    """Tell whether a spec asks for the vendor, the runtime and the images that were found."""
    if spec.vendor not in ("auto", facts.vendor) or spec.runtime not in ("auto", facts.runtime):
        return False
    if not isinstance(facts.software, Containers):
        return True
    asked, was = stack_images(spec, facts.vendor), facts.software.images
    same = (asked.engine.image, asked.router.image) == (was.engine, was.router)
    # By its tag, if its digest is not here.
    return same and was.redis in (asked.redis.image, reference(asked.redis))


def _way_on(spec: StackSpec, was: StackSpec, name: str) -> str:
    """Return the command that turns the running stack into the requested one."""
    only = {
        field for field in StackSpec.model_fields if getattr(spec, field) != getattr(was, field)
    }
    which = "" if name == "pdkit" else f" --name {name}"
    if only == {"vendor"} and spec.vendor != "auto":
        return f"deploy swap {spec.vendor}{which}"
    if only == {"image"} and spec.image:
        return f"deploy swap --image {spec.image}{which}"
    return (
        f"deploy down --name {name}; or, to keep it as it is and start what is missing: "
        f"deploy up --resume --name {name}"
    )


def _changed(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the settings that differ, with both values; without those of environment variables."""
    for field, value in new.items():
        if isinstance(value, dict) and field != "env":
            yield from _changed(old[field], value, f"{prefix}{field}.")
        elif value not in (old[field], "auto"):
            was, asked = ("not set" if v is None else v for v in (old[field], value))
            shown = "" if field == "env" else f" (running: {was}, requested: {asked})"
            yield f"{prefix}{field}{shown}"
