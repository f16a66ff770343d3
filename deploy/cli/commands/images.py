"""The commands of the image catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.answer import Answer
from deploy.cli.app import app
from deploy.cli.options import Json
from deploy.cli.shared import progress
from deploy.errors import UsageError

images = typer.Typer(
    help="The images that stacks run in: list them, build or pull them.", no_args_is_help=True
)
app.add_typer(images, name="images")


@images.command("list")
def images_list(*, json: Json = False) -> Answer:
    """Show the catalogue, and which images are on this machine."""
    from dataclasses import asdict

    from deploy.output.views import images_view
    from deploy.workflows.images import image_rows

    rows = image_rows()
    return Answer("images list", {"images": [asdict(row) for row in rows]}, images_view(rows))


@images.command("build")
def images_build(
    names: Annotated[list[str], typer.Argument(help="Names of the catalogue, such as cpu router.")],
    *,
    base: Annotated[
        str | None, typer.Option(help="Build from this image instead of the catalogue's base.")
    ] = None,
    wheelhouse: Annotated[
        Path | None, typer.Option(help="A folder of wheels; then nothing is fetched.")
    ] = None,
    build_arg: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the Dockerfile; may be repeated.")
    ] = None,
    json: Json = False,
) -> Answer:
    """Build images from the Dockerfiles of the kit."""
    from deploy.workflows.images import build_images

    arguments = _pairs(build_arg or [])
    if base is not None:
        arguments["BASE"] = base
    built = build_images(tuple(names), arguments, wheelhouse=wheelhouse, report=progress())
    return Answer("images build", {"built": built}, "\n".join(f"built {name}" for name in built))


@images.command("pull")
def images_pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names of the catalogue; all that are pulled if none."),
    ] = None,
    *,
    json: Json = False,
) -> Answer:
    """Pull the images that are not built here, and the bases of those named that are."""
    from deploy.workflows.images import pull_images

    pulled = pull_images(tuple(names or ()), report=progress())
    return Answer("images pull", {"pulled": pulled}, "\n".join(f"pulled {n}" for n in pulled))


def _pairs(given: list[str]) -> dict[str, str]:
    wrong = [text for text in given if not text.partition("=")[0] or "=" not in text]
    if wrong:
        raise UsageError(
            f"--build-arg: '{wrong[0]}' is not NAME=VALUE",
            hint="deploy images build rocm --build-arg LMCACHE_ROCM_ARCH=gfx90a",
        )
    return {name: value for name, _, value in (text.partition("=") for text in given)}
