"""`deploy status --kubernetes --watch`: repeated readings of a stack in a cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence

from deploy.metrics.page import MetricsPage
from deploy.metrics.reading import Complaint, ServiceReading, StackReading
from deploy.runtime.kubectl import Kubectl
from deploy.stack.cluster.seen import PodSeen
from deploy.workflows.cluster_look import condition_of, look_at
from deploy.workflows.watch import Watch, in_a_line, now


class ClusterWatch(Watch):
    """Reads the stack of a namespace. Redis and the router are not asked for what they count."""

    def __init__(self, kubectl: Kubectl) -> None:
        self._kubectl = kubectl.settled()
        super().__init__(self._kubectl.namespace)
        self._said: Sequence[str] = ()

    def _read(self) -> StackReading:
        at, began = now(), time.monotonic()
        look = look_at(self._kubectl)
        read_s = time.monotonic()
        services = [
            *(_reading(one, look.pages.get(one.name), read_s) for one in look.seen),
            *(ServiceReading(name, of.role, "not started") for name, of in look.lacking),
        ]
        self._name = look.name
        new = [Complaint(look.name, "error", one) for one in look.unknown if one not in self._said]
        if self._memory is not None:  # events are what came after the first frame
            self._said = look.unknown
        return StackReading(
            look.name,
            at,
            began,
            up=True,
            what=in_a_line(look.topology, look.model, look.url),
            shares_kv=False,  # nothing is said of Redis
            services={one.name: one for one in services},
            complaints=tuple(new),
        )


def _reading(pod: PodSeen, page: MetricsPage | None, read_s: float) -> ServiceReading:
    return ServiceReading(pod.name, pod.role, condition_of(pod), pod.since or 0, page, read_s)
