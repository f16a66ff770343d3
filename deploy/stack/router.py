"""What vllm-router is run with, in P/D mode: prefill on a producer, then decode on a consumer."""

from __future__ import annotations

from deploy.planning.plan import EnginePlan, Plan
from deploy.stack.layout import Layout


def router_argv(plan: Plan, layout: Layout) -> tuple[str, ...]:
    """Return the arguments after the interpreter's name."""

    def url(engine: EnginePlan) -> str:
        return f"http://{layout.engine(engine).reached_at}"

    prefill = [("--prefill", url(engine)) for engine in plan.producers]
    decode = [("--decode", url(engine)) for engine in plan.consumers]
    front, metrics = layout.router(plan), layout.router_metrics(plan)
    # Round robin on both sides would run in step: each producer would ever meet the same consumer.
    # The router refuses to choose between two where there is only one.
    decode_policy = "power_of_two" if len(plan.consumers) > 1 else "round_robin"
    return (
        "-m", "vllm_router.launch_router",
        "--vllm-pd-disaggregation",
        *(part for pair in (*prefill, *decode) for part in pair),
        "--prefill-policy", "round_robin",
        "--decode-policy", decode_policy,
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


def router_env(plan: Plan, layout: Layout) -> dict[str, str]:
    """Return what is set on top of the environment the router is started from."""
    # The router honours proxy variables; its engines are never behind one.
    hosts = {layout.engine(engine).reached_at.rpartition(":")[0] for engine in plan.engines}
    direct = ",".join(sorted({*hosts, "127.0.0.1", "localhost"}))
    # It would send a key of the user's shell, meant for somebody else, on to the engines.
    return {"NO_PROXY": direct, "no_proxy": direct, "OPENAI_API_KEY": ""}
