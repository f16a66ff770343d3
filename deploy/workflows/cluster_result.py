"""What the Job of a check says to programs: its result, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.errors import CheckFailed, PdkitError, StackUnhealthy
from deploy.runtime.kubectl import Kubectl
from deploy.stack.cluster.check import NAME
from deploy.stack.cluster.objects import Object
from deploy.stack.cluster.seen import OF_STACK


@dataclass(frozen=True)
class ClusterCheck:
    """The result of a check inside a cluster: what `deploy check` would show and return there.

    Attributes:
        junit: the findings as XML; "" if they were not asked for.
    """

    data: dict[str, Any]
    text: str
    errors: Sequence[CheckFailed]
    junit: str


def said_by(line: str) -> Object | None:
    """Return what a line of the log says to programs; None if it is for people."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) and said.keys() & {"data", "error"} else None


def result_of(said: Object, kubectl: Kubectl) -> ClusterCheck:
    """Return the result; raise the check's own error, with its code, where it ended with one."""
    try:
        return _read(said, kubectl)
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        raise StackUnhealthy(
            f"this version of pdkit cannot read the result of the Job {NAME} ({exc!r})",
            hint=kubectl.typed(f"logs job/{NAME}"),
        ) from exc


def _read(said: Object, kubectl: Kubectl) -> ClusterCheck:
    if told := said.get("error"):
        details = tuple(map(str, told["details"]))
        error = PdkitError(str(told["message"]), hint=str(told["hint"]), details=details)
        error.code, error.exit_code = str(told["code"]), int(told["exit_code"])
        raise error
    data, text, junit = said["data"], str(said["text"]), str(said.get("junit", ""))
    if data["passed"]:
        return ClusterCheck(data, text, (), junit)
    hint = kubectl.typed(f"logs {OF_STACK} --prefix")
    if data["diagnosis"]:
        hint = data["diagnosis"][0]["hint"]
    return ClusterCheck(data, text, [CheckFailed(data["failures"][0], hint=hint)], junit)
