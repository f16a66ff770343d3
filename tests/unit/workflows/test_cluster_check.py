"""The check of an exported stack: on services that are found by name, and as its Job runs it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest

from deploy.cli import cluster_check as program
from deploy.config.spec import StackSpec
from deploy.errors import StackUnhealthy, UsageError
from deploy.runtime.names import addresses
from deploy.verify.report import CheckReport
from deploy.workflows import cluster_check, key_cleanup
from deploy.workflows.check import CheckOptions, run
from deploy.workflows.cluster_check import check_cluster
from deploy.workflows.down import stop_stack
from deploy.workflows.export import Export, export
from deploy.workflows.export_folder import write_export
from deploy.workflows.running import require_stack, store_of
from tests.conftest import plain_environ
from tests.contract import validated
from tests.unit.conftest import HOME
from tests.unit.workflows.conftest import SMALL, Lab, opened
from tests.unit.workflows.test_export import kustomized, pods

HOST = "127.0.0.1"
_ALL = CheckOptions()
# Replaces the look-up of names before the program starts; whatever else it imports is the Job's.
SHIM = """
import json, os
import deploy.runtime.names as names
table = json.loads(os.environ["WHERE"])
names.addresses = lambda host, port: [tuple(one) for one in table.get(host, ())]
"""


@dataclass
class Cluster:
    """A stack of processes that serves as an exported one, and what the export wrote of it."""

    lab: Lab
    made: Export
    document: Path
    where: dict[str, list[tuple[str, int]]]

    @property
    def secrets(self) -> Path:
        return self.lab.home.stack("pdkit").secrets_dir

    def look_up(self, host: str, _port: int) -> list[tuple[str, int]]:
        return self.where.get(host, [])

    def check(self, options: CheckOptions = _ALL, **changed: object) -> CheckReport:
        document = json.loads(self.document.read_text())
        document["spec"].update(changed)
        file = self.document.with_name("changed.json")
        file.write_text(json.dumps(document))
        return check_cluster(file, self.secrets, self.lab.lines.append, options, self.look_up)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    made = export(StackSpec.model_validate({**SMALL, "vendor": "cpu"}), HOME)
    document = folder / "stack.json"
    document.write_text(made.files["check/cpu/stack.json"])
    with opened(folder / "lab") as lab:
        lab.up(lab.spec())
        running = require_stack(lab.home, "pdkit")
        with by_tcp(running.stack.service("redis").socket) as redis:
            ports = {one.role: one.port for one in running.stack.services}
            where = {
                "producer": [(HOST, ports["producer"])],
                "consumer": [(HOST, ports["consumer"])],
                "router": [(HOST, ports["router"])],
                "redis-0.redis": [(HOST, redis)],
            }
            yield Cluster(lab, made, document, where)
        stop_stack(lab.home, "pdkit", lab.lines.append)


class by_tcp:
    """Serves a Unix socket on a port, as a Redis in a pod is reached."""

    def __init__(self, path: str) -> None:
        class Handler(BaseRequestHandler):
            def handle(self) -> None:
                with socket.socket(socket.AF_UNIX) as redis:
                    redis.connect(path)
                    back = threading.Thread(target=_copy, args=(redis, self.request))
                    back.start()
                    _copy(self.request, redis)
                    back.join()

        self._server = ThreadingTCPServer((HOST, 0), Handler)
        self._server.daemon_threads = True

    def __enter__(self) -> int:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return int(self._server.server_address[1])

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(1 << 16):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def with_faults(cluster: Cluster) -> Iterator[Callable[[str], None]]:
    yield lambda word: cluster.lab.faults.write_text(word) and None
    cluster.lab.faults.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_check, "_EVERY_S", 0.01)
    monkeypatch.setattr(key_cleanup, "_QUIET_S", 0.1)


def test_a_healthy_stack_passes_and_keeps_no_key_of_the_check(cluster: Cluster) -> None:
    report = cluster.check()
    assert report.failures == []
    assert [(pair.producer, pair.consumer) for pair in report.pairs] == [
        (f"producer-{HOST}", f"consumer-{HOST}")
    ]
    assert report.store
    assert report.store.keys_removed, "it reached Redis over the network, with the password"
    assert report.race.hits.hits == report.race.hits.eligible > 0


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("producer:stores-nothing", "not_stored"),
        ("consumer:wrong-kv", "kv_differs"),
        ("producer:refuses-prefill", "router_bypasses_producers"),
    ],
)
def test_a_broken_stack_fails_and_the_cause_is_named(
    cluster: Cluster, with_faults: Callable[[str], None], fault: str, cause: str
) -> None:
    with_faults(fault)
    report = cluster.check()
    assert not report.passed
    assert report.diagnosis[0].code == cause


def test_the_check_waits_for_missing_services(cluster: Cluster) -> None:
    late, asked = ["consumer", "redis-0.redis", "router"], 0

    def look_up(host: str, port: int) -> list[tuple[str, int]]:
        nonlocal asked
        asked += 1
        if host in late and asked % 7 == 0:
            late.remove(host)
        return [] if host in late else cluster.look_up(host, port)

    cluster.lab.lines.clear()
    assert check_cluster(cluster.document, cluster.secrets, cluster.lab.lines.append, _ALL, look_up)
    first = next(line for line in cluster.lab.lines if line.startswith("waiting"))
    assert "0 of 1 consumer found" in first
    assert "0 of 1 redis found" in first
    assert "producer found" not in first


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        ({"consumer": []}, "0 of 1 consumer found"),
        ({"redis-0.redis": [(HOST, 1)]}, "not answering: redis"),
        ({"producer": [(HOST, 1)]}, f"not answering: producer-{HOST}"),
        ({"router": [(HOST, 1)]}, "not answering: router"),
    ],
)
def test_missing_services_are_named(
    cluster: Cluster, gone: dict[str, list[tuple[str, int]]], words: str
) -> None:
    without = replace(cluster, where={**cluster.where, **gone})
    with pytest.raises(StackUnhealthy, match=words) as caught:
        without.check(timeouts={"ready_s": 0.1})
    assert caught.value.hint == "kubectl -n pdkit get pods -o wide"


def test_more_engines_than_were_exported_are_checked_too(cluster: Cluster) -> None:
    """As after a change of `replicas`: all that the Service names."""
    port = cluster.where["consumer"][0][1]
    both = [("127.0.0.1", port), ("localhost", port)]
    more = replace(cluster, where={**cluster.where, "consumer": both})
    assert len(more.check().pairs) == 2


def test_a_check_that_is_interrupted_removes_its_keys(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[int | None] = []

    def interrupted(session: run.Session) -> None:
        stored.append(session.store.count_marked(session.keys.run))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "check_router", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cluster.check()
    assert stored[0], "or nothing was left to remove"
    with store_of(require_stack(cluster.lab.home, "pdkit")) as store:
        assert store.count_marked(key_cleanup.mark("check-")) == 0


# As the Job runs it.


@dataclass
class Pod:
    """What the Job's pod would run, and the files that it would see."""

    argv: list[str]
    env: dict[str, str]

    def run(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv, env=self.env, capture_output=True, text=True, timeout=120, check=False,
            cwd=self.env["HOME"],
        )  # fmt: skip


