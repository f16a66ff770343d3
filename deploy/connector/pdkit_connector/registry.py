"""The fixes: what a fix is, where they are found, and the outcome of each in this process."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

from pdkit_connector.errors import ConnectorError, FixFailed, UnsupportedSetting

DISABLE_ENV = "PDKIT_DISABLE_FIXES"


class Need(Enum):
    """Whether the installed code needs a fix, as its probe found."""

    NEEDED = "needed"
    NOT_NEEDED = "not needed"
    NOT_APPLICABLE = "not applicable"


class FixState(Enum):
    """The outcome of a fix in this process."""

    APPLIED = "applied"
    GUARDED = "guarded"
    NOT_NEEDED = "not needed"
    NOT_APPLICABLE = "not applicable"
    FAILED = "failed"
    DISABLED = "disabled"


@dataclass(frozen=True)
class ProbeResult:
    """Whether a fix is needed, and the observation it rests on."""

    need: Need
    evidence: str


@dataclass(frozen=True)
class Fix:
    """One upstream bug and its fix, or its guard if no safe fix exists.

    `probe` looks at the installed code or runs it. `apply` patches this process and returns what it
    did; after it, `probe` must no longer say NEEDED. `guard` returns why the bug bites in a
    setting, which is then refused, and None where it does not. `on_kv_caches` sees vLLM's KV
    tensors by layer name once, before LMCache does, and raises to refuse them. Lower `rank` is
    applied earlier.
    """

    id: str
    title: str
    link: str
    reason: str
    probe: Callable[[Setting], ProbeResult]
    apply: Callable[[Setting], str] | None = None
    guard: Callable[[Setting], str | None] | None = None
    on_kv_caches: Callable[[Mapping[str, Any]], None] | None = None
    rank: int = 100

    @property
    def order(self) -> tuple[int, int, str]:
        """Sort by rank, then by the number in the id, so that B2b precedes B15."""
        number = re.search(r"\d+", self.id)
        return self.rank, int(number.group()) if number else 0, self.id


@dataclass(frozen=True)
class FixOutcome:
    """A fix, its state in this process, and why."""

    fix: Fix
    state: FixState
    evidence: str

    def line(self) -> str:
        """Return the one log line of this fix, for people and for grep."""
        state = self.state.value.replace(" ", "-")
        return (
            f"pdkit-connector fix={self.fix.id} state={state} evidence={json.dumps(self.evidence)}"
        )

    def as_dict(self) -> dict[str, str]:
        """Return this outcome as `python -m pdkit_connector --json` prints it."""
        return {
            "id": self.fix.id,
            "state": self.state.value,
            "title": self.fix.title,
            "evidence": self.evidence,
            "link": self.fix.link,
            "reason": self.fix.reason,
        }


def discover(package: ModuleType | None = None) -> tuple[Fix, ...]:
    """Return the `FIX` of every module in `package` (default: `fixes`), in order of application.

    Raises ConnectorError where a module has no `FIX` or two share an id.
    """
    if package is None:
        package = importlib.import_module("pdkit_connector.fixes")
    found: dict[str, Fix] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        fix = getattr(module, "FIX", None)
        if not isinstance(fix, Fix):
            raise ConnectorError(f"{module.__name__} defines no FIX")
        if fix.id in found:
            raise ConnectorError(f"two modules of {package.__name__} claim fix {fix.id}")
        found[fix.id] = fix
    return tuple(sorted(found.values(), key=lambda fix: fix.order))


def disabled_ids(fixes: Iterable[Fix], environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Return the ids that PDKIT_DISABLE_FIXES turns off; raise ConnectorError on an unknown one."""
    named = {part.strip() for part in environ.get(DISABLE_ENV, "").split(",") if part.strip()}
    known = {fix.id for fix in fixes}
    if unknown := sorted(named - known):
        raise ConnectorError(
            f"{DISABLE_ENV} names unknown fixes {', '.join(unknown)}; "
            f"known: {', '.join(sorted(known))}"
        )
    return frozenset(named)


