"""What vllm-router is run with.

In P/D mode it sends each request to a producer, then to a consumer; before aggregated engines, in
its regular mode, to one of them.
"""

from __future__ import annotations

from deploy.planning.plan import EnginePlan, Plan
from deploy.stack.layout import Layout


def router_argv(plan: Plan, layout: Layout) -> tuple[str, ...]:
    """Return the arguments after the interpreter's name."""
    front, metrics = layout.router(plan), layout.router_metrics(plan)
    return (
        "-m", "vllm_router.launch_router",
        *(_to_any(plan, layout) if plan.aggregated else _to_pairs(plan, layout)),
        # Its defaults notice a start after half a minute, and a death after three.
        "--worker-startup-check-interval", "1",
        "--health-check-interval-secs", "2",
        "--health-check-timeout-secs", "2",
        "--health-failure-threshold", "2",
        "--health-success-threshold", "1",
        # By default pages of any origin could use a router on the user's own machine.
        "--cors-allowed-origins", f"http://127.0.0.1:{plan.port}",
        "--host", front.bind,
        "--port", str(front.port),
        "--prometheus-host", metrics.bind,
        "--prometheus-port", str(metrics.port),
    )  # fmt: skip


def _to_pairs(plan: Plan, layout: Layout) -> tuple[str, ...]:
    prefill = [("--prefill", _url(engine, layout)) for engine in plan.producers]
    decode = [("--decode", _url(engine, layout)) for engine in plan.consumers]
    # Round robin on both sides would run in step: each producer would ever meet the same consumer.
    # The router refuses to choose between two where there is only one.
    decode_policy = "power_of_two" if len(plan.consumers) > 1 else "round_robin"
    return (
        "--vllm-pd-disaggregation",
        *(part for pair in (*prefill, *decode) for part in pair),
        "--prefill-policy", "round_robin",
        "--decode-policy", decode_policy,
    )  # fmt: skip


def _to_any(plan: Plan, layout: Layout) -> tuple[str, ...]:
    # Without Redis a conversation is fastest on the engine that holds it: the router's own default
    # sends it there. With Redis every engine finds it, and round robin loads them evenly.
    policy = "round_robin" if plan.shares_kv else "cache_aware"
    urls = (_url(engine, layout) for engine in plan.engines)
    return ("--worker-urls", *urls, "--policy", policy)


def _url(engine: EnginePlan, layout: Layout) -> str:
    return f"http://{layout.engine(engine).reached_at}"


def router_env(plan: Plan, layout: Layout) -> dict[str, str]:
    """Return what is set on top of the environment the router is started from."""
    # The router honours proxy variables; its engines are never behind one.
    hosts = {layout.engine(engine).reached_at.rpartition(":")[0] for engine in plan.engines}
    direct = ",".join(sorted({*hosts, "127.0.0.1", "localhost"}))
    # It would send a key of the user's shell, meant for somebody else, on to the engines.
    return {"NO_PROXY": direct, "no_proxy": direct, "OPENAI_API_KEY": ""}
