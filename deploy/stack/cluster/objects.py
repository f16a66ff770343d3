"""The objects of the base: what all vendors' stacks of one spec have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from deploy.stack.cluster.layout import is_engine, workload
from deploy.stack.cluster.pods import LEAVES_S, labels, pod_template, ports
from deploy.stack.service import Service

Object = dict[str, Any]
DNS_PORTS = [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]
_NOTICED_S = 5
# For which nodes may pull the images, before engines begin to load their model.
_PULL_S = 1800


def namespace(name: str) -> Object:
    """Return the namespace, which admits only pods without rights."""
    level = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": name, "labels": level},
    }


def workload_objects(service: Service, stack: str, program: Sequence[str]) -> list[Object]:
    """Return a role's workload, without what its vendor decides, its Service and its budget."""
    name, own = workload(service.role), labels(stack, service.role)
    template = pod_template(service, stack, program)
    spec: Object = {"selector": {"matchLabels": own}, "template": template}
    stateless = service.role == "router"
    if stateless:
        # Its pods become ready when engines do; after ten minutes it would count as failed.
        spec["progressDeadlineSeconds"] = _PULL_S + math.ceil(service.ready_s)
        template["spec"]["terminationGracePeriodSeconds"] = _NOTICED_S + LEAVES_S + _NOTICED_S
        # Until no Service sends it new connections.
        wait = {"preStop": {"exec": {"command": ["sleep", str(_NOTICED_S)]}}}
        template["spec"]["containers"][0]["lifecycle"] = wait
    else:
        spec = {"serviceName": name, "podManagementPolicy": "Parallel", **spec}
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment" if stateless else "StatefulSet",
            "metadata": {"name": name, "labels": own},
            "spec": spec,
        },
        _service(service, stack, headless=not stateless),
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": name, "labels": own},
            "spec": {
                "maxUnavailable": 1,
                # One that never becomes ready must not keep its node from being drained.
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": own},
            },
        },
    ]


def _service(service: Service, stack: str, *, headless: bool) -> Object:
    name, own = workload(service.role), labels(stack, service.role)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": own},
        "spec": {
            **({"clusterIP": "None"} if headless else {}),
            "selector": own,
            "ports": [
                {"name": port, "port": number, "targetPort": port, "protocol": "TCP"}
                for port, number in ports(service).items()
            ],
        },
    }


def network_policies(
    services: Sequence[Service], stack: str, collector: int | None = None
) -> list[Object]:
    """Return who may reach whom: clients the router, the router engines, engines Redis.

    Engines may reach anything: a hub for models, or a Redis of the user's own.

    Args:
        collector: the port of the one that takes the router's spans, wherever that is.
    """
    engines = [service for service in services if is_engine(service.role)]
    router = next(service for service in services if service.role == "router")
    http = ports(router)["http"]
    found = [
        policy("nobody", {}, ["Ingress"], {}),
        policy(
            "engines",
            pods_of(engines, stack),
            ["Ingress"],
            {
                "ingress": [
                    {"from": [from_pods([router], stack)], "ports": tcp(ports(engines[0]).values())}
                ]
            },
        ),
        policy(
            "router",
            pods_of([router], stack),
            ["Ingress", "Egress"],
            {
                "ingress": [{"ports": tcp([http])}],
                "egress": [
                    {"to": [from_pods(engines, stack)], "ports": tcp(ports(engines[0]).values())},
                    {"ports": DNS_PORTS},
                    *([{"ports": tcp([collector])}] if collector else []),
                ],
            },
        ),
    ]
    redis = [service for service in services if service.role == "redis"]
    if redis:
        let_in = {"from": [from_pods(engines, stack)], "ports": tcp(ports(redis[0]).values())}
        only = {"ingress": [let_in]}
        found.append(policy("redis", pods_of(redis, stack), ["Ingress", "Egress"], only))
    return found


def policy(name: str, selector: Object, types: list[str], rules: Object) -> Object:
    """Return a NetworkPolicy for the pods that `selector` matches."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": {"podSelector": selector, "policyTypes": types, **rules},
    }


def pods_of(services: Sequence[Service], stack: str) -> Object:
    """Return the selector of the pods of services of one or more roles."""
    own = labels(stack, services[0].role)
    key = next(name for name, value in own.items() if value == services[0].role)
    roles = sorted({service.role for service in services})
    rest = {name: value for name, value in own.items() if name != key}
    return {
        "matchLabels": rest,
        "matchExpressions": [{"key": key, "operator": "In", "values": roles}],
    }


def from_pods(services: Sequence[Service], stack: str) -> Object:
    """Return the pods of services as a policy's other side."""
    return {"podSelector": pods_of(services, stack)}


def tcp(numbers: Iterable[int]) -> list[Object]:
    """Return a policy's ports."""
    return [{"protocol": "TCP", "port": port} for port in numbers]
