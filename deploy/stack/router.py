"""What vllm-router is run with, in P/D mode: prefill on a producer, then decode on a consumer."""

from __future__ import annotations

from deploy.planning.plan import Plan


def router_argv(plan: Plan, *, host: str) -> tuple[str, ...]:
    """Return the arguments after the interpreter's name."""
    prefill = [("--prefill", f"http://127.0.0.1:{engine.port}") for engine in plan.producers]
    decode = [("--decode", f"http://127.0.0.1:{engine.port}") for engine in plan.consumers]
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
        "--cors-allowed-origins", f"http://127.0.0.1:{plan.router_port}",
        "--host", host,
        "--port", str(plan.router_port),
        "--prometheus-host", "127.0.0.1",
        "--prometheus-port", str(plan.router_metrics_port),
    )  # fmt: skip


def router_env() -> dict[str, str]:
    """Return what is set on top of the environment the router is started from."""
    # The router honours proxy variables; its engines are on this machine.
    return {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
