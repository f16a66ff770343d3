"""`deploy check --kubernetes`, with a kubectl that plays a cluster's answers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import kubernetes_validate
import pytest
import yaml

from deploy.runtime.kubectl import Kubectl
from deploy.verify.hits import Phase
from deploy.verify.report import CheckReport, Equivalence
from deploy.workflows import cluster_job
from deploy.workflows.cluster_job import JobOptions, check_by_job
from deploy.workflows.export_folder import write_export
from tests.conftest import Ended
from tests.unit.kubectl_stand_in import (
    ROLE,
    VIEW,
    Answer,
    Player,
    assert_real_one_takes,
    ended,
    listed,
    pod,
    running,
    waiting,
    write_built,
)  # fmt: skip
from tests.unit.workflows.test_export import kustomized, made

ENGINE = pod("producer", "producer-0", running())
CHECK = "check-x7k2p"
# What the data of a check has; the rest of it is of no concern to who only hands it on.
PASSED = CheckReport([], Phase(), Equivalence(), None, None, [], [], [], 1.0).as_dict()
FAILED = {**PASSED, "passed": False, "failures": ["1 of 2 prompts failed"]}
CAUSE = {"code": "not_stored", "message": "nothing is stored", "hint": "deploy logs producer-0"}


def job(*conditions: dict[str, str]) -> dict[str, Any]:
    """Return the Job as the API server describes it, without what is of no concern here."""
    metadata = {"name": "check", "namespace": "pdkit", "labels": {ROLE: "check"}}
    status = {"conditions": list(conditions)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "status": status}


def exported_job() -> dict[str, Any]:
    """Return the Job of the export."""
    return copy.deepcopy(JOB)


def taken_job() -> dict[str, Any]:
    """Return the same as a cluster has it."""
    found, ids = exported_job(), {"controller-uid": "u-1", "job-name": "check"}
    found["metadata"] |= {"uid": "u-1", "resourceVersion": "7"}
    found["spec"]["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": "u-1"}}
    own = found["spec"]["template"]["metadata"]["labels"]
    own |= {**ids, **{f"batch.kubernetes.io/{key}": value for key, value in ids.items()}}
    return {**found, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}


RUNS = listed(job(), pod("check", CHECK, running()))


FOLDERS: dict[str, Path] = {}
JOB: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    for name, vendor in {"cpu": "cpu", "all": "auto"}.items():
        FOLDERS[name] = tmp_path_factory.mktemp(name)
        write_export(made(vendor=vendor), FOLDERS[name])
    built = yaml.load_all(write_built(FOLDERS["cpu"] / "check" / "cpu"), Loader=yaml.CSafeLoader)
    JOB.update(next(one for one in built if one["kind"] == "Job"))
    yield
    FOLDERS.clear()
    JOB.clear()


@pytest.fixture
def check(
    in_cluster: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ended]:
    monkeypatch.setattr(cluster_job, "_EVERY_S", 0.001)
    return partial(in_cluster, "check")


def log(**said: object) -> Answer:
    """Return the log of a Job's pod: progress, and what it says last."""
    last = json.dumps(said) + "\n" if said else ""
    return 0, f"[   0.0 s] waiting for the stack\n[  12.5 s] producer → consumer\n{last}"


def plays(kubectl: Player, said: Answer, *gets: Answer, **more: Answer) -> None:
    """Play a check whose pod runs at once, unless told otherwise."""
    kubectl.plays(config=VIEW, get=[listed(ENGINE), *(gets or (RUNS,))], logs=said, **more)


