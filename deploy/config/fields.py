"""The types of a spec's fields: numbers, paths and addresses, with what each refuses."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from deploy.home_folder import expanded

MAX_COUNT = 64  # GPUs or engines
_LABEL = "[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
RuntimeChoice = Literal["auto", "compose", "process"]
GpuAccess = Literal["auto", "runtime", "cdi", "all"]
# LMCache inside each engine, or LMCache's server.
Connector = Literal["lmcache", "lmcache-mp"]
IN_ENGINES: Connector = "lmcache"
MP: Connector = "lmcache-mp"


def no_boolean(value: object) -> object:
    """Refuse yes and no for a number: YAML reads booleans, and Python counts True as 1."""
    if isinstance(value, bool):
        raise ValueError("expected a number, not yes or no")
    return value


def _located(path: Path) -> Path:
    """Return the absolute path: the next command may run in another folder."""
    return expanded(path).absolute()


def _address(value: str) -> str:
    """Return an IP address; for a host name Docker would listen on every address."""
    if value == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        raise ValueError("expected an IP address, such as 127.0.0.1 or 0.0.0.0") from None


BindAddress = Annotated[str, AfterValidator(_address)]


def _collector(value: str) -> str:
    """Return the URL of a collector without a slash at its end."""
    try:
        parts = urlsplit(value)
        labels = (parts.hostname or "").removesuffix(".").split(".")
        whole = parts.port and all(1 <= len(label) <= 63 for label in labels)
        whole = whole and value.isascii() and value.isprintable() and " " not in value
    except ValueError:
        whole = None
    if not whole or parts.scheme != "http" or "@" in value or parts.query or parts.fragment:
        raise ValueError("expected http://HOST:PORT, such as http://127.0.0.1:4318")
    if parts.path.rstrip("/").endswith("/v1/traces"):
        raise ValueError("expected the URL without /v1/traces, which is added to it")
    return value.rstrip("/")


Collector = Annotated[str, AfterValidator(_collector)]
HostPath = Annotated[Path, AfterValidator(_located)]
Port = Annotated[int, Field(ge=1024, le=65535), BeforeValidator(no_boolean)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT), BeforeValidator(no_boolean)]
RoleCount = Annotated[int, Field(ge=0, le=MAX_COUNT), BeforeValidator(no_boolean)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Gibibytes = Annotated[float, Field(gt=0, le=4096)]
Share = Annotated[float, Field(gt=0, le=0.98)]
ImageName = Annotated[str, Field(min_length=1, max_length=512)]


class Strict(BaseModel):
    """A part of the spec: frozen, and strict about unknown keys."""

    # Only StackSpec is validated, and it holds the others: theirs would be built for nothing.
    model_config = ConfigDict(
        extra="forbid", frozen=True, str_strip_whitespace=True, defer_build=True
    )


def _engine_url(value: str) -> str:
    """Return the URL of an engine's root without its last slash."""
    try:
        url = urlsplit(value)
        port, host = url.port, _engine_host(url.netloc.rpartition(":")[0].lower())
        root = url.path in ("", "/") and not (url.query or url.fragment)
    except ValueError:
        root = False
    if not root or not port or not host or url.scheme != "http":
        raise ValueError("expected http://HOST:PORT, such as http://10.0.0.5:8010")
    return f"http://{host}:{port}"


def _engine_host(host: str) -> str | None:
    """Return a URL's host in its canonical form; None if nothing can connect to it.

    Raises:
        ValueError: brackets without an IPv6 address.
    """
    if host.startswith("[") and host.endswith("]"):
        six = ipaddress.IPv6Address(host[1:-1])
        nowhere = (six.ipv4_mapped or six).is_unspecified or six.scope_id
        return None if nowhere else f"[{six}]"
    try:
        return None if (four := ipaddress.IPv4Address(host)).is_unspecified else str(four)
    except ValueError:
        numbers = host.rpartition(".")[2].isdigit()  # such as 0, which is 0.0.0.0
        return host if _NAME.fullmatch(host) and not numbers else None


class RemoteEngine(Strict):
    """An engine of another host, which `deploy up` started there."""

    role: Literal["producer", "consumer"]
    url: Annotated[str, AfterValidator(_engine_url)]

    @property
    def host(self) -> str:
        """Its host's address or name, an IPv6 address without brackets."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return urlsplit(self.url).port or 0


class TracingSpec(Strict):
    """Traces of requests."""

    otlp_endpoint: Collector | None = Field(
        None,
        description="http://HOST:PORT of an OpenTelemetry collector (OTLP over HTTP) that gets "
        "the spans of router and engines; default: no traces",
    )
