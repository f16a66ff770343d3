"""What a stack of containers keeps to itself: password, Redis, and the rights of this machine."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import eventually
from tests.e2e.docker.conftest import (
    BASE,
    ENGINES,
    LABEL,
    PYTHON,
    SERVICES,
    Project,
    docker,
    inspected,
    remove_stacks_of_killed_runs,
)

# Sends a command to a Redis without a password, and prints the bytes of the answer, or why none.
PROBE = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], 6379), timeout=int(sys.argv[2])) as redis:
        redis.sendall(b"PING\\r\\n")
        print(redis.recv(100))
except OSError as exc:
    print(type(exc).__name__, exc)
"""
REFUSED = "-NOAUTH"  # what a Redis says to whoever it does not know


class TestSecrets:
    def test_password_is_shown_nowhere(self, stack: Project) -> None:
        shown = self._shown(stack)
        password = stack.password()
        assert len(password) > 20
        assert [place for place, text in shown.items() if password in text] == []
        # In each of these places the search finds what is there to be found.
        known = {"compose.yaml": "redis_password", "status": "consumer-0", "networks": "front",
                 "compose logs": "pdkit-connector", "state.json": stack.name,
                 "render": "redis_password"}  # fmt: skip
        for service in SERVICES:
            known[f"inspect {service}"] = "dev.pdkit.stack"
            known[f"top {service}"] = "redis-server" if service == "redis" else "--port"
            known[f"environ {service}"] = "PATH="
        assert known.keys() == shown.keys()
        assert [place for place, text in known.items() if text not in shown[place]] == []

    def test_the_search_finds_a_password_that_is_shown(self, stack: Project) -> None:
        """It is in the files that must hold it, and in an environment that somebody gives it."""
        password = stack.password()
        seen = stack.execute("redis", "cat", "/run/secrets/redis_password").stdout
        assert password in seen
        for engine in ENGINES:
            (file,) = (stack.files.run_dir / engine).iterdir()
            assert password in file.read_text()
        planted = docker("run", "-d", "--rm", "-e", f"X={password}", BASE, "sleep", "60").strip()
        try:
            assert password in json.dumps(inspected(planted))
            (found,) = inspected(planted)
            # `docker run -d` returns before the container's process has become the command.
            assert eventually(lambda: password in environ(found["State"]["Pid"]))
        finally:
            docker("rm", "-f", planted)

    def test_no_command_line_shows_the_password_even_briefly(self, stack: Project) -> None:
        """Health probes and `check` ask Redis all the time, with commands that live for a blink."""
        password = stack.password()
        with watching(password) as found:
            before = last_probes(stack)
            stack.ok("check", "--quick")
            assert eventually(lambda: not before & last_probes(stack), every_s=1)
        assert found == set()
        # The watch is quick enough to see such a command.
        blink = 'X="$(cat /run/secrets/redis_password)" sleep 0.1'
        with watching(password) as found:
            assert any(stack.execute("redis", "sh", "-c", blink) and found for _ in range(50))

    def test_files_with_it_are_private(self, stack: Project) -> None:
        holders = [file for file in stack.files.root.rglob("*")
                   if file.is_file() and stack.password() in file.read_text()]  # fmt: skip
        assert len(holders) >= 4
        for file in holders:
            assert file.stat().st_mode & 0o077 == 0, file

    @staticmethod
    def _shown(stack: Project) -> dict[str, str]:
        """Return place → text, of all places where others could read."""
        compose = ("compose", "-p", stack.project, "-f", str(stack.compose_file))
        shown = {
            "compose.yaml": stack.compose_file.read_text(),
            "state.json": stack.files.state_file.read_text(),
            "status": stack.run("status", "--json").stdout,
            "render": stack.run("render").stdout,
            "compose logs": docker(*compose, "logs", "--no-color"),
            "networks": docker("network", "inspect", *stack.networks()),
        }
        for service, container in stack.containers().items():
            pids = stack.pids(service)
            assert pids
            shown[f"inspect {service}"] = json.dumps(container)
            shown[f"top {service}"] = docker("top", container["Id"], "-eo", "pid,args") + "".join(
                map(cmdline, pids)
            )
            shown[f"environ {service}"] = "".join(map(environ, pids))
        return shown


