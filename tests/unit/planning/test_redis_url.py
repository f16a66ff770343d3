"""What the URL of a user's Redis says, and that no part of a password gets out."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from deploy.assets import connector_path
from deploy.connector.pdkit_connector.redis_url import (
    SCHEMES,
    is_loopback,
    parse_redis_url,
    scheme_of,
)

GOOD = {
    "redis://": "redis://localhost:6379",
    "redis://cache": "redis://cache:6379",
    "redis://:pa%2Fss@cache:7000/3": "redis://cache:7000",
    "rediss://user:pass@[2001:db8::1]:7000?ssl_ca_certs=/ca.pem": "rediss://[2001:db8::1]:7000",
    "unix://:pass@/run/redis.sock?db=2": "unix:///run/redis.sock",
    "redis-sentinel://:pass@one,two:26380/main?sentinel_password=word": (
        "redis-sentinel://one:26379,two:26380/main"
    ),
    "rediss-sentinel://one/main": "rediss-sentinel://one:26379/main",
    "redis-cluster://:pass@one:7000,two:7001": "redis-cluster://one:7000,two:7001",
    "rediss-cluster://one?ssl_cert_reqs=none": "rediss-cluster://one:6379",
}
BROKEN = (
    "",
    "cache:6379",
    "http://cache",
    "redis://cache:port",
    "redis://cache:0",
    "redis://cache:70000",
    "redis://:pa/ss@cache:6379",
    "redis://user:12/34@cache:6379",
    "redis://:pa#ss@cache:6379",
    "redis://:pa?ss@cache:6379",
    "redis://[::1",
    "unix://run/redis.sock",
    "unix://",
    "redis-sentinel://one:26379",
    "redis-sentinel:///main",
    "redis-cluster://",
    "redis-cluster://one:x",
)


@pytest.mark.parametrize(("text", "shown"), GOOD.items())
def test_the_shown_url_has_no_secret(text: str, shown: str) -> None:
    url = parse_redis_url(text)
    assert url.shown == shown
    for said in (url.shown, repr(url)):
        assert not [secret for secret in ("pass", "word", "pa%2Fss") if secret in said]


@pytest.mark.parametrize("text", BROKEN)
def test_invalid_urls_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^not a Redis URL$") as caught:
        parse_redis_url(text)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_the_parts_of_a_url_are_read() -> None:
    url = parse_redis_url("rediss-sentinel://u:p@a:1,b:2/main?db=4&sentinel_username=s"
                          "&ssl_ca_certs=/ca.pem&ssl_keyfile=/key.pem")  # fmt: skip
    assert (url.kind, url.nodes, url.master) == ("sentinel", (("a", 1), ("b", 2)), "main")
    assert url.files == ("/ca.pem", "/key.pem")
    assert url.sentinel_options == {"username": "s"}
    assert url.one_server.startswith("rediss://u:p@a:1?db=4&ssl_ca_certs=")
    assert parse_redis_url("redis://a/3").one_server == "redis://a:6379/3"


def test_every_accepted_scheme_is_read() -> None:
    assert {scheme_of(text) for text in GOOD} == {*SCHEMES}
    assert scheme_of("no scheme") == ""


@pytest.mark.parametrize("host", ["localhost", "a.localhost", "127.0.0.1", "127.9.9.9", "::1",
                                  "0.0.0.0"])  # fmt: skip  # noqa: S104 - not bound here
def test_loopback_addresses_are_recognized(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["cache", "10.0.0.1", "2001:db8::1", "localhost.example"])
def test_other_addresses_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.fixture
def engines_parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Read a URL as the connector inside the engines does."""
    monkeypatch.syspath_prepend(str(connector_path()))
    module = import_module("pdkit_connector.redis_path.servers")
    return module.parse  # type: ignore[no-any-return]


@pytest.mark.parametrize("text", GOOD)
def test_engines_read_the_same(text: str, engines_parse: Callable[[str], Any]) -> None:
    theirs, ours = engines_parse(text), parse_redis_url(text)
    assert (theirs.kind, theirs.master) == (ours.kind, ours.master)
    if ours.kind == "single":
        where = (theirs.options.get("host", "localhost"), theirs.options.get("port", 6379))
        assert theirs.options.get("path", "") == ours.socket
        assert ours.socket or ours.nodes == (where,)
    else:
        assert theirs.nodes == ours.nodes


@pytest.mark.parametrize("text", BROKEN)
def test_engines_refuse_the_same(text: str, engines_parse: Callable[[str], Any]) -> None:
    with pytest.raises(Exception, match=r"is not a Redis address|is broken") as caught:
        engines_parse(text)
    assert type(caught.value).__name__ == "ConnectorError"
