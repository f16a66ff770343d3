"""The images of a spec, and whether their versions work together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from deploy.config.catalog import (
    LIST_COMMAND,
    Catalog,
    EngineImage,
    ServiceImage,
    load_catalog,
    reference,
    reference_problem,
)
from deploy.config.compat import (
    PairRule,
    connector_of,
    image_for,
    judge,
    options_on,
    require_compatible,
)
from deploy.config.fields import IN_ENGINES
from deploy.config.spec import StackSpec
from deploy.errors import ConfigError
from deploy.stack.containers import ContainerImages
from deploy.stack.service import MONITORING_ROLES
from deploy.workflows.prepare import Report


@dataclass(frozen=True)
class StackImages:
    """The images of a spec, by name."""

    engine: EngineImage
    router: ServiceImage
    redis: ServiceImage
    monitoring: tuple[ServiceImage, ...] = ()

    @property
    def by_name(self) -> ContainerImages:
        """The references of the images, as a layout takes them; ids are not known yet."""
        return self.named(reference)

    def named(self, name: Callable[[EngineImage | ServiceImage], str]) -> ContainerImages:
        """Return the references that `name` gives to the images."""
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
    """Return the images of a spec: its own, else the catalogue's for the vendor and connector.

    Raises:
        ConfigError: a profile that is unknown or another vendor's, or no image reference.
    """
    catalog = load_catalog()
    wanted = image_for(vendor, spec.connector or IN_ENGINES)
    engine = catalog.named(spec.image) if spec.image else wanted
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
    spec: StackSpec,
    vendor: str,
    vllm: str | None,
    lmcache: str | None,
    report: Report,
    rules: Iterable[PairRule] | None = None,
) -> None:
    """Refuse versions that do not work together, before anything is started.

    Args:
        rules: the table of pairs; the one that ships with pdkit if None.

    Raises:
        ConfigError: the pair is known to be bad, or is untested; names a good one.
    """
    verdict = judge(
        vendor,
        vllm,
        lmcache,
        connector=connector_of(spec, vendor, vllm, lmcache),
        on=options_on(spec),
        rules=rules,
    )
    warning = require_compatible(verdict, allow_untested=spec.allow_untested)
    if warning:
        report(f"warning: {warning}")
