"""The exported CPU overlay runs: podman plays its pods, with real engines, and its check."""

from __future__ import annotations

import copy
import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from deploy.metrics.engine import CacheCounters
from deploy.metrics.page import parsed_page
from deploy.stack.layout import ENGINE_PORT
from deploy.workflows.cluster_status import ASK
from tests.e2e.conftest import UP_TIMEOUT_S, Deploy, eventually
from tests.e2e.docker.conftest import (  # noqa: F401 - fixtures
    catalogue,
    docker_held,
    engine,
    wheelhouse,
)
from tests.e2e.podman import Node, Object, Pod, pods
from tests.unit.workflows.test_export import kustomized

SETTINGS = {
    "vendor": "cpu",
    "topology": "1p2d",
    "redis": {"image": "redis-local", "memory_gib": 1},
    "engine": {"kv_cache_gib": 0.25, "max_model_len": 4096},
}
MACHINE = {"cpus": 2, "memory_mib": 12288}
KEYS = ("api_key", "engine_key", "redis_password")


@dataclass(frozen=True)
class Cluster:
    """An export that runs on one node, and its check, which does not yet."""

    node: Node
    pods: dict[str, Pod]
    job: Pod

    def await_ready(self, *names: str) -> None:
        for name in names:
            pod = self.pods[name]
            answers = partial(self.node.is_ready, pod)
            ready = eventually(answers, within_s=UP_TIMEOUT_S, every_s=0.5)
            assert ready, f"{name} is not ready\n{self.log(pod)}"

    def log(self, pod: Pod) -> str:
        said = self.node.podman("logs", "--tail=40", pod.container, check=False)
        return f"{said.stdout}\n{said.stderr}"

    def check(self, *options: str) -> subprocess.CompletedProcess[str]:
        spec = copy.deepcopy(self.job.spec)
        spec["containers"][0]["command"] += options
        return self.node.finished(replace(self.job, spec=spec))

    def assert_passes(self) -> None:
        ended = self.check()
        assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
        rows = [row.split() for row in ended.stdout.splitlines() if row.startswith("producer-")]
        # Both pairs: names with the addresses of pods, and what was hit of what can be.
        assert [row[-2:] for row in rows] == [["100.0", "%"]] * 2, ended.stdout
        for _, _, _, _, hits, eligible, *_ in rows:
            assert hits == eligible and int(hits) > 1000, ended.stdout


def _exported(folder: Path) -> Path:
    """Return the folder that the command writes."""
    (folder / "deploy.yaml").write_text(yaml.safe_dump(SETTINGS))
    (folder / "machine.yaml").write_text(yaml.safe_dump(MACHINE))
    told = ("-f", "deploy.yaml", "--inventory", "machine.yaml", "-o", "exported")
    ran = Deploy(folder).run("export", "kubernetes", *told)
    assert ran.code == 0, ran
    return folder / "exported"


def _images(objects: list[Object]) -> set[str]:
    """Return the images that pods run."""
    return {
        one["image"]
        for pod in pods(objects).values()
        for one in (*pod.spec["containers"], *pod.spec.get("initContainers", ()))
    }


@pytest.fixture(scope="module")
def cluster(
    catalogue: dict[str, Any],  # noqa: F811 - the fixture
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """Play all pods of the overlay, in the order of its objects, and wait until they serve."""
    assert shutil.which("podman"), "podman is not installed; scripts/test installs it as root"
    folder = tmp_path_factory.mktemp("node")
    exported = _exported(tmp_path_factory.mktemp("home"))
    overlay, check = (kustomized(exported / kind / "cpu") for kind in ("overlays", "check"))
    maps = {
        one["metadata"]["name"]: one["data"]
        for one in (*overlay, *check)
        if one["kind"] == "ConfigMap"
    }
    node = Node(folder, maps, {key: secrets.token_urlsafe(32) for key in KEYS})
    try:
        with docker_held():
            node.prepare(_images(overlay))
        made = Cluster(node, pods(overlay), pods(check)["check-0"])
        for pod in made.pods.values():
            node.play(pod)
        made.await_ready(*made.pods)
        yield made
    finally:
        node.clear()
        shutil.rmtree(folder)


def test_the_check_passes_for_every_pair(cluster: Cluster) -> None:
    cluster.assert_passes()


def test_an_engine_tells_its_counters_inside_its_pod(cluster: Cluster) -> None:
    """As `deploy status --kubernetes` asks; it comes after the check, whose hits they count."""
    consumer = cluster.pods["consumer-0"]
    command = (consumer.main["command"][0], "-I", "-c", ASK, str(ENGINE_PORT))
    told = cluster.node.podman("exec", consumer.container, *command)
    assert cluster.node.secret["engine_key"] not in told.stdout
    assert CacheCounters.read(parsed_page(told.stdout)).external_hits > 1000


def test_a_killed_engine_comes_back(cluster: Cluster) -> None:
    producer = cluster.pods["producer-0"]
    before = cluster.node.pid(producer)
    os.kill(before, signal.SIGKILL)
    assert eventually(lambda: cluster.node.pid(producer) not in (0, before))
    cluster.await_ready("producer-0")
    cluster.assert_passes()


def test_the_check_fails_without_redis(cluster: Cluster) -> None:
    cluster.node.remove(cluster.pods["redis-0"])
    # It waits for what is missing only as long as this.
    (name,) = (one for one in cluster.node.maps if one.startswith("check-stack-"))
    document: dict[str, Any] = json.loads(cluster.node.maps[name]["stack.json"])
    document["spec"].setdefault("timeouts", {})["ready_s"] = 1
    maps = {**cluster.node.maps, name: {"stack.json": json.dumps(document)}}
    hurried = replace(cluster, node=replace(cluster.node, maps=maps))
    ended = hurried.check()
    assert ended.returncode == 4, f"{ended.stdout}\n{ended.stderr}"
    assert "0 of 1 redis found" in ended.stderr


def test_the_check_fails_where_engines_have_another_password_than_redis(cluster: Cluster) -> None:
    secret = {**cluster.node.secret, "redis_password": secrets.token_urlsafe(32)}
    other = replace(cluster, node=replace(cluster.node, secret=secret))
    other.node.podman("pod", "rm", "--force", "--ignore", "--time=0", "redis-0")
    other.node.play(cluster.pods["redis-0"])
    other.await_ready("redis-0")
    ended = other.check("--json", "--junit=two machines")  # as `deploy check --kubernetes` asks
    assert ended.returncode == 1, f"{ended.stdout}\n{ended.stderr}"
    told = json.loads(ended.stdout)
    assert "[store_denied]" in told["text"]
    (suite,) = ElementTree.fromstring(told["junit"])  # noqa: S314 - our own
    assert suite.attrib["name"] == "two machines"
    failed = [case for case in suite if case.find("failure") is not None]
    assert len(failed) == int(suite.attrib["failures"]) > 0
    assert "store_denied" in str(failed[0].findtext("failure"))
