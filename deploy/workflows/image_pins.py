"""Pinned images: taken by their digest, or by the tag that is on this machine."""

from __future__ import annotations

from deploy.errors import MissingImage
from deploy.runtime.compose.images import find_image, pull_image
from deploy.workflows.prepare import Report


def name_here(name: str, digest: str | None) -> str:
    """Return how an image is named here: by its digest, else by its tag; "" if by neither.

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
