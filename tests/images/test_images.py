"""What images are built from, where no base can be had: Dockerfiles, and every pip line.

The package index is asked for the files of each pinned version, and nothing is downloaded but what
says so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO

UV = REPO / ".uv/bin/uv"
HADOLINT = Path(sys.executable).parent / "hadolint"
# Folders of wheels, as scripts/install takes them. uv tells no digests of what is in them.
FOLDERS = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Every list that an image or an environment is installed from, and its Python.
LISTS = {
    "images/cpu/requirements.lock": "3.11",
    "images/cpu/uv.txt": "3.11",
    "images/router/requirements.lock": "3.11",
    "images/redis/requirements.lock": "3.11",
    "images/cuda/requirements.txt": "3.12",
    "images/cuda/lmcache-mp.txt": "3.12",
    "images/cuda/process.lock": "3.12",
    "images/rocm/requirements.txt": "3.12",
    "images/rocm/build.txt": "3.12",
    "images/rocm/lmcache.txt": "3.12",
    "scripts/audit.lock": "3.12",
    "scripts/test-tools.lock": "3.11",
}
Pins = Mapping[str, frozenset[str]]


def pins(text: str) -> Pins:
    """Return 'name==version' → the digests of a list with hashes."""
    entries = re.findall(r"^([a-z0-9][^\s;]*==[^\s;]+)[^\n]*((?:\n {4}.*)*)", text, re.M)
    return {name: frozenset(re.findall(r"sha256:([0-9a-f]{64})", rest)) for name, rest in entries}


def on_the_index(names: Pins, python: str) -> Pins:
    """Return the same, as the index has it for an image's platform.

    Raises:
        subprocess.CalledProcessError: the index does not have one of them.
    """
    environ = {**os.environ, "UV_FIND_LINKS": FOLDERS.replace(" ", ",")}
    if os.environ.get("PIP_INDEX_URL"):
        environ.setdefault("UV_DEFAULT_INDEX", os.environ["PIP_INDEX_URL"])
    torch = any(name.startswith("torch==") for name in names)
    extra = ("--extra-index-url", TORCH_INDEX, "--index-strategy", "unsafe-best-match")
    ran = subprocess.run(
        (
            *(str(UV), "pip", "compile", "-", "--no-deps", "--generate-hashes", "--no-annotate"),
            *("--python-version", python, "--python-platform", "x86_64-manylinux_2_34"),
            *("--only-binary", ":all:", "--no-header", *(extra if torch else ())),
        ),
        input="\n".join(names),
        env=environ,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return pins(ran.stdout)


def unknown(listed: Pins, index: Pins) -> list[str]:
    """Return what is listed with a digest that no file of that version has, or with none."""
    return [name for name, digests in listed.items() if not digests or digests - index[name]]


@pytest.mark.parametrize(("name", "python"), LISTS.items())
def test_what_is_pinned_is_on_the_index_with_that_digest(name: str, python: str) -> None:
    listed = pins((REPO / name).read_text(encoding="utf-8"))
    if FOLDERS:  # torch's CPU build: scripts/install has held it against its digest
        listed = {pin: digests for pin, digests in listed.items() if not pin.startswith("torch==")}
    assert listed
    assert unknown(listed, on_the_index(listed, python)) == []


def test_every_list_is_looked_at() -> None:
    files = [file for folder in ("images", "scripts") for file in (REPO / folder).rglob("*")]
    pinned = [file for file in files if file.suffix in (".txt", ".lock")]
    found = {str(file.relative_to(REPO)) for file in pinned if "sha256:" in file.read_text()}
    assert found == set(LISTS)


def test_a_digest_that_no_file_has_is_found() -> None:
    text = (REPO / "images/cuda/requirements.txt").read_text(encoding="utf-8")
    wrong = pins(text.replace("sha256:34b8", "sha256:34b9"))
    assert unknown(wrong, pins(text)) == ["xxhash==4.1.0"]
    assert unknown({"xxhash==4.1.0": frozenset()}, pins(text)) == ["xxhash==4.1.0"]


def test_a_version_that_is_not_there_is_found() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        on_the_index({"xxhash==4.1.99": frozenset()}, "3.12")
    assert "xxhash==4.1.99" in caught.value.stderr


def test_bills_of_materials_name_every_package_and_its_digests(tmp_path: Path) -> None:
    subprocess.run((str(REPO / "scripts/sbom"), str(tmp_path)), check=True, timeout=300)
    built = {name: REPO / name for name in LISTS if "requirements" in name}
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{file.parent.name}.cdx.json" for file in built.values()
    }
    for file in built.values():
        text = (tmp_path / f"{file.parent.name}.cdx.json").read_text(encoding="utf-8")
        listed = pins(file.read_text(encoding="utf-8"))
        assert digests_by_pin(json.loads(text)) == listed and listed


def digests_by_pin(bill: Any) -> Pins:
    return {
        f"{part['name']}=={part['version']}": frozenset(
            one["content"] for place in part["externalReferences"] for one in place["hashes"]
        )
        for part in bill["components"]
    }


def linted(*files: Path) -> str:
    argv = (str(HADOLINT), "--no-color", "--config", str(REPO / ".hadolint.yaml"))
    ran = subprocess.run((*argv, *map(str, files)), capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr if ran.returncode else ""


def test_dockerfiles_are_linted() -> None:
    files = sorted((REPO / "images").glob("*/Dockerfile"))
    assert len(files) == 5
    assert linted(*files) == ""


def test_the_linter_finds_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "Dockerfile"
    shutil.copy(REPO / "images/cuda/Dockerfile", file)
    file.write_text(file.read_text() + 'RUN cd /tmp && echo "$(cat x)\n')
    assert "Dockerfile" in linted(file)
