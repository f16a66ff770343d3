"""`deploy status --kubernetes`, once and with --watch: pods of an export, and their counters."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import islice

from deploy.config.engine_args import options
from deploy.config.vendors import VENDORS
from deploy.errors import PdkitError
from deploy.metrics.page import MetricsPage, parsed_page
from deploy.metrics.reading import Complaint, ServiceCondition, ServiceReading, StackReading
from deploy.planning.engines import ENGINE_ROLES
from deploy.planning.topology import Topology
from deploy.runtime.events import ServiceEvent
from deploy.runtime.kubectl import Kubectl
from deploy.runtime.whole_page import whole_page
from deploy.stack.cluster.disaggregated_set import NAME as SET
from deploy.stack.cluster.layout import workload
from deploy.stack.cluster.objects import Object
from deploy.stack.cluster.pod_status import OF_STACK, PodSeen, main_container, role_of
from deploy.stack.cluster.pods import STACK_LABEL
from deploy.stack.layout import ENGINE_PORT
from deploy.workflows.cluster_job import no_stack
from deploy.workflows.status import ServiceStatus, StackStatus, page_counters
from deploy.workflows.watch import Watch, in_a_line, now

_ROLES = ("redis", *ENGINE_ROLES, "router")
_SETS = "disaggregatedsets.disaggregatedset.x-k8s.io"
_MOST_ABSENT = 1000  # shown of the pods that a workload asks for: it may ask for 2³¹
_AT_ONCE = 8
_PAGE_BYTES = 16 << 20  # an engine's metrics have some 100 KiB
# The key stays in the pod: it is neither in an argument nor in what is printed.
ASK = """\
import os, sys, urllib.request
with open(os.environ["PDKIT_ENGINE_KEY_FILE"]) as file:
    key = {"Authorization": "Bearer " + file.read().strip()}
page = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/metrics", headers=key)
directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(directly.open(page, timeout=10).read().decode())
"""


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
    """Yield how earlier containers of a pod ended."""
    for pod in seen:
        if pod.last.get("finishedAt"):  # unknown where the node was lost
            why, code = pod.last.get("reason", "Error"), pod.last["exitCode"]
            at = time_of(pod.last["finishedAt"]).isoformat()
            yield ServiceEvent(at, pod.name, "died", f"ended with {code} ({why})")


@dataclass(frozen=True)
class ClusterWorkload:
    """What makes the pods of a role.

    Attributes:
        what: the object, as `kubectl describe` takes it.
        numbered: its pods are called as it is, and numbered from 0.
    """

    name: str
    role: str
    replicas: int
    what: str
    numbered: bool = False


@dataclass(frozen=True)
class ClusterLook:
    """A stack as its cluster describes it at a moment.

    Attributes:
        seen: its pods.
        lacking: the name of each pod that should be there and is not, and what makes it.
        pages: what engines count, by their pods.
        unknown: what could not be read, a sentence each.
    """

    name: str
    namespace: str
    seen: Sequence[PodSeen]
    lacking: Sequence[tuple[str, ClusterWorkload]]
    pages: Mapping[str, MetricsPage]
    vendor: str
    image: str
    model: str
    unknown: Sequence[str]

    @property
    def topology(self) -> str:
        """Producers and consumers, or aggregated engines, with those that are not there yet."""
        count = Counter([*(one.role for one in self.seen), *(of.role for _, of in self.lacking)])
        shares = not count["aggregated"] or count["redis"] > 0
        roles = count["producer"], count["consumer"], count["aggregated"]
        return str(Topology(*roles, redis=shares))

    @property
    def url(self) -> str:
        """Where clients in the cluster find the router."""
        return f"http://{workload('router')}.{self.namespace}.svc:8000"


def look_at(kubectl: Kubectl) -> ClusterLook:
    """Look at the stack of a namespace.

    Args:
        kubectl: settled.

    Raises:
        StateError: there is none.
        PdkitError: kubectl failed.
    """
    found = kubectl.objects("get", "pods,statefulsets,deployments", OF_STACK)["items"]
    items = sorted(filter(_is_of_stack, found), key=_order)
    pods = [one for one in items if one["kind"] == "Pod"]
    if not items:
        raise no_stack(kubectl, "deploy status --kubernetes")
    seen = [PodSeen.read(pod) for pod in pods]
    workloads, unknown = _workloads(items, kubectl)
    ready = {one.name for one in seen if one.ready and one.role in ENGINE_ROLES}
    pages, silent = engine_pages(kubectl, [one for one in pods if _name(one) in ready])
    vendor, image, model = next(_of_engines(pods), ("", "", ""))
    return ClusterLook(
        name=items[0]["metadata"]["labels"].get(STACK_LABEL, ""),
        namespace=kubectl.namespace or items[0]["metadata"]["namespace"],
        seen=seen,
        lacking=[*islice(_lacking(workloads, seen), _MOST_ABSENT)],
        pages=pages,
        vendor=vendor,
        image=image,
        model=model,
        unknown=[*unknown, *silent],
    )


def _is_of_stack(item: Object) -> bool:
    role = role_of(item)
    return role in _ROLES and (item["kind"] != "Pod" or bool(main_container(item["spec"], role)))


def _name(item: Object) -> str:
    return str(item["metadata"]["name"])


def _order(item: Object) -> tuple[int, int, str]:
    name = _name(item)
    return _ROLES.index(role_of(item)), len(name), name  # -10 comes after -9


def _workloads(
    items: Sequence[Object], kubectl: Kubectl
) -> tuple[list[ClusterWorkload], list[str]]:
    """Return the workloads of the stack, and why those of engines are unknown."""
    found = [
        ClusterWorkload(
            _name(one),
            role_of(one),
            one["spec"].get("replicas", 1),
            f"{one['kind'].lower()} {_name(one)}",
            numbered=one["kind"] == "StatefulSet",
        )
        for one in items
        if one["kind"] != "Pod"
    ]
    if any(one.role in ENGINE_ROLES for one in found):
        return found, []
    try:
        sets, why = kubectl.objects("get", _SETS, OF_STACK)["items"], "there is none"
    except PdkitError as exc:  # the cluster knows no such objects, or does not show them
        sets, why = [], exc.message
    roles = [role for one in sets for role in one["spec"]["roles"]]
    if not roles:
        unknown = [f"no StatefulSet of engines, and no DisaggregatedSet: {why}"]
        if not any(role_of(one) in ENGINE_ROLES for one in items):
            found.append(ClusterWorkload("engine", "engine", 1, "statefulsets"))
        return found, unknown
    found += (
        ClusterWorkload(one["name"], one["name"], one["spec"].get("replicas", 1), f"{_SETS} {SET}")
        for one in roles
    )
    return found, []


def _lacking(
    workloads: Sequence[ClusterWorkload], seen: Sequence[PodSeen]
) -> Iterator[tuple[str, ClusterWorkload]]:
    """Yield each pod that a workload should have and the cluster has not made."""
    there, counts = {one.name for one in seen}, Counter(one.role for one in seen)
    for one in workloads:
        if one.numbered:
            named = (f"{one.name}-{number}" for number in range(one.replicas))
            yield from ((name, one) for name in named if name not in there)
        else:  # the names of its pods are random
            yield from ((f"{one.name}-?", one) for _ in range(counts[one.role], one.replicas))


def _of_engines(pods: Sequence[Object]) -> Iterator[tuple[str, str, str]]:
    """Yield vendor, image and model of each engine, as its pod has them."""
    for pod in pods:
        if role_of(pod) not in ENGINE_ROLES:
            continue
        container = main_container(pod["spec"], role_of(pod))
        limits = container.get("resources", {}).get("limits", {})
        gpus = (row for row in VENDORS.values() if row.container.cdi_kind in limits)
        model = options(container.get("args", ())).get("--served-model-name", "")
        yield next((row.name for row in gpus), "cpu"), container["image"], model


def condition_of(pod: PodSeen) -> ServiceCondition:
    """Return a pod's state as that of a service."""
    if pod.ready:
        return "ready"
    if pod.runs:
        return "not ready"
    return "exited" if pod.exit_code is not None or pod.last else "not started"


