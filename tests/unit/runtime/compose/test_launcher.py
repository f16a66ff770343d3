"""The Compose runtime, with an engine of pretence: what it finds, says and leaves.

What Docker says was recorded with engine 20.10.24 and 26.1.5, and Compose 2.26.1.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.errors import (
    MachineError,
    MissingGpus,
    MissingImage,
    OutOfMemory,
    PdkitError,
    PortTaken,
    StackUnhealthy,
)
from deploy.runtime.compose import launcher as launcher_module
from deploy.runtime.compose.containers import FoundContainer
from deploy.runtime.compose.launcher import ComposeLauncher, StartedContainer
from deploy.runtime.compose.project import write_project
from deploy.runtime.compose.refusals import describe_end, refusal
from deploy.runtime.home import Home, StackHome
from deploy.runtime.secrets import Secret
from deploy.runtime.state import ServiceRecord
from deploy.stack.service import (
    ConfigFile,
    Container,
    DeviceAccess,
    HealthCheck,
    Mount,
    Published,
    Service,
    Stack,
)
from tests.unit.runtime.compose.conftest import FakeDocker, FakeNetwork

SAID = {
    "no image": (
        " Container errlab-a-1  Creating\n"
        "Error response from daemon: no such image: pdkit/missing:1: No such image: pdkit/missing:1"
    ),
    "no image, 26": (
        " Container errlab-a-1  Creating\n"
        "Error response from daemon: No such image: pdkit/missing:1"
    ),
    "no driver": (
        " Container errlab-a-1  Starting\n"
        'Error response from daemon: could not select device driver "nvidia" with capabilities: '
        "[[gpu]]"
    ),
    "no device of the interface": (
        "Error response from daemon: failed to create task for container: failed to create shim "
        "task: OCI runtime create failed: CDI device injection failed: unresolvable CDI devices "
        "nvidia.com/gpu=0: unknown"
    ),
    "old driver": (
        "Error response from daemon: failed to create task for container: failed to create shim "
        "task: OCI runtime create failed: runc create failed: unable to start container process: "
        "error during container init: error running prestart hook #0: exit status 1, stdout: , "
        "stderr: Auto-detected mode as 'legacy' nvidia-container-cli: requirement error: "
        "unsatisfied condition: cuda>=13.0, please update your driver to a newer version, or use "
        "an earlier cuda container: unknown"
    ),
    "no kfd": (
        "Error response from daemon: error gathering device information while adding custom device "
        '"/dev/kfd": no such file or directory'
    ),
    "no render node": (
        "Error response from daemon: error gathering device information while adding custom device "
        '"/dev/dri/renderD128": no such file or directory'
    ),
    "port of a container": (
        "Error response from daemon: driver failed programming external connectivity on endpoint "
        "errlab-a-1 (c47acfb0): Bind for 127.0.0.1:18999 failed: port is already allocated"
    ),
    "port of a process": (
        "Error response from daemon: driver failed programming external connectivity on endpoint "
        "errlab-a-1 (ea7a586): Error starting userland proxy: listen tcp4 127.0.0.1:18999: bind: "
        "address already in use"
    ),
    "no program": (
        "Error response from daemon: failed to create shim task: OCI runtime create failed: runc "
        'create failed: unable to start container process: exec: "/opt/none": stat /opt/none: no '
        "such file or directory: unknown"
    ),
    "no folder": (
        'Error response from daemon: invalid mount config for type "bind": bind source path does '
        "not exist: /tmp/nonexistent2"
    ),
    "nothing": "",
}


class TestRefusal:
    @pytest.mark.parametrize(
        ("said", "kind", "hint"),
        [
            ("no image", MissingImage, "deploy images list"),
            ("no image, 26", MissingImage, "deploy images list"),
            ("no driver", MissingGpus, "NVIDIA Container Toolkit"),
            ("no device of the interface", MissingGpus, "NVIDIA Container Toolkit"),
            ("old driver", MissingGpus, "newer driver"),
            ("no kfd", MissingGpus, "amdgpu"),
            ("no render node", MissingGpus, "amdgpu"),
            ("port of a container", PortTaken, "--port"),
            ("port of a process", PortTaken, "--port"),
            ("no program", MachineError, "docker"),
            ("no folder", MachineError, "docker"),
            ("nothing", MachineError, "docker"),
        ],
    )
    def test_each_has_its_remedy(self, said: str, kind: type[PdkitError], hint: str) -> None:
        error = refusal(SAID[said], "producer-0")
        assert type(error) is kind
        assert error.exit_code == 3
        assert error.message.startswith("producer-0: ")
        assert "\n" not in error.message
        assert hint in error.hint

    @pytest.mark.parametrize("said", [name for name in SAID if name != "nothing"])
    def test_dockers_own_last_words_are_kept(self, said: str) -> None:
        error = refusal(SAID[said], "redis")
        assert SAID[said].splitlines()[-1] in error.message
        assert error.details[-1] == SAID[said].splitlines()[-1]


class TestEnd:
    @pytest.mark.parametrize(
        ("state", "words"),
        [
            ({"ExitCode": 1, "OOMKilled": False}, "exit code 1"),
            ({"ExitCode": 0, "OOMKilled": False}, "exit code 0"),
            ({"ExitCode": 139, "OOMKilled": False}, "killed by signal 11"),
            ({"ExitCode": 137, "OOMKilled": True}, "its memory ran out"),
            ({"ExitCode": 0, "OOMKilled": True}, "its memory ran out"),
            (
                {"ExitCode": 127, "OOMKilled": False, "Error": "no program"},
                "exit code 127, no prog",
            ),
        ],
    )
    def test_an_end_is_described_in_words(self, state: Mapping[str, Any], words: str) -> None:
        assert words in describe_end(state)

    @pytest.mark.parametrize(
        ("state", "ended"),
        [
            ({"Running": True}, None),
            ({"Running": False, "Status": "created"}, None),
            ({"Running": False, "Status": "exited", "ExitCode": 0}, "exit code 0"),
            ({"Running": False, "Status": "exited", "ExitCode": 1}, "exit code 1"),
        ],
    )
    def test_the_end_of_a_container_is_read(
        self, engine: FakeDocker, state: dict[str, Any], ended: str | None
    ) -> None:
        container = FoundContainer(engine.add("x", root="/r", state=state).attrs)
        assert StartedContainer(ServiceRecord("x"), 0.0, container).ended == ended

    def test_a_removed_container_has_ended(self, engine: FakeDocker) -> None:
        container = FoundContainer(engine.add("x", root="/r", removed=True).attrs)
        ended = StartedContainer(ServiceRecord("x"), 0.0, container).ended
        assert ended is not None
        assert "removed" in ended


def service(name: str, **container: Any) -> Service:
    """Return a service with a file that holds the password."""
    usual: dict[str, Any] = {
        "image": "image:1",
        "user": f"{os.getuid()}:{os.getgid()}",
        "networks": ("store",),
        "health_argv": ("true",),
        "limit_mib": 100,
        "secrets": ("redis_password",),
    }
    file = ConfigFile(f"ROOT/run/{name}/{name}.conf", "pass @{redis_password}", f"/run/{name}")
    return Service(
        name, "redis", ("program",), "", 0, HealthCheck("redis"), 30.0, files=(file,),
        container=Container(**{**usual, **container}),
    )  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> StackHome:
    return Home(tmp_path / "state", tmp_path / "cache").stack("pdkit")


@pytest.fixture
def stack(files: StackHome) -> Stack:
    def placed(service: Service) -> Service:
        (file,) = service.files
        at = file.path.replace("ROOT", str(files.root))
        return Service(**{**vars(service), "files": (ConfigFile(at, file.text, file.target),)})

    mounts = (Mount("/data/$models", "/models"),)
    services = (
        placed(service("redis")),
        placed(
            service("producer-0", mounts=mounts, published=(Published("127.0.0.1", 9010, 8000),))
        ),
    )
    return Stack("pdkit", "compose", services, ("redis_password",))


@pytest.fixture
def launcher(files: StackHome, engine: FakeDocker) -> ComposeLauncher:
    return ComposeLauncher("pdkit", files)


@pytest.fixture
def root(files: StackHome) -> str:
    return str(files.root)


SECRETS = {"redis_password": Secret("hunter2")}


@pytest.fixture
def secrets(files: StackHome) -> Mapping[str, Secret]:
    """The stack's secret, in its file too."""
    files.secrets_dir.mkdir(parents=True, mode=0o700)
    (files.secrets_dir / "redis_password").write_text("hunter2\n")
    (files.secrets_dir / "redis_password").chmod(0o600)
    return SECRETS