def apply_fix(fix: Fix, setting: Setting) -> FixOutcome:
    """Probe, guard or apply where needed, and probe again; raise only UnsupportedSetting."""
    try:
        probed = fix.probe(setting)
    except Exception as exc:  # noqa: BLE001 - the installed code is unknown: any error is an outcome
        return FixOutcome(fix, FixState.FAILED, f"probe raised {describe(exc)}")
    if probed.need is not Need.NEEDED:
        return FixOutcome(fix, FixState(probed.need.value), probed.evidence)
    if fix.guard is not None and (bites := fix.guard(setting)):
        raise UnsupportedSetting(
            f"{bites}: {fix.title} ({fix.id}, {fix.link}). {fix.reason} Way out: change that "
            f"setting, or set {DISABLE_ENV}={fix.id} to run with the bug."
        )
    if fix.apply is None:
        return FixOutcome(fix, FixState.GUARDED, probed.evidence)
    try:
        done = fix.apply(setting)
        after = fix.probe(setting)
    except UnsupportedSetting:
        raise  # the fix took; it is the configuration that must change
    except Exception as exc:  # noqa: BLE001 - as above
        return FixOutcome(fix, FixState.FAILED, f"{probed.evidence}; apply raised {describe(exc)}")
    if after.need is Need.NEEDED:
        return FixOutcome(fix, FixState.FAILED, f"applied ({done}), yet {after.evidence}")
    return FixOutcome(fix, FixState.APPLIED, f"{probed.evidence}; {done}")


def describe(exc: BaseException) -> str:
    """Return an exception's type and message on one line."""
    return f"{type(exc).__name__}: {exc}".splitlines()[0]


@dataclass
class Registry:
    """The fixes of this process; patches are process-wide, so their record is too."""

    fixes: tuple[Fix, ...]
    outcomes: tuple[FixOutcome, ...] = ()

    def apply(self, setting: Setting, disabled: Collection[str]) -> tuple[FixOutcome, ...]:
        """Apply every fix once and return the outcomes; later calls patch nothing."""
        if not self.outcomes:
            self.outcomes = tuple(
                FixOutcome(fix, FixState.DISABLED, f"turned off by {DISABLE_ENV}")
                if fix.id in disabled
                else apply_fix(fix, setting)
                for fix in self.fixes
            )
        return self.outcomes

    def require_no_failure(self) -> None:
        """Raise FixFailed naming each failed fix, its bug and what to do."""
        failed = [o for o in self.outcomes if o.state is FixState.FAILED]
        if failed:
            raise FixFailed("\n".join(_failure_message(outcome) for outcome in failed))

    def check_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Show vLLM's KV tensors to every applied fix; one that cannot serve them raises."""
        for outcome in self.outcomes:
            if outcome.state is FixState.APPLIED and outcome.fix.on_kv_caches is not None:
                outcome.fix.on_kv_caches(kv_caches)

    @property
    def disabled(self) -> tuple[str, ...]:
        """Ids of the fixes that the user turned off."""
        return tuple(o.fix.id for o in self.outcomes if o.state is FixState.DISABLED)


def _failure_message(outcome: FixOutcome) -> str:
    fix = outcome.fix
    return (
        f"fix {fix.id} ({fix.title}) is needed and could not be applied: {outcome.evidence}. "
        f"Upstream: {fix.link}. {fix.reason} Way out: use an LMCache and vLLM pair that the kit "
        f"knows, or set {DISABLE_ENV}={fix.id} to run with the bug."
    )


@dataclass(frozen=True)
class Setting:
    """Facts of one engine; a field is None where no engine runs (`python -m pdkit_connector`).

    `vllm_config` and `kv_cache_config` are vLLM's own objects, for what only one fix asks about.
    """

    device_type: str | None = None
    block_size: int | None = None
    cache_dtype: str | None = None
    model_dtype: Any = None
    head_size: int | None = None
    kv_cache_specs: tuple[str, ...] | None = None
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    engine: bool = False
    vllm_config: Any = None
    kv_cache_config: Any = None

    @classmethod
    def from_vllm(cls, vllm_config: Any, kv_cache_config: Any) -> Setting:
        """Read the facts off vLLM's own configuration objects."""
        groups = getattr(kv_cache_config, "kv_cache_groups", None)
        specs = None if groups is None else tuple(type(g.kv_cache_spec).__name__ for g in groups)
        return cls(
            device_type=vllm_config.device_config.device_type,
            block_size=vllm_config.cache_config.block_size,
            cache_dtype=str(vllm_config.cache_config.cache_dtype),
            model_dtype=vllm_config.model_config.dtype,
            head_size=vllm_config.model_config.get_head_size(),
            kv_cache_specs=specs,
            extra_config=dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {}),
            engine=True,
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
        )

    def lmcache_value(self, name: str) -> Any:
        """Return LMCache's value of `name` in force, None where no engine runs.

        A `lmcache.<name>` entry of vLLM's extra configuration wins, as it does in LMCache.
        """
        if not self.engine:
            return None
        if f"lmcache.{name}" in self.extra_config:
            return self.extra_config[f"lmcache.{name}"]
        from lmcache.integration.vllm.utils import lmcache_get_or_create_config

        return getattr(lmcache_get_or_create_config(), name, None)
