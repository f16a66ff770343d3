"""The images of a stack: named, found, pulled or built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from deploy.config.catalog import (
    LIST_COMMAND,
    Catalog,
    EngineImage,
    ServiceImage,
    load_catalog,
    reference,
    reference_problem,
)
from deploy.config.compat import judge, require_compatible
from deploy.config.spec import StackSpec
from deploy.errors import ConfigError
from deploy.runtime.compose.images import FoundImage, Versions, find_image, probe_versions
from deploy.stack.container_layout import ContainerImages
from deploy.stack.service import MONITORING_ROLES
from deploy.workflows.image_builds import build, build_arguments
from deploy.workflows.image_pins import name_here, pull_pinned
from deploy.workflows.prepare import Report

# The service image that is built here in the place of one that is pulled.
_BUILT_INSTEAD = {"redis": "redis-local"}

_Image = TypeVar("_Image", EngineImage, ServiceImage)


@dataclass(frozen=True)
class StackImages:
    """The images that a spec means, by name."""

    engine: EngineImage
    router: ServiceImage
    redis: ServiceImage
    monitoring: tuple[ServiceImage, ...] = ()

    @property
    def by_name(self) -> ContainerImages:
        """The references of the images, as a layout takes them; ids are not known yet."""
        return self._named(reference)

    @property
    def here(self) -> ContainerImages:
        """The same, as they are named on this machine."""
        return self._named(reference_here)

    def _named(self, name: Callable[[EngineImage | ServiceImage], str]) -> ContainerImages:
        return ContainerImages(
            engine=self.engine.image,
            router=name(self.router),
            redis=name(self.redis),
            engine_program=self.engine.interpreter,
            router_program=self.router.interpreter or "python3",
            **{service.name: name(service) for service in self.monitoring},
        )

    def needed(self, *, user_redis: bool) -> tuple[EngineImage | ServiceImage, ...]:
        """Return those that a stack runs; a Redis of the user's own runs elsewhere."""
        redis = () if user_redis else (self.redis,)
        return (self.engine, self.router, *redis, *self.monitoring)


def stack_images(spec: StackSpec, vendor: str) -> StackImages:
    """Return the images of a spec: its own, else the catalogue's for the vendor.

    Raises:
        ConfigError: a profile that is unknown or another vendor's, or no image reference.
    """
    catalog = load_catalog()
    engine = catalog.named(spec.image) if spec.image else catalog.default_for(vendor)
    if engine.vendor not in (None, vendor):
        raise ConfigError(
            f"'{spec.image}' is an image for {engine.vendor}, and the vendor is {vendor}",
            setting="image",
            hint=f"--vendor {engine.vendor} --image {spec.image}; for a stack that is up: "
            f"deploy swap {engine.vendor} --image {spec.image}",
        )
    if engine.vendor is None:  # a user's own, with the entrypoint shape of the vendor's images
        engine = replace(engine, interpreter=catalog.default_for(vendor).interpreter)
    return StackImages(
        engine,
        _service(catalog, "router", spec.router.image),
        _service(catalog, "redis", spec.redis.image),
        tuple(catalog.services[name] for name in MONITORING_ROLES) if spec.monitoring else (),
    )


def reference_here(image: EngineImage | ServiceImage) -> str:
    """Return what a stack names to run an image here: by its tag where no digest contradicts it."""
    if image.build or not image.digest:
        return image.image
    return name_here(image.image, image.digest) or reference(image)


def find_any(image: EngineImage | ServiceImage) -> FoundImage | None:
    """Return an image that is here; one of another digest is used if none can be pulled."""
    return find_image(reference_here(image)) or find_image(image.image)


def _service(catalog: Catalog, name: str, asked: str | None) -> ServiceImage:
    """Return a service's image; a reference that the catalogue knows keeps the way it is built.

    An image that is pulled, named by its tag alone, is taken by that.

    Raises:
        ConfigError: what is asked for is neither in the catalogue nor an image reference.
    """
    known = catalog.services[name]
    if asked is None:
        return known
    own = [one for one in catalog.services.values() if one.name.startswith(name)]
    for service in own:
        if asked == service.name or (service.build and asked == service.image):
            return service
    if problem := reference_problem(asked):
        names = ", ".join(service.name for service in own)
        raise ConfigError(
            f"{problem}; profiles: {names}", setting=f"{name}.image", hint=LIST_COMMAND
        )
    return replace(known, image=asked, build=None, digest=None)


def refuse_bad_pair(
    spec: StackSpec, vendor: str, vllm: str | None, lmcache: str | None, report: Report
) -> None:
    """Refuse versions that do not belong together, before anything is started.

    Raises:
        ConfigError: the pair is known to be bad, or nobody has proved it; names a good one.
    """
    verdict = judge(
        vendor, vllm, lmcache, layerwise=spec.layerwise, save_decode_cache=spec.save_decode_cache
    )
    warning = require_compatible(verdict, allow_unproven=spec.allow_unproven)
    if warning:
        report(f"warning: {warning}")


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
    assert engine is not None, "it was there, or has just been obtained"  # noqa: S101
    # The contents count, not the name.
    interpreter, held = _look_into(engine, known, spec)
    refuse_bad_pair(spec, vendor, held.vllm, held.lmcache, report)
    return replace(images.here, engine_id=engine.id, engine_program=interpreter)


def _look_into(found: FoundImage, known: EngineImage, spec: StackSpec) -> tuple[str, Versions]:
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
    if known.name or spec.allow_unproven:
        return known.interpreter, Versions(None, None)
    raise ConfigError(
        f"no vLLM found by {', '.join(tried)} in {known.image}",
        setting="image",
        hint=f"an image that has vLLM and LMCache: {LIST_COMMAND}",
    )


def found_images(images: StackImages, spec: StackSpec, vendor: str) -> ContainerImages:
    """Return the images without pulling or building; ids are known for those on this machine.

    Raises:
        ConfigError: versions that the catalogue states do not belong together.
    """
    if images.engine.vllm is not None:
        refuse_bad_pair(spec, vendor, images.engine.vllm, images.engine.lmcache, lambda _: None)
    engine = find_image(images.engine.image)
    return replace(images.here, engine_id=engine.id if engine else "")


def obtain(image: _Image, report: Report) -> _Image:
    """Build an image that the kit has a Dockerfile for, pull any other.

    It is returned without its digest if that cannot be pulled and its tag is here.

    Raises:
        ConfigError: it would be built on a base that nobody has checked.
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
