"""`export kubernetes`: what kubectl makes of the folder, and what holds for every object of it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils as validator

from deploy.assets import connector_path, router_path
from deploy.config.spec import StackSpec
from deploy.errors import ConfigError
from deploy.metrics.engine import _CORE as ENGINE_METRICS
from deploy.planning.inventory import Inventory
from deploy.stack import build
from deploy.stack.document import document_yaml
from deploy.tiny_model import model_folder_name
from deploy.tiny_model.model_folder import is_whole
from deploy.workflows.export import SET, Export, ExportRequest, export
from deploy.workflows.export_folder import MARKER, next_commands, write_export
from deploy.workflows.prepare import Prepared, installed_kit
from tests.golden_documents import differences, golden_text
from tests.unit.conftest import HOME
from tests.unit.stack.cases import VENDORS, machine_with

Object = dict[str, Any]
VERSIONS = tuple(f"1.{minor}" for minor in range(30, 38))
# Of the Prometheus Operator and KEDA: Kubernetes has no schema of them.
CUSTOM = {"PodMonitor", "PrometheusRule", "ScaledObject"}
# Larger objects have no room in the note that `kubectl apply` keeps of them.
APPLIED_BYTES = 256 * 1024
KUBECTL = Path(sys.executable).with_name("kubectl")
SECRET = "a-secret-that-nobody-may-see"
WITH_COMPONENTS = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../overlays/cuda]
components: [../components/monitoring, ../components/node-cache, ../components/autoscaling]
"""


def made(
    inventory: Inventory | None = None,
    space: str | None = None,
    *,
    flavour: str = "plain",
    machines: int = 1,
    link_gbit: float | None = None,
    **fields: Any,
) -> Export:
    kit = replace(installed_kit(), version="1.2.3")
    wanted = ExportRequest(space, flavour, machines, link_gbit)
    # A hub's cache of the machine's own would tell a model's sizes; a user may have no home.
    hub = mock.patch.dict(os.environ, HF_HUB_CACHE="/nonexistent/hub")
    with hub:
        return export(StackSpec(**fields), HOME, inventory, wanted, kit=kit)


def kustomized(folder: Path) -> list[Object]:
    done = subprocess.run(
        (KUBECTL, "kustomize", folder),
        env={},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.load_all(done.stdout, Loader=yaml.CSafeLoader))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold the export of an empty spec, for every vendor, and a kustomization of a user's own."""
    target = tmp_path_factory.mktemp("exported")
    write_export(made(), target)
    (target / "mine").mkdir()
    (target / "mine" / "kustomization.yaml").write_text(WITH_COMPONENTS)
    return target


@pytest.fixture(scope="module")
def built(folder: Path) -> dict[str, list[Object]]:
    found = {vendor: kustomized(folder / "overlays" / vendor) for vendor in VENDORS}
    found |= {f"check/{vendor}": kustomized(folder / "check" / vendor) for vendor in VENDORS}
    return {**found, "components": kustomized(folder / "mine")}


def build_one(tmp_path: Path, vendor: str = "cpu", **fields: Any) -> list[Object]:
    write_export(made(vendor=vendor, **fields), tmp_path / "out")
    return kustomized(tmp_path / "out" / "overlays" / vendor)


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (
        one
        for one in objects
        if one["kind"] == kind
        and re.fullmatch(f"{name}(-[a-z0-9]{{10}})?", one["metadata"]["name"])
    )
    return found


def pods(objects: list[Object]) -> dict[str, Object]:
    """Return workload → pod."""
    return {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]
        for one in objects
        if one["kind"] in ("StatefulSet", "Deployment", "Job")
    }


def containers(objects: list[Object]) -> Iterator[Object]:
    for pod in pods(objects).values():
        yield from (*pod.get("initContainers", ()), *pod["containers"])


def main_container(objects: list[Object], workload: str) -> Object:
    (found,) = pods(objects)[workload]["containers"]
    return dict(found)


def container_in(found: Export, file: str) -> Object:
    """Return the one lasting container of a workload, as a file of the folder has it."""
    one = next(iter(yaml.safe_load_all(found.files[file])))
    (container,) = one["spec"]["template"]["spec"]["containers"]
    return dict(container)


# Schemas.


@pytest.fixture
def misfits() -> Iterator[Callable[[Object, str], str]]:
    """Return what is wrong with an object in a version of Kubernetes; "" if nothing is."""

    def wrong(one: Object, version: str) -> str:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as exc:
            return f"{one['kind']} {one['metadata']['name']}: {exc.message}"
        return ""

    with (
        mock.patch.object(validator, "schema_contents", SCHEMAS),
        mock.patch.object(validator, "all_versions", ALL_VERSIONS),
    ):
        yield wrong


SCHEMAS = cache(validator.schema_contents)
ALL_VERSIONS = cache(validator.all_versions)


@pytest.mark.parametrize(
    "version",
    [
        VERSIONS[0],
        *(pytest.param(version, marks=pytest.mark.full) for version in VERSIONS[1:-1]),
        VERSIONS[-1],
    ],
)
def test_every_object_fits_the_schemas(
    version: str, built: dict[str, list[Object]], misfits: Callable[[Object, str], str]
) -> None:
    seen = 0
    for objects in built.values():
        for one in objects:
            if one["kind"] not in CUSTOM:
                seen += 1
                assert not misfits(one, version)
    assert seen > 60


