"""`deploy images`: what the catalogue says of images that are, or are not, on this machine."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Deploy
from tests.e2e.docker.conftest import BASE, BUILT_HERE, REPO, docker, failed, inspected


def test_list_shows_what_is_here(catalogue: dict[str, Any]) -> None:
    for name in BUILT_HERE:
        row = catalogue[name]
        (found,) = inspected(row["image"])
        assert row["here"] is True and row["how"] == "build"
        assert row["size_mib"] == found["Size"] // 2**20 > 100
    absent = [row for row in catalogue.values() if not row["here"]]
    assert absent, "nothing would show that 'here' can be false"
    for row in absent:
        assert docker("image", "ls", "-q", row["image"]) == ""
        assert row["size_mib"] == 0


def test_list_names_the_versions(catalogue: dict[str, Any]) -> None:
    cpu = catalogue["cpu"]
    (image,) = inspected(cpu["image"])
    labels = image["Config"]["Labels"]
    assert cpu["vllm"] == labels["dev.pdkit.vllm"] and cpu["lmcache"] == labels["dev.pdkit.lmcache"]
    assert (cpu["vendor"], cpu["default"], cpu["verdict"]) == ("cpu", True, "tested")
    assert catalogue["router"]["vendor"] == catalogue["router"]["verdict"] == ""
    assert catalogue["redis"]["how"] == "pull"


def test_list_prints_a_table(deploy: Deploy, catalogue: dict[str, Any]) -> None:
    ran = deploy.run("images", "list")
    assert ran.code == 0, ran
    rows = {line.split()[0]: line for line in ran.stdout.splitlines() if line.strip()}
    assert catalogue["cpu"]["image"] in rows["cpu"] and "no: " not in rows["cpu"]
    assert "no: " in next(rows[name] for name, row in catalogue.items() if not row["here"])


def test_built_images_run_as_an_unprivileged_user(catalogue: dict[str, Any]) -> None:
    for name in BUILT_HERE:
        (image,) = inspected(catalogue[name]["image"])
        assert image["Config"]["User"] == "10001:10001"
    (base,) = inspected(BASE)
    assert base["Config"]["User"] == ""


def test_a_bill_of_materials_has_all_that_is_in_an_image(
    catalogue: dict[str, Any], tmp_path: Path
) -> None:
    image = catalogue["router"]["image"]
    done = subprocess.run(
        (REPO / "scripts" / "sbom", tmp_path, image), capture_output=True, text=True, check=True
    )
    (file,) = tmp_path.iterdir()
    assert done.stdout.split() == [str(file)]
    components = json.loads(file.read_text())["components"]
    found = {
        (one["purl"][4:7], one["name"], one.get("version")) for one in components if "purl" in one
    }
    asked = ("--entrypoint=dpkg-query", image, "--show", "--showformat=${Package} ${Version}\n")
    debian = docker("run", "--rm", "--network=none", *asked).splitlines()
    assert len(debian) > 50
    assert {tuple(line.split()) for line in debian} == {one[1:] for one in found if one[0] == "deb"}
    router = (REPO / "images" / "router" / "requirements.lock").read_text()
    pins = set(re.findall(r"^(\S+)==([^\s;]+)", router, re.MULTILINE))
    assert pins <= {one[1:] for one in found if one[0] == "pyp"} and pins


def test_build_of_an_unknown_name_is_refused(deploy: Deploy) -> None:
    error = failed(deploy.run("images", "build", "nosuch", "--json"), code=2, name="config")
    assert "'nosuch'" in error["message"] and "redis-local" in error["message"]
    assert error["hint"] == "deploy images list"


def test_build_of_what_is_pulled_is_refused(deploy: Deploy) -> None:
    error = failed(deploy.run("images", "build", "redis", "--json"), code=2, name="config")
    assert error["hint"] == "deploy images pull redis"


def test_build_from_a_folder_without_wheels_is_refused(deploy: Deploy, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    options = ("--wheelhouse", str(tmp_path / "empty"), "--json")
    error = failed(deploy.run("images", "build", "router", *options), code=2, name="config")
    assert "holds no wheels" in error["message"] and "scripts/wheelhouse" in error["hint"]


def test_build_that_fails_says_so(deploy: Deploy, wheelhouse: Path) -> None:
    options = ("--wheelhouse", str(wheelhouse), "--base", "pdkit-e2e/nosuch:1", "--json")
    ran = deploy.run("images", "build", "redis-local", *options)
    error = failed(ran, code=3, name="missing_image")
    assert "could not be built" in error["message"]
    assert "pdkit-e2e/nosuch:1" in ran.stderr
