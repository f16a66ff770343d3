"""Whether a running stack is the requested one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deploy.config.catalog import reference
from deploy.config.model import Model
from deploy.config.spec import StackSpec
from deploy.errors import StateError
from deploy.runtime.home import Home
from deploy.workflows.model_files import model_changed, serving_new
from deploy.workflows.prepare import Facts, Prepared, find_model, prepare
from deploy.workflows.running import RunningStack
from deploy.workflows.software import Containers
from deploy.workflows.stack_images import stack_images


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
