"""The Job of an export that checks the stack: its objects, its program, and what it is told."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.config.spec import StackSpec
from deploy.errors import StateError
from deploy.stack.cluster.code import CodeMap, check_code
from deploy.workflows.cluster_document import read_document
from deploy.workflows.export import Export
from deploy.workflows.export_folder import next_commands, write_export
from tests.unit.stack.cases import machine_with
from tests.unit.workflows.test_export import (
    SECRET,
    VENDORS,
    Object,
    breaches,
    kustomized,
    made,
    may_reach,
    named,
    pods,
    role,
    secret_keys,
)

REDIS_OWN = {"url_file": Path("/home/me/redis-url"), "tls_files": [Path("/home/me/ca.pem")]}


def document(found: Export) -> str:
    (vendor,) = found.pods
    return found.files[f"check/{vendor}/stack.json"]


def job_of(found: Export) -> Object:
    (vendor,) = found.pods
    return dict(yaml.safe_load(found.files[f"check/{vendor}/job.yaml"]))


@pytest.fixture(scope="module", params=VENDORS)
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A vendor's stack and its check in one kustomization, as one `kubectl apply -k` takes them."""
    folder = tmp_path_factory.mktemp("together")
    write_export(made(vendor=request.param), folder)
    (folder / "mine").mkdir()
    resources = f"resources: [../overlays/{request.param}, ../check/{request.param}]\n"
    (folder / "mine" / "kustomization.yaml").write_text(resources)
    return kustomized(folder / "mine")


def test_the_pod_is_restricted_and_never_tries_twice(together: list[Object]) -> None:
    pod = pods(together)["check"]
    assert breaches(pod) == []
    assert pod["restartPolicy"] == "Never"
    spec = named(together, "Job", "check")["spec"]
    assert spec["backoffLimit"] == 0
    # Engines may take 600 s to become ready.
    assert spec["activeDeadlineSeconds"] > 600
    assert "nvidia.com/gpu" not in json.dumps(pod["containers"]), "it takes no GPU from an engine"


def test_the_check_runs_in_the_engines_image(together: list[Object]) -> None:
    found = pods(together)
    (check,), (engine,) = (found[name]["containers"] for name in ("check", "producer"))
    assert check["image"] == engine["image"]
    assert check["command"][0] == engine["command"][0]
    assert found["check"].get("tolerations") == found["producer"].get("tolerations")


def test_the_check_may_reach_every_service(together: list[Object]) -> None:
    for target, port in (("producer", 8000), ("consumer", 8000), ("redis", 6379), ("router", 8000)):
        assert may_reach(together, role("check"), target, port)
    for other in (role("router"), {}, None):
        assert not may_reach(together, other, "redis", 6379)
    without = [one for one in together if one["metadata"]["name"] != "from-check"]
    assert not may_reach(without, role("check"), "redis", 6379)
    egress = named(together, "NetworkPolicy", "check")["spec"]["egress"]
    assert [port["port"] for rule in egress for port in rule["ports"]] == [6379, 8000, 8000, 53, 53]


def test_every_file_that_the_pod_mounts_is_there(together: list[Object]) -> None:
    volumes = {one["name"]: one for one in pods(together)["check"]["volumes"]}
    for source in volumes["kit"]["projected"]["sources"]:
        own = source["configMap"]
        data = named(together, "ConfigMap", own["name"].rpartition("-")[0])["data"]
        assert {item["key"] for item in own["items"]} == data.keys()
    assert "stack.json" in named(together, "ConfigMap", "check-stack")["data"]


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ({}, {"api_key", "engine_key", "redis_password"}),
        ({"allow_keyless": True}, {"engine_key", "redis_password"}),
        ({"redis": {"integrity": "mac"}}, {"api_key", "engine_key", "redis_password"}),
        ({"redis": REDIS_OWN}, {"api_key", "engine_key", "redis_url", "ca.pem"}),
    ],
)
def test_the_check_has_the_secrets_that_it_needs(fields: dict[str, Any], keys: set[str]) -> None:
    found = made(vendor="cpu", **fields)
    assert set(secret_keys([job_of(found)])) == keys
    assert keys <= set(found.secrets)


def test_a_redis_of_the_users_own_is_reached_wherever_it_is() -> None:
    found = made(vendor="cpu", redis=REDIS_OWN)
    policies = list(yaml.safe_load_all(found.files["check/base/network-policies.yaml"]))
    assert policies[0]["spec"]["egress"] == [{}]
    (container,) = job_of(found)["spec"]["template"]["spec"]["containers"]
    mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
    assert mounts["/home/me/ca.pem"]["subPath"] == "ca.pem"


