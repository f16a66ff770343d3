"""An end-to-end test has podman run an export: all that podman changes or leaves out is listed."""

from __future__ import annotations

import pytest

from deploy.workflows.export_folder import write_export
from tests.e2e.podman import (
    CHANGED,
    IGNORED,
    IGNORED_KINDS,
    PLAYED,
    WORKLOADS,
    Object,
    fields,
    place,
    pods,
)
from tests.unit.workflows.test_export import kustomized, made

TABLES = (*PLAYED, *CHANGED, *IGNORED)
# What the pods say where podman does not listen; a value stands for its field wherever it is.
SAID: dict[str, dict[str, set[object]]] = {
    "affinity": {"topologyKey": {"kubernetes.io/hostname"}, "weight": {100}},
    "automountServiceAccountToken": {"automountServiceAccountToken": {False}},
    "containers.lifecycle": {"command": {"pdkit_connector.drain", "300", "sleep", "5"}},
    "containers.readinessProbe": {"path": {"/health"}, "port": {"http"}, "failureThreshold": {2}},
    "containers.resources.requests.cpu": {"cpu": {"1", "8", "500m"}},
    "containers.startupProbe": {"path": {"/health", "/liveness"}, "failureThreshold": {6, 120}},
    "containers.terminationMessagePolicy": {"terminationMessagePolicy": {"FallbackToLogsOnError"}},
    "enableServiceLinks": {"enableServiceLinks": {False}},
    "nodeSelector": {"arch": {"amd64"}},
    "securityContext.fsGroupChangePolicy": {"fsGroupChangePolicy": {"OnRootMismatch"}},
    "securityContext.runAsNonRoot": {"runAsNonRoot": {True}},
    "securityContext.seccompProfile": {"type": {"RuntimeDefault"}},
    "terminationGracePeriodSeconds": {"terminationGracePeriodSeconds": {310, 355}},
    "topologySpreadConstraints": {
        "maxSkew": {1},
        "topologyKey": {"kubernetes.io/hostname"},
        "whenUnsatisfiable": {"ScheduleAnyway"},
    },
}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    folder = tmp_path_factory.mktemp("exported")
    write_export(made(vendor="cpu"), folder)
    return [one for kind in ("overlays", "check") for one in kustomized(folder / kind / "cpu")]


def seen(objects: list[Object]) -> list[tuple[str, object]]:
    return [field for pod in pods(objects).values() for field in fields(pod.spec)]


def test_every_field_and_every_kind_is_listed(objects: list[Object]) -> None:
    assert {place(path, TABLES) for path, _ in seen(objects)} == set(TABLES)
    assert {one["kind"] for one in objects} == {*IGNORED_KINDS, *WORKLOADS, "ConfigMap"}


@pytest.mark.parametrize("path", ["hostNetwork", "containers.stdin", "volumes.hostPath.path"])
def test_a_new_field_is_in_no_table(path: str) -> None:
    assert place(path, TABLES) is None


@pytest.mark.parametrize("row", IGNORED)
def test_fields_that_podman_ignores_are_correct_in_the_export(
    row: str, objects: list[Object]
) -> None:
    for name, values in SAID[row].items():
        found = {
            value
            for path, value in seen(objects)
            if place(path, [row]) and path.rpartition(".")[2].rpartition("/")[2] == name
        }
        assert values <= found, name
        assert found == values or name == "command", name


def test_podman_would_replace_no_variable(objects: list[Object]) -> None:
    for path, value in seen(objects):
        if path in ("containers.args", "containers.env.value"):
            assert "$" not in str(value), path


def test_pods_have_the_names_by_which_they_are_found(objects: list[Object]) -> None:
    found = {pod.name: pod.names for pod in pods(objects).values()}
    assert found == {
        "redis-0": ("redis", "redis-0.redis"),
        "producer-0": ("producer", "producer-0.producer"),
        "consumer-0": ("consumer", "consumer-0.consumer"),
        "router-0": ("router",),
        "router-1": ("router",),
        "check-0": (),
    }
