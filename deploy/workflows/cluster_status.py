"""`deploy status --kubernetes`: the pods of an exported stack, as the cluster describes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from deploy.metrics.page import MetricsPage
from deploy.runtime.events import ServiceEvent
from deploy.runtime.kubectl import Kubectl
from deploy.stack.cluster.seen import PodSeen
from deploy.workflows.cluster_look import ClusterWorkload, condition_of, look_at, time_of
from deploy.workflows.status import ServiceStatus, StackStatus, page_counters


def cluster_status(kubectl: Kubectl) -> StackStatus:
    """Return the state of a namespace's stack; raises as `look_at` does."""
    kubectl = kubectl.settled()
    look = look_at(kubectl)
    return StackStatus(
        name=look.name,
        up=True,
        vendor=look.vendor,
        runtime="kubernetes",
        image=look.image,
        topology=look.topology,
        model=look.model,
        url=look.url,
        services=[
            *(_service(one, kubectl, look.pages.get(one.name)) for one in look.seen),
            *(_absent(name, of, kubectl) for name, of in look.lacking),
        ],
        events=sorted(_events(look.seen), key=lambda event: event.at),
        warnings=[*(f"{one.name}: {one.why}" for one in look.seen if one.why), *look.unknown],
    )


def _service(pod: PodSeen, kubectl: Kubectl, page: MetricsPage | None) -> ServiceStatus:
    up = (datetime.now(timezone.utc) - time_of(pod.since)).total_seconds() if pod.since else 0.0
    condition = condition_of(pod)
    cache, path = page_counters(page) if page else (None, None)
    never = condition == "not started"
    return ServiceStatus(
        name=pod.name,
        role=pod.role,
        condition=condition,
        pid=0,
        url="",
        uptime_s=round(max(up, 0.0), 1),
        resident_mib=0,
        restarts=pod.restarts,
        log=kubectl.typed(f"{'describe pod' if never else 'logs'} {pod.name}"),
        cache=cache,
        path=path,
    )


def _absent(name: str, of: ClusterWorkload, kubectl: Kubectl) -> ServiceStatus:
    log = kubectl.typed(f"describe {of.what}")
    return ServiceStatus(name, of.role, "not started", 0, "", 0.0, 0, 0, log, None)


def _events(seen: Sequence[PodSeen]) -> Iterator[ServiceEvent]:
    """Yield how the containers ended that ran before those of now."""
    for pod in seen:
        if pod.last.get("finishedAt"):  # unknown where the node was lost
            why, code = pod.last.get("reason", "Error"), pod.last["exitCode"]
            at = time_of(pod.last["finishedAt"]).isoformat()
            yield ServiceEvent(at, pod.name, "died", f"ended with {code} ({why})")
