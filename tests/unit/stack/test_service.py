"""Services and the stack that holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from deploy.stack.build import build_stack
from deploy.stack.layout import Layout
from deploy.stack.service import HealthCheck, Service, ServiceRole, Stack
from deploy.workflows.prepare import Prepared
from tests.unit.stack.cases import machine_with


def service(name: str, role: ServiceRole, host: str = "127.0.0.1") -> Service:
    return Service(name, role, ("true",), host, 8000, HealthCheck("http", "/health"), 1.0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),  # noqa: S104 - not bound here
        ("192.168.1.2", "http://192.168.1.2:8000"),
        ("box.example", "http://box.example:8000"),
        ("::1", "http://[::1]:8000"),
    ],
)
def test_a_url_has_a_host_that_can_be_reached(host: str, url: str) -> None:
    assert service("router", "router", host).url == url


class SomeLayout:
    """A layout that is of no class the kit knows, and answers as another one does."""

    def __init__(self, other: Layout) -> None:
        self.other = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.other, name)


@pytest.mark.parametrize("runtime", ["process", "compose"])
def test_differences_between_runtimes_come_from_the_layout(
    prepared: Callable[..., Prepared], runtime: str
) -> None:
    made = prepared(vendor="cuda", runtime=runtime, machine=machine_with("cuda", 0, 1))
    assert build_stack(made.plan, SomeLayout(made.layout)) == made.stack
    assert all((one.container is not None) is (runtime == "compose") for one in made.stack.services)


def test_services_are_found_by_name_and_role() -> None:
    services = (service("a", "producer"), service("b", "consumer"), service("c", "consumer"))
    stack = Stack("s", "process", services, ())
    assert stack.service("b") is services[1]
    with pytest.raises(KeyError):
        stack.service("d")