def test_the_exported_job_runs_and_its_result_comes_back(
    kubectl: Player, check: Callable[..., Ended]
) -> None:
    plays(kubectl, log(data=PASSED, text="the table\n\ncheck passed in 1.0 s"))
    ran = check(str(FOLDERS["cpu"]))
    assert ran.code == 0, ran.stderr
    assert ran.stdout == "the table\n\ncheck passed in 1.0 s\n"
    assert [line.partition("] ")[2] for line in ran.stderr.splitlines()] == [
        "the Job check runs in namespace pdkit of here, for at most 1230 s",
        "waiting for the stack", "producer → consumer",
    ]  # fmt: skip
    here = "--context=here --namespace=pdkit"
    label, quick = "--selector=app.kubernetes.io/name=pdkit", "--request-timeout=30s"
    assert kubectl.asked == [
        f"{quick} kustomize {FOLDERS['cpu']}/check/cpu",
        f"--namespace=pdkit {quick} config view --minify --output=json",
        f"{here} {quick} get jobs,pods {label} --output=json",
        f"{here} {quick} delete job check --ignore-not-found --cascade=foreground --timeout=90s"
        " --request-timeout=90s",
        f"{here} {quick} apply --filename=-",
        f"{here} {quick} get jobs,pods {label},app.kubernetes.io/component=check --output=json",
        f"{here} logs --follow {CHECK} --container=check",
    ]


def test_the_job_and_its_objects_are_applied_with_json_output(
    kubectl: Player, check: Callable[..., Ended]
) -> None:
    plays(kubectl, log(data=PASSED, text=""))
    assert check(str(FOLDERS["cpu"])).code == 0
    applied = next(json.loads(text) for argv, text in kubectl.calls if "apply" in argv)["items"]
    exported = kustomized(FOLDERS["cpu"] / "check" / "cpu")
    (own,) = (one for one in exported if one["kind"] == "Job")
    own["spec"]["template"]["spec"]["containers"][0]["command"].append("--json")
    assert applied == exported
    assert {one["kind"] for one in applied} == {"ConfigMap", "Job", "NetworkPolicy"}


@pytest.mark.parametrize("path", ["check/cpu", "check/cpu/stack.json"])
def test_the_folder_of_the_check_or_its_document_is_accepted(
    path: str, kubectl: Player, check: Callable[..., Ended]
) -> None:
    plays(kubectl, log(data=PASSED, text=""))
    assert check(str(FOLDERS["cpu"] / path)).code == 0
    assert kubectl.asked[0].endswith(f"kustomize {FOLDERS['cpu']}/check/cpu")


def test_json_is_that_of_deploy_check(kubectl: Player, check: Callable[..., Ended]) -> None:
    plays(kubectl, log(data=PASSED, text="the table"))
    ran = check(str(FOLDERS["cpu"]), "--json")
    document = json.loads(ran.stdout)
    assert (document["command"], document["exit_code"]) == ("check", 0)
    assert document["data"] == PASSED


@pytest.mark.parametrize(
    ("causes", "hint"),
    [
        ([CAUSE], "deploy logs producer-0"),
        ([], "kubectl --context=here --namespace=pdkit logs --selector=app.kubernetes.io/name=pdkit"
         " --prefix"),
    ],
)  # fmt: skip
def test_a_check_that_failed_exits_with_its_code(
    causes: list[object], hint: str, kubectl: Player, check: Callable[..., Ended]
) -> None:
    plays(kubectl, log(data={**FAILED, "diagnosis": causes}, text="check FAILED"))
    ran = check(str(FOLDERS["cpu"]), "--json")
    assert ran.code == 1
    document = json.loads(ran.stdout)
    assert document["data"]["passed"] is False
    (error,) = document["errors"]
    assert (error["code"], error["message"]) == ("check_failed", "1 of 2 prompts failed")
    assert error["hint"] == hint


def test_an_error_of_the_check_is_an_error_of_the_command(
    kubectl: Player, check: Callable[..., Ended]
) -> None:
    error = {"code": "stack_unhealthy", "message": "after 600 s: 0 of 1 producer found",
             "hint": "kubectl -n pdkit get pods", "details": ["one", "two"]}  # fmt: skip
    plays(kubectl, log(error={**error, "exit_code": 4}))
    ran = check(str(FOLDERS["cpu"]), "--json")
    assert ran.code == 4
    assert json.loads(ran.stdout)["errors"] == [error]
    assert json.loads(ran.stdout)["data"] is None