@pytest.mark.parametrize(("vendor", "name"), [("cpu", "cpu"), ("auto", "VENDOR")])
def test_the_next_commands_include_the_check(vendor: str, name: str) -> None:
    found = made(vendor=vendor, space="mine")
    *_, check, status, _ = next_commands(found, StackSpec(), Path("out dir"))
    assert check == f"deploy check --kubernetes 'out dir'/check/{name}"
    assert status == "deploy status --kubernetes --namespace mine"


def test_the_job_may_take_as_long_as_engines_and_pairs_need() -> None:
    found = made(topology="3p4d", timeouts={"ready_s": 1000})
    jobs = [yaml.safe_load(found.files[f"check/{vendor}/job.yaml"]) for vendor in found.pods]
    assert len(jobs) == 3
    assert {job["spec"]["activeDeadlineSeconds"] for job in jobs} == {1000 + 600 + 12 * 30}


# The program.


def imported(path: str, text: str) -> set[str]:
    """Return the files that a module's imports of the kit may mean, wherever it has them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deploy":
            found |= {str(node.module), *(f"{node.module}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names if one.name.split(".")[0] == "deploy"}
    stems = {name.replace(".", "/") for name in found}
    return {f"{stem}{end}" for stem in stems for end in (".py", "/__init__.py")}


def lacking(maps: tuple[CodeMap, ...], repo: Path) -> set[str]:
    """Return the modules of the kit that the program may ask for and does not find."""
    files = {path: text for one in maps for path, text in one.files.items()}
    asked = {
        name
        for path, text in files.items()
        if path.endswith(".py")
        for name in imported(path, text)
    }
    return {name for name in asked - files.keys() if (repo / name).is_file()}


def test_the_check_has_every_module_that_it_imports(repo: Path) -> None:
    maps = check_code("deploy.cli.cluster_check")
    assert lacking(maps, repo) == set()
    first, *rest = maps
    assert lacking(tuple(rest), repo) & first.files.keys(), "the test notices what is left out"


def test_the_check_has_no_module_that_it_does_not_import() -> None:
    paths = {path for one in check_code("deploy.cli.cluster_check") for path in one.files}
    assert "deploy/cli/cluster_check.py" in paths
    assert not [path for path in paths if path.startswith(("deploy/benchmark", "deploy/router"))]
    assert check_code("deploy.errors")[0].files.keys() == {
        "deploy/__init__.py", "deploy/errors.py", "images/catalog.yaml", "images/compat.yaml",
    }  # fmt: skip


# What it is told.


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"machines": 3, "topology": "1p3d"},
        {"topology": "4a+redis"},
        {"topology": "2a"},
        {"tp": 4, "layerwise": True, "save_decode_cache": True},
        {"redis": REDIS_OWN, "engine": {"env": {"PDKIT_DISABLE_FIXES": "B1"}}},
        {"model": "owner/name", "lmcache": {"chunk_size": 128}, "name": "other", "tp": 2},
    ],
)
@pytest.mark.parametrize("vendor", ["cuda", "cpu"])
def test_the_stack_is_planned_again_as_it_was(vendor: str, fields: dict[str, Any]) -> None:
    if vendor == "cpu" and fields.get("tp"):
        fields = {**fields, "tp": 1}
    found = made(vendor=vendor, **fields)
    again = read_document(document(found))
    plan = again.prepared.plan
    assert again.namespace == found.namespace
    engines = {name: count for name, count in found.pods[vendor].items() if name != "router"}
    redis = {"redis": len(plan.redis)} if plan.redis else {}
    names = [engine.name.rpartition("-")[0] for engine in plan.engines]
    assert engines == {**redis, **{name: names.count(name) for name in names}}
    assert plan.user_redis == ("redis" in fields)
    assert plan.chunk_size == fields.get("lmcache", {}).get("chunk_size", 256)
    assert (plan.layerwise, plan.tp) == ("layerwise" in fields, fields.get("tp", 1))
    assert again.prepared.spec.engine.env == fields.get("engine", {}).get("env", {})


def test_the_check_has_no_data_of_the_exporting_machine(tmp_path: Path) -> None:
    for name in ("key", "url", "token"):
        (tmp_path / name).write_text(f"redis://:{SECRET}@redis.example")
    found = made(
        machine_with("cuda", 0, 1), api_key_file=tmp_path / "key", hub_cache=tmp_path,
        hf_token_file=tmp_path / "token", redis={"url_file": tmp_path / "url"},
    )  # fmt: skip
    assert str(tmp_path) not in document(found)
    assert SECRET not in document(found)


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", "format", "spec", "machine"])
def test_a_document_of_another_version_is_refused(damage: str) -> None:
    text = damage
    if damage.isalpha():
        whole = json.loads(document(made(vendor="cpu")))
        text = json.dumps({**whole, damage: {"unknown": 1}})
    with pytest.raises(StateError, match="does not fit this version") as caught:
        read_document(text)
    assert "deploy export kubernetes" in caught.value.hint
