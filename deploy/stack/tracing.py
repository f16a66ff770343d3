"""How router and engines are pointed to the collector for traces, if there is one.

The router makes the trace of a request and the engines go on with it: vLLM's own spans, and those
of the connector, which vLLM's exporter sends.
"""

from __future__ import annotations

from deploy.planning.engines import EnginePlan
from deploy.planning.plan import Plan
from deploy.stack.layout import Layout


def router_args(plan: Plan) -> tuple[str, ...]:
    """Return arguments of the router."""
    endpoint = plan.spec.tracing.otlp_endpoint
    return ("--otlp-endpoint", endpoint, "--stack", plan.name) if endpoint else ()


def engine_args(plan: Plan) -> tuple[str, ...]:
    """Return arguments of vLLM, which takes the whole URL."""
    endpoint = plan.spec.tracing.otlp_endpoint
    return ("--otlp-traces-endpoint", f"{endpoint}/v1/traces") if endpoint else ()


def engine_env(engine: EnginePlan, plan: Plan, layout: Layout) -> dict[str, str]:
    """Return variables of OpenTelemetry's SDK, which vLLM leaves to it."""
    if not plan.spec.tracing.otlp_endpoint:
        return {}
    # In a cluster the engines of a role have one environment.
    instance = "" if layout.engine_source(engine.role) else f",service.instance.id={engine.name}"
    return {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",  # else gRPC
        # Seconds for a batch: at its exit an engine sends what is left, to a dead collector too.
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "2",
        "OTEL_SERVICE_NAME": engine.role,
        "OTEL_RESOURCE_ATTRIBUTES": f"service.namespace={plan.name}{instance}",
    }
