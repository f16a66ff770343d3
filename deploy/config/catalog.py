"""The image catalogue, read from images/catalog.yaml."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from functools import lru_cache
from typing import Any

from deploy.assets import yaml_asset
from deploy.errors import ConfigError

LIST_COMMAND = "deploy images list"


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image of the catalogue.

    Attributes:
        name: in the catalogue; "" of an image that the user names.
        base: image that it is built from.
        digest: what the tag of the base stands for, or of the image if it is pulled; or None.
        digest_source: document that states the digest, or the reason why it is missing.
        pinned: day on which its versions were chosen; None of a user's image.
        build: build context, a folder below the project's root; None if the image is pulled.
        size_gib: unpacked size; None if unknown.
        size_is_estimate: the size was not measured.
    """

    image: str
    name: str = ""
    base: str | None = None
    digest: str | None = None
    digest_source: str = ""
    pinned: date | None = None
    build: str | None = None
    build_args: Mapping[str, str] = field(default_factory=dict)
    size_gib: float | None = None
    size_is_estimate: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineImage(Image):
    """An image with vLLM and LMCache, from the catalogue or named by the user.

    Only `image` is known of a user's image: `vendor`, `vllm` and `lmcache` are None.

    Attributes:
        interpreter: program that runs engines, instead of the image's entrypoint.
        lmcache_from: how LMCache gets into it.
        cuda: CUDA release it is built for; "" if it is not for NVIDIA GPUs, or unknown.
        archs: GPUs that it is built for, such as 'gfx942'; empty if unknown.
        unverified: statements about it that are not checked.
    """

    vendor: str | None = None
    default: bool = False
    vllm: str | None = None
    lmcache: str | None = None
    python: str | None = None
    torch: str | None = None
    interpreter: str = "python3"
    lmcache_from: str = ""
    cuda: str = ""
    archs: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    @property
    def pair(self) -> str:
        """Return its versions, for messages."""
        return f"vLLM {self.vllm or 'unknown'} with LMCache {self.lmcache or 'unknown'}"


@dataclass(frozen=True, kw_only=True)
class ServiceImage(Image):
    """An image of another service than the engines.

    Attributes:
        interpreter: program that runs the service's module; None if it is not a Python program.
    """

    version: str
    interpreter: str | None = None


@dataclass(frozen=True)
class Catalog:
    """All images, by name, in the order of the file."""

    engines: Mapping[str, EngineImage]
    services: Mapping[str, ServiceImage]

    def default_for(self, vendor: str) -> EngineImage:
        """Return the default profile of a vendor.

        Raises:
            ConfigError: the vendor has no default profile.
        """
        for engine in self.engines.values():
            if engine.default and engine.vendor == vendor:
                return engine
        raise ConfigError(f"no image profile is the default for '{vendor}'", hint=LIST_COMMAND)

    def interpreters_of(self, engine: EngineImage) -> tuple[str, ...]:
        """Return where an image's Python may be; for a user's image, all known places."""
        others = () if engine.name else (one.interpreter for one in self.engines.values())
        return tuple(dict.fromkeys((engine.interpreter, *others)))

    def named(self, value: str) -> EngineImage:
        """Return the engine image that `--image` means: a profile's name, or a reference.

        An unknown reference gives an EngineImage without vendor and versions.

        Raises:
            ConfigError: it is neither, or a reference without tag and digest.
        """
        if value in self.engines:
            return self.engines[value]
        for engine in self.engines.values():
            if engine.image == value.partition("@")[0] and not reference_problem(value):
                return replace(engine, image=value)
        if problem := reference_problem(value):
            raise ConfigError(
                f"{problem}{self._suggestion(value)}", setting="image", hint=LIST_COMMAND
            )
        return EngineImage(image=value)

    def _suggestion(self, value: str) -> str:
        close = difflib.get_close_matches(value, self.engines, n=1)
        meant = f"did you mean '{close[0]}'?" if close else f"profiles: {', '.join(self.engines)}"
        return f"; {meant}"


_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_PORT = r"(?::[0-9]+)"
_HOST = rf"(?:{_LABEL}(?:\.{_LABEL})+{_PORT}?|{_LABEL}{_PORT}|localhost|\[[0-9a-fA-F:]+\]{_PORT}?)"
_PATH = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = (  # compiled when it is used
    rf"(?:{_HOST}/)?(?P<path>{_PATH}(?:/{_PATH})*)"
    r"(?P<tag>:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?P<digest>@sha256:[0-9a-f]{64})?"
)


def reference_problem(value: str) -> str:
    """Return the fault of an image reference, or ''.

    The form is [host[:port]/]path[:tag][@sha256:digest], with a path in lower case. Tag or digest
    is required, since a bare name is more often a mistyped profile than an image.
    """
    found = re.fullmatch(_REFERENCE, value)
    if found is None:
        lower = " (image names are lower case)" if re.fullmatch(_REFERENCE, value.lower()) else ""
        return f"'{value}' is neither a profile nor an image reference{lower}"
    if not (found["tag"] or found["digest"]):
        return f"'{value}' is not a profile, and as an image it lacks a tag or a digest"
    return ""


def fetched(image: Image) -> str:
    """Return the reference to pull for an image: itself or its base, by digest if known."""
    name = image.base or "" if image.build else image.image
    return f"{name}@{image.digest}" if image.digest else name


def reference(image: Image) -> str:
    """Return the reference by which a stack runs an image: with its digest if it is pulled."""
    return image.image if image.build else fetched(image)


@lru_cache(maxsize=1)
def load_catalog() -> Catalog:
    """Read the catalogue that ships with pdkit."""
    return parse_catalog(yaml_asset("images", "catalog.yaml"))


def parse_catalog(document: Mapping[str, Any]) -> Catalog:
    """Return the catalogue in a document; an unknown key is a TypeError, a bug of pdkit."""
    engines = {
        name: EngineImage(
            name=name,
            **{**row, **{key: tuple(row.get(key, ())) for key in ("archs", "unverified")}},
        )
        for name, row in document["engines"].items()
    }
    services = {name: ServiceImage(name=name, **row) for name, row in document["services"].items()}
    return Catalog(engines, services)
