"""What a cluster may lack or not want: objects of the Prometheus Operator, models in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from deploy.assets import yaml_asset
from deploy.planning.plan import Plan
from deploy.stack.cluster.layout import is_engine
from deploy.stack.cluster.objects import Object, pods_of, policy, tcp
from deploy.stack.cluster.overlay import HUB
from deploy.stack.cluster.pods import SECRET, ports
from deploy.stack.layout import ENGINE_KEY
from deploy.stack.monitoring import DROPPED, SCRAPE_S, latency_limits
from deploy.stack.service import Service

# Where kube-prometheus puts Prometheus.
PROMETHEUS_NAMESPACE = "monitoring"
_NAME_LABEL = "kubernetes.io/metadata.name"
_ENFORCE = "/metadata/labels/pod-security.kubernetes.io~1enforce"
NODE_FOLDER = "/var/lib/pdkit/hub"


def monitoring(services: Sequence[Service], plan: Plan, space: str) -> list[Object]:
    """Return whom to scrape, the kit's alert rules, and who may reach the pods for it.

    Each names its namespace, for a component is given none by the base.
    """
    stack = plan.name
    engines = [service for service in services if is_engine(service.role)]
    router = [service for service in services if service.role == "router"]
    from_engines = {
        "port": "http",
        "authorization": {"credentials": {"name": SECRET, "key": ENGINE_KEY}},
        "metricRelabelings": [{"sourceLabels": ["__name__"], "regex": DROPPED, "action": "drop"}],
    }
    limits = yaml.safe_load(latency_limits(plan))["groups"]
    groups = [*yaml_asset("compose", "monitoring", "rules.yml")["groups"], *limits]
    watched = [*engines, *router]
    open_to = {"namespaceSelector": {"matchLabels": {_NAME_LABEL: PROMETHEUS_NAMESPACE}}}
    scraped = sorted({ports(engines[0])["http"], ports(router[0])["metrics"]})
    let_in = {"from": [open_to], "ports": tcp(scraped)}
    found = [
        _pod_monitor("engines", engines, stack, from_engines),
        _pod_monitor("router", router, stack, {"port": "metrics"}),
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "pdkit"},
            "spec": {"groups": groups},
        },
        policy("prometheus", pods_of(watched, stack), ["Ingress"], {"ingress": [let_in]}),
    ]
    return [{**one, "metadata": {**one["metadata"], "namespace": space}} for one in found]


def _pod_monitor(job: str, services: Sequence[Service], stack: str, own: Object) -> Object:
    """Return a PodMonitor whose series have the labels that the kit's rules ask for."""
    endpoint = {
        **own,
        "path": "/metrics",
        "interval": f"{SCRAPE_S}s",
        "followRedirects": False,
        "relabelings": [
            {"targetLabel": "job", "replacement": job},
            {"targetLabel": "stack", "replacement": stack},
            {"targetLabel": "service", "sourceLabels": ["__meta_kubernetes_pod_name"]},
            {
                "targetLabel": "role",
                "sourceLabels": ["__meta_kubernetes_pod_label_app_kubernetes_io_component"],
            },
        ],
    }
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": job},
        "spec": {"selector": pods_of(services, stack), "podMetricsEndpoints": [endpoint]},
    }


@dataclass(frozen=True)
class ClaimHolder:
    """An object that has engines' claims, and JSON pointers to those and to the pods' volumes."""

    kind: str
    name: str
    claims: str = "/spec/volumeClaimTemplates"
    volumes: str = "/spec/template/spec/volumes"


def node_folder(namespace: str, holders: Sequence[ClaimHolder]) -> list[Object]:
    """Return kustomize's patches that keep models in a folder of each node, not in claims."""
    privileged: Object = {"op": "replace", "path": _ENFORCE, "value": "privileged"}
    volume = {"name": HUB, "hostPath": {"path": NODE_FOLDER, "type": "Directory"}}
    patches = [json_patch("Namespace", namespace, [privileged])]
    for holder in holders:
        instead: list[Object] = [
            {"op": "test", "path": f"{holder.claims}/0/metadata/name", "value": HUB},
            {"op": "remove", "path": f"{holder.claims}/0"},
            {"op": "add", "path": f"{holder.volumes}/-", "value": volume},
        ]
        patches.append(json_patch(holder.kind, holder.name, instead))
    return patches


def json_patch(kind: str, name: str, operations: list[Object]) -> Object:
    """Return kustomize's entry for a JSON patch of one object."""
    text = yaml.safe_dump(operations, sort_keys=False)
    return {"target": {"kind": kind, "name": name}, "patch": text}
