"""Whether the files by which a stack was planned are still those in its model's folder.

And those in other folders that arguments of its engines name, such as adapters.
"""

from __future__ import annotations

from pathlib import Path

from deploy.connector.pdkit_connector.identity.model_files import (
    cached_snapshot,
    changed_files,
    model_files,
    named_files,
)
from deploy.errors import ModelChanged
from deploy.workflows.prepare import Prepared


def require_same_model(prepared: Prepared) -> None:
    """Check, before engines are started, that their weights are those whose KV the stack has.

    A model that a hub may give is held to its revision instead, and the tiny model is checked by
    its content.

    Raises:
        ModelChanged: naming the first file that is another, and the command that serves the new
            ones.
    """
    if error := model_changed(prepared):
        raise error


def model_changed(prepared: Prepared) -> ModelChanged | None:
    """Return the error for a model whose files are not the planned ones; None if they are."""
    what, change = _change(prepared)
    if not change:
        return None
    return ModelChanged(
        f"{what} have changed since the stack '{prepared.stack.name}' was started ({change}); new "
        f"engines would load KV of the old {what.split()[1]}",
        hint=f"{serving_new(prepared)}; or put the old files back",
    )


def require_last_good_model(target: Prepared) -> None:
    """Check that the model's folder has the files of the plan that a rollback returns to.

    Raises:
        ModelChanged: naming the first file that is another.
    """
    what, change = _change(target)
    if change:
        raise ModelChanged(
            f"{what} are not those that the last good plan was made for: {change}",
            hint=f"put the old files back, then: deploy rollback --name {target.stack.name}",
        )


def _change(prepared: Prepared) -> tuple[str, str]:
    """Name the first changed file, and count the others; "" if none has changed."""
    was, what, changes = prepared.model, f"the weights in {prepared.model.ref}", []
    if was.files:
        of_hub = was.source == "hub"
        folder = (
            cached_snapshot(prepared.hub_cache, was.ref, was.version) if of_hub else Path(was.ref)
        )
        changes = list(changed_files(was.files, model_files(folder)))
    if was.named and not changes:
        what = "the files that engine.args names"
        changes = list(changed_files(was.named, named_files(prepared.spec.engine.args)))
    more = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
    return what, f"{changes[0]}{more}" if changes else ""


def serving_new(prepared: Prepared) -> str:
    """Return the command that serves the files that are there now, under other keys."""
    name, spec = prepared.stack.name, prepared.spec
    if prepared.stack.remote or not prepared.stack.has_front:
        return f"deploy down --name {name}, then deploy up with the same settings, on every host"
    to = f"--image {spec.image}" if spec.image else prepared.plan.vendor.name
    return f"deploy swap {to} --name {name}, which serves the new files and none of the old KV"
