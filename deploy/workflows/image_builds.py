"""Builds of the catalogue's images, from bases and sources that are pinned by digest."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from deploy.assets import asset
from deploy.config.catalog import EngineImage, ServiceImage, fetched
from deploy.errors import ConfigError, MissingImage
from deploy.home_folder import expanded
from deploy.runtime.compose.images import build_image, find_image, pull_image
from deploy.workflows.prepare import Report

WHEELHOUSE_VARIABLE = "PDKIT_WHEELHOUSE"
_ROCM = "images/rocm"
_LMCACHE = "https://github.com/LMCache/LMCache.git"
_COMMIT = re.compile(r"git\+\S+@[0-9a-f]{40}")


def build(
    image: EngineImage | ServiceImage,
    arguments: Mapping[str, str],
    report: Report,
    *,
    wheelhouse: Path | None = None,
    attest: bool = False,
) -> None:
    """Build an image that the kit has a Dockerfile for; `attest` adds its SBOM and provenance.

    Its base is that of the arguments, else the catalogue's.

    Raises:
        ConfigError: the wheelhouse holds no wheels.
        MissingImage: it cannot be built.
    """
    assert image.build is not None, "others are pulled"  # noqa: S101 - for mypy
    if "BASE" not in arguments:
        arguments = {**arguments, "BASE": _base(image, report)}
    wheels = _wheels(wheelhouse)
    report(f"building {image.image}" + (f" from the wheels in {wheels}" if wheels else ""))
    folder = asset(*image.build.split("/"))
    build_image(image.image, folder, arguments, wheelhouse=wheels, attest=attest)


def _base(image: EngineImage | ServiceImage, report: Report) -> str:
    """Return the catalogue's base, by the name that works here."""
    base = image.base or ""
    if here := name_here(base, image.digest):
        return here
    if image.digest and find_image(base):
        return pull_pinned(base, image.digest, report)
    return fetched(image)  # by the build


def _wheels(wheelhouse: Path | None) -> Path | None:
    named = os.environ.get(WHEELHOUSE_VARIABLE)
    return wheelhouse or (expanded(named) if named else None)


def build_arguments(
    image: EngineImage | ServiceImage,
    given: Mapping[str, str],
    *,
    wheelhouse: Path | None = None,
) -> Mapping[str, str]:
    """Return the arguments of a build: what is `given`, and the catalogue's but for the base.

    Raises:
        ConfigError: a base or wheel has no digest, or a source no commit.
    """
    arguments = {**image.build_args, **given}
    source = arguments.get("LMCACHE_SOURCE", "")
    if source and not _COMMIT.fullmatch(source):
        raise ConfigError(
            f"--build-arg: LMCACHE_SOURCE={source} does not name a commit by its 40 digits",
            hint=f"git ls-remote {_LMCACHE} TAG, and then: deploy images build {image.name} "
            f"--build-arg LMCACHE_SOURCE=git+{_LMCACHE}@COMMIT",
        )
    wheels = _wheels(wheelhouse) if image.build == _ROCM else None
    if wheels and not arguments.get("LMCACHE_SHA256"):
        raise ConfigError(
            f"the digest of LMCache's ROCm wheel in {wheels} is unknown",
            hint=f"sha256sum {wheels}/lmcache-*.whl, and with the digest that the release's page "
            f"shows: deploy images build {image.name} --build-arg LMCACHE_SHA256=DIGEST",
        )
    if "BASE" in given:
        return arguments
    if image.digest is None and not name_here(image.base or "", None):
        raise ConfigError(
            f"the digest of {image.base}, the base of {image.image}, is unknown",
            hint=f"docker buildx imagetools inspect {image.base}, and then: "
            f"deploy images build {image.name} --base {image.base}@sha256:DIGEST",
        )
    return {name: value for name, value in arguments.items() if name != "BASE"}


def name_here(name: str, digest: str | None) -> str:
    """Return the name of an image here: its digest, or its tag; "" if it has neither.

    The tag does not count if it was pulled from the same repository by another digest. An image
    from a file, or tagged from a mirror's, has no digest of that repository.
    """
    if digest and find_image(f"{name}@{digest}"):
        return f"{name}@{digest}"
    found = find_image(name)
    if found is None:
        return ""
    digests = found.digests_in(name)
    return name if not digests or digest in digests else ""


def pull_pinned(name: str, digest: str | None, report: Report, *, otherwise: str = "") -> str:
    """Pull an image, by its digest if that is known, and return its name here.

    If it cannot be pulled, this is the tag of another digest that is here, with a warning.

    Raises:
        MissingImage: it cannot be pulled, and its tag is not here; the hint is `otherwise`.
    """
    pinned = f"{name}@{digest}" if digest else name
    report(f"pulling {pinned}")
    try:
        pull_image(pinned, otherwise=otherwise)
    except MissingImage as exc:
        found = find_image(name)
        if found is None:
            raise
        report(
            f"warning: {exc.message}; using {name}, which is here with another digest "
            f"({', '.join(found.digests_in(name)) or found.id}). "
            f"For the pinned image, with a network: docker pull {pinned}"
        )
        return name
    return pinned
