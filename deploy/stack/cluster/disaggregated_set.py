"""The engines as one DisaggregatedSet of LeaderWorkerSet's operator: roles that roll out together.

Its pods have the same labels as those of StatefulSets: Services, policies and budgets find them.
"""

from __future__ import annotations

from typing import Any

from deploy.stack.cluster.layout import is_engine, workload
from deploy.stack.cluster.objects import Object, workload_objects
from deploy.stack.cluster.overlay import VendorStack, patch, replicas
from deploy.stack.cluster.pods import labels

KIND = "DisaggregatedSet"
NAME = "engines"
_TEMPLATE = "spec/leaderWorkerTemplate"
# What lists of objects are merged by, as `kubectl` merges them.
_KEYS = ("mountPath", "name")


def disaggregated_set(stack: VendorStack, name: str) -> Object:
    """Return the set, whole: kustomize merges no lists in objects that it does not know."""
    counts = replicas(stack)
    roles = []
    for service in (one for one in stack.services if is_engine(one.role)):
        spec = merged(workload_objects(service, name, stack.program)[0], patch(service, stack))[
            "spec"
        ]
        template = {
            "size": 1,
            # A container that exits is started again in its pod.
            "restartPolicy": "None",
            "workerTemplate": spec["template"],
            **{key: spec[key] for key in ("volumeClaimTemplates",) if key in spec},
        }
        own = {"replicas": counts[workload(service.role)], "leaderWorkerTemplate": template}
        roles.append({"name": service.role, "spec": own})
    return {
        "apiVersion": "disaggregatedset.x-k8s.io/v1",
        "kind": KIND,
        "metadata": {"name": NAME, "labels": labels(name, NAME)},
        "spec": {"roles": roles},
    }


def name_references() -> Object:
    """Return where kustomize finds the names of ConfigMaps in a set."""
    volumes = f"spec/roles/{_TEMPLATE}/workerTemplate/spec/volumes"
    paths = (f"{volumes}/configMap/name", f"{volumes}/projected/sources/configMap/name")
    fields = [{"kind": KIND, "path": path} for path in paths]
    return {"nameReference": [{"kind": "ConfigMap", "version": "v1", "fieldSpecs": fields}]}


def template_paths(count: int) -> list[tuple[str, str]]:
    """Return, for each role, the JSON pointers of its claims and of its pods' volumes."""
    heads = [f"/spec/roles/{number}/{_TEMPLATE}" for number in range(count)]
    return [
        (f"{head}/volumeClaimTemplates", f"{head}/workerTemplate/spec/volumes") for head in heads
    ]


def merged(base: Any, change: Any) -> Any:
    """Return an object with a strategic merge patch applied."""
    if isinstance(base, dict) and isinstance(change, dict):
        both = {key: merged(base[key], value) for key, value in change.items() if key in base}
        return {**base, **change, **both}
    if isinstance(base, list) and isinstance(change, list):
        return _merged_lists(base, change)
    return change


def _merged_lists(base: list[Any], change: list[Any]) -> list[Any]:
    objects = [one for one in (*base, *change) if isinstance(one, dict)]
    key = next((key for key in _KEYS if objects and all(key in one for one in objects)), None)
    if key is None or len(objects) < len(base) + len(change):
        return change
    changes = {one[key]: one for one in change}
    kept = [merged(one, changes.pop(one[key], {})) for one in base]
    return [*changes.values(), *kept]
