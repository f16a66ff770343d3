"""`deploy swap` and `deploy rollback`: another vendor, image or connector, as a transaction."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from deploy.config.spec import StackSpec
from deploy.config.vendors import vendor_named
from deploy.errors import ConfigError, MissingGpus, MissingImage, StateError
from deploy.planning.connector import UNUSED_SIZE
from deploy.runtime.compose.images import find_image
from deploy.runtime.home import Home
from deploy.verify.report import CheckReport
from deploy.workflows.facts import facts_here, without_held_gpus
from deploy.workflows.hub import described_model
from deploy.workflows.model_files import require_last_good_model
from deploy.workflows.plan_swap import PlanSwap, vendor_and_image
from deploy.workflows.preflight import require_shared_memory
from deploy.workflows.prepare import Prepared, Report, engine_image, prepare
from deploy.workflows.running import RunningStack, require_stack
from deploy.workflows.saved_state import label, last_good
from deploy.workflows.up import provided
from deploy.workflows.user_files import require_user_files


@dataclass(frozen=True)
class SwapTo:
    """The changes of a swap; None changes nothing.

    Attributes:
        image: of the engines; with another vendor, None is that vendor's own.
        connector: how engines share KV.
    """

    vendor: str | None = None
    image: str | None = None
    connector: str | None = None
    allow_untested: bool = False


@dataclass(frozen=True)
class SwapResult:
    """What a swap or rollback did.

    Attributes:
        before, after: vendor and image of the engines.
        connectors: how they shared KV before, and after.
        kept: services that went on running, since they are the same in both plans.
        down_s: seconds in which the stack did not serve.
        check: of the new plan; None if nothing had to change.
    """

    name: str
    before: tuple[str, str]
    after: tuple[str, str]
    connectors: tuple[str, str]
    kept: tuple[str, ...]
    down_s: float
    seconds: float
    check: CheckReport | None

    @property
    def labels(self) -> tuple[str, str]:
        """What engines ran on before, and after, in words."""
        was, now = self.connectors
        return label(*self.before, was), label(*self.after, now)


def swap_stack(home: Home, name: str, to: SwapTo, report: Report) -> SwapResult:
    """Let a stack's engines run on another vendor, image or connector. The caller holds its lock.

    All other settings stay. The image is found, pulled or built, and the new plan
    made, before anything is stopped.

    Raises:
        ConfigError, MachineError: the new plan is impossible; nothing was changed.
        StateError: there is no such stack, or its router is on another host.
        SwapFailed: it did not serve, or failed its check; the previous stack serves again.
    """
    running = _checkable(home, name)
    old = running.prepared
    if to.image is not None and not engine_image(old):
        raise ConfigError(
            "--image: the stack runs as processes, which have no image",
            hint=f"deploy swap VENDOR --name {name}, or engine.python in deploy.yaml",
        )
    spec = _changed(old, to, report)
    pinned = spec.model_copy(update={"runtime": old.facts.runtime})
    try:
        facts = facts_here(pinned, home, report)
        model = described_model(spec, home, facts.vendor, report, runtime=facts.runtime)
        planned = prepare(spec, home, facts, model=model)
    except (ConfigError, MissingGpus) as exc:
        if isinstance(exc, ConfigError) and not exc.retry:
            raise
        raise type(exc)(
            exc.message,
            hint=f"deploy status --name {name}: the stack keeps running unchanged",
            details=exc.details,
        ) from exc
    require_user_files(planned, home.stack(name).secrets_dir)
    if not old.plan.kv_server:
        require_shared_memory(planned, home, report)
    return _swap_plans(home, running, provided(planned, home, report), "swap", report)


def _checkable(home: Home, name: str) -> RunningStack:
    """Return the stack, whose router sends the prompts that a new plan is checked by."""
    running = require_stack(home, name)
    if running.stack.has_front:
        return running
    raise StateError(
        f"the stack '{name}' has no router on this host, so a new plan could not be checked",
        hint=f"deploy down --name {name}, then deploy up with the new settings, on every host",
    )


def _changed(old: Prepared, to: SwapTo, report: Report) -> StackSpec:
    """Return a stack's spec with the changes."""
    vendor = to.vendor or old.facts.vendor
    changes = {
        "vendor": vendor,
        "image": to.image if to.image or to.vendor else old.spec.image,
        "allow_untested": to.allow_untested or old.spec.allow_untested,
        "model": _same_model(old, vendor),
        **(_to_connector(old, to.connector, report) if to.connector else {}),
    }
    return StackSpec.model_validate({**old.spec.model_dump(), **changes})