def test_findings_come_back_as_junit_xml(
    kubectl: Player, check: Callable[..., Ended], tmp_path: Path
) -> None:
    file = tmp_path / "found.xml"
    plays(kubectl, log(data=FAILED | {"diagnosis": []}, text="check FAILED", junit="<testsuites/>"))
    assert check(str(FOLDERS["cpu"]), "--junit", str(file)).code == 1
    assert told(kubectl) == ["--json", "--junit=kubernetes"]
    assert file.read_text().splitlines()[1:] == ["<testsuites/>"]


def test_a_check_without_a_result_is_an_error_in_junit_xml(
    kubectl: Player, check: Callable[..., Ended], tmp_path: Path
) -> None:
    file = tmp_path / "found.xml"
    kubectl.plays(config=VIEW, get=listed())
    assert check("--namespace", "mine", "--junit", str(file)).code == 2
    (suite,) = ElementTree.fromstring(file.read_bytes())  # noqa: S314 - our own
    assert (suite.attrib["name"], suite.attrib["errors"]) == ("mine", "1")
    (error,) = suite.iter("error")
    assert error.attrib["message"].startswith("no pods of a stack in namespace mine")


def test_a_missing_folder_for_junit_xml_is_refused(
    kubectl: Player, check: Callable[..., Ended], tmp_path: Path
) -> None:
    ran = check("--junit", str(tmp_path / "none" / "found.xml"))
    assert ran.code == 2
    assert not (kubectl.folder / "calls").exists(), "the cluster is left alone"


@pytest.mark.parametrize(
    "said",
    [
        {"data": 5}, {"data": {"passed": False}}, {"data": {"passed": True}}, {"error": 5},
        {"error": {"message": "x"}},
        {"error": {"message": 1, "hint": 2, "details": 3, "code": 4, "exit_code": "x"}},
    ],
)  # fmt: skip
def test_an_invalid_result_is_an_error(
    said: dict[str, object], kubectl: Player, check: Callable[..., Ended]
) -> None:
    plays(kubectl, log(**said))
    ran = check(str(FOLDERS["cpu"]))
    assert ran.code == 4
    assert "error: this version of pdkit cannot read the result of the Job check (" in ran.stderr


def test_a_deeply_nested_line_is_printed_as_text(
    kubectl: Player, check: Callable[..., Ended]
) -> None:
    code, said = log(data=PASSED, text="check passed")
    plays(kubectl, (code, "[" * 100_000 + "\n" + said))
    assert check(str(FOLDERS["cpu"])).code == 0


# The Job that the cluster has.


@pytest.mark.parametrize("lacks", ["container", "command", "deadline"])
def test_a_job_that_no_export_has_is_refused(
    lacks: str, kubectl: Player, check: Callable[..., Ended]
) -> None:
    other = taken_job()
    (container,) = other["spec"]["template"]["spec"]["containers"]
    if lacks == "container":
        container["name"] = "another"
    elif lacks == "command":
        del container["command"]
    else:
        del other["spec"]["activeDeadlineSeconds"]
    kubectl.plays(config=VIEW, get=listed(ENGINE, other))
    ran = check()
    assert ran.code == 2
    assert "error: the Job check in namespace pdkit of here is not that of an export" in ran.stderr
    assert not [asked for asked in kubectl.asked if "delete" in asked or "apply" in asked]


def test_the_job_of_the_cluster_runs_again_without_a_folder(
    kubectl: Player, check: Callable[..., Ended]
) -> None:
    old = taken_job()
    old["spec"]["template"]["spec"]["containers"][0]["command"].append("--json")
    over = pod("check", "check-old", ended(0))
    kubectl.plays(
        config=VIEW,
        get=[listed(ENGINE, over, old), RUNS],
        logs=log(data=PASSED, text="check passed"),
    )
    assert check().code == 0
    (anew,) = next(json.loads(text) for argv, text in kubectl.calls if "apply" in argv)["items"]
    exported = exported_job()
    exported["spec"]["template"]["spec"]["containers"][0]["command"].append("--json")
    assert anew == exported, "without what Kubernetes added to it"


