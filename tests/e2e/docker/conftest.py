"""Stacks of containers: real images, engines and Redis, and Docker asked by its own command.

The images are built once and stay. Most modules share one stack, started by the first that needs
it; whatever a test leaves in Docker is a failure of that test.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from deploy.runtime.engine_api import EngineApi
from deploy.runtime.home import Home, StackHome
from tests.e2e.conftest import KEPT, Deploy, Ran, eventually, is_free
from tests.ports import free_row

REPO = Path(__file__).resolve().parents[3]
MODEL = "pdkit-tiny"
BASE = "pdkit/base:bookworm"
LABEL = "label=dev.pdkit.root"
BUILT_HERE = ("cpu", "router", "redis-local")
SERVICES = ("redis", "producer-0", "consumer-0", "router")
ENGINES = ("producer-0", "consumer-0")
PYTHON = "/opt/venv/bin/python"
_BUILD_TIMEOUT_S = 500

# Engine images made of the kit's own by one layer each; another run on this machine has its own.
SECOND, BROKEN, UNTESTED = (
    f"pdkit-e2e/engine:{name}-{os.getpid()}" for name in ("second", "broken", "untested")
)
_VARIANTS = {
    SECOND: "FROM {engine}\nENV PDKIT_VARIANT=second\n",
    BROKEN: "FROM {engine}\nUSER 0\n"
    "RUN rm /opt/venv/lib/python3.11/site-packages/vllm/config/__init__.py\nUSER 10001\n",
    UNTESTED: "FROM {base}\nLABEL dev.pdkit.vllm=0.99 dev.pdkit.lmcache=0.1\n",
}


def docker(*arguments: str, stdin: str | None = None, check: bool = True) -> str:
    """Run the `docker` command and return what it printed on stdout."""
    done = subprocess.run(
        ("docker", *arguments),
        input=stdin,
        env={**os.environ, "DOCKER_BUILDKIT": "1"},
        capture_output=True,
        text=True,
        timeout=_BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0 or not check, f"docker {' '.join(arguments)}\n{done.stderr}"
    return done.stdout


def inspected(*names: str, check: bool = True) -> list[dict[str, Any]]:
    if not names:
        return []
    found: list[dict[str, Any]] = json.loads(docker("inspect", *names, check=check))
    return found


@dataclass(frozen=True)
class Project:
    """One stack of containers: its commands, and what Docker says of it."""

    kit: Deploy
    name: str
    port: int

    @property
    def files(self) -> StackHome:
        return Home(self.kit.home, self.kit.home).stack(self.name)

    @property
    def compose_file(self) -> Path:
        return self.files.root / "compose.yaml"

    @property
    def project(self) -> str:
        return f"pdkit-{self.name}"

    def run(self, *arguments: str) -> Ran:
        return self.kit.run(*arguments)

    def ok(self, *arguments: str) -> Any:
        """Run with --json, expect exit 0, and return the data."""
        return self.kit.ok(*arguments)

    def url(self, service: str) -> str:
        offset = {"router": 0, "producer-0": 10, "consumer-0": 11}[service]
        return f"http://127.0.0.1:{self.port + offset}"

    def api(self, service: str) -> EngineApi:
        return EngineApi(self.url(service), api_key=self.kit.engine_key(self.name))

    def containers(self) -> dict[str, dict[str, Any]]:
        """Return service → all that Docker says of its container, running or not."""
        # One that goes meanwhile is left out.
        found = inspected(*self._marked("ps", "-aq"), check=False)
        return {one["Config"]["Labels"]["com.docker.compose.service"]: one for one in found}

    def ids(self) -> dict[str, str]:
        return {service: str(one["Id"]) for service, one in self.containers().items()}

    def networks(self) -> list[str]:
        return self._marked("network", "ls", "-q")

    def pids(self, service: str) -> list[int]:
        """Return the processes of a container by their numbers on this machine."""
        rows = docker("top", self.ids()[service], "-eo", "pid").split()
        return [int(row) for row in rows if row.isdigit()]

    def execute(self, service: str, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ("docker", "exec", self.ids()[service], *argv),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def redis(self, *command: str) -> list[str]:
        """Return the lines that Redis answers to a command, asked inside its container."""
        ask = 'REDISCLI_AUTH="$(cat /run/secrets/redis_password)" exec redis-cli "$@"'
        done = self.execute("redis", "sh", "-c", ask, "sh", *command)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    @contextmanager
    def store_held(self) -> Iterator[subprocess.Popen[str]]:
        """Check the stack, and have Redis hold back the first store of the check until the end."""
        self.redis("CLIENT", "PAUSE", "3600000", "WRITE")
        try:
            check = self.kit.start("check", "--quick", "--json")
            assert eventually(lambda: "set" in self.held())
            yield check
        finally:
            self.redis("CLIENT", "UNPAUSE")

    def held(self) -> list[str]:
        """Return the commands that Redis holds back, one a client."""
        clients = [dict(re.findall(r"(\S+)=(\S*)", row)) for row in self.redis("CLIENT", "LIST")]
        return [client["cmd"] for client in clients if "b" in client.get("flags", "")]

    def password(self) -> str:
        return (self.files.secrets_dir / "redis_password").read_text().strip()

    def assert_nothing_left(self, *, logs: bool = False) -> None:
        """Check that no container, network, volume, port or file is left; `logs` may be kept."""
        assert docker("ps", "-aq", "--filter", f"label=dev.pdkit.stack={self.name}") == ""
        for what in (("ps", "-aq"), ("network", "ls", "-q"), ("volume", "ls", "-q")):
            assert self._marked(*what) == [], what
        for offset in (0, 1, 2, 10, 11):
            assert is_free(self.port + offset), f"port {self.port + offset} is still taken"
        left = sorted(path.name for path in self.files.root.glob("*"))
        assert left == (["logs"] if logs else []), left
        assert not Home(self.kit.home, self.kit.home).lock_file(self.name).exists()

    def _marked(self, *what: str) -> list[str]:
        label = f"label=com.docker.compose.project={self.project}"
        return docker(*what, "--filter", label).split()


def own_name(name: str) -> str:
    """Return a name that no other run of tests on this Docker engine gives a stack."""
    return f"{name}-{os.getpid()}"


def make_project(home: Path, name: str, port: int, **more: Any) -> Project:
    """Return a project whose deploy.yaml lies in its home, where its commands are run."""
    write_settings(home, name, port, **more)
    env = {"PDKIT_RUNTIME": "compose", "PDKIT_FILE": "deploy.yaml"}
    return Project(Deploy(home, env), name, port)


def write_settings(home: Path, name: str, port: int, **more: Any) -> None:
    redis = {"image": "redis-local", "memory_gib": 1}
    settings = {"name": name, "topology": "1p1d", "port": port, "redis": redis}
    (home / "deploy.yaml").write_text(yaml.safe_dump({**settings, **more}))


@contextmanager
def taken_down(project: Project) -> Iterator[Project]:
    """Take a project down at the end, whatever happened, and check that nothing is left."""
    try:
        yield project
    finally:
        ran = project.run("down")
        assert ran.code == 0, ran
        project.assert_nothing_left()


def failed(ran: Ran, *, code: int, name: str) -> dict[str, Any]:
    """Return the error of a command that must have failed, with this exit code and error code."""
    assert ran.code == code, ran
    assert ran.envelope["status"] == "error" and ran.envelope["exit_code"] == code, ran
    error: dict[str, Any] = ran.envelope["errors"][0]
    assert error["code"] == name, ran
    return error


def complete(url: str, prompt: str, headers: Mapping[str, str] | None = None) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
    answer = httpx.post(
        f"{url}/v1/completions", json=body, headers=headers, trust_env=False, timeout=60
    )
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@contextmanager
def docker_held() -> Iterator[None]:
    """Keep other workers from building images, and from restarting Docker, until the end."""
    with (KEPT / "docker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def engine() -> None:
    """Fail where Docker does not answer: without it, nothing of this would be tested."""
    with docker_held():
        _require(("docker", "info"))
        _require(("docker", "compose", "version"))
        remove_stacks_of_killed_runs()


def remove_stacks_of_killed_runs() -> None:
    """Remove stacks whose run of the tests was killed: their names are this run's, too.

    Docker starts their containers again whenever it starts itself.
    """
    shown = '{{.Label "com.docker.compose.project"}} {{.Label "dev.pdkit.root"}}'
    for row in set(docker("ps", "-a", "--filter", LABEL, "--format", shown).splitlines()):
        project, _, root = row.partition(" ")
        if of_killed_run(Path(root)):
            of_project = ("--filter", f"label=com.docker.compose.project={project}")
            docker("rm", "--force", *docker("ps", "-aq", *of_project).split())
            for kind in ("network", "volume"):
                for left in docker(kind, "ls", "-q", *of_project).split():
                    docker(kind, "rm", left)


def of_killed_run(root: Path) -> bool:
    """Tell whether a stack's folder is of pytest's, whose own process has ended.

    pytest writes its process into a file beside the tests' folders, and removes it at its end.
    """
    run = next(
        (folder for folder in root.parents if re.fullmatch(r"pytest-\d+", folder.name)), None
    )
    if run is None:
        return False
    lock = run / ".lock"
    try:
        # A number that another process has since is of one that began later.
        return psutil.Process(int(lock.read_text())).create_time() > lock.stat().st_mtime
    except (FileNotFoundError, psutil.NoSuchProcess):
        return True


@pytest.fixture(scope="session")
def wheelhouse(engine: None) -> Path:
    """Return the folder of the pinned wheels, filled on first use and kept between runs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "pdkit" / "wheelhouse"
    with docker_held():
        _require(("scripts/wheelhouse", str(folder)))
    return folder


