"""What `deploy doctor` finds on this machine, sound and really broken, and that `up` agrees."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import pytest
import redis

from bench.redis_server import HOST, RedisServer
from deploy.config.spec import StackSpec
from deploy.doctor.finding import Finding
from deploy.document import as_document
from deploy.errors import (
    ConfigError,
    DockerUnavailable,
    MachineUnfit,
    MissingModel,
    PdkitError,
    PortTaken,
)
from deploy.metrics.connector import KV
from deploy.output.views import doctor_view
from deploy.runtime.compose import docker as docker_module
from deploy.runtime.process.launcher import ProcessLauncher
from deploy.workflows import doctor as doctor_module
from deploy.workflows import preflight
from deploy.workflows.doctor import Examination, examine
from deploy.workflows.up import prepare_here
from tests.ports import taken
from tests.unit.docker_stand_in import hanging_engine
from tests.unit.hub_stand_in import open_hub
from tests.unit.workflows.conftest import Lab
from tests.unit.workflows.test_fixes import FAILS

RIGHTS = ["+get", "+set", "+strlen", "+unlink", "+ping"]
ALWAYS = {
    "ports.free", "memory.host", "memory.plan", "memory.store", "disk.state", "host.files",
    "host.huge_pages", "host.overcommit", "host.shm", "host.numa", "host.cpu", "host.quota",
    "host.clock", "engine.programs", "engine.versions", "engine.plug_ins", "engine.connector",
    "engine.native", "engine.fixes", "stack.up", "stack.lock",
}  # fmt: skip


def look(lab: Lab, spec: StackSpec | None = None, **fields: Any) -> Examination:
    return examine(spec or lab.spec(**fields), lab.home, lab.lines.append)


def of(found: Examination, rule: str) -> Finding:
    (one,) = [finding for finding in found.findings if finding.id == rule]
    return one


def failing(found: Examination) -> dict[str, str]:
    return {one.id: one.message for one in found.failed}


def test_a_healthy_machine_has_no_failures(lab: Lab) -> None:
    found = look(lab)
    assert failing(found) == {}
    assert {one.id for one in found.findings} == ALWAYS
    assert (found.name, found.vendor, found.runtime) == ("pdkit", "cpu", "process")
    assert found.topology == "1p1d"
    assert lab.pids() == []
    assert not lab.home.stack("pdkit").root.exists()
    assert "nothing blocks" in doctor_view(found)
    assert json.loads(json.dumps(as_document(found)))["findings"][0]["id"] == "ports.free"


def test_a_second_look_tries_nothing_again(lab: Lab) -> None:
    look(lab)
    lab.lines.clear()
    assert of(look(lab), "engine.fixes").status == "ok"
    assert lab.lines == []


class TestWhatUpRefusesToo:
    def test_a_port_that_is_taken(self, lab: Lab) -> None:
        spec = lab.spec()
        with taken(spec.port + 10):
            found = of(look(lab, spec), "ports.free")
            with pytest.raises(PortTaken) as caught:
                lab.up(spec)
        assert (found.status, found.message) == ("fail", caught.value.message)
        assert found.fix == caught.value.hint_for("up")
        assert of(look(lab, spec), "ports.free").status == "ok"

    def test_an_interpreter_without_lmcache(self, lab: Lab) -> None:
        python = lab.folder / "python"
        python.write_text(f'#!/bin/sh\nexec env -u PYTHONPATH {sys.executable} -S "$@"\n')
        python.chmod(0o755)
        spec = lab.spec(engine={"python": str(python)})
        found = look(lab, spec)
        assert "lacks vllm, lmcache, httptools, uvloop" in failing(found)["engine.programs"]
        assert "engine.fixes" not in {one.id for one in found.findings}, "nowhere to try them"
        assert of(found, "ports.free").status == "ok", "the rest is looked at"
        with pytest.raises(PdkitError) as caught:
            lab.up(spec)
        assert (caught.value.exit_code, caught.value.message) == (
            3, of(found, "engine.programs").message,
        )  # fmt: skip

    def test_a_fix_that_fails(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STAND_IN_TRIED", FAILS)
        assert "fix B7" in failing(look(lab))["engine.fixes"]

    def test_an_untested_pair_of_versions(self, lab: Lab) -> None:
        vendor_of_another = lab.spec(
            vendor="cuda", gpus=2, allow_untested=False, connector="lmcache"
        )
        found = look(lab, vendor_of_another)
        assert set(failing(found)) >= {"gpu.enough", "engine.versions"}
        assert found.failed[0].id == "engine.versions", "the spec's own fault first"
        assert found.failed[0].usage
        assert of(found, "gpu.enough").fix.startswith("deploy up --vendor cpu")

    def test_too_little_memory(self, lab: Lab) -> None:
        message = failing(look(lab, redis={"memory_gib": 4000}))["memory.host"]
        assert "are available" in message

    def test_an_invalid_setting_is_an_error(self, lab: Lab) -> None:
        with pytest.raises(ConfigError, match="chunk_size"):
            look(lab, lmcache={"chunk_size": 65})

    def test_the_model_does_not_fit_on_any_gpu(self, lab: Lab) -> None:
        found = look(lab, vendor="cuda", gpus=2, engine={"kv_cache_gib": 900})
        assert "do not fit" in failing(found)["memory.plan"]
        assert found.topology == ""
        seen = {one.id for one in found.findings if one.area in ("host", "disk")}
        assert seen >= {"disk.state", "host.overcommit", "host.clock"}, "they need no plan"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mount a disk of so many MiB, which takes root."""
    mounted = []

    def mount(mib: int) -> Path:
        folder = tmp_path / f"disk-{mib}"
        folder.mkdir()
        options = ("-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder))
        if os.getuid() or subprocess.run(("mount", *options), check=False).returncode:
            pytest.skip("mounting takes root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(("umount", str(folder)), check=True)


class TestDisks:
    def test_a_disk_that_is_too_small_fails(
        self, lab: Lab, small_disk: Callable[[int], Path]
    ) -> None:
        home = replace(lab.home, state=small_disk(8) / "state")
        spec = lab.spec()
        found = of(examine(spec, home, lab.lines.append), "disk.state")
        assert (found.status, found.message) == (
            "fail", f"only 8 MiB free at {home.state}"
        )  # fmt: skip
        with pytest.raises(MachineUnfit) as caught:
            preflight.require_fit(
                prepare_here(spec, home, lab.lines.append), home, lab.lines.append
            )
        assert found.message in caught.value.message
        assert (caught.value.exit_code, caught.value.hint) == (3, found.fix)

    def test_a_small_disk_is_a_warning(self, lab: Lab, small_disk: Callable[[int], Path]) -> None:
        home = replace(lab.home, state=small_disk(500) / "state")
        planned = prepare_here(lab.spec(), home, lab.lines.append)
        preflight.require_fit(planned, home, lab.lines.append)
        (line,) = lab.lines
        assert line.startswith("warning: only 500 MiB free") and "[disk.state]" in line

    def test_up_starts_nothing_on_one_that_is_too_small(
        self, lab: Lab, small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home = replace(lab.home, state=small_disk(8) / "state")
        monkeypatch.setattr(Lab, "home", property(lambda _: home))
        with pytest.raises(MachineUnfit):
            lab.up(lab.spec())
        assert lab.pids() == []
        assert not home.stack("pdkit").root.exists()


def test_a_low_limit_of_open_files_fails_and_up_refuses(tmp_path: Path) -> None:
    """A user's command, in a shell that allows 64 open files: it fails, and `up` refuses it."""
    program = (
        "import sys; from deploy.config.spec import StackSpec\n"
        "from deploy.runtime.home import Home; from pathlib import Path\n"
        "from deploy.workflows.facts import stated_facts\n"
        "from deploy.workflows.prepare import prepare\n"
        "from deploy.workflows.preflight import require_fit\n"
        "spec = StackSpec(vendor='cpu', runtime='process'); home = Home(Path('h'), Path('h'))\n"
        "made = prepare(spec, home, stated_facts(spec, None, runtime='process'))\n"
        "require_fit(made, home, print)\n"
    )
    (tmp_path / "program.py").write_text(program)
    done = {
        limit: subprocess.run(
            ("sh", "-c", f"ulimit -n {limit}; exec {sys.executable} program.py"),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        for limit in (64, 1024)
    }
    assert "MachineUnfit: at most 64 open files (ulimit -n)" in done[64].stderr
    assert done[1024].returncode == 0, done[1024].stderr
    assert "warning: at most 1024 open files" in done[1024].stdout


class TestDocker:
    def test_a_docker_engine_that_does_not_answer_fails(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{lab.folder}/dead.sock")
        found = look(lab, runtime="compose")
        assert "dead.sock" in failing(found)["docker.engine"]
        assert "--runtime process" in of(found, "docker.engine").fix
        assert not [one for one in found.findings if one.id == "docker.images"]

    def test_auto_takes_processes_then_and_says_so(self, lab: Lab) -> None:
        found = look(lab, runtime="auto")
        assert found.runtime == "process"
        said = of(found, "docker.engine")
        assert said.status in ("ok", "warn") and "starts processes" in said.message

    def test_a_docker_engine_that_hangs_fails_in_time(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(docker_module, "_ASK_TIMEOUT_S", 0.3)
        with silent_socket(lab.folder / "s") as address:
            monkeypatch.setenv("DOCKER_HOST", address)
            began = time.monotonic()
            found = look(lab, runtime="compose")
        assert "no answer in 0.3 s" in failing(found)["docker.engine"]
        assert time.monotonic() - began < 60

    @pytest.mark.parametrize("runtime", ["auto", "compose"])
    def test_a_docker_engine_that_hangs_after_a_ping_fails(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch, runtime: str
    ) -> None:
        """It answers pings, so `up` takes it and ends; then doctor must say so, too."""
        command = lab.folder / "docker"
        command.write_text("#!/bin/sh\necho 2.30.0\n")
        command.chmod(0o755)
        monkeypatch.setenv("PATH", os.pathsep.join((str(lab.folder), os.environ["PATH"])))
        monkeypatch.setattr(docker_module, "_ASK_TIMEOUT_S", 3.0)
        docker_module.answering_engine.cache_clear()
        spec = lab.spec(runtime=runtime)
        with hanging_engine(lab.folder / "s") as address:
            monkeypatch.setenv("DOCKER_HOST", address)
            found = look(lab, spec)
            with pytest.raises(DockerUnavailable) as caught:
                prepare_here(spec, lab.home, lab.lines.append)
        docker_module.answering_engine.cache_clear()
        assert failing(found)["docker.engine"] == caught.value.message
        assert "no answer in 3 s" in caught.value.message


@contextmanager
def silent_socket(path: Path) -> Iterator[str]:
    """Listen as an engine would, and never answer."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        held: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield f"unix://{path}"
        server.shutdown(socket.SHUT_RDWR)
        for one in held:
            one.close()


class TestOwnRedis:
    def spec(self, lab: Lab, url: str) -> StackSpec:
        (lab.folder / "url").write_text(url)
        return lab.spec(redis={"url_file": str(lab.folder / "url")})

    def test_a_suitable_redis_is_ok(self, lab: Lab) -> None:
        options = ("--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru")
        with RedisServer(lab.folder, *options) as server:
            found = look(lab, self.spec(lab, server.url))
        statuses = {one.id: one.status for one in found.findings if one.area == "redis"}
        assert statuses == dict.fromkeys(
            ("redis.answers", "redis.policy", "redis.size", "redis.persistence", "redis.version"),
            "ok",
        )

    def test_an_unsuitable_redis_has_warnings(self, lab: Lab) -> None:
        options = ("--maxmemory", "200mb", "--appendonly", "yes", "--save", "3600 1")
        with RedisServer(lab.folder, *options) as server:
            found = look(lab, self.spec(lab, server.url))
        assert failing(found) == {}
        said = {one.id: one.message for one in found.findings if one.status == "warn"}
        assert "noeviction" in said["redis.policy"]
        assert "0.2 GiB" in said["redis.size"]
        assert 'appendonly yes, save "3600 1"' in said["redis.persistence"]

    def test_a_redis_that_refuses_fails(self, lab: Lab) -> None:
        with RedisServer(lab.folder, "--requirepass", "sesame") as server:
            found = look(lab, self.spec(lab, f"redis://:wrong@{HOST}:{server.port}"))
        assert "cannot be used" in failing(found)["redis.answers"]
        assert not any("wrong" in str(one) for one in found.findings)
        assert not [one for one in found.findings if one.id == "redis.policy"]

    def test_a_redis_with_limited_rights_is_unknown(self, lab: Lab) -> None:
        with RedisServer(lab.folder) as server:
            with redis.Redis(HOST, server.port) as client:
                client.acl_setuser("kv", enabled=True, passwords="+pw", keys="*", commands=RIGHTS)
            found = look(lab, self.spec(lab, f"redis://kv:pw@{HOST}:{server.port}"))
        statuses = {one.id: one.status for one in found.findings if one.area == "redis"}
        assert statuses == {
            "redis.answers": "ok", "redis.policy": "unknown", "redis.persistence": "unknown",
        }  # fmt: skip


class TestHub:
    @pytest.fixture(autouse=True)
    def _cache(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(lab.folder / "hub"))

    def test_a_model_on_the_hub_is_ok(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        with open_hub() as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.address)
            found = look(lab, model="owner/70b", engine={"kv_cache_gib": 4})
        assert of(found, "hub.model").message.endswith(f"{hub.address} has it")
        assert of(found, "disk.hub").status == "unknown", "nobody said how large it is"

    def test_a_model_that_the_hub_refuses_fails_as_in_up(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with open_hub() as hub:
            hub.status = 403
            monkeypatch.setenv("HF_ENDPOINT", hub.address)
            found = of(look(lab, model="owner/70b"), "hub.model")
            with pytest.raises(MissingModel) as caught:
                lab.up(lab.spec(model="owner/70b"))
        assert (found.status, found.message) == ("fail", caught.value.message)
        assert "HF_TOKEN" in found.fix == caught.value.hint

    def test_an_offline_hub_is_not_asked(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        spec = lab.spec(model="owner/70b")
        with open_hub() as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.address)
            assert "HF_HUB_OFFLINE" in failing(look(lab, spec))["hub.model"]
            with pytest.raises(MachineUnfit, match="HF_HUB_OFFLINE"):
                lab.up(spec)
            assert hub.asked == []
        assert lab.pids() == []

    def test_the_engines_own_settings_forbid_it(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with open_hub() as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.address)
            found = look(lab, model="owner/70b", engine={"env": {"HF_HUB_OFFLINE": "1"}})
            assert "HF_HUB_OFFLINE" in failing(found)["hub.model"]
            assert hub.asked == []

    def test_a_hub_that_does_not_answer_is_a_warning(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        found = look(lab, model="owner/70b")
        assert of(found, "hub.model").status == "warn"
        assert failing(found) == {}


class TestEarlierRuns:
    def test_a_stack_that_is_up(self, lab: Lab) -> None:
        spec = lab.spec()
        lab.up(spec)
        found = look(lab, spec)
        assert failing(found) == {}
        assert "is up already" in of(found, "stack.up").message
        assert of(found, "ports.free").message == "the stack has its own"
        other = look(lab, spec.model_copy(update={"topology": "1p2d"}))
        assert "up with another plan" in failing(other)["stack.up"]
        assert other.failed[0].usage
        assert list(failing(other)) == ["stack.up"], "what it has itself is nobody else's"

    @pytest.mark.parametrize(
        ("unplanned", "status", "words"),
        [
            ({}, "ok", "all engines run what was planned"),
            ({"vllm": "0.1"}, "warn", "consumer-0 0.2 (0.1 was planned)"),
        ],
    )
    def test_engines_that_do_not_run_what_was_planned(
        self,
        lab: Lab,
        monkeypatch: pytest.MonkeyPatch,
        unplanned: dict[str, str],
        status: str,
        words: str,
    ) -> None:
        kv = json.dumps({"rows": {"vllm": "0.2", "dtype": "x"}, "unplanned": unplanned})
        sample = f"{KV}{{facts={json.dumps(kv)}}} 1"
        monkeypatch.setenv("STAND_IN_REPORT", sample)
        spec = lab.spec()
        lab.up(spec)
        found = of(look(lab, spec), "stack.engines")
        assert (found.status, words in found.message) == (status, True), found.message
        assert "dtype" not in found.message

    def test_engines_that_report_nothing(self, lab: Lab) -> None:
        spec = lab.spec()
        assert "stack.engines" not in {one.id for one in look(lab, spec).findings}
        lab.up(spec)
        assert "stack.engines" not in {one.id for one in look(lab, spec).findings}

    def test_an_earlier_run_without_docker_is_unknown(
        self, lab: Lab, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = lab.spec()
        lab.up(spec)

        def refuse(*_: object) -> str:
            raise DockerUnavailable("no Docker engine answers", hint="start it")

        monkeypatch.setattr(ProcessLauncher, "state", refuse)
        assert failing(look(lab, spec))["stack.up"] == "no Docker engine answers"

    def test_a_state_that_is_broken(self, lab: Lab) -> None:
        file = lab.home.stack("pdkit").state_file
        file.parent.mkdir(parents=True)
        file.write_text("{")
        found = look(lab)
        assert "state file of stack 'pdkit' is broken" in failing(found)["stack.up"]
        assert "deploy down" in of(found, "stack.up").fix

    def test_a_lock_that_is_held_and_one_that_was_left(self, lab: Lab) -> None:
        file = lab.home.lock_file("pdkit")
        file.parent.mkdir(parents=True)
        with filelock.FileLock(file):
            assert list(failing(look(lab))) == ["stack.lock"]
        file.touch()
        assert failing(look(lab)) == {}

    def test_processes_without_a_state(self, lab: Lab) -> None:
        spec = lab.spec()
        lab.up(spec)
        lab.home.stack("pdkit").state_file.unlink()
        found = look(lab, spec)
        assert "4 processes or containers" in of(found, "stack.up").message
        assert "ports.free" in failing(found)


def test_a_look_that_fails_is_a_finding(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def fall(*_: object) -> None:
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(doctor_module, "require_ports", fall)
    found = of(look(lab), "ports.free")
    assert found.status == "unknown" and "nobody foresaw this" in found.message


def test_code_that_lacks_a_plug_in_point_is_asked_for_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = lab.folder / "own" / "lmcache"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    path = os.pathsep.join((str(lab.folder / "own"), os.environ["PYTHONPATH"]))
    monkeypatch.setenv("PYTHONPATH", path)
    for _ in range(2):
        assert "storage_plugins" in failing(look(lab))["engine.plug_ins"]
    (package / "v1").mkdir()
    (package / "v1" / "config.py").write_text("DEFINITIONS = {'storage_plugins': {}}\n")
    assert failing(look(lab)) == {}