class TestProject:
    def test_project_files_are_written_for_the_owner_only(
        self, stack: Stack, files: StackHome, secrets: Mapping[str, Secret]
    ) -> None:
        old = os.umask(0)
        try:
            written = write_project(stack, files, secrets, stop_s=15)
        finally:
            os.umask(old)
        assert [path.relative_to(files.root).as_posix() for path in written] == [
            "compose.yaml", "run/redis/redis.conf", "run/producer-0/producer-0.conf",
            "secrets/redis_password",
        ]  # fmt: skip
        for path in written:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path

    def test_a_system_call_filter_is_written_where_the_document_names_it(
        self, stack: Stack, files: StackHome, secrets: Mapping[str, Secret]
    ) -> None:
        engine = stack.service("producer-0")
        assert engine.container
        filtered = replace(engine.container, devices=DeviceAccess(seccomp="seccomp-rocm.json"))
        services = (stack.service("redis"), replace(engine, container=filtered))
        written = write_project(replace(stack, services=services), files, secrets, stop_s=15)
        document = yaml.safe_load((files.root / "compose.yaml").read_text())
        (option,) = document["services"]["producer-0"]["security_opt"][1:]
        file = Path(option.removeprefix("seccomp="))
        assert file in written and "mount" in file.read_text()

    def test_secrets_are_filled_in_where_services_read_them(
        self, stack: Stack, files: StackHome, secrets: Mapping[str, Secret]
    ) -> None:
        write_project(stack, files, secrets, stop_s=15)
        assert (files.run_dir / "redis" / "redis.conf").read_text() == "pass hunter2"
        assert "hunter2" not in (files.root / "compose.yaml").read_text()

    def test_the_document_is_that_of_the_stack(
        self, stack: Stack, files: StackHome, secrets: Mapping[str, Secret]
    ) -> None:
        write_project(stack, files, secrets, stop_s=7)
        document = yaml.safe_load((files.root / "compose.yaml").read_text())
        assert list(document["services"]) == ["redis", "producer-0"]
        assert document["services"]["redis"]["stop_grace_period"] == "7s"
        assert document["services"]["redis"]["labels"]["dev.pdkit.root"] == str(files.root)
        (mount,) = document["services"]["producer-0"]["volumes"]
        assert mount["source"] == "/data/$$models"

    def test_roots_files_are_given_to_the_containers_user(
        self,
        stack: Stack,
        files: StackHome,
        secrets: Mapping[str, Secret],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        given: dict[str, tuple[int, int]] = {}
        monkeypatch.setattr(os, "getuid", lambda: 0)
        monkeypatch.setattr(os, "chown", lambda path, *ids: given.update({Path(path).name: ids}))
        write_project(stack, files, secrets, stop_s=15)
        user = stack.services[0].container
        assert user is not None
        assert set(given) == {"redis.conf", "producer-0.conf", "redis_password"}
        assert "compose.yaml" not in given
        assert {f"{uid}:{gid}" for uid, gid in given.values()} == {user.user}

    def test_another_folders_project_of_the_name_is_refused(
        self,
        launcher: ComposeLauncher,
        engine: FakeDocker,
        stack: Stack,
        files: StackHome,
        secrets: Mapping[str, Secret],
    ) -> None:
        other = files.root.parent / "other"
        other.mkdir(parents=True)
        engine.add("redis", root=str(other))
        with pytest.raises(MachineError, match=f"belongs to the stack in {other}$") as caught:
            launcher.prepare(stack, secrets, stop_s=15)
        assert caught.value.hint == "deploy up --name ANOTHER"
        assert not (files.root / "compose.yaml").exists()

    def test_a_project_whose_folder_was_deleted_is_removed_by_docker(
        self,
        launcher: ComposeLauncher,
        engine: FakeDocker,
        stack: Stack,
        secrets: Mapping[str, Secret],
    ) -> None:
        engine.add("redis", root="/home/other/stacks/pdkit")
        with pytest.raises(MachineError, match="a folder that does not exist") as caught:
            launcher.prepare(stack, secrets, stop_s=15)
        assert caught.value.hint == "docker compose -p pdkit down -v"

    def test_somebody_elses_project_of_the_name_is_refused(
        self,
        launcher: ComposeLauncher,
        engine: FakeDocker,
        stack: Stack,
        secrets: Mapping[str, Secret],
    ) -> None:
        engine.add("web", root="").labels.pop("dev.pdkit.root")
        with pytest.raises(MachineError, match="something other than pdkit"):
            launcher.prepare(stack, secrets, stop_s=15)

    def test_its_own_containers_are_no_conflict(
        self,
        launcher: ComposeLauncher,
        engine: FakeDocker,
        stack: Stack,
        files: StackHome,
        secrets: Mapping[str, Secret],
        root: str,
    ) -> None:
        engine.add("redis", root=root)
        launcher.prepare(stack, secrets, stop_s=15)
        assert (files.root / "compose.yaml").exists()


@pytest.fixture
def compose(monkeypatch: pytest.MonkeyPatch, engine: FakeDocker, root: str) -> Callable[..., Any]:
    """Let `docker compose` make a container, or refuse to; return the commands it was given."""

    def behave(said: str = "", **container: Any) -> list[tuple[str, ...]]:
        commands: list[tuple[str, ...]] = []

        def run(arguments: tuple[str, ...], **_: Any) -> subprocess.CompletedProcess[str]:
            commands.append(arguments)
            if said:
                return subprocess.CompletedProcess(arguments, 1, "", said)
            engine.add(arguments[-1], root=root, **container)
            return subprocess.CompletedProcess(arguments, 0, "", "")

        monkeypatch.setattr(launcher_module, "run_docker", run)
        return commands

    return behave


class TestStart:
    def test_created_alone_and_left_dead_if_it_dies(
        self,
        launcher: ComposeLauncher,
        engine: FakeDocker,
        stack: Stack,
        compose: Callable[..., Any],
        root: str,
    ) -> None:
        commands = compose()
        started = launcher.start(stack.services[1], SECRETS, starts=3)
        assert commands == [
            ("compose", "-p", "pdkit", "-f", f"{root}/compose.yaml", "up", "--no-start",
             "--no-deps", "--no-build", "producer-0"),
        ]  # fmt: skip
        assert engine.all_containers[0].done == [("restart", "no"), "start"]
        assert (started.record.name, started.record.starts) == ("producer-0", 3)
        assert started.ended is None

    @pytest.mark.parametrize(
        ("said", "kind"), [("no image", MissingImage), ("no folder", MachineError)]
    )
    def test_refused_when_it_is_made(
        self,
        launcher: ComposeLauncher,
        stack: Stack,
        compose: Callable[..., Any],
        said: str,
        kind: type[PdkitError],
    ) -> None:
        compose(SAID[said])
        with pytest.raises(kind, match="producer-0: "):
            launcher.start(stack.services[1], SECRETS)

    @pytest.mark.parametrize(
        ("said", "kind"),
        [("no driver", MissingGpus), ("no kfd", MissingGpus), ("port of a process", PortTaken)],
    )
    def test_refused_when_it_is_started_leaves_no_container(
        self,
        launcher: ComposeLauncher,
        stack: Stack,
        engine: FakeDocker,
        compose: Callable[..., Any],
        said: str,
        kind: type[PdkitError],
    ) -> None:
        compose(refuses=SAID[said])
        with pytest.raises(kind):
            launcher.start(stack.services[1], SECRETS)
        assert engine.all_containers[0].removed

    def test_a_start_without_a_container_is_an_error(
        self, launcher: ComposeLauncher, stack: Stack, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done = subprocess.CompletedProcess((), 0, "", "")
        monkeypatch.setattr(launcher_module, "run_docker", lambda *_, **__: done)
        with pytest.raises(MachineError, match="created no container for redis"):
            launcher.start(stack.services[0], SECRETS)

    def test_once_all_serve_they_come_back_by_themselves(
        self, launcher: ComposeLauncher, engine: FakeDocker, root: str
    ) -> None:
        container = engine.add("redis", root=root)
        launcher.keep_up({"redis": ServiceRecord("redis"), "gone": ServiceRecord("gone")})
        assert container.done == [("restart", "unless-stopped")]


class TestDied:
    @pytest.fixture
    def died(
        self, launcher: ComposeLauncher, engine: FakeDocker, root: str
    ) -> Callable[..., StackUnhealthy]:
        def make(**state: Any) -> StackUnhealthy:
            ended = {"Running": False, "Status": "exited", **state}
            log = b"loading\n(EngineCore pid=3) ERROR 07-27 [core.py:8] ValueError: too big\nbye\n"
            container = engine.add("producer-0", root=root, state=ended, log=log)
            began = StartedContainer(
                ServiceRecord("producer-0"), 0.0, FoundContainer(container.attrs)
            )
            return launcher.died(began)

        return make

    def test_names_the_cause_and_where_its_log_is_kept(
        self, died: Callable[..., StackUnhealthy], files: StackHome
    ) -> None:
        error = died(ExitCode=1)
        assert type(error) is StackUnhealthy
        assert "producer-0 died while starting (exit code 1), ValueError: too big" in error.message
        kept = files.logs_dir / "producer-0.log"
        assert str(kept) in error.message
        assert kept.read_text().endswith("bye\n")
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        assert error.details[-1] == "bye"

    def test_exit_code_zero_is_a_death_as_well(self, died: Callable[..., StackUnhealthy]) -> None:
        assert "(exit code 0)" in died(ExitCode=0).message

    def test_out_of_memory_has_its_own_error(self, died: Callable[..., StackUnhealthy]) -> None:
        error = died(ExitCode=137, OOMKilled=True)
        assert type(error) is OutOfMemory
        assert error.exit_code == 4
        assert "memory ran out" in error.message
        assert "engine.memory_gib" in error.hint


class TestLooking:
    RECORD = ServiceRecord("redis", starts=2)

    @pytest.mark.parametrize(
        ("state", "expected"),
        [
            ({"Running": True}, "running"),
            ({"Running": False, "Status": "exited"}, "exited"),
            ({"Running": False, "Status": "created"}, "exited"),
        ],
    )
    def test_the_state_of_a_container_is_read(
        self,
        launcher: ComposeLauncher,
        engine: FakeDocker,
        root: str,
        state: dict[str, Any],
        expected: str,
    ) -> None:
        engine.add("redis", root=root, state=state)
        assert launcher.state(self.RECORD) == expected

    def test_a_missing_container_is_not_started(self, launcher: ComposeLauncher) -> None:
        assert launcher.state(self.RECORD) == "not started"
        assert launcher.state(None) == "not started"
        assert launcher.pid(self.RECORD) == 0
        assert launcher.uptime_s(self.RECORD) == 0.0
        assert launcher.resident_mib(self.RECORD) == 0
        assert launcher.environment(self.RECORD) == {}
        assert launcher.restarts(self.RECORD) == 1
        assert launcher.logs() == ()
        assert launcher.log_lines("redis") == ()

    def test_a_snapshot_does_not_change(
        self, launcher: ComposeLauncher, engine: FakeDocker, root: str
    ) -> None:
        redis = engine.add("redis", root=root, memory={"usage": 3 << 20})
        looked = launcher.at_once()
        assert looked.resident_mib(self.RECORD) == 3
        redis.removed = True
        assert launcher.state(self.RECORD) == "not started"
        assert (looked.state(self.RECORD), looked.pid(self.RECORD)) == ("running", 4711)
        assert looked.state(ServiceRecord("router")) == "not started"
        assert looked.resident_mib(self.RECORD) == 0

    def test_another_folders_stack_is_not_this_one(
        self, launcher: ComposeLauncher, engine: FakeDocker
    ) -> None:
        engine.add("redis", root="/home/other/stacks/pdkit")
        assert launcher.state(self.RECORD) == "not started"
        assert launcher.stop_marked(grace_s=1) == 0

    @pytest.mark.parametrize("form", ["%fZ", "%f123Z", "%f789000Z"])
    def test_uptime_is_since_the_start(
        self, launcher: ComposeLauncher, engine: FakeDocker, root: str, form: str
    ) -> None:
        began = datetime.now(timezone.utc) - timedelta(seconds=90)
        engine.add(
            "redis", root=root, state={"StartedAt": began.strftime(f"%Y-%m-%dT%H:%M:%S.{form}")}
        )
        assert launcher.uptime_s(self.RECORD) == pytest.approx(90, abs=5)

    def test_uptime_of_a_whole_second(
        self, launcher: ComposeLauncher, engine: FakeDocker, root: str
    ) -> None:
        began = datetime.now(timezone.utc) - timedelta(seconds=90)
        engine.add("redis", root=root, state={"StartedAt": began.strftime("%Y-%m-%dT%H:%M:%SZ")})
        assert launcher.uptime_s(self.RECORD) == pytest.approx(90, abs=5)

    def test_an_ended_container_has_no_uptime(
        self, launcher: ComposeLauncher, engine: FakeDocker, root: str
    ) -> None:
        engine.add("redis", root=root, state={"Running": False, "Status": "exited"}, env=["A=1"])
        assert launcher.uptime_s(self.RECORD) == 0.0
        assert launcher.environment(self.RECORD) == {}

    def test_restarts_are_dockers_and_ours(
        self, launcher: ComposeLauncher, engine: FakeDocker, root: str
    ) -> None:
        engine.add("redis", root=root, restarts=3)
        assert launcher.restarts(self.RECORD) == 4

    @pytest.mark.parametrize(
        ("memory", "mib"),
        [
            ({"usage": 300 << 20, "stats": {"inactive_file": 100 << 20}}, 200),
            ({"usage": 300 << 20, "stats": {"total_inactive_file": 50 << 20}}, 250),
            ({"usage": 300 << 20}, 300),
            ({}, 0),
        ],
    )
    def test_memory_without_what_could_be_dropped(
        self,
        launcher: ComposeLauncher,
        engine: FakeDocker,
        root: str,
        memory: dict[str, Any],
        mib: int,
    ) -> None:
        engine.add("redis", root=root, memory=memory)
        assert launcher.resident_mib(self.RECORD) == mib

    def test_the_environment_of_a_container_is_read(
        self, launcher: ComposeLauncher, engine: FakeDocker, root: str
    ) -> None:
        engine.add("redis", root=root, env=["PYTHONHASHSEED=7", "A=b=c", "EMPTY="])
        assert launcher.environment(self.RECORD) == {
            "PYTHONHASHSEED": "7", "A": "b=c", "EMPTY": "",
        }  # fmt: skip


class TestLogs:
    def test_logs_of_a_container_are_read(
        self, launcher: ComposeLauncher, engine: FakeDocker, root: str
    ) -> None:
        engine.add("redis", root=root, log=b"\x1b[31mone\x1b[0m\ntwo \xff\n")
        assert launcher.log_lines("redis") == ("one", "two \N{REPLACEMENT CHARACTER}")
        assert launcher.where_log("redis") == "docker logs pdkit-redis-1"

    def test_logs_of_a_removed_container_are_read_from_the_file(
        self, launcher: ComposeLauncher, files: StackHome
    ) -> None:
        files.logs_dir.mkdir(parents=True)
        (files.logs_dir / "router.log").write_text("last words\n")
        assert launcher.log_lines("router", 1) == ("last words",)
        assert launcher.where_log("router") == str(files.logs_dir / "router.log")

    def test_names_of_both(
        self, launcher: ComposeLauncher, engine: FakeDocker, files: StackHome, root: str
    ) -> None:
        engine.add("redis", root=root)
        files.logs_dir.mkdir(parents=True)
        (files.logs_dir / "router.log").touch()
        assert launcher.logs() == ("redis", "router")

    def test_following_asks_again_for_what_is_new(
        self, launcher: ComposeLauncher, engine: FakeDocker, root: str
    ) -> None:
        container = engine.add("redis", root=root)
        reader = launcher.log_reader(("redis", "gone"))
        for written in ("one", "two"):
            container.log = f"{written}\n".encode()
            assert reader.read() == [("redis", written)]
        first, second = container.asked
        assert second["since"] == first["until"], "no gap, and nothing twice"


class TestStop:
    def test_logs_are_kept_and_containers_removed(
        self, launcher: ComposeLauncher, engine: FakeDocker, files: StackHome, root: str
    ) -> None:
        redis = engine.add("redis", root=root, log=b"bye\n")
        router = engine.add("router", root=root)
        launcher.stop({"redis": ServiceRecord("redis")}, grace_s=4)
        assert redis.done == [
            ("restart", "no"), ("stop", 4), ("remove", {"force": "1", "v": "1"}),
        ]  # fmt: skip
        assert (files.logs_dir / "redis.log").read_text() == "bye\n"
        assert router.done == []

    def test_a_stop_waits_at_least_a_second(
        self, launcher: ComposeLauncher, engine: FakeDocker, root: str
    ) -> None:
        redis = engine.add("redis", root=root)
        launcher.stop({"redis": ServiceRecord("redis")}, grace_s=0.1)
        assert ("stop", 1) in redis.done

    def test_a_missing_container_is_not_an_error(self, launcher: ComposeLauncher) -> None:
        launcher.stop({"redis": ServiceRecord("redis")}, grace_s=1)

    def test_everything_with_the_stacks_label_is_removed(
        self, launcher: ComposeLauncher, engine: FakeDocker, root: str
    ) -> None:
        own = [engine.add(name, root=root) for name in ("redis", "consumer-7")]
        other = engine.add("redis", root="/home/other/stacks/demo", project="pdkit-demo")
        label = {"com.docker.compose.project": "pdkit"}
        engine.all_networks = [
            FakeNetwork("pdkit_store", label),
            FakeNetwork("else", {"com.docker.compose.project": "pdkit-demo"}),
        ]
        engine.all_volumes = [FakeNetwork("pdkit_shm-9m", label), FakeNetwork("theirs", {})]
        assert launcher.stop_marked(grace_s=1) == 2
        assert all(one.removed for one in own)
        assert not other.removed
        for kept in (engine.all_networks, engine.all_volumes):
            assert [one.removed for one in kept] == [True, False]

    def test_networks_and_volumes_of_another_folders_stack_of_that_name_stay(
        self, launcher: ComposeLauncher, engine: FakeDocker
    ) -> None:
        engine.add("redis", root="/home/other/stacks/pdkit")
        label = {"com.docker.compose.project": "pdkit"}
        engine.all_networks, engine.all_volumes = (
            [FakeNetwork("x", label)],
            [FakeNetwork("y", label)],
        )
        assert launcher.stop_marked(grace_s=1) == 0
        assert not engine.all_networks[0].removed
        assert not engine.all_volumes[0].removed

    def test_files_go_and_logs_stay_if_they_are_to_be_read(
        self,
        launcher: ComposeLauncher,
        stack: Stack,
        files: StackHome,
        secrets: Mapping[str, Secret],
    ) -> None:
        write_project(stack, files, secrets, stop_s=1)
        files.logs_dir.mkdir()
        (files.logs_dir / "redis.log").touch()
        launcher.clear(keep_logs=True)
        assert [path.name for path in files.root.iterdir()] == ["logs"]
        launcher.clear(keep_logs=False)
        assert not files.root.exists()