@pytest.fixture(scope="session")
def catalogue(wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the catalogue by name, after its images for processors have been built."""
    kit = Deploy(tmp_path_factory.mktemp("images"))
    offline = ("--base", BASE, "--wheelhouse", str(wheelhouse))
    with docker_held():
        _require(("scripts/base-image",))
        assert kit.ok("images", "build", *BUILT_HERE, *offline)["built"]
        return {row["name"]: row for row in kit.ok("images", "list")["images"]}


@pytest.fixture(scope="session", autouse=True)
def images(catalogue: dict[str, Any]) -> Iterator[None]:
    """Build the variants of the engine image; they are removed at the end."""
    known = {"engine": catalogue["cpu"]["image"], "base": BASE}
    for tag, text in _VARIANTS.items():
        docker("build", "--quiet", "--tag", tag, "-", stdin=text.format(**known))
    kept = Home(KEPT, KEPT)
    engine, second = (kept.engine_cache(one["Id"]) for one in inspected(known["engine"], SECOND))
    # Their vLLM is the same, and looks up the same; what is rendered names the image by its tag.
    for other in (second, kept.engine_cache(known["engine"])):
        other.symlink_to(engine)
    yield
    docker("image", "rm", "--force", *_VARIANTS)


@pytest.fixture(scope="package")
def project(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Return the stack that most modules share; `stack` starts it."""
    home = tmp_path_factory.mktemp("home")
    with taken_down(make_project(home, own_name("shared"), free_row())) as made:
        yield made


@pytest.fixture(scope="module")
def stack(project: Project) -> Project:
    """Return the shared stack as its deploy.yaml says, healthy and checked once."""
    healthy = project.run("status", "--json").data["healthy"]
    # What another module broke is not this one's concern.
    if not healthy and project.run("up").code:
        assert project.run("down").code == 0
        project.ok("up")
    return project


def _require(argv: Sequence[str]) -> None:
    """Run what the tests cannot do without; its own message says what is missing."""
    try:
        done = subprocess.run(
            argv,
            cwd=REPO,
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        pytest.fail(f"{argv[0]} is not installed; these tests need Docker and its Compose plugin")
    if done.returncode:
        pytest.fail(f"{' '.join(argv)} ended with {done.returncode}\n{done.stderr.strip()}")
