"""`deploy patches`: the connector's fixes, in a stack that runs or in an image."""

from __future__ import annotations

from deploy.assets import connector_path
from deploy.config.catalog import load_catalog
from deploy.errors import ConfigError, MissingImage, MissingTool, PdkitError, StateError
from deploy.runtime.compose.images import find_image
from deploy.runtime.fixes import FixReports, fixes_of_image, fixes_of_interpreter
from deploy.runtime.home import Home
from deploy.runtime.host import find_engine_python
from deploy.workflows.running import answering_pages, find_stack
from deploy.workflows.stack_patches import FixRow, Patches, stack_patches


def patches_of(home: Home, name: str, image: str | None) -> Patches:
    """Return the fixes of an image, else of a stack that is up, else of this interpreter.

    Raises:
        ConfigError: the image holds no vLLM and LMCache.
        MissingImage: it is not on this machine.
        MissingTool: there is no stack, and no engine can run here.
    """
    if image is not None:
        return _image_patches(image)
    running = find_stack(home, name)
    if running is not None:
        return stack_patches(running, answering_pages(running))
    if stacks := home.stacks_beside(name):
        raise StateError(
            f"no stack '{name}'; running stacks: {', '.join(stacks)}",
            hint=f"deploy patches --name {stacks[0]}",
        )
    python = find_engine_python(None)
    return _tried(f"{python}, no stack is up", fixes_of_interpreter(python, connector_path()))


def _image_patches(asked: str) -> Patches:
    catalog = load_catalog()
    engine = catalog.named(asked)
    found = find_image(engine.image)
    if found is None:
        get = "build" if engine.build else "pull"
        raise MissingImage(
            f"--image: {engine.image} is not on this machine",
            hint=f"deploy images {get} {engine.name}"
            if engine.name
            else f"docker pull {engine.image}",
        )
    refusal: PdkitError | None = None
    for interpreter in catalog.interpreters_of(engine):
        try:
            reports = fixes_of_image(found.id, interpreter, connector_path())
        except MissingTool as exc:
            refusal = exc
        else:
            return _tried(f"image {engine.image}", reports)
    raise ConfigError(f"--image: {refusal}", hint="deploy images list")


def _tried(where: str, reports: FixReports) -> Patches:
    rows = [
        FixRow(fix.id, fix.title, fix.link, {fix.state: ()}, fix.evidence) for fix in reports.fixes
    ]
    return Patches(where, reports.lmcache, reports.tested, rows)
