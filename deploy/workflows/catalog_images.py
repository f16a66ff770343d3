"""The images of the catalogue, as `deploy images` lists, pulls and builds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from deploy.config.catalog import EngineImage, ServiceImage, fetched, load_catalog
from deploy.config.compat import default_connector, judge
from deploy.errors import ConfigError
from deploy.runtime.compose.docker import answering_engine, engine_answers
from deploy.runtime.compose.images import pull_image
from deploy.stack.service import MONITORING_ROLES
from deploy.workflows.image_builds import build, build_arguments
from deploy.workflows.images import find_any
from deploy.workflows.prepare import Report


@dataclass(frozen=True)
class ImageRow:
    """An image of the catalogue, as `deploy images list` shows it.

    Attributes:
        verdict: what is known of its pair of versions; "" for services.
        size_mib: 0 if it is not on this machine, or no Docker engine answers.
        pinned, age_days: when its versions were chosen, and how long ago that is.
    """

    name: str
    image: str
    vendor: str
    default: bool
    vllm: str
    lmcache: str
    verdict: str
    here: bool
    size_mib: int
    how: str
    pinned: str
    age_days: int
    note: str


def named_images(names: tuple[str, ...]) -> list[EngineImage | ServiceImage]:
    """Return images of the catalogue by name.

    Raises:
        ConfigError: a name is not in the catalogue.
    """
    everything = _everything()
    unknown = [name for name in names if name not in everything]
    if unknown:
        raise ConfigError(
            f"'{unknown[0]}' is not an image of the catalogue; images: {', '.join(everything)}",
            hint="deploy images list",
        )
    return [everything[name] for name in names]


def _everything() -> Mapping[str, EngineImage | ServiceImage]:
    catalog = load_catalog()
    return {**catalog.engines, **catalog.services}


def build_images(
    names: tuple[str, ...],
    build_args: Mapping[str, str],
    *,
    wheelhouse: Path | None,
    report: Report,
    attest: bool = False,
) -> list[str]:
    """Build images of the catalogue, and return their references.

    `build_args` take precedence over the catalogue's. `attest` adds SBOM and provenance.

    Raises:
        ConfigError: one is not in the catalogue, or is pulled instead, or would be built of
            something that no digest or commit names.
        MissingImage: one cannot be built.
    """
    images = named_images(names)
    for image, name in zip(images, names, strict=True):
        if image.build is None:
            raise ConfigError(
                f"'{name}' is not built here, it is pulled", hint=f"deploy images pull {name}"
            )
    answering_engine()
    arguments = [build_arguments(image, build_args, wheelhouse=wheelhouse) for image in images]
    for image, given in zip(images, arguments, strict=True):
        build(image, given, report, wheelhouse=wheelhouse, attest=attest)
    return [image.image for image in images]


def pull_images(names: tuple[str, ...], *, report: Report) -> list[str]:
    """Pull images, or the bases of images that are built here; return the references.

    Raises:
        ConfigError: one is not in the catalogue.
        MissingImage: one cannot be pulled.
    """
    images = named_images(names) or [
        service
        for service in load_catalog().services.values()
        if service.build is None and service.name not in MONITORING_ROLES
    ]
    answering_engine()
    wanted = list(map(fetched, images))
    for reference in wanted:
        report(f"pulling {reference}")
        pull_image(reference)
    return wanted


def image_rows(today: date) -> list[ImageRow]:
    """Return the catalogue, and which images are on this machine if a Docker engine answers."""
    looks = engine_answers()
    return [_row(image, looks, today) for image in _everything().values()]


def _verdict(engine: EngineImage) -> str:
    of = (engine.vendor or "", engine.vllm, engine.lmcache)
    return judge(*of, connector=default_connector(*of)).verdict


def _row(image: EngineImage | ServiceImage, looks: bool, today: date) -> ImageRow:
    pinned = image.pinned or today
    found = find_any(image) if looks else None
    engine = image if isinstance(image, EngineImage) else EngineImage(image=image.image)
    return ImageRow(
        name=image.name,
        image=image.image,
        vendor=engine.vendor or "",
        default=engine.default,
        vllm=engine.vllm or "",
        lmcache=engine.lmcache or "",
        verdict=_verdict(engine) if engine is image else "",
        here=found is not None,
        size_mib=found.size_mib if found else 0,
        how="build" if image.build else "pull",
        pinned=pinned.isoformat(),
        age_days=(today - pinned).days,
        note=image.note,
    )
