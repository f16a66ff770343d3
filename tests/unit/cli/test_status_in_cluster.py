"""`deploy status --kubernetes`, with a kubectl that plays a cluster's answers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy.workflows import cluster_status
from deploy.workflows.cluster_status import ASK
from deploy.workflows.export_folder import write_export
from tests.conftest import Ended
from tests.unit.kubectl_stand_in import (
    VIEW,
    Answer,
    Player,
    assert_real_one_takes,
    ended,
    listed,
    running,
    waiting,
)
from tests.unit.workflows.test_export import kustomized, made

TYPED = "kubectl --context=here --namespace=pdkit"
SETS = "disaggregatedsets.disaggregatedset.x-k8s.io"
Object = dict[str, Any]


@pytest.fixture(scope="module", params=["cuda", "rocm", "cpu"])
def vendor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Object]:
    return exported(tmp_path_factory.mktemp("cuda"), "cuda", topology="1p2d")


def exported(folder: Path, vendor: str, **fields: Any) -> dict[str, Object]:
    """Return the workloads of an export by their names."""
    write_export(made(vendor=vendor, **fields), folder)
    objects = kustomized(folder / "overlays" / vendor)
    kinds = ("StatefulSet", "Deployment", "DisaggregatedSet")
    return {one["metadata"]["name"]: one for one in objects if one["kind"] in kinds}


def pods_of(workload: Object) -> list[Object]:
    """Return the pods that a workload's controller makes, all of them ready."""
    template, name = workload["spec"]["template"], workload["metadata"]["name"]
    ends = [
        f"7d9f-{one}" if name == "router" else one for one in range(workload["spec"]["replicas"])
    ]
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{name}-{end}", "namespace": "pdkit",
                "labels": template["metadata"]["labels"],
            },
            "spec": template["spec"],
            "status": {"phase": "Running", "containerStatuses": [status(template, running())]},
        }
        for end in ends
    ]  # fmt: skip


def status(template: Object, state: Object, *, ready: bool = True, **more: Any) -> Object:
    (container,) = template["spec"]["containers"]
    known = {"restartCount": 0, "image": container["image"], "imageID": "", "lastState": {}}
    return {"name": container["name"], "ready": ready, "state": state, **known, **more}


def cluster(workloads: dict[str, Object]) -> dict[str, Object]:
    """Return the pods of a healthy stack by their names."""
    return {one["metadata"]["name"]: one for each in workloads.values() for one in pods_of(each)}


@pytest.fixture
def look(in_cluster: Callable[..., Ended]) -> Callable[..., Ended]:
    return partial(in_cluster, "status")


def shown(ran: Ended) -> Object:
    return dict(json.loads(ran.stdout)["data"])


def test_a_healthy_stack_is_reported_as_healthy(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    kubectl.plays(config=VIEW, get=listed(*workloads.values(), *cluster(workloads).values()))
    ran = look("--json")
    assert ran.code == 0, ran.stderr
    data = shown(ran)
    assert data["healthy"] and data["up"]
    assert (data["name"], data["vendor"], data["runtime"]) == ("pdkit", "cuda", "kubernetes")
    assert (data["topology"], data["model"]) == ("1p2d", "Qwen/Qwen3-0.6B")
    assert data["url"] == "http://router.pdkit.svc:8000"
    assert data["image"].startswith("pdkit/vllm-cuda:")
    names = [(one["name"], one["role"], one["condition"]) for one in data["services"]]
    assert names == [
        *((f"redis-{number}", "redis", "ready") for number in range(4)),
        ("producer-0", "producer", "ready"),
        ("consumer-0", "consumer", "ready"), ("consumer-1", "consumer", "ready"),
        ("router-7d9f-0", "router", "ready"), ("router-7d9f-1", "router", "ready"),
    ]  # fmt: skip
    assert all(one["uptime_s"] > 0 and one["restarts"] == 0 for one in data["services"])
    assert data["services"][4]["log"] == f"{TYPED} logs producer-0"
    assert kubectl.asked[1:2] == [
        "--context=here --namespace=pdkit --request-timeout=30s get pods,statefulsets,deployments"
        " --selector=app.kubernetes.io/name=pdkit --output=json"
    ]


def test_kubectl_takes_every_command(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended], tmp_path: Path
) -> None:
    kubectl.plays(config=VIEW, get=listed(*workloads.values(), *cluster(workloads).values()))
    assert look().code == 0
    assert_real_one_takes(kubectl.calls, tmp_path)


