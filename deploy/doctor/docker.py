"""Rules on the Docker engine, its Compose plugin, and the images of a stack."""

from __future__ import annotations

import re

from deploy.doctor.finding import Rule, Verdict, fail, ok, tried, warn
from deploy.doctor.observed import ImageSeen, Seen

# The oldest engine that stacks were run on.
MIN_ENGINE = (20, 10)


def _engine(seen: Seen) -> Verdict | None:
    docker = seen.docker
    if docker is None:
        return None
    if not docker.trouble:
        return _answering(docker.version, docker.compose, chosen=docker.chosen)
    if docker.chosen:
        return fail(docker.trouble, "the stack needs Docker (runtime compose)", docker.fix)
    if not docker.installed:
        return ok("Docker is not installed, so `up` starts processes (--runtime auto)")
    return warn(
        f"{docker.trouble}; `up` starts processes instead (--runtime auto)",
        "a stack that ran in containers before does not reuse its images or its KV",
        docker.fix,
    )


def _answering(version: str, compose: str, *, chosen: bool) -> Verdict:
    says = f"Docker {version or '(unknown version)'} answers, Compose {compose}"
    if not chosen:
        return ok(f"{says}; not used: the runtime is process")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < MIN_ENGINE:
        wanted = ".".join(map(str, MIN_ENGINE))
        return warn(
            f"{says}; pdkit is untested with Docker before {wanted}",
            "it may not support options of the stack's containers",
            "sudo apt-get install --only-upgrade docker-ce docker-ce-cli, or your system's package",
        )
    return ok(f"{says}; `up` starts containers")


def _images(seen: Seen) -> Verdict | None:
    if not seen.images:
        return None
    missing = [image for image in seen.images if not image.here]
    if not missing:
        return ok("all present: " + ", ".join(image.reference for image in seen.images))
    return warn(
        "not on this machine: " + ", ".join(image.reference for image in missing),
        "`up` builds or pulls them first, which takes minutes and needs a network",
        "; ".join(dict.fromkeys(image.get for image in missing)),
    )


def engine_image(seen: Seen) -> ImageSeen | None:
    """Return the image that engines run in; None if they are processes."""
    return seen.images[0] if seen.images else None


RULES = (
    Rule(
        "docker.engine",
        _engine,
        looks_at="Docker's engine and Compose plugin, whether this user may use them, and "
        "which runtime `up` would choose",
        fails="containers are requested but no engine answers, or the plugin is missing or older "
        "than 2.20",
        warns="Docker is installed but does not answer, so `--runtime auto` starts processes; the "
        "engine is older than the tested ones",
        fix="what the message names: install Docker, start it, or join the group `docker`; or "
        "`--runtime process`",
    ),
    Rule(
        "docker.images",
        _images,
        looks_at="the images of the engines, the router and Redis",
        warns="an image is not on this machine yet",
        fix="`deploy images build NAME` or `deploy images pull NAME`",
    ),
    Rule(
        "docker.project",
        tried("project", "containers of both would conflict"),
        looks_at="whether the Compose project of the stack's name is free",
        fails="it belongs to a stack of another home folder or user, or to something else",
        fix="`--name ANOTHER`",
    ),
)
