"""What a cluster may lack or not want: objects of the Prometheus Operator, models in a folder."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from deploy.assets import monitoring_path
from deploy.stack.cluster.layout import is_engine, workload
from deploy.stack.cluster.objects import Object, pods_of, policy, tcp
from deploy.stack.cluster.overlay import HUB
from deploy.stack.cluster.pods import SECRET, ports
from deploy.stack.layout import ENGINE_KEY
from deploy.stack.monitoring import DROPPED, SCRAPE_S
from deploy.stack.service import Service

# Where kube-prometheus puts Prometheus.
_PROMETHEUS_NAMESPACE = "monitoring"
_NAME_LABEL = "kubernetes.io/metadata.name"
_CLAIMS = "/spec/volumeClaimTemplates"
_ENFORCE = "/metadata/labels/pod-security.kubernetes.io~1enforce"
NODE_FOLDER = "/var/lib/pdkit/hub"


def monitoring(services: Sequence[Service], stack: str) -> list[Object]:
    """Return whom to scrape, the kit's alert rules, and who may reach the pods for it."""
    engines = [service for service in services if is_engine(service.role)]
    router = [service for service in services if service.role == "router"]
    from_engines = {
        "port": "http",
        "authorization": {"credentials": {"name": SECRET, "key": ENGINE_KEY}},
        "metricRelabelings": [{"sourceLabels": ["__name__"], "regex": DROPPED, "action": "drop"}],
    }
    rules = yaml.safe_load((monitoring_path() / "rules.yml").read_text(encoding="utf-8"))
    watched = [*engines, *router]
    open_to = {"namespaceSelector": {"matchLabels": {_NAME_LABEL: _PROMETHEUS_NAMESPACE}}}
    scraped = sorted({ports(engines[0])["http"], ports(router[0])["metrics"]})
    let_in = {"from": [open_to], "ports": tcp(scraped)}
    return [
        _pod_monitor("engines", engines, stack, from_engines),
        _pod_monitor("router", router, stack, {"port": "metrics"}),
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "pdkit"},
            "spec": rules,
        },
        policy("prometheus", pods_of(watched, stack), ["Ingress"], {"ingress": [let_in]}),
    ]


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


def node_folder(services: Sequence[Service], namespace: str) -> list[Object]:
    """Return kustomize's patches that keep models in a folder of each node, not in claims."""
    privileged = {"op": "replace", "path": _ENFORCE, "value": "privileged"}
    volume = {"name": HUB, "hostPath": {"path": NODE_FOLDER, "type": "Directory"}}
    instead = [
        {"op": "test", "path": f"{_CLAIMS}/0/metadata/name", "value": HUB},
        {"op": "remove", "path": f"{_CLAIMS}/0"},
        {"op": "add", "path": "/spec/template/spec/volumes/-", "value": volume},
    ]
    names = [workload(service.role) for service in services if is_engine(service.role)]
    targets = [
        ({"kind": "Namespace", "name": namespace}, [privileged]),
        *(({"kind": "StatefulSet", "name": name}, instead) for name in names),
    ]
    return [
        {"target": target, "patch": yaml.safe_dump(patch, sort_keys=False)}
        for target, patch in targets
    ]