def test_the_text_is_a_table(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    kubectl.plays(config=VIEW, get=listed(*workloads.values(), *cluster(workloads).values()))
    first, second, _, head, *rows = look().stdout.splitlines()
    assert first == "stack 'pdkit': 1p2d, Qwen/Qwen3-0.6B, http://router.pdkit.svc:8000"
    assert second.startswith("on cuda, runtime kubernetes, image pdkit/vllm-cuda:")
    assert head.split()[:2] == ["service", "state"]
    assert rows[1].split()[:2] == ["redis-0", "ready"]


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (waiting("ErrImagePull", "not found"),
         ("not started", ["consumer-1: ErrImagePull: not found"], "describe pod consumer-1")),
        (waiting("ContainerCreating"),
         ("not started", ["consumer-1: ContainerCreating"], "describe pod consumer-1")),
        (running(), ("not ready", [], "logs consumer-1")),
        (ended(1), ("exited", ["consumer-1: Error"], "logs consumer-1")),
    ],
)  # fmt: skip
def test_a_pod_that_is_not_ready_is_reported(
    state: Object, told: tuple[str, list[str], str],
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended],
) -> None:  # fmt: skip
    condition, warnings, log = told
    pods = cluster(workloads)
    template = workloads["consumer"]["spec"]["template"]
    own = [status(template, state, ready=False)]
    pods["consumer-1"]["status"] = {"phase": "Pending", "containerStatuses": own}
    kubectl.plays(config=VIEW, get=listed(*workloads.values(), *pods.values()))
    ran = look("--json")
    assert ran.code == 4
    data = shown(ran)
    assert not data["healthy"]
    (bad,) = (one for one in data["services"] if one["condition"] != "ready")
    assert (bad["name"], bad["condition"]) == ("consumer-1", condition)
    assert bad["log"] == f"{TYPED} {log}"
    assert data["warnings"] == warnings
    (error,) = json.loads(ran.stdout)["errors"]
    assert (error["code"], error["message"]) == ("stack_unhealthy", "not ready: consumer-1")
    assert error["hint"] == f"{TYPED} {log}"


def test_an_unschedulable_pod_and_a_missing_image_are_reported(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    pods = cluster(workloads)
    pods["consumer-0"]["status"] = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."}],
    }  # fmt: skip
    template = workloads["consumer"]["spec"]["template"]
    first = {**status(template, waiting("ImagePullBackOff", "no"), ready=False), "name": "fill-in"}
    own = status(template, waiting("PodInitializing"), ready=False)
    pods["consumer-1"]["status"] = {
        "phase": "Pending", "initContainerStatuses": [first], "containerStatuses": [own]
    }  # fmt: skip
    kubectl.plays(config=VIEW, get=listed(*workloads.values(), *pods.values()))
    ran = look()
    assert ran.code == 4
    assert "warning: consumer-0: Unschedulable: 0/3 nodes are available: 3 Insuff" in ran.stdout
    assert "warning: consumer-1: ImagePullBackOff: no" in ran.stdout
    assert "error: not ready: consumer-0, consumer-1" in ran.stderr


