"""Containers, as Docker's client has them."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deploy.errors import MachineError

LET_DIE = {"Name": "no"}


def reloaded(container: Any) -> Any | None:
    """Return the container as it is now; None if it was removed."""
    from docker.errors import NotFound

    try:
        container.reload()
    except NotFound:
        return None
    return container


def docker_error() -> type[Exception]:
    """Return the base of the errors of Docker's client, which is imported only where it is used."""
    from docker.errors import DockerException

    found: type[Exception] = DockerException
    return found


def end_containers(containers: list[Any], grace_s: float) -> None:
    """Stop containers together, then remove them.

    Raises:
        MachineError: Docker could not remove one.
    """

    def end(container: Any) -> None:
        with contextlib.suppress(docker_error()):
            container.update(restart_policy=LET_DIE)
            container.stop(timeout=max(1, round(grace_s)))
        with contextlib.suppress(docker_error()):
            container.remove(force=True, v=True)

    with ThreadPoolExecutor(max_workers=max(1, len(containers))) as pool:
        list(pool.map(end, containers))
    left = [container.name for container in containers if reloaded(container) is not None]
    if left:
        raise MachineError(
            f"Docker could not remove {', '.join(left)}; their ports and GPUs may be in use",
            hint=f"docker rm -f {' '.join(left)}, else restart Docker; then deploy down again",
        )
