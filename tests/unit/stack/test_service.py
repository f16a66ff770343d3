"""Services and the stack that holds them."""

from __future__ import annotations

import pytest

from deploy.stack.service import HealthCheck, Service, ServiceRole, Stack


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
def test_url(host: str, url: str) -> None:
    assert service("router", "router", host).url == url


def test_finding_services() -> None:
    services = (service("a", "producer"), service("b", "consumer"), service("c", "consumer"))
    stack = Stack("s", "process", services, ())
    assert stack.service("b") is services[1]
    with pytest.raises(KeyError):
        stack.service("d")
