"""What the router is run with: the engines it sends requests to, and who may send them."""

from __future__ import annotations

from deploy.config.spec import RouterSpec
from deploy.planning.engines import EnginePlan
from deploy.planning.plan import Plan
from deploy.stack.layout import ENGINE_KEY, Layout
from deploy.stack.tracing import router_args


def router_argv(plan: Plan, layout: Layout, key_file: str | None) -> tuple[str, ...]:
    """Return the arguments after the interpreter's name."""
    front, metrics = layout.router(plan), layout.router_metrics(plan)
    return (
        "-m", "pdkit_router",
        "--host", front.bind,
        "--port", str(front.port),
        "--metrics-host", metrics.bind,
        "--metrics-port", str(metrics.port),
        *(part for role, engine in _roles(plan) for part in _engine(role, engine, layout)),
        # With Redis every engine finds a prompt's KV: the one with the least work serves it.
        *(("--follow-prefixes",) if plan.aggregated and not plan.shares_kv else ()),
        *(() if plan.aggregated else ("--degrade", plan.spec.router.degrade)),
        *_body_limit(plan),
        "--engine-key-file", layout.secret(ENGINE_KEY),
        "--drain-file", layout.drain_file.seen_at,
        *(("--key-file", key_file) if key_file else ()),
        *router_args(plan),
    )  # fmt: skip


def _body_limit(plan: Plan) -> tuple[str, ...]:
    limit = plan.spec.router.max_body_mib
    default = RouterSpec.model_fields["max_body_mib"].default  # an instance takes pydantic 10 ms
    return () if limit == default else ("--max-body-mib", str(limit))


def _engine(role: str, engine: EnginePlan, layout: Layout) -> tuple[str, str]:
    if source := layout.engine_source(role):
        return "--engines-from", source
    return f"--{role}", f"{engine.name}={layout.engine(engine).reached_at}"


def _roles(plan: Plan) -> list[tuple[str, EnginePlan]]:
    if plan.aggregated:
        return [("engine", engine) for engine in plan.engines]
    return [
        *(("producer", engine) for engine in plan.producers),
        *(("consumer", engine) for engine in plan.consumers),
    ]
