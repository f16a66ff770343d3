"""A stack's pods, and the Job that checks it, as `kubectl get` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from deploy.stack.cluster.check import NAME as CHECK
from deploy.stack.cluster.pods import NAME_LABEL, ROLE_LABEL, container_name
from deploy.stack.service import ServiceRole

OF_STACK = f"--selector={NAME_LABEL}=pdkit"
OF_CHECK = f"{OF_STACK},{ROLE_LABEL}={CHECK}"
# A node tries again by itself, but without an image that it can pull it never succeeds.
_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName")


def role_of(item: Mapping[str, Any]) -> str:
    """Return the role of an object of a stack."""
    return str(item["metadata"]["labels"].get(ROLE_LABEL, ""))


def main_container(spec: Mapping[str, Any], role: str) -> dict[str, Any]:
    """Return the one lasting container of a pod; a cluster may have added others.

    It is empty where a pod has none: anyone who may create pods can give them a stack's labels.
    """
    name = container_name(cast(ServiceRole, role))
    found: dict[str, Any] = next((one for one in spec["containers"] if one["name"] == name), {})
    return found


@dataclass(frozen=True)
class PodSeen:
    """A pod, and its one lasting container.

    Attributes:
        role: as the pod's label has it.
        runs: the container does, whether or not it is ready.
        since: when it was started; "" if it does not run.
        exit_code: None unless the container has ended.
        reason: why it does not run, in Kubernetes' word; "" if it runs.
        why: the same, with Kubernetes' sentence.
        last: how the container ended that ran before: `exitCode`, `reason`, `finishedAt`; or empty.
    """

    name: str
    role: str
    runs: bool
    ready: bool
    restarts: int
    since: str
    exit_code: int | None
    reason: str
    why: str
    last: Mapping[str, Any]

    @classmethod
    def read(cls, pod: Mapping[str, Any]) -> PodSeen:
        """Read the state of a pod."""
        role, status = role_of(pod), pod.get("status", {})
        container = container_name(cast(ServiceRole, role))
        every = (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
        states = {one["name"]: one.get("state", {}) for one in every}
        own = states.get(container, {})
        mine: Mapping[str, Any] = next((one for one in every if one["name"] == container), {})
        ended = own.get("terminated", {})
        said = {} if "running" in own else _said(status, [*states.values()], ended)
        reason = str(said.get("reason", ""))
        return cls(
            name=pod["metadata"]["name"],
            role=role,
            runs="running" in own,
            ready=mine.get("ready", False),
            restarts=mine.get("restartCount", 0),
            since=own.get("running", {}).get("startedAt", ""),
            exit_code=ended.get("exitCode"),
            reason=reason,
            # A container that ends may leave any text.
            why=": ".join(filter(None, (reason, " ".join(str(said.get("message", "")).split())))),
            last=mine.get("lastState", {}).get("terminated", {}),
        )

    @property
    def lacks_image(self) -> bool:
        """Whether its node cannot pull an image."""
        return self.reason in _NO_IMAGE


def _said(
    status: Mapping[str, Any], states: list[Mapping[str, Any]], ended: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the reason and the message that say most of why a container does not run."""
    waits = [state["waiting"] for state in states if "waiting" in state]
    unplaced = [
        one
        for one in status.get("conditions", ())
        if (one["type"], one["status"]) == ("PodScheduled", "False")
    ]
    return next(filter(None, (ended, *waits, *unplaced, status)), {})


def job_end(job: Mapping[str, Any]) -> str:
    """Return the condition with which a Job ended; "" while it runs."""
    for one in job.get("status", {}).get("conditions", ()):
        if one["status"] == "True" and one["type"] in ("Complete", "Failed"):
            return ": ".join(filter(None, (one["type"], one.get("reason"), one.get("message"))))
    return ""


def job_anew(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Job of a cluster as it was before that took it, to be created again."""
    spec = {key: value for key, value in job["spec"].items() if key != "selector"}
    template = spec["template"]
    own = template["metadata"].get("labels", {})
    # The labels by which Kubernetes finds the pods of this very Job.
    kept = {key: own[key] for key in own if not key.endswith(("controller-uid", "job-name"))}
    metadata = {key: job["metadata"][key] for key in ("name", "namespace", "labels")}
    return {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "metadata": metadata,
        "spec": {**spec, "template": {**template, "metadata": {"labels": kept}}},
    }
