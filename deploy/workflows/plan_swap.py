"""Replace the plan of a running stack by another, or put the old one back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from deploy.errors import (
    CheckFailed,
    Interrupted,
    ModelChanged,
    PdkitError,
    StackUnhealthy,
    SwapFailed,
)
from deploy.planning.engines import ENGINE_ROLES
from deploy.runtime.drains import drained_by_command
from deploy.runtime.home import Home
from deploy.runtime.interrupts import cleaning_up, uninterrupted
from deploy.runtime.state import boot_id
from deploy.verify.report import CheckReport
from deploy.workflows.check import (
    CheckOptions,
    check_running,
    renew_store_connections,
    require_answers,
)
from deploy.workflows.drain import wait_until_idle
from deploy.workflows.model_files import model_changed
from deploy.workflows.prepare import Prepared, Report, engine_image
from deploy.workflows.running import RunningStack
from deploy.workflows.saved_state import (
    StackState,
    following,
    label,
    new_state,
    with_failure,
    with_outcome,
)
from deploy.workflows.start import StackStart
from deploy.workflows.user_files import outdated_services

# For the requests of engines that are replaced; new ones are refused meanwhile.
_DRAIN_S = 60.0


class PlanSwap:
    """One swap of plans: stop what differs, start and check the new, or put the old back."""

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
        """Do it; on any failure or interrupt, the old plan serves again.

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
            self._tell(self._start.warnings())
            self._renew_connections(took)
            checked = check_running(
                self._home, self._start.running(), self._report, CheckOptions(quick=True)
            )
            if not checked.passed:
                raise CheckFailed(checked.failures[0])
            self._start.save(with_outcome(self._start.state, "good"))
        except BaseException as exc:
            # Whatever the reason, the stack must serve again.
            with cleaning_up():
                raise self._put_back(exc) from exc
        return checked

    def _tell(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            self._report(f"warning: {warning}")

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
        engines = [name for name in records if old.stack.service(name).role in ENGINE_ROLES]
        if engines and model_changed(old.prepared):
            self._tell([
                f"the old weights in {old.prepared.model.ref} are gone: if the new stack fails, "
                "the present one cannot be restored"
            ])  # fmt: skip
        self._report(f"stopping {', '.join(records)}; keeping {', '.join(self.kept) or 'nothing'}")
        with drained_by_command(self._home.stack(old.stack.name).drain_file, engines):
            self._await_requests(engines)
            with uninterrupted():  # half-stopped services would block those that are put back
                old.launcher.stop(records, grace_s=old.prepared.spec.timeouts.stop_s)
                self._start.save(self._start.state)

    def _await_requests(self, engines: Sequence[str]) -> None:
        """Let engines that get no new requests finish those that they have."""
        for engine in engines:
            try:
                wait_until_idle(self._running, engine, self._report, _DRAIN_S)
            except StackUnhealthy as exc:
                self._report(f"warning: {exc.message}; it is stopped anyway")

    def _put_back(self, cause: BaseException) -> PdkitError:
        """Start the old plan again, and return the error that says what happened."""
        interrupted = isinstance(cause, KeyboardInterrupt)
        reason = "interrupted" if interrupted else _said(cause)
        self._report(f"failed: {reason}; restoring the previous stack")
        old, tried, back = self._running, self._start.state, None
        try:
            self._start.undo()
            state = self._old_state(tried, reason)
            back = StackStart(old.prepared, state, self._home, self._report, before=state)
            back.save(state)
            back.run(back.missing())
            self._tell(back.warnings())
            # Services that kept running, such as the router, must notice the engines' return.
            require_answers(back.running())
        except Exception as exc:  # noqa: BLE001 - the state must be the old one's in any event
            # It includes what was started, so that `up` and `down` find it.
            self._start.save(back.state if back else self._old_state(tried, reason))
            return SwapFailed(
                f"{_label(self._start.prepared)} failed ({reason}), and the previous stack could "
                f"not be restored either: {_said(exc)}",
                hint=exc.hint
                if isinstance(exc, ModelChanged)
                else f"deploy up --resume --name {old.stack.name}",
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
        # The engines' start is another one now, unless all went on.
        extra_s = old.up_extra_s if kept.keys() == old.services.keys() else None
        return replace(with_failure(old, tried, reason), services=kept, up_extra_s=extra_s)


def _differing(running: RunningStack, target: Prepared) -> set[str]:
    """Return the running services that the target lacks or runs differently."""
    wanted = {service.name: service.fingerprint() for service in target.stack.services}
    other = {
        service.name
        for service in running.stack.services
        if wanted.get(service.name) != service.fingerprint()
    }
    return other | outdated_services(target, running.secrets)


def _said(cause: BaseException) -> str:
    return cause.message if isinstance(cause, PdkitError) else f"{type(cause).__name__}: {cause}"


def vendor_and_image(prepared: Prepared) -> tuple[str, str]:
    """Return the vendor's name and the reference of the engines' image."""
    return prepared.plan.vendor.name, engine_image(prepared)


def _label(prepared: Prepared) -> str:
    return label(*vendor_and_image(prepared), prepared.plan.connector)
