"""The commands of the image catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.app import app
from deploy.cli.options import Json
from deploy.cli.printing import progress
from deploy.cli.result import CommandResult
from deploy.errors import UsageError

images = typer.Typer(
    help="List, build and pull the images that stacks run in.", no_args_is_help=True
)
app.add_typer(images, name="images")


@images.command("list")
def images_list(*, json: Json = False) -> CommandResult:
    """List the catalogue's images, and which are on this machine."""
    from dataclasses import asdict
    from datetime import date

    from deploy.output.views import images_view
    from deploy.workflows.catalog_images import image_rows

    rows = image_rows(date.today())
    return CommandResult(
        "images list", {"images": [asdict(row) for row in rows]}, images_view(rows)
    )


@images.command("build")
def images_build(
    names: Annotated[list[str], typer.Argument(help="Images to build, such as cpu router.")],
    *,
    base: Annotated[
        str | None, typer.Option(help="Base image to build from (default: the catalogue's).")
    ] = None,
    wheelhouse: Annotated[
        Path | None,
        typer.Option(help="Folder of wheels to install from, without a network (default: PyPI)."),
    ] = None,
    build_arg: Annotated[
        list[str] | None,
        typer.Option(help="Build argument for the Dockerfile, NAME=VALUE; repeatable."),
    ] = None,
    attest: Annotated[
        bool,
        typer.Option("--attest", help="Attach an SBOM and provenance; Docker must support it."),
    ] = False,
    json: Json = False,
) -> CommandResult:
    """Build images from pdkit's Dockerfiles."""
    from deploy.workflows.catalog_images import build_images

    arguments = _pairs(build_arg or [])
    if base is not None:
        arguments["BASE"] = base
    built = build_images(
        tuple(names), arguments, wheelhouse=wheelhouse, report=progress(), attest=attest
    )
    return CommandResult(
        "images build", {"built": built}, "\n".join(f"built {name}" for name in built)
    )


@images.command("pull")
def images_pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Images to pull (default: every image that is not built here)."),
    ] = None,
    *,
    json: Json = False,
) -> CommandResult:
    """Pull images; for an image that is built here, pull its base."""
    from deploy.workflows.catalog_images import pull_images

    pulled = pull_images(tuple(names or ()), report=progress())
    return CommandResult(
        "images pull", {"pulled": pulled}, "\n".join(f"pulled {n}" for n in pulled)
    )


def _pairs(given: list[str]) -> dict[str, str]:
    wrong = [text for text in given if not text.partition("=")[0] or "=" not in text]
    if wrong:
        raise UsageError(
            f"--build-arg: '{wrong[0]}' is not NAME=VALUE",
            hint="deploy images build rocm --build-arg LMCACHE_ROCM_ARCH=gfx90a",
        )
    return {name: value for name, _, value in (text.partition("=") for text in given)}
