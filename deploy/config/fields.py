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
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|\[[0-9a-fA-F:.]+\]")


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


Address = Annotated[str, AfterValidator(_address)]


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
    """A part of the spec: unknown keys are refused, and nothing changes."""

    # Only StackSpec is validated, and it holds the others: theirs would be built for nothing.
    model_config = ConfigDict(
        extra="forbid", frozen=True, str_strip_whitespace=True, defer_build=True
    )


def _engine_url(value: str) -> str:
    """Return the URL of an engine's root without its last slash."""
    url = urlsplit(value)
    try:
        port = url.port
    except ValueError:
        port = None
    root = url.path in ("", "/") and not (url.query or url.fragment or "@" in url.netloc)
    host = url.netloc.rpartition(":")[0]
    if url.scheme != "http" or not port or not root or not _HOST.fullmatch(host):
        raise ValueError("expected http://HOST:PORT, such as http://10.0.0.5:8010")
    return f"http://{url.netloc}"


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
        description="http://HOST:PORT of an OpenTelemetry collector that takes OTLP over HTTP, "
        "for spans of router and engines; default: no traces",
    )