def test_restarts_are_reported_with_the_reason(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    pods = cluster(workloads)
    template = workloads["producer"]["spec"]["template"]
    died = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-11-23T13:00:00Z"}
    last = {"restartCount": 3, "lastState": {"terminated": died}}
    back_off = waiting("CrashLoopBackOff", "back-off 40s")
    pods["producer-0"]["status"]["containerStatuses"] = [
        status(template, back_off, ready=False, **last)
    ]
    kubectl.plays(config=VIEW, get=listed(*workloads.values(), *pods.values()))
    data = shown(look("--json"))
    (bad,) = (one for one in data["services"] if one["name"] == "producer-0")
    assert (bad["condition"], bad["restarts"]) == ("exited", 3)
    assert data["events"] == [
        {"at": "2026-11-23T13:00:00+00:00", "service": "producer-0", "kind": "died",
         "text": "ended with 137 (OOMKilled)"}
    ]  # fmt: skip
    assert data["warnings"] == ["producer-0: CrashLoopBackOff: back-off 40s"]


def test_a_termination_message_cannot_forge_a_line(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    pods = cluster(workloads)
    template = workloads["producer"]["spec"]["template"]
    state = ended(1)
    state["terminated"]["message"] = "no\n\ntry: rm\x1b[2J -r"
    pods["producer-0"]["status"]["containerStatuses"] = [status(template, state, ready=False)]
    kubectl.plays(config=VIEW, get=listed(*workloads.values(), *pods.values()))
    assert "warning: producer-0: Error: no try: rm[2J -r\n" in look().stdout


def test_an_end_without_a_time_is_not_an_event(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    pods = cluster(workloads)
    template = workloads["producer"]["spec"]["template"]
    lost = {"exitCode": 137, "reason": "ContainerStatusUnknown", "finishedAt": None}
    pods["producer-0"]["status"]["containerStatuses"] = [
        status(template, running(), restartCount=1, lastState={"terminated": lost})
    ]
    kubectl.plays(config=VIEW, get=listed(*workloads.values(), *pods.values()))
    ran = look("--json")
    assert (ran.code, shown(ran)["events"]) == (0, [])


def test_a_foreign_pod_with_the_labels_of_a_stack_is_ignored(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    pods = cluster(workloads)
    labels = {"app.kubernetes.io/name": "pdkit", "app.kubernetes.io/component": "producer"}
    spec = {"containers": [{"name": "another", "image": "x"}]}
    planted = {"kind": "Pod", "metadata": {"name": "a", "labels": labels}, "spec": spec}
    other = {**pods["producer-0"], "metadata": {"name": "producer-1", "labels": labels}}
    other["spec"] = {"containers": [{"name": "engine", "image": "x"}]}
    kubectl.plays(config=VIEW, get=listed(*workloads.values(), *pods.values(), planted, other))
    ran = look("--json")
    assert ran.code == 0, ran.stderr
    names = [one["name"] for one in shown(ran)["services"]]
    assert "a" not in names
    assert "producer-1" in names


def test_at_most_1000_missing_pods_are_listed(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    consumer = {**workloads["consumer"], "spec": {"replicas": 2**31 - 1}}
    kubectl.plays(config=VIEW, get=listed(consumer, *cluster(workloads).values()))
    ran = look("--json")
    assert ran.code == 4
    absent = [one for one in shown(ran)["services"] if one["condition"] == "not started"]
    assert len(absent) == 1000


def test_missing_pods_are_reported(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    """As where a quota forbids them."""
    pods = cluster(workloads)
    del pods["consumer-1"], pods["router-7d9f-0"]
    kubectl.plays(config=VIEW, get=listed(*workloads.values(), *pods.values()))
    ran = look("--json")
    assert ran.code == 4
    lacking = {
        one["name"]: one["log"] for one in shown(ran)["services"] if one["condition"] != "ready"
    }
    assert lacking == {
        "consumer-1": f"{TYPED} describe statefulset consumer",
        "router-?": f"{TYPED} describe deployment router",
    }
    assert shown(ran)["topology"] == "1p2d", "as it should be"


def test_the_gpus_determine_the_vendor(
    vendor: str, kubectl: Player, look: Callable[..., Ended], tmp_path: Path
) -> None:
    workloads = exported(tmp_path / "out", vendor, topology="2a+redis", name="mine")
    kubectl.plays(config=VIEW, get=listed(*workloads.values(), *cluster(workloads).values()))
    data = shown(look("--json"))
    assert (data["name"], data["vendor"], data["topology"]) == ("mine", vendor, "2a+redis")


# The engines as a DisaggregatedSet: its operator gives pods the labels of the set's templates, and
# names with a revision.

NO_SUCH_KIND = 'error: the server doesn\'t have a resource type "disaggregatedsets"\n'
NO_SETS = "no StatefulSet of engines, and no DisaggregatedSet: "


@pytest.fixture(scope="module")
def in_set(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Object]:
    fields = {"flavour": "disaggregatedset", "topology": "1p2d"}
    return exported(tmp_path_factory.mktemp("set"), "cuda", **fields)


def set_pods(engines: Object) -> dict[str, Object]:
    """Return the pods that the operator makes of a set."""
    found = {}
    for role in engines["spec"]["roles"]:
        template = role["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        labels = {**template["metadata"]["labels"], "disaggregatedset.x-k8s.io/role": role["name"]}
        made = {"metadata": {"labels": labels}, "spec": template["spec"]}
        name = f"engines-0-5f2a91c4-{role['name']}"
        spec = {"template": made, "replicas": role["spec"]["replicas"]}
        found |= cluster({role["name"]: {"metadata": {"name": name}, "spec": spec}})
    return found


def looked_at(kubectl: Player, objects: list[Object], sets: Answer) -> None:
    kubectl.plays(config=VIEW, get=listed(*objects), **{f"get {SETS}": sets})


def test_a_set_is_healthy(
    in_set: dict[str, Object], kubectl: Player, look: Callable[..., Ended], tmp_path: Path
) -> None:
    engines, rest = in_set["engines"], {key: in_set[key] for key in ("redis", "router")}
    pods = {**cluster(rest), **set_pods(engines)}
    looked_at(kubectl, [*rest.values(), *pods.values()], listed(engines))
    ran = look("--json")
    assert ran.code == 0, ran.stderr
    data = shown(ran)
    assert (data["topology"], data["vendor"], data["model"]) == ("1p2d", "cuda", "Qwen/Qwen3-0.6B")
    engines_seen = [one["name"] for one in data["services"] if one["role"] != "redis"][:3]
    assert engines_seen == [
        "engines-0-5f2a91c4-producer-0",
        "engines-0-5f2a91c4-consumer-0", "engines-0-5f2a91c4-consumer-1",
    ]  # fmt: skip
    assert_real_one_takes(kubectl.calls, tmp_path)


def test_missing_pods_of_a_set_are_reported(
    in_set: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    """As where its operator does not run."""
    engines, rest = in_set["engines"], {key: in_set[key] for key in ("redis", "router")}
    made = [one for name, one in set_pods(engines).items() if not name.endswith("consumer-1")]
    looked_at(kubectl, [*rest.values(), *cluster(rest).values(), *made], listed(engines))
    ran = look("--json")
    assert ran.code == 4
    lacking = [one for one in shown(ran)["services"] if one["condition"] != "ready"]
    assert [(one["name"], one["log"]) for one in lacking] == [
        ("consumer-?", f"{TYPED} describe {SETS} engines")
    ]
    assert shown(ran)["topology"] == "1p2d", "as it should be"


def test_a_set_that_may_not_be_read_is_not_a_failure_while_its_pods_are_ready(
    in_set: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    engines, rest = in_set["engines"], {key: in_set[key] for key in ("redis", "router")}
    pods = {**cluster(rest), **set_pods(engines)}
    refused = (1, "Error from server (Forbidden): disaggregatedsets is forbidden\n")
    looked_at(kubectl, [*rest.values(), *pods.values()], refused)
    ran = look("--json")
    assert ran.code == 0
    (warning,) = shown(ran)["warnings"]
    assert warning.startswith(f"{NO_SETS}kubectl get: Error from server (Forbidden)")


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (listed(), "there is none"),
        ((1, NO_SUCH_KIND), "kubectl get: the server doesn't have a resource type"),
    ],
)
def test_a_stack_without_engines_is_not_healthy(
    sets: Answer, why: str,
    in_set: dict[str, Object], kubectl: Player, look: Callable[..., Ended],
) -> None:  # fmt: skip
    rest = {key: in_set[key] for key in ("redis", "router")}
    looked_at(kubectl, [*rest.values(), *cluster(rest).values()], sets)
    ran = look("--json")
    assert ran.code == 4
    (warning,) = shown(ran)["warnings"]
    assert warning.startswith(f"{NO_SETS}{why}")
    (error,) = json.loads(ran.stdout)["errors"]
    assert error["message"] == "not ready: engine-?"


def test_the_check_is_not_a_service(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    pods = cluster(workloads)
    labels = {**pods["producer-0"]["metadata"]["labels"], "app.kubernetes.io/component": "check"}
    metadata = {"name": "check-1", "namespace": "pdkit", "labels": labels}
    check = {**pods["producer-0"], "metadata": metadata}
    kubectl.plays(config=VIEW, get=listed(*workloads.values(), *pods.values(), check))
    assert "check-1" not in [one["name"] for one in shown(look("--json"))["services"]]


# Hits, as engines count them.

PAGE = """\
vllm:external_prefix_cache_queries_total{engine="0"} 4000
vllm:external_prefix_cache_hits_total{engine="0"} 3000
vllm:prefix_cache_queries_total{engine="0"} 5000
vllm:prefix_cache_hits_total{engine="0"} 1000
"""


def test_hits_are_read_from_the_engines(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended], tmp_path: Path
) -> None:
    everything = listed(*workloads.values(), *cluster(workloads).values())
    other = PAGE.replace("3000", "1000")
    kubectl.plays(config=VIEW, get=everything, exec=(0, PAGE), **{"exec consumer-1": (0, other)})
    data = shown(look("--json"))
    counted = {one["name"]: one["cache"] for one in data["services"] if one["cache"]}
    assert counted.keys() == {"producer-0", "consumer-0", "consumer-1"}
    assert counted["consumer-1"] == {
        "external_queries": 4000, "external_hits": 1000, "local_queries": 5000, "local_hits": 1000,
    }  # fmt: skip
    assert data["external_hit_rate"] == 0.5, "of the consumers"
    assert data["warnings"] == []
    asked = sorted(argv for argv, _ in kubectl.calls if "exec" in argv)
    assert asked[0] == [
        "--context=here", "--namespace=pdkit", "--request-timeout=30s", "exec", "consumer-0",
        "--container=engine", "--", "python3", "-I", "-c", ASK, "8000",
    ]  # fmt: skip
    assert len(asked) == 3, "only engines are asked"
    assert_real_one_takes(kubectl.calls, tmp_path)


def test_an_engine_that_is_not_ready_is_not_asked(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    pods = cluster(workloads)
    template = workloads["consumer"]["spec"]["template"]
    own = [status(template, running(), ready=False)]
    pods["consumer-1"]["status"]["containerStatuses"] = own
    kubectl.plays(config=VIEW, get=listed(*workloads.values(), *pods.values()), exec=(0, PAGE))
    look()
    assert not [asked for asked in kubectl.asked if "exec consumer-1" in asked]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((1, 'Error from server (Forbidden): cannot create resource "pods/exec"\n'),
         'kubectl exec: Error from server (Forbidden): cannot create resource "pods/exec"'),
        ((1, "urllib.error.HTTPError: HTTP Error 401: Unauthorized\n"
          "command terminated with exit code 1\n"),
         "urllib.error.HTTPError: HTTP Error 401: Unauthorized"),
        ((0, "<html>\n"), "its page is not Prometheus' format"),
    ],
)  # fmt: skip
def test_engines_without_a_report_are_not_a_failure(
    answer: Answer, why: str,
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended],
) -> None:  # fmt: skip
    everything = listed(*workloads.values(), *cluster(workloads).values())
    kubectl.plays(config=VIEW, get=everything, exec=answer)
    ran = look("--json")
    assert ran.code == 0, "they are ready"
    (warning,) = shown(ran)["warnings"]
    assert warning.startswith(f"no counters of producer-0, consumer-0, consumer-1: {why}")
    assert not [one for one in shown(ran)["services"] if one["cache"]]


def test_a_page_without_end_is_not_read(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(cluster_status, "_PAGE_BYTES", 1 << 20)
    everything = listed(*workloads.values(), *cluster(workloads).values())
    kubectl.plays(config=VIEW, get=everything, exec=(0, "x" * (2 << 20)))
    (warning,) = shown(look("--json"))["warnings"]
    assert warning.endswith("kubectl exec was stopped: it printed more than 1 MiB")


@pytest.mark.parametrize(("key", "code"), [("the key\n", 0), ("another", 1)])
def test_the_engine_is_asked_with_the_key_of_its_pod(key: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(key)

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["Authorization"] == "Bearer the key" and self.path == "/metrics"
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        done = subprocess.run(
            (sys.executable, "-I", "-c", ASK, str(server.server_port)),
            env={"PDKIT_ENGINE_KEY_FILE": str(tmp_path / "key"), "http_proxy": "http://127.0.0.1:1"},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert (done.stdout.rstrip() == PAGE.rstrip()) == (code == 0)
    assert key.strip() not in done.stderr


# Frame after frame.


def frames(ran: Ended) -> list[Object]:
    return [json.loads(line)["data"] for line in ran.stdout.splitlines()]


def watched(look: Callable[..., Ended], count: int, *options: str) -> Ended:
    return look("--watch", "--interval", "0.2", "--count", str(count), *options)


def test_a_watch_counts_what_engines_do_meanwhile(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    everything = listed(*workloads.values(), *cluster(workloads).values())
    later = PAGE.replace(" 4000", " 6000").replace(" 3000", " 4500")
    answers = [*[(0, PAGE)] * 3, (0, later)]  # one of each engine and frame
    kubectl.plays(
        config=VIEW,
        get=everything,
        exec=(0, PAGE),
        **{"exec consumer-1": answers},
    )
    ran = watched(look, 2, "--json")
    assert ran.code == 0, ran.stderr
    first, second = frames(ran)
    assert first["healthy"] and first["name"] == "pdkit"
    assert first["services"].keys() == cluster(workloads).keys()
    assert second["watch"]["external_queries"] == 2000
    assert second["watch"]["external_hits"] == 1500
    assert second["redis"] is None and second["router"] is None, "they are not asked"


def test_a_watch_sees_a_pod_that_was_restarted(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    pods = cluster(workloads)
    template = workloads["consumer"]["spec"]["template"]
    early, late = ({"running": {"startedAt": f"2026-11-23T10:0{n}:00Z"}} for n in range(2))
    looks = []
    for state in (early, late):
        own = {"containerStatuses": [status(template, state)]}
        changed = {**pods["consumer-0"], "status": own}
        looks.append(listed(*workloads.values(), *{**pods, "consumer-0": changed}.values()))
    kubectl.plays(config=VIEW, get=looks, exec=(0, PAGE))
    _, second = frames(watched(look, 2, "--json"))
    assert [(one["about"], one["text"]) for one in second["events"]] == [
        ("consumer-0", "restarted, running since 2026-11-23T10:01:00Z")
    ]
    assert second["watch"]["external_queries"] == 4000, "all that its new life counted"


def test_a_watch_goes_on_where_the_cluster_does_not_answer(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    there = listed(*workloads.values(), *cluster(workloads).values())
    gone = (1, "Unable to connect to the server: dial tcp: i/o timeout\n")
    kubectl.plays(config=VIEW, get=[there, gone, there], exec=(0, PAGE))
    first, second, third = frames(watched(look, 3, "--json"))
    assert first["healthy"] and third["healthy"]
    assert "Unable to connect to the server" in second["trouble"]


def test_a_watch_says_once_why_counters_are_missing(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    everything = listed(*workloads.values(), *cluster(workloads).values())
    denied = (1, "Error from server (Forbidden): pods is forbidden\n")
    kubectl.plays(config=VIEW, get=everything, exec=denied)
    ran = watched(look, 3, "--json")
    assert ran.code == 0, ran.stderr
    said = [event for frame in frames(ran) for event in frame["events"]]
    assert [(one["kind"], one["about"]) for one in said] == [("error", "pdkit")]
    assert "no counters of producer-0, consumer-0, consumer-1" in said[0]["text"]
    assert "pods is forbidden" in said[0]["text"]


def test_a_watch_ends_with_what_is_not_ready(
    workloads: dict[str, Object], kubectl: Player, look: Callable[..., Ended]
) -> None:
    pods = cluster(workloads)
    del pods["consumer-1"]
    kubectl.plays(config=VIEW, get=listed(*workloads.values(), *pods.values()), exec=(0, PAGE))
    ran = watched(look, 1)
    assert ran.code == 4
    assert "stack 'pdkit': 1p2d, Qwen/Qwen3-0.6B, http://router.pdkit.svc:8000" in ran.stdout
    assert "redis" not in ran.stdout, "nothing is said of what is not asked"
    assert "evicted" not in ran.stdout
    assert "error: not ready: consumer-1\ntry: deploy status --kubernetes" in ran.stderr


def test_a_watch_without_a_stack_is_an_error(kubectl: Player, look: Callable[..., Ended]) -> None:
    kubectl.plays(config=VIEW, get=listed())
    ran = watched(look, 2)
    assert ran.code == 2
    assert "no pods of a stack in namespace pdkit of here" in ran.stderr


def test_a_namespace_without_a_stack_is_an_error(
    kubectl: Player, look: Callable[..., Ended]
) -> None:
    kubectl.plays(config=VIEW, get=listed())
    ran = look("--json")
    assert ran.code == 2
    (error,) = json.loads(ran.stdout)["errors"]
    assert error["message"] == "no pods of a stack in namespace pdkit of here"
    assert "deploy status --kubernetes --namespace NAME" in error["hint"]


def test_a_cluster_that_does_not_answer_is_an_error(
    kubectl: Player, look: Callable[..., Ended]
) -> None:
    kubectl.plays(config=VIEW, get=(1, "Unable to connect to the server: dial tcp: i/o timeout\n"))
    ran = look("--json")
    assert ran.code == 3
    (error,) = json.loads(ran.stdout)["errors"]
    assert error["hint"] == f"{TYPED} cluster-info"