@pytest.fixture(scope="module")
def pod(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Pod:
    """Mount what kubectl makes of the folder, and nothing else of the kit."""
    folder = tmp_path_factory.mktemp("pod")
    write_export(cluster.made, folder / "exported")
    objects = kustomized(folder / "exported" / "check" / "cpu")
    data = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
    job = pods(objects)["check"]
    (container,) = job["containers"]
    volumes = {one["name"]: one for one in job["volumes"]}
    for mount in container["volumeMounts"]:
        volume, target = volumes[mount["name"]], folder / mount["mountPath"].lstrip("/")
        target.mkdir(parents=True)
        for source in volume.get("projected", {}).get("sources", ()):
            for item in source["configMap"]["items"]:
                file = target / item["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(data[source["configMap"]["name"]][item["key"]])
        for name, text in data.get(volume.get("configMap", {}).get("name"), {}).items():
            (target / name).write_text(text)
    for name in (item["key"] for item in volumes["secrets"]["secret"]["items"]):
        with suppress(FileNotFoundError):  # the stack of processes asks for no key of clients
            text = (cluster.secrets / name).read_text()
            (folder / "run/secrets" / name).write_text(text)
    env = {one["name"]: one["value"] for one in container["env"]}
    (folder / "shim").mkdir()
    (folder / "shim" / "sitecustomize.py").write_text(SHIM)
    kit = folder / env["PYTHONPATH"].lstrip("/")
    own = {"HOME": str(folder / "tmp"), "PYTHONPATH": f"{folder / 'shim'}:{kit}"}
    _, *words = container["command"]
    seen = [f"{folder}{word}" if word.startswith("/") else word for word in words]
    where = {"WHERE": json.dumps(cluster.where)}
    return Pod([sys.executable, *seen], {**plain_environ(), **env, **own, **where})


def test_the_job_passes_on_a_healthy_stack(pod: Pod) -> None:
    ended = pod.run()
    assert ended.returncode == 0, ended.stderr
    assert "check passed" in ended.stdout


def test_the_job_fails_on_a_broken_one(pod: Pod, with_faults: Callable[[str], None]) -> None:
    with_faults("producer:stores-nothing")
    ended = pod.run()
    assert ended.returncode == 1, ended.stderr
    assert "[not_stored]" in ended.stdout


def test_the_job_says_the_same_as_json(pod: Pod, with_faults: Callable[[str], None]) -> None:
    with_faults("producer:stores-nothing")
    ended = replace(pod, argv=[*pod.argv, "--json"]).run()
    assert ended.returncode == 1, ended.stderr
    (line,) = ended.stdout.splitlines()
    said = json.loads(line)
    validated({
        "version": "1", "command": "check", "status": "error", "exit_code": 1, "errors": [],
        "data": said["data"],
    })  # fmt: skip
    assert said["data"]["passed"] is False
    assert said["data"]["diagnosis"][0]["code"] == "not_stored"
    assert "check FAILED" in said["text"]


def test_the_job_takes_the_options_of_deploy_check(pod: Pod) -> None:
    told = [*pod.argv, "--json", f"--pairs=producer-{HOST}:consumer-{HOST}"]
    whole, quick = (
        replace(pod, argv=argv).run() for argv in (told, [*told, "--quick", "--repeat=2"])
    )
    assert (whole.returncode, quick.returncode) == (0, 0), quick.stderr
    whole_data, quick_data = (json.loads(one.stdout)["data"] for one in (whole, quick))
    assert [one["consumer"] for one in quick_data["pairs"]] == [f"consumer-{HOST}"]
    assert whole_data["burst"]
    assert quick_data["burst"] is None
    assert (quick_data["runs"], quick_data["runs_passed"]) == (2, 2)
    assert "2 of 2 runs passed" in json.loads(quick.stdout)["text"]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), CheckOptions()),
        (("--pairs=a:b", "--pairs=c:d"), CheckOptions(["a:b", "c:d"])),
        (("--json", "--quick", "--min-hit-rate=0.95"), CheckOptions(quick=True, least=0.95)),
        (("--json", "--prompt=two\nlines"), CheckOptions(prompt="two\nlines")),
    ],
)
def test_the_job_understands_its_arguments(
    arguments: tuple[str, ...], options: CheckOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def check(document: Path, secrets: Path, _report: object, options: CheckOptions) -> None:
        asked.extend((document, secrets, options))
        raise StackUnhealthy("it does not serve", hint="")

    monkeypatch.setattr(program, "check_cluster", check)
    monkeypatch.setattr(program, "interrupt_once", lambda: None)
    assert program.main(["stack.json", "secrets", *arguments]) == StackUnhealthy.exit_code
    assert asked == [Path("stack.json"), Path("secrets"), options]


def test_a_pair_that_the_job_does_not_find_is_an_error(pod: Pod) -> None:
    ended = replace(pod, argv=[*pod.argv, "--pairs=producer-0:*"]).run()
    assert ended.returncode == UsageError.exit_code
    assert "no such pair" in ended.stderr


def test_a_bug_of_the_program_is_not_a_failed_check(pod: Pod) -> None:
    ended = replace(pod, argv=[*pod.argv[:-2], "/nonexistent/stack.json", pod.argv[-1]]).run()
    assert ended.returncode == 70
    assert "Traceback" in ended.stderr


def test_a_stack_that_does_not_serve_is_not_a_failed_check(pod: Pod, tmp_path: Path) -> None:
    document = json.loads(Path(pod.argv[-2]).read_text())
    document["spec"]["timeouts"]["ready_s"] = 0.1
    (tmp_path / "stack.json").write_text(json.dumps(document))
    argv = [*pod.argv[:-2], str(tmp_path / "stack.json"), pod.argv[-1]]
    lost = Pod(argv, {**pod.env, "WHERE": "{}"})
    ended = lost.run()
    assert ended.returncode == StackUnhealthy.exit_code
    assert "0 of 1 producer found" in ended.stderr
    assert "try: kubectl -n pdkit get pods" in ended.stderr
    told = replace(lost, argv=[*argv, "--json"]).run()
    assert told.returncode == StackUnhealthy.exit_code
    error = json.loads(told.stdout)["error"]
    assert (error["code"], error["exit_code"]) == ("stack_unhealthy", told.returncode)
    assert "0 of 1 producer found" in error["message"]


def test_names_are_looked_up() -> None:
    assert addresses("localhost", 8000) == [("127.0.0.1", 8000)]


def test_an_unknown_name_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert addresses("no-such-name.invalid", 8000) == []
