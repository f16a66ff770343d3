"""What Hugging Face says about a model that is not on this machine yet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from deploy.config.engine_args import options
from deploy.config.model import Model, is_folder, with_config
from deploy.config.runtimes import RUNTIMES
from deploy.config.spec import StackSpec
from deploy.connector.pdkit_connector.identity.model_files import is_offline
from deploy.doctor.hub import refused
from deploy.doctor.observed import HubSeen
from deploy.errors import ConfigError, MissingModel
from deploy.runtime.home import Home
from deploy.runtime.hub import (
    HubConfig,
    HubError,
    fetch_config,
    fetch_weight_bytes,
    hub_address,
)
from deploy.runtime.weights import WantedModel, fetch, give_to
from deploy.workflows.model_reading import keep_config
from deploy.workflows.prepare import OTHER_CACHES, Prepared, Report, find_model, prepare
from deploy.workflows.user_files import hub_token, provide_caches

_UNKNOWN = (
    "KV size and context are unknown, and Redis gets redis.memory_gib, else a quarter of the memory"
)


def described_model(
    spec: StackSpec, home: Home, vendor: str, report: Report, *, runtime: str = ""
) -> Model | None:
    """Return the model by the hub's config.json; None if this machine has it, or the hub fails.

    With the size of its weights, and the commit that the hub names, to which engines are then
    held: whatever they fetch is what was planned for.

    Raises:
        ConfigError: the model can be none, or the named file holds no token.
        MissingModel: the hub does not give it to this user.
    """
    if spec.model and is_folder(spec.model):
        return None
    model = find_model(spec, home, vendor, runtime=runtime)
    if model.source != "hub" or model.shape is not None or model.version:
        return None
    if not may_ask(spec):
        report(f"config.json of {model.ref} is not here, and HF_HUB_OFFLINE is set: {_UNKNOWN}")
        return None
    try:
        found, described = _asked(spec, model)
        keep_config(home, found.commit, found.config)
    except (HubError, ConfigError) as exc:
        if isinstance(exc, HubError) and exc.refused:
            verdict = refused(model.ref, str(exc))
            raise MissingModel(verdict.message, hint=verdict.fix) from exc
        report(f"config.json of {model.ref} could not be fetched ({exc}): {_UNKNOWN}")
        return None
    described, trouble = _with_size(described, spec)
    size = described.weight_bytes
    known = (
        f"{size / 1e9:.1f} GB of weights" if size else f"size of its weights unknown ({trouble})"
    )
    report(f"config.json of {model.ref} fetched from {hub_of(spec)}: {known}")
    return described


def _with_size(model: Model, spec: StackSpec) -> tuple[Model, str]:
    """Return the model with the size of its weights, or why that is unknown."""
    given = options(spec.engine.args)
    revision = model.version or _revision(given)
    try:
        size = fetch_weight_bytes(
            hub_of(spec), model.ref, revision, hub_token(spec), _load_format(given)
        )
    except HubError as exc:
        return model, str(exc)
    return replace(model, weight_bytes=size), ""


def ask_about_model(
    spec: StackSpec, home: Home, vendor: str, *, runtime: str = ""
) -> tuple[Model | None, HubSeen | None]:
    """Return the same model for `doctor`, and the hub's answer.

    None for a model that is here, or not of the hub; and where the hub is not to be asked
    (HF_HUB_OFFLINE).

    Raises:
        ConfigError: the model can be none.
    """
    model = find_model(spec, home, vendor, runtime=runtime)
    if model.source != "hub":
        return None, None
    asked = HubSeen(cached=False, offline=False, cache="", address=hub_of(spec), asked=True)
    if model.version or not may_ask(spec):
        return None, replace(asked, asked=False)
    try:
        return _with_size(_asked(spec, model)[1], spec)[0], asked
    except HubError as exc:
        return None, replace(asked, trouble=str(exc), refused=exc.refused)
    except ConfigError as exc:
        return None, replace(asked, trouble=exc.message)


def fetch_weights(prepared: Prepared, home: Home, report: Report) -> Prepared:
    """Fetch a hub's model before engines start, so that their deadline is for loading it alone.

    Returns the plan, which holds engines to the commit that is here now: a branch may move, and
    whoever starts next would get other weights and the KV of these. If the hub did not say how
    large the model is, it is planned again with what was fetched.

    Raises:
        MissingModel: the hub does not give all of it.
        ConfigError, NotEnoughMemory: what was fetched cannot run here.
    """
    spec, wanted = prepared.spec, _wanted(prepared)
    if wanted is None or wanted.is_here() or not may_ask(spec):
        return _with_fetched(prepared, wanted, home, report)
    provide_caches(prepared)
    report(f"fetching {wanted.model} from {hub_of(spec)} into {wanted.cache}")
    try:
        fetch(wanted, hub_of(spec), hub_token(spec))
    except HubError as exc:
        raise MissingModel(
            f"{wanted.model} could not be downloaded: {exc}",
            hint="deploy up, which resumes the download; or --model FOLDER",
        ) from exc
    if os.getuid() == 0 and not RUNTIMES[prepared.plan.runtime].as_user:
        give_to(wanted, *prepared.facts.software.owner)
    return _with_fetched(prepared, wanted, home, report)


def _with_fetched(
    prepared: Prepared, wanted: WantedModel | None, home: Home, report: Report
) -> Prepared:
    """Return the plan with what was unknown of the model before it was fetched."""
    model = prepared.model
    if wanted is None or not wanted.snapshot.is_dir():
        return prepared
    if model.shape is None or model.weight_bytes is None:
        facts = prepared.facts
        found = find_model(prepared.spec, home, facts.vendor, runtime=facts.runtime)
        found = replace(found, shape=model.shape or found.shape)  # vLLM's own, if it was asked
        if found.version and (found.shape, found.weight_bytes) != (model.shape, model.weight_bytes):
            report(f"{model.ref} is planned again with its files")
            again = prepare(prepared.spec, home, facts, model=found)
            return replace(again, layout=prepared.layout)
    if model.version:
        return prepared
    model = replace(model, version=wanted.snapshot.name)
    return replace(prepared, model=model, plan=replace(prepared.plan, model=model))


def _wanted(prepared: Prepared) -> WantedModel | None:
    """Return the model as engines would fetch it; None if it does not come from a hub.

    None, too, if the user's variables send engines to another folder, which may be inside their
    container.
    """
    spec, model = prepared.spec, prepared.model
    if model.source != "hub" or not OTHER_CACHES.isdisjoint(spec.engine.env):
        return None
    given = options(spec.engine.args)
    revision = model.version or _revision(given)
    return WantedModel(model.ref, revision, prepared.hub_cache, _load_format(given))


def may_ask(spec: StackSpec) -> bool:
    """Tell whether the hub may be asked: not with HF_HUB_OFFLINE."""
    return not is_offline(_environ(spec))


def _asked(spec: StackSpec, model: Model) -> tuple[HubConfig, Model]:
    """Ask the hub for a model, as the engines will; return its answer, and the model by it.

    Raises:
        HubError: it does not answer, or not with that.
        ConfigError: what it answers cannot be used.
    """
    given = options(spec.engine.args)
    found = fetch_config(hub_of(spec), model.ref, _revision(given), hub_token(spec))
    return found, with_config(model, found.config, found.commit, given.get("--hf-overrides") or "")


def hub_of(spec: StackSpec) -> str:
    """Return where the hub is for engines."""
    return hub_address(_environ(spec))


def _environ(spec: StackSpec) -> dict[str, str]:
    return {**os.environ, **spec.engine.env}  # engines use the same variable


def _revision(given: Mapping[str, str]) -> str:
    """Return the revision that the user's own arguments of vLLM name, else 'main'."""
    return given.get("--revision") or "main"


def _load_format(given: Mapping[str, str]) -> str:
    return given.get("--load-format") or "auto"
