"""`render`: the same bytes anywhere, from nothing; and a folder that is all that a start needs."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.errors import ConfigError, MachineError
from deploy.runtime.home import Home
from deploy.stack.document import document_yaml
from deploy.workflows import prepare as prepare_module
from deploy.workflows.prepare import Prepared
from deploy.workflows.render import rendered, write_rendered
from tests.conftest import Ended, plain_environ, run_python
from tests.unit.conftest import HOME
from tests.unit.stack.cases import TOKEN, VENDORS

# Put before all of a Python program: whatever it wants of the machine ends it.
GUARD = """
import os, socket, subprocess
def refuse(*_, **__):
    raise AssertionError("rendering touches the machine")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
subprocess.Popen.__init__ = os.fork = os.posix_spawn = refuse
"""


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guard")
    (folder / "sitecustomize.py").write_text(GUARD)
    return folder


RENDER_EACH = f"""
from deploy.cli.main import main
for vendor in {VENDORS}:
    assert main(["render", "--vendor", vendor, "--gpus", "4"]) == 0
    print("=====")
"""


@pytest.fixture(scope="module")
def documents(guard: Path) -> dict[str, tuple[str, str]]:
    """What is rendered for each vendor, in two processes."""
    both = [guarded(guard, "-c", RENDER_EACH) for _ in range(2)]
    assert [(ended.code, ended.stderr) for ended in both] == [(0, "")] * 2
    texts = zip(*(ended.stdout.split("=====\n")[:-1] for ended in both), strict=True)
    return dict(zip(VENDORS, texts, strict=True))


def guarded(guard: Path, *arguments: str) -> Ended:
    """Run Python where no program is on PATH, and none could be started."""
    environ = plain_environ(
        settled=False, PYTHONPATH=str(guard), PATH="/nonexistent", PDKIT_HOME="/nonexistent/home"
    )
    return run_python(*arguments, cwd=guard, env=environ)


class TestNothingIsTouched:
    @pytest.mark.parametrize("vendor", VENDORS)
    def test_render_is_reproducible_and_touches_nothing(
        self, documents: dict[str, tuple[str, str]], vendor: str
    ) -> None:
        first, second = documents[vendor]
        assert first == second, "byte for byte, in another process too"
        document = yaml.safe_load(first)
        assert list(document["services"]) == [
            "redis", "producer-0", "producer-1", "consumer-0", "consumer-1", "router",
        ]  # fmt: skip

    def test_plan_of_a_machine_that_is_described(self, guard: Path, tmp_path: Path) -> None:
        file = tmp_path / "machine.yaml"
        file.write_text(
            "cpus: 8\nmemory_mib: 65536\ngpus: {vendor: rocm, count: 2, memory_mib: 65536}\n"
        )
        asked = ("--runtime", "compose", "--inventory", str(file), "--json")
        ended = guarded(guard, "-m", "deploy", "plan", *asked)
        assert (ended.code, ended.stderr) == (0, "")
        data = json.loads(ended.stdout)["data"]
        assert (data["vendor"], data["topology"]) == ("rocm", "1p1d")
        assert [engine["devices"] for engine in data["engines"]] == [[0], [1]]

    def test_the_guard_guards(self, guard: Path) -> None:
        """`--runtime auto` of a plan asks for a Docker engine; with one named it asks nobody."""
        program = "import socket; socket.create_connection(('127.0.0.1', 9))"
        ended = run_python("-c", program, cwd=guard, env=plain_environ(PYTHONPATH=str(guard)))
        assert "touches the machine" in ended.stderr


def test_the_same_bytes_each_time(prepared: Callable[..., Prepared]) -> None:
    for vendor in VENDORS:
        fields: dict[str, Any] = {"vendor": vendor, "runtime": "compose", "machine": None}
        first, second = (document_yaml(rendered(prepared(**fields), HOME)) for _ in range(2))
        assert first.encode() == second.encode()


class TestIntoAFolder:
    @pytest.fixture
    def home(self, tmp_path: Path) -> Home:
        return Home(tmp_path / "state", tmp_path / "cache")

    @pytest.fixture
    def make(self, prepared: Callable[..., Prepared], home: Home) -> Callable[..., Prepared]:
        def prepare(**fields: Any) -> Prepared:
            made = prepared(runtime="compose", machine=None, **fields)
            # This user's own number, so that files need not be given away.
            own = replace(made.facts.software, user="0:0")
            facts = replace(made.facts, software=own)
            return prepare_module.prepare(made.spec, home, facts)

        return prepare

    def test_a_rendered_folder_is_complete_and_private(
        self, make: Callable[..., Prepared], home: Home, tmp_path: Path
    ) -> None:
        written, then = write_rendered(make(), home, tmp_path / "out")
        file = tmp_path / "out" / "compose.yaml"
        assert written[0] == file
        assert f"docker compose -f {file} up" in then
        document = yaml.safe_load(file.read_text())
        for secret in document["secrets"].values():
            assert Path(secret["file"]) in written
        for path in written:
            assert path.is_relative_to(tmp_path / "out")
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for service in document["services"].values():
            for mount in service.get("volumes", []):
                assert Path(mount["source"]).exists(), "Docker refuses what is not there"

    def test_secrets_are_filled_in_and_only_in_their_files(
        self, make: Callable[..., Prepared], home: Home, tmp_path: Path
    ) -> None:
        write_rendered(make(), home, tmp_path / "out")
        password = (tmp_path / "out" / "secrets" / "redis_password").read_text().strip()
        assert len(password) >= 32
        assert password not in (tmp_path / "out" / "compose.yaml").read_text()
        conf = (tmp_path / "out" / "run" / "redis" / "redis.conf").read_text()
        assert f"requirepass {password}\n" in conf
        engine = (tmp_path / "out" / "run" / "producer-0" / "lmcache.yaml").read_text()
        assert (
            yaml.safe_load(engine)["extra_config"]["pdkit.url"] == f"redis://:{password}@redis:6379"
        )

    def test_twice_keeps_the_password(
        self, make: Callable[..., Prepared], home: Home, tmp_path: Path
    ) -> None:
        """Containers that run have the old one."""
        texts = []
        for _ in range(2):
            write_rendered(make(), home, tmp_path / "out")
            texts.append((tmp_path / "out" / "secrets" / "redis_password").read_text())
        assert texts[0] == texts[1]

    def test_a_token_of_the_hub_only_for_a_model_of_the_hub(
        self,
        make: Callable[..., Prepared],
        home: Home,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        environ = {"HF_TOKEN": TOKEN, "HF_HUB_CACHE": str(tmp_path / "hub")}
        write_rendered(make(environ=environ), home, tmp_path / "tiny")
        assert not (tmp_path / "tiny" / "secrets" / "hf_token").exists()
        write_rendered(make(environ=environ, model="owner/name"), home, tmp_path / "hub-model")
        token = tmp_path / "hub-model" / "secrets" / "hf_token"
        assert token.read_text().strip() == TOKEN
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert (tmp_path / "hub").is_dir(), "it is mounted"

    def test_the_engines_cache(
        self, make: Callable[..., Prepared], home: Home, tmp_path: Path
    ) -> None:
        """Made before Docker would make it as root's; one for each image."""
        write_rendered(make(), home, tmp_path / "out")
        (cache,) = (home.cache / "engines").iterdir()
        document = yaml.safe_load((tmp_path / "out" / "compose.yaml").read_text())
        mounts = {m["target"]: m for m in document["services"]["producer-0"]["volumes"]}
        assert mounts["/cache"]["source"] == str(cache)
        write_rendered(make(image="another:1"), home, tmp_path / "other")
        assert len(list((home.cache / "engines").iterdir())) == 2

    def test_a_hub_cache_that_is_another_users(
        self,
        make: Callable[..., Prepared],
        home: Home,
        tmp_path: Path,
    ) -> None:
        cache = tmp_path / "hub"
        cache.mkdir()
        made = make(model="owner/name", hub_cache=str(cache))
        stranger = replace(made.facts.software, user=f"{cache.stat().st_uid + 77}:5")
        made = replace(made, facts=replace(made.facts, software=stranger))
        with pytest.raises(MachineError, match="hub_cache") as caught:
            write_rendered(made, home, tmp_path / "out")
        assert "chown" in caught.value.hint

    def test_a_key_for_clients(
        self, make: Callable[..., Prepared], home: Home, tmp_path: Path
    ) -> None:
        key = tmp_path / "key"
        key.write_text("abc123\n")
        write_rendered(make(api_key_file=str(key)), home, tmp_path / "out")
        assert (tmp_path / "out" / "secrets" / "api_key").read_text().strip() == "abc123"
        key.write_text("two words\n")
        with pytest.raises(ConfigError, match="--api-key-file"):
            write_rendered(make(api_key_file=str(key)), home, tmp_path / "other")

    def test_the_users_own_home_is_left_alone(
        self, make: Callable[..., Prepared], home: Home, tmp_path: Path
    ) -> None:
        write_rendered(make(), home, tmp_path / "out")
        assert not home.state.exists()
        assert home.models.exists(), "where the tiny model is made, for any stack"