def time_of(text: str) -> datetime:
    """Return a time as Kubernetes writes it; Python 3.10 does not know the Z."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def engine_pages(
    kubectl: Kubectl, pods: Sequence[Object]
) -> tuple[dict[str, MetricsPage], list[str]]:
    """Return the metrics pages of engines by their pods, and why some have none.

    Args:
        pods: of engines that are ready.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = list(pool.map(lambda pod: _page(kubectl, pod), pods))
    pages: dict[str, MetricsPage] = {}
    silent: dict[str, list[str]] = defaultdict(list)
    for pod, answer in zip(pods, answers, strict=True):
        name = pod["metadata"]["name"]
        if isinstance(answer, MetricsPage):
            pages[name] = answer
        else:
            silent[answer].append(name)
    return pages, [f"no counters of {', '.join(names)}: {why}" for why, names in silent.items()]


def _page(kubectl: Kubectl, pod: Object) -> MetricsPage | str:
    """Return an engine's page, or why there is none."""
    python, *_ = main_container(pod["spec"], role_of(pod)).get("command") or ["python3"]
    # -I: without the connector, which would be imported first.
    command = ("--container=engine", "--", python, "-I", "-c", ASK, str(ENGINE_PORT))
    try:
        name = pod["metadata"]["name"]
        return whole_page(
            lambda: parsed_page(kubectl.run("exec", name, *command, most_bytes=_PAGE_BYTES))
        )
    except PdkitError as exc:
        return (*exc.details[-1:], exc.message)[0]
    except ValueError as exc:
        return f"its page is not Prometheus' format: {exc}"


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
            shares_kv=False,  # the page does not mention Redis
            services={one.name: one for one in services},
            complaints=tuple(new),
        )


def _reading(pod: PodSeen, page: MetricsPage | None, read_s: float) -> ServiceReading:
    return ServiceReading(pod.name, pod.role, condition_of(pod), pod.since or 0, page, read_s)