def last_probes(stack: Project) -> set[tuple[str, str]]:
    """Return every service with the time at which its last health probe began."""
    found = stack.containers()
    health = {name: one["State"]["Health"]["Log"] for name, one in found.items()}
    return {(name, probes[-1]["Start"]) for name, probes in health.items()}


def cmdline(pid: int) -> str:
    return of_process(pid, "cmdline")


def environ(pid: int) -> str:
    return of_process(pid, "environ")


def of_process(pid: int, what: str) -> str:
    """Return what the kernel says of a process; "" of one that ended, as health probes soon do."""
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes().decode("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


@contextmanager
def watching(text: str) -> Iterator[set[str]]:
    """Look, as often as it goes, for a text in all processes' arguments and environments."""
    stop, found = threading.Event(), set()

    def look() -> None:
        while not stop.is_set():
            for pid in psutil.pids():
                with contextlib.suppress(PermissionError):
                    if text in environ(pid) or text in cmdline(pid):
                        found.add(cmdline(pid) or str(pid))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


class TestRedisIsSealed:
    def test_no_port_is_published(self, stack: Project) -> None:
        redis = stack.containers()["redis"]
        assert not any(redis["NetworkSettings"]["Ports"].values())
        assert not redis["HostConfig"]["PortBindings"]
        assert redis["HostConfig"]["NetworkMode"] != "host"

    def test_this_machine_gets_no_answer(self, stack: Project) -> None:
        """Judged by what comes back: on some machines every connection is accepted by a proxy."""
        addresses = self._addresses(stack)
        assert addresses
        for address in addresses:
            heard = probed_from_here(address)
            assert REFUSED not in heard and "PONG" not in heard, heard

    def test_engines_reach_it_and_are_asked_for_the_password(self, stack: Project) -> None:
        for engine in ENGINES:
            for address in ("redis", *self._addresses(stack)):
                heard = stack.execute(engine, PYTHON, "-c", PROBE, address, "60").stdout
                assert REFUSED in heard, heard

    def test_the_router_cannot_reach_it(self, stack: Project) -> None:
        for address in ("redis", *self._addresses(stack)):
            heard = stack.execute("router", PYTHON, "-c", PROBE, address, "2").stdout
            assert heard and REFUSED not in heard and "PONG" not in heard, heard
        assert "gaierror" in stack.execute("router", PYTHON, "-c", PROBE, "redis", "2").stdout

    @staticmethod
    def _addresses(stack: Project) -> list[str]:
        networks = stack.containers()["redis"]["NetworkSettings"]["Networks"].values()
        return [network["IPAddress"] for network in networks]


def probed_from_here(address: str) -> str:
    """Run the probe on this machine itself."""
    return subprocess.run(
        (sys.executable, "-c", PROBE, address, "2"), capture_output=True, text=True, check=True
    ).stdout


def rights(pid: int) -> dict[str, str]:
    """Return what the kernel says of a process's user and rights."""
    text = of_process(pid, "status")
    return dict(re.findall(r"^(Uid|NoNewPrivs|Cap\w+):\s*(.*)$", text, flags=re.MULTILINE))


def is_bare(pid: int) -> bool:
    """Tell whether a process is no root, has no capability, and can never get one."""
    found = rights(pid)
    if not found:  # it has ended
        return True
    capabilities = [int(found[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")]
    return "0" not in found["Uid"].split() and found["NoNewPrivs"] == "1" and not any(capabilities)


class TestRights:
    @pytest.mark.parametrize("service", SERVICES)
    def test_no_process_has_capabilities(self, stack: Project, service: str) -> None:
        assert len(stack.pids(service)) >= 2  # the service, and the first process of its container
        # A health probe that is just being put into the container gives up its rights last.
        assert eventually(lambda: all(map(is_bare, stack.pids(service))))

    def test_a_default_docker_container_has_capabilities(self) -> None:
        plain = docker("run", "-d", "--rm", BASE, "sleep", "60").strip()
        try:
            (found,) = inspected(plain)
            assert not is_bare(found["State"]["Pid"])
        finally:
            docker("rm", "-f", plain)

    @pytest.mark.parametrize("service", SERVICES)
    def test_nothing_but_its_cache_can_be_written(self, stack: Project, service: str) -> None:
        container = stack.containers()[service]
        assert container["HostConfig"]["ReadonlyRootfs"] is True
        written = [mount["Destination"] for mount in container["Mounts"] if mount["RW"]]
        assert written == (["/cache"] if service in ENGINES else [])
        mounts = [mount["Destination"] for mount in container["Mounts"] if not mount["RW"]]
        assert any(path.startswith("/run/secrets/") for path in mounts)
        if service in ENGINES:
            assert "/opt/pdkit/connector" in mounts
            assert any(path.startswith("/models/") for path in mounts)
        places = [path if path.startswith("/run/secrets/") else f"{path}/new" for path in mounts]
        for place in (*places, "/new", "/etc/new", "/usr/local/new"):
            done = stack.execute(service, "sh", "-c", f": >>{place}")
            assert done.returncode != 0 and "Read-only file system" in done.stderr, done
        # What may be written can be, so it is not the test that cannot write.
        for place in ("/tmp/new", *(f"{folder}/new" for folder in written)):
            done = stack.execute(service, "sh", "-c", f": >>{place} && rm {place}")
            assert done.returncode == 0, done

    @pytest.mark.parametrize("service", SERVICES)
    def test_memory_processes_and_logs_are_limited(self, stack: Project, service: str) -> None:
        container = stack.containers()[service]
        host = container["HostConfig"]
        assert 0 < host["Memory"] < psutil.virtual_memory().total
        assert 0 < host["PidsLimit"] < 2**20
        assert host["LogConfig"]["Type"] == "json-file"
        assert {"max-size", "max-file"} <= host["LogConfig"]["Config"].keys()
        assert host["RestartPolicy"]["Name"] == "unless-stopped"
        assert host["Init"] is True and host["Privileged"] is False
        assert not any("docker.sock" in mount["Source"] for mount in container["Mounts"])

    def test_ports_are_published_on_loopback_only(self, stack: Project) -> None:
        listened = {
            connection.laddr
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
            and stack.port <= connection.laddr.port < stack.port + 20
        }
        assert {(address.ip, address.port - stack.port) for address in listened} == {
            ("127.0.0.1", offset) for offset in (0, 2, 10, 11)
        }
        for service, container in stack.containers().items():
            bindings = (container["HostConfig"]["PortBindings"] or {}).values()
            published = [binding["HostIp"] for each in bindings for binding in each]
            assert set(published) == (set() if service == "redis" else {"127.0.0.1"})


def test_only_a_killed_runs_stack_is_removed(stack: Project, tmp_path: Path) -> None:
    """One is of a process that has ended, one of this run, and one of no run of pytest."""
    ended = subprocess.Popen(("true",))
    ended.wait()
    killed = tmp_path / "pytest-1"
    killed.mkdir()
    (killed / ".lock").write_text(str(ended.pid))
    roots = (killed / "home/stacks/a", stack.files.root.parent / "b", Path("/opt/pdkit/stacks/c"))
    made = {str(root): _created(root) for root in roots}
    try:
        remove_stacks_of_killed_runs()
        left = docker("ps", "-aq", "--no-trunc", "--filter", LABEL).split()
        assert set(stack.ids().values()) <= set(left)
        assert [root for root, container in made.items() if container not in left] == [
            str(roots[0])
        ]
    finally:
        docker("rm", "--force", *made.values(), check=False)


def _created(root: Path) -> str:
    """Create a container, which never runs, as a stack in a folder would have it."""
    labels = (f"dev.pdkit.root={root}", f"com.docker.compose.project=pdkit-e2e-{root.name}")
    options = (part for label in labels for part in ("--label", label))
    return docker("create", *options, BASE, "true").strip()
