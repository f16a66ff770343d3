"""Builds of the catalogue's images, from bases and sources with a digest."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from deploy.assets import asset
from deploy.config.catalog import EngineImage, ServiceImage, fetched
from deploy.errors import ConfigError
from deploy.home_folder import expanded
from deploy.runtime.compose.images import build_image, find_image
from deploy.workflows.image_pins import name_here, pull_pinned
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
    """Return the catalogue's base, as it is named here or can be fetched."""
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