def test_a_field_that_does_not_exist_is_found(
    built: dict[str, list[Object]], misfits: Callable[[Object, str], str]
) -> None:
    one = json.loads(json.dumps(named(built["cpu"], "StatefulSet", "producer")))
    one["spec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Never"
    assert "imagePullPolice" in misfits(one, VERSIONS[-1])


@pytest.mark.parametrize("overlay", [*VENDORS, "components", "check/cuda"])
def test_no_object_is_too_large_to_apply(overlay: str, built: dict[str, list[Object]]) -> None:
    sizes = {one["metadata"]["name"]: len(json.dumps(one)) for one in built[overlay]}
    assert max(sizes.values()) < APPLIED_BYTES, sizes


# Rights.


def breaches(pod: Object) -> list[str]:
    """Return where a pod is more than the Pod Security Standard `restricted` lets in."""
    own = pod["securityContext"]
    found = []
    if not (own["runAsNonRoot"] and own["runAsUser"]):
        found.append("root")
    if own["seccompProfile"]["type"] not in ("RuntimeDefault", "Localhost"):
        found.append("seccomp")
    found += [name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    found += [volume["name"] for volume in pod["volumes"] if "hostPath" in volume]
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        rights = container["securityContext"]
        if rights["allowPrivilegeEscalation"] or rights["capabilities"] != {"drop": ["ALL"]}:
            found.append(container["name"])
        if rights.keys() & {"privileged", "runAsUser", "procMount"}:
            found.append(container["name"])
        if not rights["readOnlyRootFilesystem"]:
            found.append(container["name"])
    return found


@pytest.mark.parametrize("vendor", VENDORS)
def test_every_pod_is_restricted(vendor: str, built: dict[str, list[Object]]) -> None:
    for pod in pods(built[vendor]).values():
        assert breaches(pod) == []
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "else REDIS_PORT and the like are set"
    levels = named(built[vendor], "Namespace", "pdkit")["metadata"]["labels"]
    assert levels["pod-security.kubernetes.io/enforce"] == "restricted"


def test_a_folder_of_the_node_is_a_breach_that_the_namespace_allows(
    built: dict[str, list[Object]],
) -> None:
    found = built["components"]
    assert breaches(pods(found)["producer"]) == ["hub"]
    levels = named(found, "Namespace", "pdkit")["metadata"]["labels"]
    assert levels["pod-security.kubernetes.io/enforce"] == "privileged"
    claims = named(found, "StatefulSet", "consumer")["spec"]["volumeClaimTemplates"]
    assert [claim["metadata"]["name"] for claim in claims] == ["cache"]


def test_quantities_are_written_as_the_cluster_keeps_them(built: dict[str, list[Object]]) -> None:
    text = yaml.safe_dump(built["cuda"])
    mebibytes = list(map(int, re.findall(r" (\d+)Mi$", text, re.M)))
    assert mebibytes and not [number for number in mebibytes if number % 1024 == 0]
    assert main_container(built["cuda"], "router")["resources"]["limits"]["memory"] == "2Gi"


@pytest.mark.parametrize("vendor", VENDORS)
def test_every_container_has_limits(vendor: str, built: dict[str, list[Object]]) -> None:
    for container in containers([*built[vendor], *built[f"check/{vendor}"]]):
        own = container["resources"]
        assert own["limits"]["memory"]
        assert own["requests"].keys() >= {"cpu", "memory"}
    for pod in pods(built[vendor]).values():
        for volume in pod["volumes"]:
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""})


# GPUs.


@pytest.mark.parametrize(
    ("vendor", "resource"), [("cuda", "nvidia.com/gpu"), ("rocm", "amd.com/gpu")]
)
def test_engines_get_as_many_gpus_as_ranks(vendor: str, resource: str) -> None:
    found = made(vendor=vendor, tp=4, topology="1p3d")
    for role in ("producer", "consumer"):
        file = f"overlays/{vendor}/{role}.yaml"
        engine = container_in(found, file)
        assert engine["resources"]["limits"][resource] == "4"
        assert engine["resources"]["requests"][resource] == "4"
        assert engine["args"][(at := engine["args"].index("--tensor-parallel-size")) : at + 2] == [
            "--tensor-parallel-size",
            "4",
        ]
        pod = yaml.safe_load(found.files[file])["spec"]["template"]["spec"]
        assert pod["tolerations"][0]["key"] == resource


def test_redis_may_be_where_its_memory_was_planned(built: dict[str, list[Object]]) -> None:
    for vendor in VENDORS:
        found = {name: pod.get("tolerations") for name, pod in pods(built[vendor]).items()}
        assert found["redis"] == found["producer"] == found["consumer"]
        assert found["router"] is None
    assert pods(built["cuda"])["redis"]["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_amd_gpus_need_groups_and_a_filter_of_calls(
    built: dict[str, list[Object]], folder: Path
) -> None:
    rights = pods(built["rocm"])["producer"]["securityContext"]
    assert rights["supplementalGroups"] == [44, 109]
    profile = rights["seccompProfile"]["localhostProfile"]
    assert (folder / "overlays/rocm/nodes/seccomp" / profile).is_file()
    assert "supplementalGroups" not in pods(built["cuda"])["producer"]["securityContext"]


# The network.


def matches(selector: Object, labels: dict[str, str]) -> bool:
    exact = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in exact.items()) and all(
        labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ())
    )


def may_reach(objects: list[Object], source: Object | None, target: str, port: int) -> bool:
    """Tell whether pods with these labels reach a workload; None is a pod of another namespace."""
    labels = next(
        one["spec"]["template"]["metadata"]["labels"]
        for one in objects
        if one["kind"] in ("StatefulSet", "Deployment") and one["metadata"]["name"] == target
    )
    policies = [
        one["spec"]
        for one in objects
        if one["kind"] == "NetworkPolicy" and matches(one["spec"]["podSelector"], labels)
    ]
    rules = [rule for policy in policies for rule in policy.get("ingress", ())]
    return not policies or any(
        port in [one["port"] for one in rule["ports"]]
        and (
            "from" not in rule
            or any(
                source is not None
                and "podSelector" in peer
                and matches(peer["podSelector"], source)
                for peer in rule["from"]
            )
        )
        for rule in rules
    )


def role(name: str) -> Object:
    return {
        "app.kubernetes.io/name": "pdkit",
        "app.kubernetes.io/instance": "pdkit",
        "app.kubernetes.io/component": name,
    }


def test_only_engines_reach_redis(built: dict[str, list[Object]]) -> None:
    objects = built["cuda"]
    for engine in ("producer", "consumer"):
        assert may_reach(objects, role(engine), "redis", 6379)
    for other in (role("router"), {}, None):
        assert not may_reach(objects, other, "redis", 6379)
    open_to_all = [one for one in objects if one["kind"] != "NetworkPolicy"]
    assert may_reach(open_to_all, role("router"), "redis", 6379)


