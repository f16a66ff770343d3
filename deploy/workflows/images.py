"""The images of a stack: found, pulled or built."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from deploy.config.catalog import (
    LIST_COMMAND,
    EngineImage,
    ServiceImage,
    load_catalog,
    reference,
)
from deploy.config.spec import StackSpec
from deploy.errors import ConfigError
from deploy.runtime.compose.images import FoundImage, ImageVersions, find_image, probe_versions
from deploy.stack.containers import ContainerImages
from deploy.workflows.image_builds import build, build_arguments, name_here, pull_pinned
from deploy.workflows.prepare import Report
from deploy.workflows.stack_images import StackImages, refuse_bad_pair

# The service image that is built here in the place of one that is pulled.
_BUILT_INSTEAD = {"redis": "redis-local"}

_Image = TypeVar("_Image", EngineImage, ServiceImage)


def reference_here(image: EngineImage | ServiceImage) -> str:
    """Return the reference by which a stack runs an image: the tag, unless its digest differs."""
    if image.build or not image.digest:
        return image.image
    return name_here(image.image, image.digest) or reference(image)


def find_any(image: EngineImage | ServiceImage) -> FoundImage | None:
    """Return an image that is here; one of another digest is used if none can be pulled."""
    return find_image(reference_here(image)) or find_image(image.image)


def obtain_images(
    images: StackImages, spec: StackSpec, vendor: str, report: Report
) -> ContainerImages:
    """Pull or build what is not on this machine, and return the images with their contents' ids.

    Raises:
        ConfigError: the engine image holds versions that do not belong together.
        MissingImage: one is not here and cannot be had.
    """

    def had(image: _Image) -> _Image:
        return image if find_image(reference_here(image)) else obtain(image, report)

    user_redis = spec.redis.url_file is not None
    images = StackImages(
        had(images.engine),
        had(images.router),
        images.redis if user_redis else had(images.redis),
        tuple(map(had, images.monitoring)),
    )
    return looked_into(images, spec, vendor, report)


def looked_into(
    images: StackImages, spec: StackSpec, vendor: str, report: Report
) -> ContainerImages:
    """Return the images with what is in the engines', which is on this machine.

    Raises:
        ConfigError: it holds versions that do not belong together.
    """
    known = images.engine
    engine = find_image(known.image)
    assert engine is not None, "it was there, or has just been obtained"  # noqa: S101 - for mypy
    # The contents count, not the name.
    interpreter, held = _look_into(engine, known, spec)
    refuse_bad_pair(spec, vendor, held.vllm, held.lmcache, report)
    return replace(images.named(reference_here), engine_id=engine.id, engine_program=interpreter)


def _look_into(found: FoundImage, known: EngineImage, spec: StackSpec) -> tuple[str, ImageVersions]:
    """Return the interpreter that has vLLM in an engine image, and what else it has.

    The path of Python in a user's own image is unknown, so the catalogue's paths are all tried.

    Raises:
        ConfigError: none of them has vLLM.
    """
    tried = load_catalog().interpreters_of(known)
    for interpreter in tried:
        held = probe_versions(found, interpreter)
        if held.vllm is not None:
            return interpreter, held
    if known.name or spec.allow_untested:
        return known.interpreter, ImageVersions(None, None)
    raise ConfigError(
        f"no vLLM found by {', '.join(tried)} in {known.image}",
        setting="image",
        hint=f"an image that has vLLM and LMCache: {LIST_COMMAND}",
    )


def found_images(images: StackImages) -> ContainerImages:
    """Return the images without pulling or building; ids are known for those on this machine."""
    engine = find_image(images.engine.image)
    return replace(images.named(reference_here), engine_id=engine.id if engine else "")


def obtain(image: _Image, report: Report) -> _Image:
    """Build an image that the kit has a Dockerfile for, pull any other.

    It is returned without its digest if that cannot be pulled and its tag is here.

    Raises:
        ConfigError: it would be built on a base without a digest.
        MissingImage: it can be neither built nor pulled.
    """
    if image.build:
        build(image, build_arguments(image, {}), report)
        return image
    used = pull_pinned(image.image, image.digest, report, otherwise=_otherwise(image))
    return image if used == reference(image) else replace(image, digest=None)


def _otherwise(image: EngineImage | ServiceImage) -> str:
    """Return the hint for an image that cannot be pulled if there is another way, else ""."""
    if not isinstance(image, ServiceImage) or image.name not in _BUILT_INSTEAD:
        return ""
    name = _BUILT_INSTEAD[image.name]
    return (
        f"deploy images build {name}, and {image.name}: {{image: {name}}} in deploy.yaml "
        "(with no network: docs/how-to/offline.md)"
    )
