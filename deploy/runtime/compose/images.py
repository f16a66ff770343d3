"""Images on this machine: which are there, what is in them, and how to get one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import ConfigError, MissingImage
from deploy.runtime.compose.api import inspect
from deploy.runtime.compose.docker import DOCKER, run_docker
from deploy.runtime.host import FIND_VERSIONS

# Labels of images that the kit builds.
VLLM_LABEL = "dev.pdkit.vllm"
LMCACHE_LABEL = "dev.pdkit.lmcache"
WHEELHOUSE = "wheelhouse"
_HUB = ("docker.io", "index.docker.io")
_PROBE_TIMEOUT_S = 120
_TAG_TIMEOUT_S = 60


@dataclass(frozen=True)
class FoundImage:
    """An image that is on this machine.

    Attributes:
        id: of its content, such as 'sha256:…'.
        size_mib: of all its layers.
        digests: what registries call it, such as 'redis@sha256:…'; none where it came from a file,
            or was built here, unless Docker's containerd image store gave it one.
    """

    reference: str
    id: str
    labels: Mapping[str, str]
    size_mib: int
    digests: tuple[str, ...] = ()

    def digests_in(self, repository: str) -> tuple[str, ...]:
        """Return its digests, such as 'sha256:…', in the repository of a reference."""
        wanted = repository_of(repository)
        pairs = (name.partition("@") for name in self.digests)
        return tuple(digest for name, _, digest in pairs if repository_of(name) == wanted)


@dataclass(frozen=True)
class ImageVersions:
    """What is in an engine image; None if unknown."""

    vllm: str | None
    lmcache: str | None


def find_image(reference: str) -> FoundImage | None:
    """Return the image of that name, or None if this machine has none.

    Raises:
        DockerUnavailable: no Docker engine answers.
    """
    attrs = inspect(f"/images/{reference}")
    if attrs is None:
        return None
    labels = attrs.get("Config", {}).get("Labels") or {}
    size_mib = int(attrs.get("Size", 0)) // 2**20
    digests = tuple(attrs.get("RepoDigests") or ())
    return FoundImage(reference, str(attrs["Id"]), labels, size_mib, digests)


def repository_of(reference: str) -> str:
    """Return the repository of a reference in full, as Docker compares it.

    That of 'redis:8.4.0' is 'docker.io/library/redis'.
    """
    folder, slash, last = reference.partition("@")[0].rpartition("/")
    name = folder + slash + last.partition(":")[0]
    host, _, path = name.partition("/")
    if path and host not in _HUB and (host == "localhost" or set(host) & set(".:")):
        return name
    path = path if path and host in _HUB else name
    return f"docker.io/{path if '/' in path else f'library/{path}'}"


def pull_image(reference: str, *, otherwise: str = "") -> None:
    """Pull an image, its progress on stderr; one by tag and digest is given its tag, too.

    Raises:
        MissingImage: it cannot be pulled; the hint is `otherwise`, if there is another way.
    """
    done = subprocess.run(
        (DOCKER, "pull", reference),
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise MissingImage(
            f"the image {reference} is not on this machine, and cannot be pulled: "
            f"{lines[-1].strip() if lines else 'docker pull failed'}",
            hint=otherwise or f"docker load the image from a file, or see docker pull {reference}",
            details=tuple(lines[-4:-1]),  # the last is in the message
        )
    name, by_digest, _ = reference.partition("@")
    if by_digest and ":" in name.rpartition("/")[2]:
        # As people and `docker save` name it.
        run_docker(("tag", reference, name), timeout_s=_TAG_TIMEOUT_S)


def build_image(
    reference: str,
    folder: Path,
    build_args: Mapping[str, str],
    *,
    wheelhouse: Path | None,
    attest: bool = False,
) -> None:
    """Build an image from a folder with a Dockerfile, its progress on stderr.

    With a `wheelhouse`, a folder of wheels, nothing is fetched. `attest` adds SBOM and provenance.

    Raises:
        ConfigError: the wheelhouse holds no wheels.
        MissingImage: it cannot be built.
    """
    if wheelhouse is not None and not any(wheelhouse.glob("*.whl")):
        raise ConfigError(
            f"--wheelhouse: {wheelhouse} holds no wheels", hint=f"scripts/wheelhouse {wheelhouse}"
        )
    arguments = [part for pair in build_args.items() for part in ("--build-arg", "=".join(pair))]
    network = ("--network", "none") if wheelhouse else ()
    attested = ("--sbom=true", "--provenance=mode=max") if attest else ()
    with tempfile.TemporaryDirectory(prefix="pdkit-build-") as scratch:
        context = Path(scratch)
        _fill(context, folder, wheelhouse)
        done = subprocess.run(
            (DOCKER, "build", "--tag", reference, *network, *attested, *arguments, str(context)),
            env={**os.environ, "DOCKER_BUILDKIT": "1"},
            stdout=sys.stderr,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    if done.returncode:
        raise MissingImage(
            f"the image {reference} could not be built (docker build ended with "
            f"{done.returncode}; its output is above)",
            hint="--attest needs Docker's containerd image store: docs/how-to/images.md"
            if attest
            else "with no network: deploy images build NAME --wheelhouse DIR --base IMAGE",
        )


def probe_versions(image: FoundImage, interpreter: str) -> ImageVersions:
    """Return the versions in an engine image: from its labels, or from its packages."""
    if VLLM_LABEL in image.labels and LMCACHE_LABEL in image.labels:
        return ImageVersions(image.labels[VLLM_LABEL], image.labels[LMCACHE_LABEL])
    run = ("run", "--rm", "--network", "none", "--entrypoint", interpreter)
    done = run_docker(
        (*run, image.id, "-c", FIND_VERSIONS), timeout_s=_PROBE_TIMEOUT_S, check=False
    )
    try:
        vllm, lmcache = json.loads(done.stdout)
    except (ValueError, TypeError, RecursionError):  # an image may say anything
        return ImageVersions(None, None)
    return ImageVersions(vllm, lmcache)


def _fill(context: Path, folder: Path, wheelhouse: Path | None) -> None:
    """Put a build's files into its context: the folder's, and the wheels that its files name."""
    from packaging.utils import canonicalize_name

    shutil.copytree(folder, context, dirs_exist_ok=True)
    target = context / WHEELHOUSE
    target.mkdir(exist_ok=True)
    wanted = set(map(canonicalize_name, _wanted(folder)))
    for wheel in sorted(wheelhouse.iterdir()) if wheelhouse else ():
        if wheel.suffix == ".whl" and canonicalize_name(wheel.name.partition("-")[0]) not in wanted:
            continue  # what is sent to Docker is read and hashed
        try:
            os.link(wheel.resolve(), target / wheel.name)
        except OSError:  # another file system
            shutil.copy2(wheel, target / wheel.name)


def _wanted(folder: Path) -> set[str]:
    """Return the packages that a folder's lists and its Dockerfile name with a version."""
    texts = (file.read_text(encoding="utf-8") for file in folder.iterdir() if file.is_file())
    return {name for text in texts for name in re.findall(r"\b([\w.-]+)==", text)}