def test_only_the_router_reaches_engines_and_everybody_the_router(
    built: dict[str, list[Object]],
) -> None:
    objects = built["cpu"]
    assert may_reach(objects, role("router"), "consumer", 8000)
    for other in (role("producer"), {}, None):
        assert not may_reach(objects, other, "consumer", 8000)
    assert may_reach(objects, None, "router", 8000)
    assert not may_reach(objects, None, "router", 9000)


# Secrets.


def test_no_secret_is_in_the_folder(tmp_path: Path) -> None:
    key, url = tmp_path / "key", tmp_path / "url"
    key.write_text(SECRET)
    url.write_text(f"rediss://:{SECRET}@redis.example:6380")
    with mock.patch.dict("os.environ", {"HF_TOKEN": SECRET}):
        files = made(
            vendor="cuda", api_key_file=key, model="owner/name",
            redis={"url_file": url, "tls_files": [tmp_path / "ca.pem"]},
        ).files  # fmt: skip
    assert not [name for name, text in files.items() if SECRET in text or "kind: Secret" in text]


def test_a_secret_in_a_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="MY_TOKEN looks like a secret"):
        made(engine={"env": {"MY_TOKEN": SECRET}})


def test_the_command_makes_every_key_that_pods_mount(tmp_path: Path) -> None:
    fields = {"vendor": "cpu", "redis": {"integrity": "mac"}}
    found = made(**fields)
    create = next_commands(found, StackSpec(**fields), tmp_path)[1]
    assert "--from-literal" not in create, "users of the machine see arguments"
    assert re.findall(r"--from-file=(\w+)=<\(openssl rand", create) == [
        "api_key", "engine_key", "kv_key", "redis_password",
    ]  # fmt: skip
    write_export(found, tmp_path / "out")
    keys = set(secret_keys(kustomized(tmp_path / "out" / "overlays" / "cpu")))
    assert keys - set(re.findall(r"=(\w+)=", create)) == {"hf_token"}
    spec = StackSpec(**fields, hf_token_file=tmp_path / "token")
    assert f"--from-file=hf_token={tmp_path / 'token'}" in next_commands(found, spec, tmp_path)[1]


def test_new_keys_are_made_by_the_command_that_is_typed(tmp_path: Path) -> None:
    create = next_commands(made(vendor="cpu"), StackSpec(vendor="cpu"), tmp_path)[1]
    typed = create.replace("kubectl", shlex.quote(str(KUBECTL)), 1)
    (tmp_path / "openssl").write_text("#!/bin/sh\nprintf '%064d\\n' $$\n")
    (tmp_path / "openssl").chmod(0o755)
    done = subprocess.run(
        ("bash", "-c", f"{typed} --dry-run=client --output=json"),
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "KUBECONFIG": os.devnull},
        capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    data = json.loads(done.stdout)["data"]
    values = {key: base64.b64decode(value).decode() for key, value in data.items()}
    assert set(values) == {"api_key", "engine_key", "redis_password"}
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in values.values()), "no line end"
    assert len(set(values.values())) == 3


def secret_keys(objects: list[Object]) -> Iterator[str]:
    """Yield the keys of the Secret that pods mount."""
    for pod in pods(objects).values():
        for volume in pod["volumes"]:
            sources = volume.get("projected", {}).get("sources", [])
            secrets = [volume.get("secret"), *(source.get("secret") for source in sources)]
            yield from (item["key"] for one in filter(None, secrets) for item in one["items"])


