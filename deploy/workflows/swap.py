"""`deploy swap` and `deploy rollback`: another vendor or image, or none of it, as a transaction."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from deploy.config.spec import StackSpec
from deploy.config.vendors import vendor_named
from deploy.errors import (
    CheckFailed,
    ConfigError,
    Interrupted,
    MissingGpus,
    MissingImage,
    PdkitError,
    SwapFailed,
)
from deploy.runtime.compose.images import find_image
from deploy.runtime.home import Home
from deploy.runtime.interrupts import cleaning_up, uninterrupted
from deploy.runtime.state import StackState, boot_id
from deploy.verify.report import CheckReport
from deploy.workflows.check import (
    CheckOptions,
    check_running,
    renew_store_connections,
    require_answers,
)
from deploy.workflows.facts import without_held_gpus
from deploy.workflows.history import (
    following,
    last_good,
    new_state,
    with_failure,
    with_outcome,
)
from deploy.workflows.hub import described_model
from deploy.workflows.prepare import Containers, Prepared, Report, engine_image, prepare
from deploy.workflows.running import (
    RunningStack,
    require_stack,
    restored_facts,
    restored_model,
)
from deploy.workflows.start import StackStart
from deploy.workflows.survey import facts_here
from deploy.workflows.up import provided
from deploy.workflows.user_files import outdated_services, require_user_files


@dataclass(frozen=True)
class SwapResult:
    """What a swap or rollback did.

    Attributes:
        before, after: vendor and image of the engines.
        kept: services that went on running, since they are the same in both plans.
        down_s: seconds in which the stack did not serve.
        check: of the new plan; None where nothing had to change.
    """

    name: str
    before: tuple[str, str]
    after: tuple[str, str]
    kept: tuple[str, ...]
    down_s: float
    seconds: float
    check: CheckReport | None

    def as_dict(self) -> dict[str, Any]:
        """Return it for scripts."""
        return {**asdict(self), "check": self.check.as_dict() if self.check else None}


def swap_stack(
    home: Home,
    name: str,
    *,
    vendor: str | None,
    image: str | None,
    allow_unproven: bool = False,
    report: Report,
) -> SwapResult:
    """Let a stack's engines run on another vendor or image. The caller holds its lock.

    Everything else stays as it was asked for. The image is found, pulled or built, and the new plan
    made, before anything is stopped.

    Raises:
        ConfigError, MachineError: the new plan cannot be; nothing was changed.
        SwapFailed: it did not serve, or failed its check; the previous stack serves again.
    """
    running = require_stack(home, name)
    old = running.prepared
    if image is not None and old.plan.runtime == "process":
        raise ConfigError(
            "--image: the stack runs as processes, which have no image",
            hint=f"deploy swap VENDOR --name {name}, or engine.python in deploy.yaml",
        )
    to = vendor or old.facts.vendor
    changes = {
        "vendor": to,
        "image": image,
        "allow_unproven": allow_unproven or old.spec.allow_unproven,
        "model": _same_model(old, to),
    }
    spec = StackSpec.model_validate({**old.spec.model_dump(), **changes})
    pinned = spec.model_copy(update={"runtime": old.facts.runtime})
    try:
        facts = facts_here(pinned, home, report)
        model = described_model(spec, home, facts.vendor, report)
        planned = prepare(spec, home, facts, model=model)
    except MissingGpus as exc:
        raise MissingGpus(
            exc.message,
            hint=f"deploy status --name {name}: the stack goes on as it was",
            details=exc.details,
        ) from exc
    require_user_files(planned, home.stack(name).secrets_dir)
    return _exchange(home, running, provided(planned, home, report), "swap", report)


def roll_back(home: Home, name: str, *, report: Report) -> SwapResult:
    """Return a stack to its last good plan before this one. The caller holds its lock.

    Raises:
        StateError: there is none.
        SwapFailed: it does not serve any more; the present stack serves again.
    """
    running = require_stack(home, name)
    spec, facts, model = last_good(running.state)
    target = prepare(spec, home, restored_facts(facts), model=restored_model(model))
    _require_still_there(target, home)
    require_user_files(target, home.stack(name).secrets_dir)
    return _exchange(home, running, target, "rollback", report)


def _require_still_there(target: Prepared, home: Home) -> None:
    """Check that an earlier plan's images and GPUs can still be had, before anything is stopped.

    Raises:
        MissingImage, MissingGpus: naming what is gone.
    """
    software, name = target.facts.software, target.stack.name
    if isinstance(software, Containers):
        images = software.images
        redis = () if target.plan.user_redis else (images.redis,)
        watching = filter(None, (images.prometheus, images.grafana))
        for reference in (images.engine_id or images.engine, images.router, *redis, *watching):
            if find_image(reference) is None:
                raise MissingImage(
                    f"the image {reference} of the last good plan is not on this machine any more",
                    hint=f"deploy swap --image {images.engine} --name {name} pulls or builds it",
                )
    left = {gpu.index for gpu in without_held_gpus(target.inventory, home, name).gpus}
    gone = {index for engine in target.plan.engines for index in engine.devices} - left
    if gone:
        raise MissingGpus(
            f"GPU {', '.join(map(str, sorted(gone)))} of the last good plan is held by another "
            "stack",
            hint="deploy down --name THE_OTHER, or deploy swap VENDOR",
        )


def _exchange(
    home: Home, running: RunningStack, target: Prepared, action: str, report: Report
) -> SwapResult:
    began = time.monotonic()
    old = running.prepared
    names = (_what(old), _what(target))
    if target.stack.fingerprint() == running.state.fingerprint and not _missing(running):
        kept = tuple(service.name for service in old.stack.services)
        return SwapResult(old.stack.name, *names, kept, 0.0, time.monotonic() - began, None)
    exchange = _Exchange(home, running, target, action, report)
    checked = exchange.run()
    return SwapResult(
        name=old.stack.name,
        before=names[0],
        after=names[1],
        kept=exchange.kept,
        down_s=round(exchange.down_s, 2),
        seconds=round(time.monotonic() - began, 2),
        check=checked,
    )


def _same_model(old: Prepared, vendor: str) -> str | None:
    """Return what names the present model on another vendor, whose default may be another."""
    default = old.plan.vendor.default_model
    unnamed = old.spec.model is None and vendor_named(vendor).default_model != default
    return default if unnamed else old.spec.model


class _Exchange:
    """One exchange of plans: stop what differs, start and check the new, or put the old back."""

    def __init__(
        self, home: Home, running: RunningStack, target: Prepared, action: str, report: Report
    ) -> None:
        self._home = home
        self._running = running
        self._report = report
        fresh = new_state(target, action, boot=boot_id())
        old = running.state
        self._leaving = _differing(running, target)
        staying = {name: rec for name, rec in old.services.items() if name not in self._leaving}
        self.kept = tuple(staying)
        self._start = StackStart(
            target, replace(following(old, fresh), services=staying), home, report, before=old
        )
        self.down_s = 0.0

    def run(self) -> CheckReport:
        """Carry it out; on any failure or interrupt the old plan serves again.

        Raises:
            SwapFailed: with the reason.
            Interrupted: by the user.
        """
        down_since = time.monotonic()
        try:
            self._stop_old()
            missing = self._start.missing()
            self._start.require_room(missing)
            took = self._start.run(missing)
            self.down_s = time.monotonic() - down_since
            self._renew_connections(took)
            checked = check_running(
                self._home, self._start.running(), self._report, CheckOptions(quick=True)
            )
            if not checked.passed:
                raise CheckFailed(checked.failures[0])
            self._start.save(with_outcome(self._start.state, "good"))
        except BaseException as exc:
            # Whatever it was: a stack that served before must serve after.
            with cleaning_up():
                raise self._put_back(exc) from exc
        return checked

    def _renew_connections(self, took: Mapping[str, float]) -> None:
        """Let engines that went on running find a store that did not."""
        engines = {engine.name for engine in self._start.prepared.plan.engines}
        stores = {service.name for service in self._start.prepared.stack.stores}
        if stores & took.keys() and engines - took.keys():
            renew_store_connections(self._home, self._start.running())

    def _stop_old(self) -> None:
        """Stop the services that the new plan runs differently or not at all."""
        old = self._running
        records = {name: rec for name, rec in old.state.services.items() if name in self._leaving}
        self._report(f"stopping {', '.join(records)}; keeping {', '.join(self.kept) or 'nothing'}")
        with uninterrupted():  # half-stopped services would be in the way of those put back
            old.launcher.stop(records, grace_s=old.prepared.spec.timeouts.stop_s)
            self._start.save(self._start.state)

    def _put_back(self, cause: BaseException) -> PdkitError:
        """Start the old plan again, and return the error that tells what happened."""
        interrupted = isinstance(cause, KeyboardInterrupt)
        reason = "interrupted" if interrupted else _said(cause)
        self._report(f"failed: {reason}; going back to the previous stack")
        old, tried, back = self._running, self._start.state, None
        try:
            self._start.undo()
            state = self._old_state(tried, reason)
            back = StackStart(old.prepared, state, self._home, self._report, before=state)
            back.save(state)
            back.run(back.missing())
            # What went on running, the router among it, has to notice the engines' return.
            require_answers(back.running())
        except Exception as exc:  # noqa: BLE001 - the state must be the old one's in any event
            # With what did start of it, so that `up` and `down` know it.
            self._start.save(back.state if back else self._old_state(tried, reason))
            return SwapFailed(
                f"{_label(self._start.prepared)} failed ({reason}), and the previous stack did not "
                f"come back either: {_said(exc)}",
                hint=f"deploy up --resume --name {old.stack.name}",
                details=exc.details if isinstance(exc, PdkitError) else (),
            )
        if interrupted:
            return Interrupted("interrupted; the previous stack serves again")
        details = cause.details if isinstance(cause, PdkitError) else ()
        return SwapFailed(
            f"{_label(self._start.prepared)} failed: {reason}; the previous stack "
            f"({_label(old.prepared)}) serves again",
            hint=f"deploy status --name {old.stack.name}",
            details=details,
        )

    def _old_state(self, tried: StackState, reason: str) -> StackState:
        """Return the old plan's state, with the services that went on running all the while."""
        old, launcher = self._running.state, self._running.launcher
        kept = {name: r for name, r in old.services.items() if launcher.state(r) == "running"}
        return replace(with_failure(old, tried, reason), services=kept)


def _differing(running: RunningStack, target: Prepared) -> set[str]:
    """Return the names of the running stack's services that the target has not, or otherwise."""
    wanted = {service.name: service.fingerprint() for service in target.stack.services}
    other = {
        service.name
        for service in running.stack.services
        if wanted.get(service.name) != service.fingerprint()
    }
    return other | outdated_services(target, running.secrets)


def _missing(running: RunningStack) -> bool:
    return any(running.service_state(service) != "running" for service in running.stack.services)


def _said(cause: BaseException) -> str:
    return cause.message if isinstance(cause, PdkitError) else f"{type(cause).__name__}: {cause}"


def _what(prepared: Prepared) -> tuple[str, str]:
    return prepared.plan.vendor.name, engine_image(prepared)


def _label(prepared: Prepared) -> str:
    vendor, image = _what(prepared)
    return f"{vendor}, {image}" if image else vendor
