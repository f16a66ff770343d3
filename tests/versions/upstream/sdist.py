"""LMCache's source releases, of which only the tests are unpacked, and what those tests import."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from tests.conftest import REPO
from tests.wheels import cache_folder

HERE = Path(__file__).parent
SDISTS = HERE / "sdists.txt"
REQUIREMENTS = HERE / "requirements.txt"
BIN = REPO / ".uv" / "bin"


class NoTests(Exception):
    """This release cannot be tested: it has no sdist, or its sdist no tests."""


def pins() -> dict[str, str]:
    """Return version → its pinned line of sdists.txt, oldest first."""
    lines = SDISTS.read_text(encoding="utf-8").splitlines()
    return {line.partition("==")[2].split()[0]: line for line in lines if "==" in line}


def unpack_tests(version: str, folder: Path) -> None:
    """Put the release's `tests/` and `pytest.ini` into `folder`; raise NoTests.

    Its `lmcache/` is left out, for pytest would import that instead of the wheel's.
    """
    archive = _download(version, folder)
    with tarfile.open(archive) as sdist:
        for member in sdist.getmembers():
            top, _, member.name = member.name.partition("/")
            if top and (member.name == "pytest.ini" or member.name.startswith("tests/")):
                # With no filter, which Debian 12's Python 3.11.2 lacks: the hash is pinned.
                sdist.extract(member, folder)
    archive.unlink()
    if not (folder / "tests").is_dir():
        raise NoTests("its sdist holds no tests")


def _download(version: str, folder: Path) -> Path:
    """Fetch the sdist; pip also asks its setup.py for metadata, but nothing is built."""
    if version not in pins():
        raise NoTests(f"{SDISTS.name} pins no sdist of it")
    wanted = folder / "wanted.txt"
    wanted.write_text(pins()[version], encoding="utf-8")
    command = (
        str(BIN / "python"), "-m", "pip", "--python", sys.executable, "download", "--quiet",
        "--disable-pip-version-check", "--no-binary", ":all:", "--no-deps", "--no-build-isolation",
        "--require-hashes", "--requirement", str(wanted), "--dest", str(folder),
    )  # fmt: skip
    environ = {**os.environ, "NO_CUDA_EXT": "1"}
    if "UV_DEFAULT_INDEX" in environ:
        environ.setdefault("PIP_INDEX_URL", environ["UV_DEFAULT_INDEX"])
    done = subprocess.run(
        command, env=environ, check=False, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise NoTests(f"its sdist could not be fetched: {done.stderr.strip().splitlines()[-1]}")
    return next(folder.glob("*.tar.gz"))


def extra_packages() -> Path:
    """Return a folder with the packages of requirements.txt, installed once for these pins."""
    digest = sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    folder = cache_folder() / "upstream" / f"tools-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / ".complete").exists():
            command = (
                str(BIN / "uv"), "pip", "install", "--quiet", "--python", sys.executable,
                "--target", str(folder), "--no-deps", "--require-hashes",
                "--requirements", str(REQUIREMENTS),
            )  # fmt: skip
            environ = dict(os.environ)
            if "PIP_INDEX_URL" in environ:
                environ.setdefault("UV_DEFAULT_INDEX", environ["PIP_INDEX_URL"])
            subprocess.run(command, check=True, env=environ, timeout=300)
            (folder / ".complete").touch()
    return folder