def test_a_redis_of_the_users_own(tmp_path: Path) -> None:
    ca, url = tmp_path / "ca.pem", tmp_path / "url"
    fields: dict[str, Any] = {"redis": {"url_file": url, "tls_files": [ca]}}
    objects = build_one(tmp_path, **fields)
    assert "redis" not in pods(objects)
    mounts = {one["mountPath"]: one for one in main_container(objects, "consumer")["volumeMounts"]}
    assert mounts[str(ca)]["subPath"] == "ca.pem"
    create = next_commands(made(vendor="cpu", **fields), StackSpec(**fields), tmp_path)[1]
    assert f"--from-file=redis_url={url}" in create
    assert f"--from-file=ca.pem={ca}" in create


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://redis.example", "does not contain a Redis URL"),
        ("redis://:pa'ss@redis.example", "is invalid"),
        ("redis-sentinel://localhost:26379/main", "means the container itself"),
        ("unix:///run/redis.sock", "is a socket of this machine"),
        ("rediss://redis.example?ssl_ca_certs=/etc/other.pem", "URL names /etc/other.pem"),
    ],
)
def test_a_url_that_no_pod_can_use_is_refused(url: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text(url)
    with pytest.raises(ConfigError, match=words) as caught:
        made(vendor="cpu", redis={"url_file": file})
    assert not caught.value.retry, "no option of `export` changes that"
    # Where the file is elsewhere, nothing is known of it.
    file.unlink()
    assert made(vendor="cpu", redis={"url_file": file}).files


def test_an_export_has_a_key_unless_keyless_is_allowed() -> None:
    file = "overlays/cpu/router.yaml"
    assert "--key-file" in container_in(made(vendor="cpu"), file)["args"]
    keyless = made(vendor="cpu", allow_keyless=True)
    assert "--key-file" not in container_in(keyless, file)["args"]


# What runs in the pods.


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_engines_run_as_they_do_under_compose(
    vendor: Any, prepared: Callable[..., Prepared], tmp_path: Path
) -> None:
    node = machine_with(vendor, 0, 1)
    services = prepared(vendor=vendor, runtime="compose", machine=node).stack.services
    write_export(made(node, vendor=vendor), tmp_path)
    objects = kustomized(tmp_path / "overlays" / vendor)
    for role_ in ("producer", "consumer"):
        (service,) = (one for one in services if one.role == role_)
        engine = main_container(objects, role_)
        assert (*engine["command"], *engine["args"]) == service.argv
        env = {one["name"]: one["value"] for one in engine["env"]}
        other = {
            key for key in env.keys() | service.env.keys() if env.get(key) != service.env.get(key)
        }
        assert other == {
            "HOME", "TORCHINDUCTOR_CACHE_DIR", "HF_TOKEN_PATH", "LMCACHE_CONFIG_FILE",
        }  # fmt: skip


def test_a_dollar_is_not_a_variable_of_kubernetes() -> None:
    engine = {"args": ["--seed", "$(HOME)"], "env": {"A": "$$x"}}
    found = container_in(made(vendor="cpu", engine=engine), "overlays/cpu/producer.yaml")
    assert "$$(HOME)" in found["args"]
    assert {"name": "A", "value": "$$$$x"} in found["env"]


def mounted(objects: list[Object], workload: str, volume: str) -> dict[str, str]:
    """Return path → text of what a projected volume shows a pod."""
    (found,) = (one for one in pods(objects)[workload]["volumes"] if one["name"] == volume)
    texts = {}
    for source in found["projected"]["sources"]:
        data = named(objects, "ConfigMap", source["configMap"]["name"])["data"]
        texts |= {item["path"]: data[item["key"]] for item in source["configMap"]["items"]}
    return texts


@pytest.mark.parametrize(
    ("workload", "root"), [("consumer", connector_path()), ("router", router_path())]
)
def test_pods_have_all_of_the_kits_code(
    workload: str, root: Path, built: dict[str, list[Object]]
) -> None:
    there = {file.relative_to(root).as_posix(): file.read_text() for file in root.rglob("*.py")}
    assert mounted(built["cpu"], workload, "code") == there


def run_in(folder: Path, objects: list[Object], name: str, **environ: str) -> int:
    """Run an init container's program, with its folders below one of the test's."""
    container = next(one for one in containers(objects) if one["name"] == name)
    program = container["command"][-1]
    for mount in container["volumeMounts"]:
        (folder / mount["name"]).mkdir(exist_ok=True)
        program = program.replace(f'"{mount["mountPath"]}"', f'"{folder / mount["name"]}"')
    done = subprocess.run((sys.executable, "-c", program), env=environ, timeout=60, check=False)
    return done.returncode


def test_secrets_are_filled_into_configuration(
    tmp_path: Path, built: dict[str, list[Object]]
) -> None:
    objects = built["cuda"]
    data = named(objects, "ConfigMap", "producer-config")["data"]
    for name in ("config", "passwords"):
        (tmp_path / name).mkdir()
    # As a node mounts it: names lead to a folder that is exchanged as a whole.
    (tmp_path / "config" / "..2026_11_22").mkdir()
    (tmp_path / "config" / "..data").symlink_to("..2026_11_22")
    (tmp_path / "config" / "..data" / "lmcache.yaml").write_text(data["lmcache.yaml"])
    (tmp_path / "config" / "lmcache.yaml").symlink_to("..data/lmcache.yaml")
    assert run_in(tmp_path, objects, "fill-in-secrets") != 0, "without a password"
    (tmp_path / "passwords" / "redis_password").write_text("p\\1 \n")
    assert run_in(tmp_path, objects, "fill-in-secrets") == 0
    filled = yaml.safe_load((tmp_path / "filled" / "lmcache.yaml").read_text())
    assert filled["extra_config"]["pdkit.url"] == [
        f"redis://:p\\1@redis-{number}.redis:6379" for number in range(4)
    ]


def test_the_tiny_model_is_made_in_the_pod(tmp_path: Path, built: dict[str, list[Object]]) -> None:
    for path, text in mounted(built["cpu"], "producer", "tiny-model").items():
        (tmp_path / "code" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / path).write_text(text)
    assert run_in(tmp_path, built["cpu"], "tiny-model", PYTHONPATH=str(tmp_path / "code")) == 0
    assert is_whole(tmp_path / "model" / model_folder_name())
    engine = main_container(built["cpu"], "producer")
    assert f"/models/{model_folder_name()}" in engine["args"]


def test_a_loading_engine_is_not_taken_for_a_dead_one() -> None:
    found = made(vendor="cpu", timeouts={"ready_s": 1801})
    engine = container_in(found, "base/consumer.yaml")
    start = engine["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 1801
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[probe]["httpGet"] == {"path": "/health", "port": "http"}
    router = container_in(found, "base/router.yaml")
    assert router["livenessProbe"]["httpGet"]["path"] == "/liveness"


@pytest.mark.parametrize("role", ["producer", "consumer", "router"])
def test_a_pod_that_refuses_to_start_shows_why(role: str) -> None:
    """As an engine does whose model is not the stack's, with its exit code."""
    container = container_in(made(vendor="cpu"), f"base/{role}.yaml")
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_a_router_that_waits_for_engines_has_not_failed() -> None:
    found = made(vendor="cpu", timeouts={"ready_s": 3600})
    (router, *_) = yaml.safe_load_all(found.files["base/router.yaml"])
    assert router["spec"]["progressDeadlineSeconds"] > 3600


def test_node_drains_take_one_pod_of_a_role_and_any_that_is_not_ready(
    built: dict[str, list[Object]],
) -> None:
    roles = {
        name: named(built["cuda"], kind, name)["spec"]["template"]["metadata"]["labels"]
        for kind, *names in (
            ("StatefulSet", "redis", "producer", "consumer"),
            ("Deployment", "router"),
        )
        for name in names
    }
    budgets = [one["spec"] for one in built["cuda"] if one["kind"] == "PodDisruptionBudget"]
    for labels in roles.values():
        (own,) = (
            one for one in budgets if one["selector"]["matchLabels"].items() <= labels.items()
        )
        assert own["maxUnavailable"] == 1
        assert own["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert len(budgets) == len(roles)


def test_a_router_that_ends_has_time_for_its_streams(built: dict[str, list[Object]]) -> None:
    args = main_container(built["cpu"], "router")["args"]
    leave_s = int(args[args.index("--leave-s") + 1])
    sleep, before_s = main_container(built["cpu"], "router")["lifecycle"]["preStop"]["exec"][
        "command"
    ]
    assert sleep == "sleep"
    grace_s = pods(built["cpu"])["router"]["terminationGracePeriodSeconds"]
    assert grace_s > leave_s + int(before_s) > 300


def test_each_shard_of_redis_has_a_name_that_engines_know(tmp_path: Path) -> None:
    objects = build_one(tmp_path, "cuda", redis={"shards": 3})
    assert named(objects, "StatefulSet", "redis")["spec"]["replicas"] == 3
    assert named(objects, "Service", "redis")["spec"]["clusterIP"] == "None"
    (text,) = named(objects, "ConfigMap", "consumer-config")["data"].values()
    urls = yaml.safe_load(text)["extra_config"]["pdkit.url"]
    assert urls == [f"redis://:@{{redis_password}}@redis-{n}.redis:6379" for n in range(3)]


def test_aggregated_engines_without_redis(tmp_path: Path) -> None:
    objects = build_one(tmp_path, topology="3a")
    assert set(pods(objects)) == {"engine", "router"}
    assert "initContainers" not in pods(objects)["router"]
    assert named(objects, "StatefulSet", "engine")["spec"]["replicas"] == 3
    router = main_container(objects, "router")["args"]
    assert sources(router) == ["dns://engine:8000?role=engine"]


def test_engines_are_built_once_for_each_role(tmp_path: Path) -> None:
    """However many there are: thousands take no longer."""
    with mock.patch.object(build, "engine_argv", wraps=build.engine_argv) as built_argv:
        found = made(vendor="cpu", topology="20p30d")
    assert built_argv.call_count == 2
    write_export(found, tmp_path)
    objects = kustomized(tmp_path / "overlays" / "cpu")
    assert named(objects, "StatefulSet", "producer")["spec"]["replicas"] == 20
    assert named(objects, "StatefulSet", "consumer")["spec"]["replicas"] == 30


def sources(args: list[str]) -> list[str]:
    return [value for name, value in pairwise(args) if name == "--engines-from"]


def test_the_router_finds_engines_by_services_that_are_there(
    built: dict[str, list[Object]],
) -> None:
    found = sources(main_container(built["cuda"], "router")["args"])
    assert found == ["dns://producer:8000?role=producer", "dns://consumer:8000?role=consumer"]
    for role_ in ("producer", "consumer"):
        service = named(built["cuda"], "Service", role_)["spec"]
        assert service["clusterIP"] == "None"
        assert service["ports"][0]["port"] == 8000
        assert matches({"matchLabels": service["selector"]}, role(role_))
        assert "publishNotReadyAddresses" not in service


@pytest.mark.parametrize("vendor", VENDORS)
def test_an_engine_that_ends_has_time_for_its_requests(
    vendor: str, built: dict[str, list[Object]]
) -> None:
    engine = main_container(built[vendor], "consumer")
    program, *rest, limit_s = engine["lifecycle"]["preStop"]["exec"]["command"]
    assert [program] == engine["command"]
    assert rest == ["-m", "pdkit_connector.drain", "8000"]
    noticed_s, stop_s = 10, 15
    grace_s = pods(built[vendor])["consumer"]["terminationGracePeriodSeconds"]
    assert grace_s >= noticed_s + int(limit_s) + stop_s


# The engines as a DisaggregatedSet.


@pytest.fixture(scope="module")
def in_set(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    target = tmp_path_factory.mktemp("set")
    write_export(made(flavour="disaggregatedset", producers=1, consumers=1), target)
    (target / "mine").mkdir()
    components = WITH_COMPONENTS.replace(", ../components/autoscaling", "")
    (target / "mine" / "kustomization.yaml").write_text(components)
    return {
        **{vendor: kustomized(target / "overlays" / vendor) for vendor in VENDORS},
        "components": kustomized(target / "mine"),
    }


def roles_of(objects: list[Object]) -> dict[str, Object]:
    found = named(objects, "DisaggregatedSet", "engines")
    assert found["apiVersion"] == "disaggregatedset.x-k8s.io/v1"
    return {one["name"]: one["spec"] for one in found["spec"]["roles"]}


@pytest.mark.parametrize("vendor", VENDORS)
def test_pods_of_a_set_are_those_of_the_plain_flavour(
    vendor: str, in_set: dict[str, list[Object]], built: dict[str, list[Object]]
) -> None:
    """As kustomize merges them: the names of ConfigMaps among them, which follow the contents."""
    assert set(pods(in_set[vendor])) == {"redis", "router"}
    assert roles_of(in_set[vendor]).keys() == {"producer", "consumer"}
    for name, spec in roles_of(in_set[vendor]).items():
        template = spec["leaderWorkerTemplate"]
        plain = named(built[vendor], "StatefulSet", name)["spec"]
        assert sorted_lists(template["workerTemplate"]) == sorted_lists(plain["template"])
        assert template.get("volumeClaimTemplates") == plain.get("volumeClaimTemplates")
        assert template["size"] == 1


def sorted_lists(value: Any) -> Any:
    """Return a value whose lists of named things, which have no order, have one."""
    if isinstance(value, dict):
        return {key: sorted_lists(one) for key, one in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return sorted(map(sorted_lists, value), key=json.dumps)
    return value


def test_a_set_has_as_many_engines_as_the_plan() -> None:
    files = made(flavour="disaggregatedset", topology="2p5d", vendor="cpu").files
    found = roles_of([yaml.safe_load(files["overlays/cpu/engines.yaml"])])
    assert {name: spec["replicas"] for name, spec in found.items()} == {
        "producer": 2, "consumer": 5,
    }  # fmt: skip


@pytest.mark.parametrize("vendor", VENDORS)
def test_templates_of_a_set_fit_the_schema(
    vendor: str, in_set: dict[str, list[Object]], misfits: Callable[[Object, str], str]
) -> None:
    for name, spec in roles_of(in_set[vendor]).items():
        template = spec["leaderWorkerTemplate"]["workerTemplate"]
        one = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}}
        assert not misfits({**one, "template": template}, VERSIONS[-1])
        assert breaches(template["spec"]) == []


def test_components_fit_a_set(in_set: dict[str, list[Object]]) -> None:
    for spec in roles_of(in_set["components"]).values():
        template = spec["leaderWorkerTemplate"]
        assert [one["metadata"]["name"] for one in template["volumeClaimTemplates"]] == ["cache"]
        assert breaches(template["workerTemplate"]["spec"]) == ["hub"]


def test_pods_of_a_set_are_found_as_those_of_the_plain_flavour() -> None:
    """By Services, policies and the Job of the check: its operator keeps the template's labels."""
    fields: dict[str, Any] = {"vendor": "cpu", "topology": "1p1d"}
    plain, in_set = (made(flavour=flavour, **fields).files for flavour in ("plain", SET))
    same = [path for path in in_set if path.startswith("check/") or "policies" in path]
    assert len(same) > 4
    assert {path: plain[path] for path in same} == {path: in_set[path] for path in same}
    for name, spec in roles_of([yaml.safe_load(in_set["overlays/cpu/engines.yaml"])]).items():
        labels = spec["leaderWorkerTemplate"]["workerTemplate"]["metadata"]["labels"]
        service = next(iter(yaml.safe_load_all(in_set[f"base/{name}.yaml"])))
        assert service["kind"] == "Service"
        assert matches({"matchLabels": service["spec"]["selector"]}, labels)


def test_pods_of_a_set_are_waited_for(tmp_path: Path) -> None:
    found = made(flavour="disaggregatedset", vendor="cpu")
    wait = next_commands(found, StackSpec(), tmp_path)[3]
    assert "wait pod --for=condition=Ready" in wait
    assert "in (producer,consumer)" in wait


# Several machines.


def test_each_machine_brings_its_engines_and_its_redis(tmp_path: Path) -> None:
    node = machine_with("cuda", *range(4))
    found = made(node, machines=3, gpus=4, topology="1p3d")
    assert found.pods == {"cuda": {"redis": 12, "producer": 3, "consumer": 9, "router": 2}}
    write_export(found, tmp_path)
    objects = kustomized(tmp_path / "overlays" / "cuda")
    (text,) = named(objects, "ConfigMap", "consumer-config")["data"].values()
    assert len(yaml.safe_load(text)["extra_config"]["pdkit.url"]) == 12
    one = made(node, gpus=4, topology="1p3d").files["overlays/cuda/config/redis/redis.conf"]
    assert found.files["overlays/cuda/config/redis/redis.conf"] == one


def test_a_thousand_engines_take_no_more_files_than_two() -> None:
    many, few = made(machines=16, gpus=64, vendor="cuda"), made(gpus=2, vendor="cuda")
    assert many.pods["cuda"] == {"redis": 16, "producer": 512, "consumer": 512, "router": 2}
    assert many.files.keys() == few.files.keys()


def test_the_needed_network_rate_is_noted(tmp_path: Path) -> None:
    node, spec = machine_with("cuda", *range(8)), {"gpus": 8, "machines": 2}
    assert not [note for note in made(node, gpus=8).notes if "Gbit/s" in note]
    *_, note = made(node, **spec).notes
    computed, gbit = map(
        float, re.findall(r"up to ([\d.]+) GB/s .* receives (\d+) Gbit/s", note)[0]
    )
    assert gbit == pytest.approx(16 * computed, rel=0.02)
    assert "loading KV is slower" in made(node, link_gbit=10, **spec).notes[-1]
    assert made(node, link_gbit=10000, **spec).notes[-1].endswith("its link carries 10000")
    assert "is unknown" in made(vendor="cuda", **spec).notes[-1]


def test_redis_is_compared_with_what_all_machines_compute() -> None:
    node = machine_with("cuda", *range(8))
    one, many = (made(node, gpus=8, machines=machines).notes[1] for machines in (1, 64))
    assert "8 Redis servers move" in one
    assert "16 Redis servers move" in many
    computed = [float(re.findall(r"computes up to ([\d.]+) GB/s", note)[0]) for note in (one, many)]
    assert computed[1] == pytest.approx(64 * computed[0], rel=0.02)


# What users change.


def test_kustomizations_of_the_page_do_what_it_says(tmp_path: Path, repo: Path) -> None:
    page = (repo / "docs/how-to/kubernetes.md").read_text()
    blocks = list(map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)))
    (of_set,) = (one for one in blocks if "DisaggregatedSet" in str(one))
    whole = {
        key: [part for one in blocks if one is not of_set for part in one.get(key, ())]
        for key in ("resources", "components", "replicas", "patches")
    }
    components = list(dict.fromkeys(whole["components"]))
    # The component has no number of engines, which another block sets.
    scaled = {**whole, "components": components, "replicas": []}
    counted = {**whole, "components": [components[0]], "patches": []}
    in_set = {"resources": whole["resources"], **of_set}
    built = {}
    for flavour, own in (("plain", scaled), ("plain", counted), (SET, in_set)):
        write_export(made(vendor="cuda", flavour=flavour), tmp_path / "stack")
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(own))
        built[id(own)] = kustomized(tmp_path)
    consumer = named(built[id(scaled)], "ScaledObject", "consumer")["spec"]
    assert consumer["maxReplicaCount"] == 12
    assert consumer["triggers"][0]["metadata"]["threshold"] == "8"
    assert named(built[id(counted)], "StatefulSet", "consumer")["spec"]["replicas"] == 12
    roles = named(built[id(in_set)], "DisaggregatedSet", "engines")["spec"]["roles"]
    assert [one["spec"]["replicas"] for one in roles] == [1, 12]


