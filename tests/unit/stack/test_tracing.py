"""What services are told of the collector for traces."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deploy.workflows.prepare import Prepared
from tests.unit.stack.conftest import Case

Make = Callable[..., Prepared]
MakeCase = Callable[..., Case]
TRACING = {"otlp_endpoint": "http://192.0.2.1:4318/base"}
VARIABLES = (
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT",
    "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES",
)  # fmt: skip


@pytest.mark.parametrize("topology", ["1p1d", "2a"])
def test_router_and_engines_send_spans_to_one_collector(prepared: Make, topology: str) -> None:
    made = prepared(topology=topology, tracing=TRACING, name="mine")
    router = made.stack.service("router").argv
    at = router.index("--otlp-endpoint")
    assert router[at : at + 4] == (
        "--otlp-endpoint",
        "http://192.0.2.1:4318/base",
        "--stack",
        "mine",
    )
    for plan in made.plan.engines:
        engine = made.stack.service(plan.name)
        at = engine.argv.index("--otlp-traces-endpoint")
        assert engine.argv[at + 1] == "http://192.0.2.1:4318/base/v1/traces"
        assert [engine.env[name] for name in VARIABLES] == [
            "http/protobuf", "2", plan.role,
            f"service.namespace=mine,service.instance.id={plan.name}",
        ]  # fmt: skip


def test_containers_get_the_same_options(contained: MakeCase) -> None:
    case = contained(tracing=TRACING)
    assert "--otlp-endpoint" in case.services["router"]["command"]
    for engine in case.engines.values():
        assert "--otlp-traces-endpoint" in engine["command"]
        assert set(VARIABLES) <= set(engine["environment"])


def test_variables_of_the_user_win(prepared: Make) -> None:
    env = {"OTEL_SERVICE_NAME": "theirs"}
    stack = prepared(tracing=TRACING, engine={"env": env}).stack
    assert stack.service("producer-0").env["OTEL_SERVICE_NAME"] == "theirs"


def test_engines_get_no_trace_headers_without_a_collector(
    prepared: Make, contained: MakeCase
) -> None:
    stack = prepared().stack
    told = [(service.argv, sorted(service.env)) for service in stack.services]
    assert "otlp" not in f"{told} {contained().document}".lower()
    assert "OTEL" not in f"{told} {contained().document}"
