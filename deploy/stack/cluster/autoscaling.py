"""Engines whose number follows their load: objects of KEDA, which asks Prometheus."""

from __future__ import annotations

from deploy.planning.plan import Plan
from deploy.stack.cluster.components import PROMETHEUS_NAMESPACE, json_patch
from deploy.stack.cluster.layout import is_engine, workload
from deploy.stack.cluster.objects import Object
from deploy.stack.cluster.overlay import VendorStack, engine_ends_s, replicas
from deploy.stack.service import ServiceRole

# The Service that the Prometheus Operator makes for what it runs.
_PROMETHEUS = f"http://prometheus-operated.{PROMETHEUS_NAMESPACE}.svc:9090"
# As many engines as keep these below: requests that wait for each, and its share of KV blocks in
# use. The second one holds engines that are busy while nothing waits.
_LIMITS = {"vllm:num_requests_waiting": "4", "vllm:kv_cache_usage_perc": "0.8"}
# An engine takes minutes to load its model.
_UP_EVERY_S, _DOWN_AFTER_S = 180, 600
# The longest period that Kubernetes takes.
_LONGEST_S = 1800


def autoscaling(stack: VendorStack, space: str) -> list[Object]:
    """Return a ScaledObject for each role: from the exported number of engines to twice of it."""
    counts = replicas(stack)
    return [
        _scaled(service.role, counts[workload(service.role)], stack.plan, space)
        for service in stack.services
        if is_engine(service.role)
    ]


def without_replicas(stack: VendorStack) -> list[Object]:
    """Return kustomize's patches without which each apply would undo the scaling."""
    return [
        json_patch(
            "StatefulSet", workload(service.role), [{"op": "remove", "path": "/spec/replicas"}]
        )
        for service in stack.services
        if is_engine(service.role)
    ]


def _scaled(role: ServiceRole, count: int, plan: Plan, space: str) -> Object:
    own = workload(role)
    labels = f'{{job="engines",stack="{plan.name}",role="{role}"}}'
    behavior = {
        "scaleUp": {"policies": [_step(max(1, count // 2), _UP_EVERY_S)]},
        "scaleDown": {
            "stabilizationWindowSeconds": _DOWN_AFTER_S,
            "policies": [_step(1, min(engine_ends_s(plan), _LONGEST_S))],
        },
    }
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": own, "namespace": space},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": own},
            "minReplicaCount": count,
            "maxReplicaCount": 2 * count,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}},
            "triggers": [
                _trigger(f"sum({metric}{labels})", limit) for metric, limit in _LIMITS.items()
            ],
        },
    }


def _step(pods: int, seconds: int) -> Object:
    return {"type": "Pods", "value": pods, "periodSeconds": seconds}


def _trigger(query: str, limit: str) -> Object:
    asked = {
        "serverAddress": _PROMETHEUS,
        "query": query,
        "threshold": limit,
        # Series that are missing are no reason to end engines.
        "ignoreNullValues": "false",
    }
    return {"type": "prometheus", "metricType": "AverageValue", "metadata": asked}