# Monitoring.


def test_series_have_the_labels_that_the_rules_ask_for(built: dict[str, list[Object]]) -> None:
    objects = built["components"]
    watching = [one for one in objects if one["kind"] in CUSTOM]
    assert {one["metadata"].get("namespace") for one in watching} == {"pdkit"}
    for name in ("engines", "router"):
        (endpoint,) = named(objects, "PodMonitor", name)["spec"]["podMetricsEndpoints"]
        labels = {one["targetLabel"]: one for one in endpoint["relabelings"]}
        assert labels["job"]["replacement"] == name
        assert labels["stack"]["replacement"] == "pdkit"
        assert labels.keys() >= {"service", "role"}
        assert endpoint["port"] in [
            port["name"]
            for workload in ("producer", "router")
            for port in main_container(objects, workload)["ports"]
        ]
    (engines,) = named(objects, "PodMonitor", "engines")["spec"]["podMetricsEndpoints"]
    assert engines["authorization"]["credentials"] == {"name": "pdkit", "key": "engine_key"}


def test_the_rules_are_the_kits(built: dict[str, list[Object]], repo: Path) -> None:
    groups = named(built["components"], "PrometheusRule", "pdkit")["spec"]["groups"]
    assert (
        groups[:-1] == yaml.safe_load((repo / "compose/monitoring/rules.yml").read_text())["groups"]
    )


