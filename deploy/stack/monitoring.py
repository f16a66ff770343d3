"""What watches a stack: Prometheus, which scrapes what has metrics, and Grafana."""

from __future__ import annotations

from io import StringIO
from typing import Any

import yaml

from deploy.planning.plan import Plan
from deploy.stack.layout import ENGINE_KEY, GRAFANA_HOME, LOOPBACK, Endpoint, Layout
from deploy.stack.service import ConfigFile, HealthCheck, Service

GRAFANA_PASSWORD = "grafana_password"  # noqa: S105 - the name of the secret, not the secret
SCRAPE_S = 10
_LIMITS = "limits.yml"
# Long texts, which change: each would become another time series.
DROPPED = "pdkit_(fix|kv|connector)_info|pdkit_store_last_failure_timestamp_seconds|.+_created"
_MEMORY_MIB = 256
# Prometheus replays its log first; Grafana migrates its database.
_PROMETHEUS_READY_S, _GRAFANA_READY_S = 60.0, 120.0


def monitoring_services(plan: Plan, layout: Layout) -> tuple[Service, ...]:
    """Return Prometheus and, where there is one, Grafana; nothing unless the plan has them."""
    if not plan.prometheus_port:
        return ()
    grafana = (_grafana(plan, layout),) if layout.grafana_program else ()
    return (_prometheus(plan, layout), *grafana)


def _prometheus(plan: Plan, layout: Layout) -> Service:
    place = layout.file("prometheus", "prometheus.yml")
    limits = layout.file("prometheus", _LIMITS)
    own = layout.prometheus(plan)
    return Service(
        name="prometheus",
        role="prometheus",
        # It has no path for administration unless an argument opens one.
        argv=(
            layout.prometheus_program,
            f"--config.file={place.seen_at}",
            f"--storage.tsdb.path={layout.data_dir('prometheus')}",
            "--storage.tsdb.retention.time=15d",
            "--storage.tsdb.retention.size=2GB",
            f"--web.listen-address={own.bind}:{own.port}",
        ),
        host=LOOPBACK,
        port=plan.prometheus_port,
        health=HealthCheck("http", "/-/ready"),
        ready_s=min(_PROMETHEUS_READY_S, plan.ready_s),
        files=(
            ConfigFile(place.path, prometheus_config(plan, layout), place.target),
            ConfigFile(limits.path, latency_limits(plan), limits.target),
        ),
        # Earlier, alerts would fire while engines load their model.
        depends_on=("router",),
        memory_mib=_MEMORY_MIB,
    )


def prometheus_config(plan: Plan, layout: Layout) -> str:
    """Return the text of Prometheus's configuration: rules, and where to scrape."""
    engines = {
        "job_name": "engines",
        "authorization": {"credentials_file": layout.secret(ENGINE_KEY)},
        "follow_redirects": False,
        "metric_relabel_configs": [
            {"source_labels": ["__name__"], "regex": DROPPED, "action": "drop"}
        ],
        "static_configs": [
            {
                "targets": [layout.engine(engine).reached_at],
                "labels": {"stack": plan.name, "service": engine.name, "role": engine.role},
            }
            for engine in plan.all_engines
        ],
    }
    jobs = [engines, _job("router", layout.router_metrics(plan), plan)]
    if plan.kv_server:
        jobs.append(_job(plan.kv_server.name, layout.kv_metrics(plan.kv_server), plan))
    every = f"{SCRAPE_S}s"
    config = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [
            f"{layout.monitoring_dir}/rules.yml",
            layout.file("prometheus", _LIMITS).seen_at,
        ],
        "scrape_configs": jobs,
    }
    return yaml.safe_dump(config, sort_keys=False)


def _job(name: str, place: Endpoint, plan: Plan) -> dict[str, Any]:
    """Return the job of a service that is the only one of its kind, and asks for no key."""
    return {
        "job_name": name,
        "follow_redirects": False,
        "static_configs": [
            {
                "targets": [place.reached_at],
                "labels": {"stack": plan.name, "service": name},
            }
        ],
    }


def latency_limits(plan: Plan) -> str:
    """Return the text of the rules that name a stack's limits of latency to the other rules."""
    limits = {"pdkit:ttft_limit_seconds": plan.spec.slo.ttft_s,
              "pdkit:itl_limit_seconds": plan.spec.slo.itl_s}  # fmt: skip
    rules = [
        {"record": name, "expr": f"vector({seconds:g})", "labels": {"stack": plan.name}}
        for name, seconds in limits.items()
    ]
    return yaml.safe_dump({"groups": [{"name": "pdkit-limits", "rules": rules}]}, sort_keys=False)


def _grafana(plan: Plan, layout: Layout) -> Service:
    place = layout.file("grafana", "grafana.ini")
    return Service(
        name="grafana",
        role="grafana",
        argv=(
            layout.grafana_program, "server",
            "--homepath", GRAFANA_HOME,
            "--config", place.seen_at,
        ),
        host=LOOPBACK,
        port=plan.grafana_port,
        health=HealthCheck("http", "/api/health"),
        ready_s=min(_GRAFANA_READY_S, plan.ready_s),
        # Its provisioning files name two of these. A proxy that Docker gives to containers knows
        # no Prometheus of ours.
        env={
            "NO_PROXY": "*",
            "no_proxy": "*",
            "PDKIT_PROMETHEUS_URL": f"http://{layout.prometheus(plan).reached_at}",
            "PDKIT_DASHBOARDS": f"{layout.monitoring_dir}/dashboards",
        },
        files=(ConfigFile(place.path, _grafana_config(plan, layout), place.target),),
        depends_on=("prometheus",),
        memory_mib=_MEMORY_MIB,
    )  # fmt: skip


def _grafana_config(plan: Plan, layout: Layout) -> str:
    """Return the text of Grafana's configuration: anyone may look, one password may change."""
    own, data = layout.grafana(plan), layout.data_dir("grafana")
    folder = layout.monitoring_dir
    no, yes = "false", "true"
    from configparser import ConfigParser

    config = ConfigParser(interpolation=None)
    config.read_dict(
        {
            "paths": {
                "data": data,
                "logs": f"{data}/log",
                "plugins": f"{data}/plugins",
                "provisioning": f"{folder}/grafana",
            },
            "server": {"http_addr": own.bind, "http_port": str(own.port)},
            "security": {
                "admin_password": f"@{{{GRAFANA_PASSWORD}}}",
                "disable_gravatar": yes,
            },
            "auth.anonymous": {"enabled": yes, "org_role": "Viewer"},
            "users": {"allow_sign_up": no},
            "dashboards": {"default_home_dashboard_path": f"{folder}/dashboards/overview.json"},
            # The alerts are Prometheus's.
            "unified_alerting": {"enabled": no},
            # Nothing is sent or fetched.
            "analytics": {
                "reporting_enabled": no,
                "check_for_updates": no,
                "check_for_plugin_updates": no,
                "feedback_links_enabled": no,
            },
            "plugins": {"preinstall_disabled": yes, "plugin_admin_enabled": no},
            "news": {"news_feed_enabled": no},
            "snapshots": {"external_enabled": no},
            "log": {"mode": "console"},
        }
    )
    text = StringIO()
    config.write(text)
    return text.getvalue().rstrip("\n") + "\n"