# What of the stack is checked.

ENGINES = [
    pod(role, name, running(), podIP=f"10.0.0.{number}")
    for number, (role, name) in enumerate(
        [("producer", "producer-0"), ("producer", "producer-1"), ("consumer", "consumer-0"),
         ("consumer", "consumer-1"), ("redis", "redis-0")]
    )
]  # fmt: skip


def told(kubectl: Player) -> list[str]:
    """Return the arguments that the Job's program got."""
    applied = next(json.loads(text) for argv, text in kubectl.calls if "apply" in argv)["items"]
    (own,) = (one for one in applied if one["kind"] == "Job")
    command = own["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[1:3] == ["-m", "deploy.cli.cluster_check"]
    return list(command[5:])


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ((), []),
        (("--quick", "--min-hit-rate", "0.95"), ["--quick", "--min-hit-rate=0.95"]),
        (
            ("--pairs", "producer-1:*", "--pairs", "*:consumer-1"),
            ["--pairs=producer-10.0.0.0:consumer-10.0.0.3",
             "--pairs=producer-10.0.0.1:consumer-10.0.0.2",
             "--pairs=producer-10.0.0.1:consumer-10.0.0.3"],
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("again", [False, True])
def test_options_go_to_the_job(
    options: tuple[str, ...], arguments: list[str], again: bool,
    kubectl: Player, check: Callable[..., Ended],
) -> None:  # fmt: skip
    old = taken_job()
    command = old["spec"]["template"]["spec"]["containers"][0]["command"]
    command += ["--json", "--pairs=a:b", "--quick", "--min-hit-rate=0.1"]
    there = listed(*ENGINES, *([old] if again else ()))
    kubectl.plays(config=VIEW, get=[there, RUNS], logs=log(data=PASSED, text=""))
    assert check(*([] if again else [str(FOLDERS["cpu"])]), *options).code == 0
    assert told(kubectl) == ["--json", *arguments], "without those of the last time"


def test_each_pair_of_aggregated_engines_has_two_of_them(
    kubectl: Player, check: Callable[..., Ended]
) -> None:
    both = [pod("aggregated", f"engine-{n}", running(), podIP=f"10.0.0.{n}") for n in range(2)]
    kubectl.plays(
        config=VIEW, get=[listed(*both, taken_job()), RUNS], logs=log(data=PASSED, text="")
    )
    assert check("--pairs", "*:*").code == 0
    assert told(kubectl)[1:] == [
        "--pairs=engine-10.0.0.0:engine-10.0.0.1", "--pairs=engine-10.0.0.1:engine-10.0.0.0",
    ]  # fmt: skip


def test_repeated_runs_get_a_longer_time_limit(
    kubectl: Player, check: Callable[..., Ended]
) -> None:
    old = taken_job()
    once_s = old["spec"]["activeDeadlineSeconds"]
    old["spec"]["activeDeadlineSeconds"] = 2 * once_s
    old["spec"]["template"]["spec"]["containers"][0]["command"].append("--repeat=2")
    kubectl.plays(config=VIEW, get=[listed(*ENGINES, old), RUNS], logs=log(data=PASSED, text=""))
    assert check("--repeat", "3").code == 0
    assert told(kubectl) == ["--json", "--repeat=3"]
    applied = next(json.loads(text) for argv, text in kubectl.calls if "apply" in argv)["items"]
    assert [one["spec"]["activeDeadlineSeconds"] for one in applied] == [3 * once_s]


def test_the_prompt_of_a_file_goes_to_the_job(
    kubectl: Player, check: Callable[..., Ended], tmp_path: Path
) -> None:
    """Kubernetes replaces $(NAME) in commands by a variable, and $$ by $."""
    (tmp_path / "prompt").write_text("two\nlines, $(HOME) and $5")
    kubectl.plays(
        config=VIEW, get=[listed(*ENGINES, taken_job()), RUNS], logs=log(data=PASSED, text="")
    )
    assert check("--prompt-file", str(tmp_path / "prompt")).code == 0
    assert told(kubectl) == ["--json", "--prompt=two\nlines, $$(HOME) and $$5"]


def test_a_prompt_too_long_for_a_command_line_is_refused(
    kubectl: Player, check: Callable[..., Ended], tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text("long " * 30_000)
    kubectl.plays(config=VIEW, get=listed(*ENGINES, taken_job()))
    ran = check("--prompt-file", str(tmp_path / "prompt"))
    assert ran.code == 2
    assert "--prompt-file: 150000 bytes; with --kubernetes, at most 100000" in ran.stderr
    assert not [asked for asked in kubectl.asked if "delete" in asked or "apply" in asked]


@pytest.mark.parametrize("pattern", ["consumer-0:*", "producer-2:*", "producer-0:redis-0"])
def test_a_pair_that_does_not_exist_is_refused(
    pattern: str, kubectl: Player, check: Callable[..., Ended]
) -> None:
    unplaced = pod("producer", "producer-2", waiting("ContainerCreating"))
    kubectl.plays(config=VIEW, get=listed(*ENGINES[:3], *ENGINES[4:], unplaced, taken_job()))
    ran = check("--json", "--pairs", "*:*", "--pairs", pattern)
    assert ran.code == 2
    (error,) = json.loads(ran.stdout)["errors"]
    assert error["message"] == (
        f"--pairs {pattern}: no such pair; pairs: producer-0:consumer-0, producer-1:consumer-0"
    )
    assert error["hint"] == "deploy check --kubernetes --pairs '*:*'"
    assert not [asked for asked in kubectl.asked if "delete" in asked or "apply" in asked]


def test_engines_without_an_address_make_no_pair(
    kubectl: Player, check: Callable[..., Ended]
) -> None:
    kubectl.plays(config=VIEW, get=listed(ENGINE, taken_job()))
    ran = check("--pairs", "*:*")
    assert ran.code == 2
    assert "--pairs *:*: no such pair; pairs: none yet" in ran.stderr


# Containers of others.


def test_a_container_that_others_added_to_the_job_is_left_as_it_is(
    kubectl: Player, check: Callable[..., Ended]
) -> None:
    old = taken_job()
    old["spec"]["template"]["spec"]["containers"].insert(0, {"name": "proxy", "image": "proxy:1"})
    kubectl.plays(
        config=VIEW, get=[listed(ENGINE, old), RUNS], logs=log(data=PASSED, text="check passed")
    )
    assert check().code == 0
    (anew,) = next(json.loads(text) for argv, text in kubectl.calls if "apply" in argv)["items"]
    proxy, own = anew["spec"]["template"]["spec"]["containers"]
    assert proxy == {"name": "proxy", "image": "proxy:1"}
    assert own["command"][-1] == "--json"


def test_context_and_namespace_go_to_kubectl(kubectl: Player, check: Callable[..., Ended]) -> None:
    kubectl.plays(
        config=(0, json.dumps({"contexts": [{"name": "prod", "context": {"cluster": "c"}}]})),
        get=[listed(ENGINE, taken_job()), RUNS],
        logs=log(data=PASSED, text=""),
    )
    assert check("--context", "prod", "--namespace", "mine").code == 0
    assert all(asked.startswith("--context=prod --namespace=mine ") for asked in kubectl.asked)


def test_a_pod_uses_kubectl_without_a_context(kubectl: Player, check: Callable[..., Ended]) -> None:
    kubectl.plays(
        config=(1, "error: current-context must exist in order to minify\n"),
        get=[listed(ENGINE, taken_job()), RUNS],
        logs=log(data=PASSED, text=""),
    )
    ran = check()
    assert ran.code == 0
    assert "in kubectl's namespace" in ran.stderr
    assert not [asked for asked in kubectl.asked if "--context" in asked or "--namespace" in asked]


# Errors, each with the next command.


@pytest.mark.parametrize(
    ("answers", "code", "message", "hint"),
    [
        (
            {"config": (1, "error: cannot locate context nowhere\n")}, 2,
            "kubectl config: cannot locate context nowhere", "kubectl config get-contexts",
        ),
        (
            {"config": VIEW, "get": (1, "E1123 memcache.go:265] refused\nThe connection to the "
             "server 10.0.0.1:6443 was refused - did you specify the right host or port?\n")}, 3,
            "kubectl get: The connection to the server 10.0.0.1:6443 was refused - did you specify "
            "the right host or port?", "kubectl --context=here --namespace=pdkit cluster-info",
        ),
        (
            {"config": VIEW, "get": (1, "Error from server (Forbidden): pods is forbidden: "
             'User "me" cannot list resource "pods"\n')}, 3,
            'kubectl get: Error from server (Forbidden): pods is forbidden: User "me" cannot list '
            'resource "pods"', "kubectl --context=here --namespace=pdkit auth can-i --list",
        ),
        (
            {"config": VIEW, "get": (1, "error: a riddle\n")}, 3, "kubectl get: a riddle",
            "kubectl --context=here --namespace=pdkit get jobs,pods"
            " --selector=app.kubernetes.io/name=pdkit --output=json",
        ),
        (
            {"config": VIEW, "get": listed()}, 2, "no pods of a stack in namespace pdkit of here",
            "kubectl apply -k FOLDER/overlays/VENDOR, or "
            "deploy check --kubernetes --namespace NAME",
        ),
        (
            {"config": VIEW, "get": listed(ENGINE)}, 2, "no Job check in namespace pdkit of here",
            "deploy check --kubernetes FOLDER_OF_THE_EXPORT",
        ),
        (
            {"config": VIEW, "get": listed(ENGINE, pod("check", CHECK, running()))}, 3,
            "a check of the stack in namespace pdkit of here is already running",
            "kubectl --context=here --namespace=pdkit logs -f job/check, or end it: "
            "kubectl --context=here --namespace=pdkit delete job check",
        ),
    ],
)  # fmt: skip
def test_errors_before_a_check_name_the_fix(
    answers: dict[str, Answer], code: int, message: str, hint: str,
    kubectl: Player, check: Callable[..., Ended],
) -> None:  # fmt: skip
    kubectl.plays(**answers)
    ran = check("--json")
    assert ran.code == code
    (error,) = json.loads(ran.stdout)["errors"]
    assert (error["message"], error["hint"]) == (message, hint)
    assert not [asked for asked in kubectl.asked if "delete" in asked or "apply" in asked]


def test_a_missing_kubectl_is_an_error(
    check: Callable[..., Ended], kubectl: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kubectl.folder / "kubectl").unlink()
    monkeypatch.setenv("PATH", str(kubectl.folder))
    ran = check()
    assert ran.code == 3
    assert "error: the command kubectl is not installed" in ran.stderr


NO_PULL = 'Back-off pulling image "registry/engine:1"'


@pytest.mark.parametrize(
    ("gets", "code", "message"),
    [
        (
            [listed(job(), pod("check", CHECK, waiting("ImagePullBackOff", NO_PULL)))], 3,
            f"the check's pod has no image: ImagePullBackOff: {NO_PULL}",
        ),
        (
            [listed(job(), pod("check", CHECK, ended(137, "OOMKilled")))], 137,
            "the check's pod ended with 137 (OOMKilled) and without a result that this version of "
            "pdkit can read",
        ),
        (
            [listed(job(), pod("check", CHECK, ended(0)))], 4,
            "the check's pod ended with 0 (Completed) and without a result that this version of "
            "pdkit can read",
        ),
        (
            [listed(job({"type": "Failed", "status": "True", "reason": "DeadlineExceeded",
                         "message": "Job was active longer than specified deadline"}))], 4,
            "the Job check ended without a result: Failed: DeadlineExceeded: Job was active longer "
            "than specified deadline",
        ),
        ([listed()], 4, "the Job check ended without a result: it was deleted"),
    ],
)  # fmt: skip
def test_a_job_without_a_result_is_an_error(
    gets: list[Answer], code: int, message: str, kubectl: Player, check: Callable[..., Ended]
) -> None:
    plays(kubectl, log(), *gets)
    ran = check(str(FOLDERS["cpu"]), "--json")
    assert ran.code == code
    (error,) = json.loads(ran.stdout)["errors"]
    assert error["message"] == message
    assert error["hint"]


def test_a_job_that_never_ends_is_given_up_after_its_own_time(
    kubectl: Player, check: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_job, "_LATE_S", -1230)
    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                "message": "0/3 nodes are available"}  # fmt: skip
    waits = pod("check", CHECK, waiting("ContainerCreating"), conditions=[unplaced])
    waits["status"]["containerStatuses"] = []
    plays(kubectl, log(), listed(job(), waits))
    ran = check(str(FOLDERS["cpu"]))
    assert ran.code == 4
    assert "waiting for the check's pod: Unschedulable: 0/3 nodes are available" in ran.stderr
    assert "error: the Job check has not ended within 0 s" in ran.stderr
    assert "try: kubectl --context=here --namespace=pdkit describe pods" in ran.stderr


def test_a_pod_of_which_nothing_is_known_yet_has_no_reason(
    kubectl: Player, check: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_job, "_LATE_S", -1230)
    new = pod("check", CHECK, waiting("ContainerCreating"))
    new["status"] = {"phase": "Pending"}
    plays(kubectl, log(), listed(job(), new))
    assert "waiting for the check's pod\n" in check(str(FOLDERS["cpu"])).stderr


def test_a_refused_apply_is_an_error(kubectl: Player, check: Callable[..., Ended]) -> None:
    plays(kubectl, log(), apply=(1, 'jobs.batch "check" is forbidden: exceeded quota\n'))
    ran = check(str(FOLDERS["cpu"]))
    assert ran.code == 3
    assert "exceeded quota" in ran.stderr
    assert not [asked for asked in kubectl.asked if "logs" in asked]


@pytest.mark.parametrize(
    ("folder", "options", "message", "hint"),
    [
        ("cpu", ("--namespace", "mine"), "--namespace mine: the export is for the namespace pdkit",
         "deploy export kubernetes --namespace mine -o FOLDER"),
        ("all", (), "has the checks of several vendors: cpu, cuda, rocm", "/check/cpu"),
        ("cpu/base", (), "is not the folder of an export, or has no check",
         "deploy export kubernetes -o FOLDER"),
    ],
)  # fmt: skip
def test_a_folder_of_another_export_is_refused(
    folder: str, options: tuple[str, ...], message: str, hint: str,
    kubectl: Player, check: Callable[..., Ended],
) -> None:  # fmt: skip
    kubectl.plays(config=VIEW, get=listed(ENGINE))
    name, _, below = folder.partition("/")
    ran = check(str(FOLDERS[name] / below), *options, "--json")
    assert ran.code == 2
    (error,) = json.loads(ran.stdout)["errors"]
    assert message in error["message"]
    assert hint in error["hint"]


@pytest.mark.parametrize("command", ["check", "status"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--kubernetes", "--name", "x"), "--name cannot be used with --kubernetes"),
        (("--context", "here"), "--context needs --kubernetes"),
        (("--namespace", "pdkit"), "--namespace needs --kubernetes"),
    ],
)
def test_contradicting_options_are_refused(
    command: str,
    options: tuple[str, ...],
    message: str,
    deploy_here: Callable[..., Ended],
    tmp_path: Path,
) -> None:
    refused(deploy_here(command, *options, cwd=tmp_path, home=tmp_path), command, message)


def test_a_folder_of_a_check_needs_a_cluster(
    deploy_here: Callable[..., Ended], tmp_path: Path
) -> None:
    ran = deploy_here("check", "stack", cwd=tmp_path, home=tmp_path)
    refused(ran, "check", "FOLDER needs --kubernetes")


def refused(ran: Ended, command: str, message: str) -> None:
    assert ran.code == 2
    assert message in ran.stderr
    assert f"try: deploy {command} --help" in ran.stderr


# What breaks off, and what is waited for.


def test_a_log_that_breaks_off_is_continued_without_repeats(
    kubectl: Player, check: Callable[..., Ended]
) -> None:
    whole = log(data=PASSED, text="check passed")
    first = whole[1].splitlines(keepends=True)[0]
    kubectl.plays(
        config=VIEW,
        get=[listed(ENGINE), (1, "Unable to connect to the server: EOF\n"), RUNS],
        logs=[(0, first), (1, "error: container is waiting to start\n"), whole],
    )
    ran = check(str(FOLDERS["cpu"]))
    assert (ran.code, ran.stdout) == (0, "check passed\n")
    told = [line.partition("] ")[2] for line in ran.stderr.splitlines()][1:]
    assert told == [
        "kubectl get: Unable to connect to the server: EOF; trying again",
        "waiting for the stack",
        "kubectl logs: container is waiting to start; trying again",
        "producer → consumer",
    ]


def test_a_log_that_was_not_read_is_not_a_missing_result(
    kubectl: Player, check: Callable[..., Ended]
) -> None:
    over = listed(job({"type": "Complete", "status": "True"}), pod("check", CHECK, ended(0)))
    kubectl.plays(
        config=VIEW, get=[listed(ENGINE), over],
        logs=[(1, "Unable to connect to the server: EOF\n"), log(data=PASSED, text="passed")],
    )  # fmt: skip
    assert check(str(FOLDERS["cpu"])).stdout == "passed\n"


def test_a_pod_that_only_waits_is_replaced(kubectl: Player, check: Callable[..., Ended]) -> None:
    """As one whose image could not be pulled."""
    waits = pod("check", "check-old", waiting("ErrImagePull"))
    kubectl.plays(
        config=VIEW, get=[listed(ENGINE, waits), RUNS], logs=log(data=PASSED, text="passed")
    )
    assert check(str(FOLDERS["cpu"])).code == 0


def test_ctrl_c_deletes_the_job(
    kubectl: Player, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plays(kubectl, log(data=PASSED, text=""))
    monkeypatch.setenv("PATH", kubectl.path)
    told: list[str] = []

    def report(line: str) -> None:
        told.append(line)
        if line == "waiting for the stack":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_by_job(Kubectl(), FOLDERS["cpu"], report, JobOptions())
    assert told[-1] == "deleting the Job check"
    assert kubectl.asked[-1].endswith(" delete job check --ignore-not-found --wait=false")


# The stand-in itself.


def test_kubectl_takes_every_command(
    kubectl: Player, check: Callable[..., Ended], tmp_path: Path
) -> None:
    plays(kubectl, log(data=PASSED, text=""))
    assert check(str(FOLDERS["cpu"])).code == 0
    assert_real_one_takes(kubectl.calls, tmp_path)


def test_a_command_that_kubectl_does_not_take_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="unknown flag"):
        assert_real_one_takes([(["get", "pods", "--everything"], "")], tmp_path)


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_the_test_objects_are_valid_kubernetes_objects(version: str) -> None:
    for state in (running(), waiting("ErrImagePull", "no"), ended(137, "OOMKilled")):
        kubernetes_validate.validate(pod("check", CHECK, state), version, strict=True)
    kubernetes_validate.validate(taken_job(), version, strict=True)