def test_latency_has_the_limits_of_the_spec() -> None:
    objects = made(vendor="cpu", slo={"ttft_s": 7}).files["components/monitoring/objects.yaml"]
    (rules,) = (one for one in yaml.safe_load_all(objects) if one["kind"] == "PrometheusRule")
    limit = rules["spec"]["groups"][-1]["rules"][0]
    assert (limit["record"], limit["expr"]) == ("pdkit:ttft_limit_seconds", "vector(7)")
    assert limit["labels"] == {"stack": "pdkit"}


# Autoscaling.


def scaled(objects: list[Object]) -> dict[str, Object]:
    return {
        one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "ScaledObject"
    }


def test_the_number_of_engines_is_left_to_the_autoscaler(built: dict[str, list[Object]]) -> None:
    with_it, without = built["components"], built["cuda"]
    found = scaled(with_it)
    assert found.keys() == {"producer", "consumer"}
    for name, spec in found.items():
        target = named(with_it, spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
        assert target["metadata"]["name"] == name
        assert "replicas" not in target["spec"], "else each apply would undo the scaling"
        exported = named(without, "StatefulSet", name)["spec"]["replicas"]
        assert spec["minReplicaCount"] == exported
        assert spec["maxReplicaCount"] > exported
    assert "replicas" in named(with_it, "StatefulSet", "redis")["spec"], "keys lie on all of them"


def test_autoscaling_uses_series_that_monitoring_has(built: dict[str, list[Object]]) -> None:
    objects = built["components"]
    (endpoint,) = named(objects, "PodMonitor", "engines")["spec"]["podMetricsEndpoints"]
    known = {one["targetLabel"]: one.get("replacement") for one in endpoint["relabelings"]}
    for name, spec in scaled(objects).items():
        for trigger in spec["triggers"]:
            query, metadata = trigger["metadata"]["query"], trigger["metadata"]
            metric, labels = re.fullmatch(r"sum\((\S+?){(.+)}\)", query).groups()  # type: ignore[union-attr]
            assert metric in ENGINE_METRICS
            asked = dict(re.findall(r'(\w+)="(\w+)"', labels))
            assert asked == {"job": known["job"], "stack": known["stack"], "role": name}
            assert metadata["ignoreNullValues"] == "false", "a silent Prometheus ends no engine"
            assert float(metadata["threshold"]) > 0


def test_an_engine_that_ends_has_ended_before_the_next_one_may(
    built: dict[str, list[Object]],
) -> None:
    objects = built["components"]
    for name, spec in scaled(objects).items():
        down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        (policy,) = down["policies"]
        assert (policy["type"], policy["value"]) == ("Pods", 1)
        assert policy["periodSeconds"] >= pods(objects)[name]["terminationGracePeriodSeconds"]


def test_aggregated_engines_are_scaled_by_their_own_role() -> None:
    files = made(vendor="cuda", topology="3a", name="mine", space="mine").files
    (one,) = yaml.safe_load_all(files["components/autoscaling/objects.yaml"])
    assert one["spec"]["scaleTargetRef"]["name"] == "engine"
    assert one["spec"]["minReplicaCount"] == 3
    assert one["metadata"]["namespace"] == "mine"
    assert 'stack="mine",role="aggregated"' in one["spec"]["triggers"][0]["metadata"]["query"]


def test_a_set_is_not_scaled() -> None:
    files = made(vendor="cuda", flavour="disaggregatedset").files
    assert not [path for path in files if "autoscaling" in path]


# The folder.


def test_the_same_spec_gives_the_same_bytes() -> None:
    assert made(gpus=16, vendor="cuda").files == made(gpus=16, vendor="cuda").files


def test_an_export_replaces_its_own_files_alone(tmp_path: Path) -> None:
    write_export(made(vendor="rocm"), tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    write_export(made(vendor="cuda"), tmp_path)
    assert not (tmp_path / "overlays/rocm/kustomization.yaml").exists()
    assert (tmp_path / "overlays/cuda/kustomization.yaml").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("left", ["edited", "foreign", "unmarked"])
def test_files_that_the_export_did_not_write_are_never_replaced(left: str, tmp_path: Path) -> None:
    write_export(made(vendor="cpu"), tmp_path)
    file = tmp_path / "overlays" / ("cuda" if left == "foreign" else "cpu") / "router.yaml"
    if left == "unmarked":
        (tmp_path / MARKER).unlink()
    else:
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    before = {one: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()}
    with pytest.raises(ConfigError, match="not written by an export") as caught:
        write_export(made(), tmp_path)
    assert str(file) in caught.value.details
    assert {one: one.read_bytes() for one in tmp_path.rglob("*") if one.is_file()} == before


@pytest.mark.parametrize("named", ["../mine", "{outside}/mine", "\0"])
def test_a_marker_that_names_files_elsewhere_deletes_none(named: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("known to all")
    digest = hashlib.sha256(mine.read_bytes()).hexdigest()
    (tmp_path / "out").mkdir()
    files = {named.format(outside=tmp_path): digest}
    (tmp_path / "out" / MARKER).write_text(json.dumps({"files": files}))
    with pytest.raises(ConfigError, match="not written by an export"):
        write_export(made(vendor="cpu"), tmp_path / "out")
    assert mine.read_text() == "known to all"
    assert [one.name for one in (tmp_path / "out").iterdir()] == [MARKER]


@pytest.mark.parametrize("link", ["base", "base/router.yaml", "overlays/cpu/kustomization.yaml"])
@pytest.mark.parametrize("target", ["there", "missing"])
def test_no_link_leads_an_export_out_of_its_folder(link: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    out = tmp_path / "out"
    (out / link).parent.mkdir(parents=True)
    (out / link).symlink_to(tmp_path / target)
    with pytest.raises(ConfigError, match="not written by an export"):
        write_export(made(vendor="cpu"), out)
    assert {one.name for one in tmp_path.iterdir()} == {"out", "there"}
    assert not [*(tmp_path / "there").iterdir()]


def test_a_marker_that_is_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / MARKER).symlink_to(tmp_path / "mine")
    write_export(made(vendor="cpu"), tmp_path / "out")
    assert (tmp_path / "mine").read_text() == "mine"
    write_export(made(vendor="cpu"), tmp_path / "out")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{", "[]", '{"files": 5}'], ids=["levels", "cut", "list", "number"]
)
def test_a_marker_that_cannot_be_read_is_ignored(text: str, tmp_path: Path) -> None:
    (tmp_path / MARKER).write_text(text)
    write_export(made(vendor="cpu"), tmp_path)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_export(made(vendor="cpu"), tmp_path / "file" / "deep")


def shown(vendor: str) -> dict[str, Any]:
    """Return a vendor's folder for people to read: without the kit's code and the lists of it."""
    found: dict[str, Any] = {}
    for path, text in made(vendor=vendor).files.items():
        name = path.replace(f"overlays/{vendor}", "overlays/VENDOR")
        name = name.replace(f"check/{vendor}", "check/VENDOR")
        if "/code/" in name:
            continue
        if name.endswith(".yaml") and "/config/" not in name:
            found[name] = [without_code(one) for one in yaml.safe_load_all(text)]
        elif not name.endswith((".py", ".json")):
            found[name] = text
    del found["components/monitoring/objects.yaml"]  # it has all alert rules
    for folder in ("base", "overlays/VENDOR"):
        producer, consumer = (f"{folder}/{role}.yaml" for role in ("producer", "consumer"))
        found[consumer] = {f"as {producer}, but": differences(found[producer], found[consumer])}
    return found


def without_code(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_code(one) for key, one in value.items()}
    if isinstance(value, list) and value and all(is_variable(one) for one in value):
        return {one["name"]: one["value"] for one in value}
    if isinstance(value, list):
        return [without_code(one) for one in value if not is_code(one)]
    return value


def is_variable(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"name", "value"}


def is_code(value: Any) -> bool:
    """Tell whether a value is a path of code, or an item of a ConfigMap that has one."""
    path = value.get("path") if isinstance(value, dict) else value
    return isinstance(path, str) and path.endswith(".py")


def component_of(name: str) -> str:
    """Return what a file of the folder is about: a service, or what is not about one."""
    top, *_ = name.split("/")
    services = (one for one in ("redis", "producer", "consumer", "router") if one in name)
    return top if top in ("check", "components") else next(services, "namespace")


def test_golden_of_a_vendor(golden: Callable[[str, str], None], repo: Path) -> None:
    """A file for each component: one for all is too long to read."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in shown("cuda").items():
        parts.setdefault(component_of(name), {})[name] = value
    for component, part in parts.items():
        golden(f"kubernetes/cuda/{component}.yaml", document_yaml(part))
    files = (repo / "tests/golden/kubernetes/cuda").iterdir()
    assert {one.name for one in files} == {f"{component}.yaml" for component in parts}


@pytest.mark.parametrize("vendor", [one for one in VENDORS if one != "cuda"])
def test_goldens_of_the_others(vendor: str, golden: Callable[[str, str], None]) -> None:
    base = "tests/golden/kubernetes/cuda"
    golden(f"kubernetes/{vendor}.yaml", golden_text(base, shown(vendor)))


def test_the_base_is_the_same_for_all_vendors() -> None:
    bases = [
        {name: text for name, text in made(vendor=vendor).files.items() if name.startswith("base/")}
        for vendor in VENDORS
    ]
    assert all(base == bases[0] for base in bases)


# What is refused.


@pytest.mark.parametrize(
    ("fields", "words", "hint"),
    [
        ({"vendor": "cuda", "gpus": 1}, "gpus: 1 is too few", "--gpus 2"),
        ({"image": "mine/vllm:1"}, "an image for one vendor", "--vendor cuda"),
        ({"name": "a-", "space": "a"}, "'a-' is not a valid Kubernetes label", "another name"),
        ({"space": "default"}, "'default' is not the stack's own", "--namespace NAME"),
        ({"space": "kube-system"}, "'kube-system' is not the stack's own", "--namespace NAME"),
        ({"space": "No"}, "'No' is not a valid namespace", "--namespace NAME"),
        (
            {"vendor": "cpu", "connector": "lmcache-mp"},
            "lmcache-mp is not exported",
            "--connector lmcache",
        ),
        ({"vendor": "cuda", "image": "cuda-mp"}, "silently wrong", "--image cuda;"),
        ({"flavour": "helm"}, "'helm' is not one of plain, disagg", "--flavour plain"),
        ({"flavour": "disaggregatedset", "topology": "2a"}, "2a has one role", "--flavour plain"),
        ({"name": "a_b"}, "'pdkit-a_b' is not a valid namespace", "--namespace NAME"),
    ],
)
def test_exports_that_cannot_work_are_refused(
    fields: dict[str, Any], words: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**fields)
    assert words in caught.value.message
    assert hint in caught.value.hint


def test_a_model_of_this_machine_is_refused(tmp_path: Path) -> None:
    shape = {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 2,
        "hidden_size": 8, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="a folder of this machine"):
        made(vendor="cpu", model=str(tmp_path))


def test_a_node_of_an_inventory_decides_the_vendor() -> None:
    found = made(machine_with("rocm", 0, 1))
    assert set(found.pods) == {"rocm"}
    assert "--inventory" in found.notes[0]
    assert "64 CPUs and 1024 GiB" in found.notes[0]


@pytest.mark.parametrize(("tracing", "open_to"), [({}, []), ({"port": 4318}, [4318])])
def test_the_router_reaches_the_collector_for_traces(
    tracing: dict[str, int], open_to: list[int]
) -> None:
    fields = {"otlp_endpoint": f"http://collector.example:{tracing['port']}"} if tracing else {}
    files = made(vendor="cuda", tracing=fields).files
    policies = yaml.safe_load_all(files["base/network-policies.yaml"])
    (egress,) = [one["spec"]["egress"] for one in policies if one["metadata"]["name"] == "router"]
    anywhere = [port["port"] for rule in egress if "to" not in rule for port in rule["ports"]]
    assert anywhere == [53, 53, *open_to]
