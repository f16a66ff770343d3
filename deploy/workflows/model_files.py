"""Whether a model's folder still has the files by which a stack was planned."""

from __future__ import annotations

from pathlib import Path

from deploy.config.model import Model
from deploy.connector.pdkit_connector.model_files import changed_files, model_files
from deploy.errors import ModelChanged
from deploy.workflows.prepare import Prepared


def require_same_model(prepared: Prepared) -> None:
    """Check, before engines are started, that their weights are those whose KV the stack has.

    A model of a hub is held to its revision instead, and the tiny model is checked by its content.

    Raises:
        ModelChanged: naming the first file that is another, and the command that serves the new
            ones.
    """
    if error := model_changed(prepared):
        raise error


def model_changed(prepared: Prepared) -> ModelChanged | None:
    """Return the error for a model whose files are not the planned ones; None if they are."""
    change = _change(prepared.model)
    if not change:
        return None
    return ModelChanged(
        f"the weights in {prepared.model.ref} have changed since the stack "
        f"'{prepared.stack.name}' was started ({change}); new engines would load KV of the old "
        "weights",
        hint=f"{serving_new(prepared)}; or put the old files back",
    )


def require_last_good_model(target: Prepared) -> None:
    """Check that the model's folder has the files of the plan that a rollback returns to.

    Raises:
        ModelChanged: naming the first file that is another.
    """
    if change := _change(target.model):
        raise ModelChanged(
            f"the last good plan was made for other weights than {target.model.ref} has now: "
            f"{change}",
            hint=f"put the old files back, then: deploy rollback --name {target.stack.name}",
        )


def _change(was: Model) -> str:
    """Return the first file that is not the planned one, and how many others; "" if all are."""
    if was.source != "folder" or not was.files:
        return ""
    changes = list(changed_files(was.files, model_files(Path(was.ref))))
    more = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
    return f"{changes[0]}{more}" if changes else ""


def serving_new(prepared: Prepared) -> str:
    """Return the command that serves the files that are there now, under other keys."""
    name, spec = prepared.stack.name, prepared.spec
    if prepared.stack.remote or not prepared.stack.has_front:
        return f"deploy down --name {name}, then deploy up with the same settings, on every host"
    to = f"--image {spec.image}" if spec.image else prepared.plan.vendor.name
    return f"deploy swap {to} --name {name}, which serves the new files and none of the old KV"