def _to_connector(old: Prepared, connector: str, report: Report) -> dict[str, Any]:
    """Return the changes for another connector, without the size that only the old one has."""
    lmcache, size = old.spec.lmcache, UNUSED_SIZE[connector]
    if getattr(lmcache, size) is not None:
        report(f"lmcache.{size} is left out: {connector} has no such memory")
    return {"connector": connector, "lmcache": {**lmcache.model_dump(), size: None}}


def roll_back(home: Home, name: str, *, report: Report) -> SwapResult:
    """Return a stack to its last good plan before this one. The caller holds its lock.

    Raises:
        StateError: there is none, or the router is on another host.
        ModelChanged: its model's folder has other files by now.
        SwapFailed: it does not serve any more; the present stack serves again.
    """
    running = _checkable(home, name)
    past = last_good(running.state)
    target = prepare(past.spec, home, past.machine, model=past.model)
    _require_still_there(target, home)
    require_last_good_model(target)
    require_user_files(target, home.stack(name).secrets_dir)
    if not running.prepared.plan.kv_server:
        require_shared_memory(target, home, report)
    return _swap_plans(home, running, target, "rollback", report)


def _require_still_there(target: Prepared, home: Home) -> None:
    """Check that an earlier plan's images and GPUs can still be had, before anything is stopped.

    Raises:
        MissingImage, MissingGpus: naming what is gone.
    """
    software, name = target.facts.software, target.stack.name
    for reference in software.needed_images(user_redis=target.plan.user_redis):
        if find_image(reference) is None:
            raise MissingImage(
                f"the image {reference} of the last good plan is not on this machine any more",
                hint=f"deploy swap --image {software.engine_image} --name {name} pulls or "
                "builds it",
            )
    left = {gpu.index for gpu in without_held_gpus(target.inventory, home, name).gpus}
    gone = {index for engine in target.plan.engines for index in engine.devices} - left
    if gone:
        raise MissingGpus(
            f"GPU {', '.join(map(str, sorted(gone)))} of the last good plan is in use by "
            "another stack",
            hint="deploy down --name THE_OTHER, or deploy swap VENDOR",
        )


def _swap_plans(
    home: Home, running: RunningStack, target: Prepared, action: str, report: Report
) -> SwapResult:
    began = time.monotonic()
    old = running.prepared
    names = (vendor_and_image(old), vendor_and_image(target))
    connectors = (old.plan.connector, target.plan.connector)
    if target.stack.fingerprint() == running.state.plan.fingerprint and not running.stopped():
        kept = tuple(service.name for service in old.stack.services)
        seconds = time.monotonic() - began
        return SwapResult(old.stack.name, *names, connectors, kept, 0.0, seconds, None)
    plan_swap = PlanSwap(home, running, target, action, report)
    checked = plan_swap.run()
    return SwapResult(
        name=old.stack.name,
        before=names[0],
        after=names[1],
        connectors=connectors,
        kept=plan_swap.kept,
        down_s=round(plan_swap.down_s, 2),
        seconds=round(time.monotonic() - began, 2),
        check=checked,
    )


def _same_model(old: Prepared, vendor: str) -> str | None:
    """Return the setting that keeps the present model on a vendor with another default."""
    default = old.plan.vendor.default_model
    unnamed = old.spec.model is None and vendor_named(vendor).default_model != default
    return default if unnamed else old.spec.model
