"""Which Docker is enough, and what is said where it is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.errors import DockerUnavailable, MachineError
from deploy.runtime import http_client
from deploy.runtime.compose import docker as docker_module
from deploy.runtime.compose.docker import (
    answering_engine,
    docker_answers,
    docker_info,
    engine_answers,
    is_rootless,
    require_compose,
    run_docker,
)
from deploy.runtime.http_client import Page
from deploy.runtime.observe import code_of_image
from tests.unit.docker_stand_in import hanging_engine

Install = Callable[[str], Path]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The file that holds for which files the Compose plugin was new enough."""
    return tmp_path / "cache" / "compose-plugin"


@pytest.mark.usefixtures("engine")
class TestCompose:
    @pytest.mark.parametrize(
        ("said", "version"),
        [
            ("2.20.0", (2, 20, 0)),
            ("v2.29.1", (2, 29, 1)),
            ("2.20.2-desktop.1", (2, 20, 2)),
            ("2.26.1-4", (2, 26, 1)),
            ("5.0.0", (5, 0, 0)),
            ("2.21", (2, 21, 0)),
        ],
    )
    def test_a_new_enough_compose_plugin_is_accepted(
        self, docker_command: Install, kept: Path, said: str, version: tuple[int, ...]
    ) -> None:
        docker_command(f"echo {said}")
        assert require_compose() == version
        assert docker_answers(kept)

    @pytest.mark.parametrize("said", ["2.19.9", "v2.0.0", "1.29.2"])
    def test_an_old_compose_plugin_is_refused(
        self, docker_command: Install, kept: Path, said: str
    ) -> None:
        docker_command(f"echo {said}")
        with pytest.raises(DockerUnavailable) as caught:
            require_compose()
        assert said.removeprefix("v") in caught.value.message
        assert "2.20" in caught.value.message
        assert "--runtime process" in caught.value.hint
        assert caught.value.exit_code == 3
        assert not docker_answers(kept)

    @pytest.mark.parametrize(
        "script",
        ["echo \"docker: 'compose' is not a docker command.\" >&2; exit 1", "exit 0", "echo soon"],
    )
    def test_a_missing_compose_plugin_is_an_error(
        self, docker_command: Install, script: str
    ) -> None:
        docker_command(script)
        with pytest.raises(DockerUnavailable, match="plugin is not installed") as caught:
            require_compose()
        assert "docker-compose-plugin" in caught.value.hint


@pytest.mark.usefixtures("engine", "plugin")
class TestKept:
    """The plugin is asked for its version again when a file that decides on it is another."""

    @pytest.fixture
    def plugin(
        self, docker_command: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> Path:
        """A plugin where Docker looks for it."""
        docker_command("exit 1")
        folder = tmp_path / "plugins"
        folder.mkdir()
        monkeypatch.setattr(docker_module, "_PLUGIN_FOLDERS", (str(folder),))
        (folder / "docker-compose").write_text("one")
        return folder / "docker-compose"

    @pytest.fixture
    def answers(self, docker_command: Install, kept: Path, tmp_path: Path) -> Callable[..., str]:
        """Ask twice; return the answers and how often Docker was asked, such as 'yes yes 1'."""

        def asked_twice(said: str = "2.26.1") -> str:
            log = tmp_path / "asked"
            if said:
                docker_command(f'echo "$*" >> {log}; echo {said}')
            log.write_text("")
            twice = ["yes" if docker_answers(kept) else "no" for _ in range(2)]
            return " ".join((*twice, str(log.read_text().count("compose version"))))

        return asked_twice

    def test_the_plugin_is_asked_once(self, answers: Callable[..., str]) -> None:
        assert answers() == "yes yes 1"
        assert answers("") == "yes yes 0"

    def test_another_docker_command(self, answers: Callable[..., str]) -> None:
        assert answers() == "yes yes 1"
        assert answers("2.9.1") == "no no 2"

    @pytest.mark.parametrize("by_configuration", [True, False])
    def test_another_plugin_is_asked_again(
        self,
        answers: Callable[..., str],
        plugin: Path,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        by_configuration: bool,
    ) -> None:
        assert answers() == "yes yes 1"
        other = tmp_path / "cli-plugins" / "docker-compose" if by_configuration else plugin
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        other.parent.mkdir(exist_ok=True)
        other.write_text("another")
        assert answers("") == "yes yes 1"

    @pytest.mark.parametrize("elsewhere", [True, False])
    def test_an_unidentified_plugin_is_always_asked(
        self,
        answers: Callable[..., str],
        plugin: Path,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        elsewhere: bool,
    ) -> None:
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        if elsewhere:
            (tmp_path / "config.json").write_text('{"cliPluginsExtraDirs": ["/opt"]}')
        else:
            plugin.unlink()
        assert answers() == "yes yes 2"

    def test_an_engine_that_went(
        self, answers: Callable[..., str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert answers() == "yes yes 1"

        def refuse() -> None:
            raise DockerUnavailable("no Docker engine answers")

        monkeypatch.setattr(docker_module, "answering_engine", refuse)
        assert answers("") == "no no 0"

    def test_a_cache_that_cannot_be_written(self, answers: Callable[..., str], kept: Path) -> None:
        kept.parent.write_text("a file")
        assert answers() == "yes yes 2"


class TestEngine:
    @pytest.mark.usefixtures("docker_command")
    def test_a_missing_docker_command_is_an_error(self, kept: Path) -> None:
        with pytest.raises(DockerUnavailable, match="docker is not installed") as caught:
            answering_engine()
        assert caught.value.fix == "curl -fsSL https://get.docker.com | sudo sh"
        assert "--runtime process" in caught.value.hint
        assert not docker_answers(kept)
        assert not engine_answers()

    @pytest.mark.parametrize("host", ["tcp://192.0.2.1:2376", "ssh://box", "http://127.0.0.1:2375"])
    def test_a_remote_docker_host_is_refused(
        self, docker_command: Install, monkeypatch: pytest.MonkeyPatch, host: str
    ) -> None:
        docker_command("exit 1")
        monkeypatch.setenv("DOCKER_HOST", host)
        with pytest.raises(DockerUnavailable, match="is on another machine") as caught:
            answering_engine()
        assert host in caught.value.message
        assert "unset DOCKER_HOST" in caught.value.hint

    def test_a_remote_docker_context_is_refused(self, docker_command: Install) -> None:
        docker_command("echo ssh://box")
        with pytest.raises(DockerUnavailable, match="ssh://box is on another machine"):
            answering_engine()

    def test_an_engine_that_does_not_run_is_an_error(
        self, docker_command: Install, kept: Path, tmp_path: Path
    ) -> None:
        docker_command(f"echo unix://{tmp_path}/no.sock")
        with pytest.raises(DockerUnavailable, match="it does not run") as caught:
            answering_engine()
        assert f"{tmp_path}/no.sock" in caught.value.message
        assert "systemctl start docker" in caught.value.hint
        assert not docker_answers(kept)

    @pytest.mark.parametrize(
        ("host", "error", "fix"),
        [
            ("", "Permission denied", "sudo usermod -aG docker $USER, then log in again"),
            ("", "Connection refused", "sudo systemctl start docker"),
            ("unix:///run/user/1000/docker.sock", "Connection refused",
             "systemctl --user start docker"),
            ("unix:///run/podman/podman.sock", "Connection refused", "unset DOCKER_HOST"),
            ("", "timed out", "sudo systemctl restart docker"),
        ],
    )  # fmt: skip
    def test_each_state_of_docker_has_its_own_command(
        self, monkeypatch: pytest.MonkeyPatch, host: str, error: str, fix: str
    ) -> None:
        def refuse(*_: object, **__: object) -> Page:
            raise OSError(error)

        monkeypatch.setenv("DOCKER_HOST", host)
        monkeypatch.setattr(docker_module, "_engine_address", lambda: host or "unix:///var/s")
        monkeypatch.setattr(Path, "exists", lambda _: True)
        monkeypatch.setattr(http_client, "get", refuse)
        answering_engine.cache_clear()
        with pytest.raises(DockerUnavailable) as caught:
            answering_engine()
        assert caught.value.fix == fix
        assert caught.value.hint.startswith(fix)
        commands = ("usermod", "systemctl start", "--user start", "restart", "unset")
        assert sum(one in caught.value.hint for one in commands) == 1

    def test_a_context_that_is_broken_means_the_usual_socket(self, docker_command: Install) -> None:
        docker_command("exit 1")
        assert docker_module._engine_address() == "unix:///var/run/docker.sock"

    def test_the_context_is_not_asked_for_without_one(
        self, docker_command: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        docker_command("echo ssh://box")
        monkeypatch.delenv("DOCKER_CONTEXT")
        assert docker_module._engine_address() == "unix:///var/run/docker.sock"
        (tmp_path / "config.json").write_text('{"auths": {}}')
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        assert docker_module._engine_address() == "unix:///var/run/docker.sock"

    @pytest.mark.parametrize(("variable", "folder"), [("DOCKER_CONFIG", "."), ("HOME", ".docker")])
    def test_a_context_in_the_configuration_of_docker(
        self,
        docker_command: Install,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        variable: str,
        folder: str,
    ) -> None:
        docker_command("echo ssh://box")
        monkeypatch.delenv("DOCKER_CONTEXT")
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "config.json").write_text('{"currentContext": "box"}')
        monkeypatch.setenv(variable, str(tmp_path))
        assert docker_module._engine_address() == "ssh://box"

    def test_a_refusal_is_not_remembered(self, docker_command: Install, tmp_path: Path) -> None:
        """The engine may be started while a long command waits."""
        docker_command(f"echo unix://{tmp_path}/no.sock")
        for _ in range(2):
            with pytest.raises(DockerUnavailable):
                answering_engine()

    @pytest.mark.parametrize(
        ("said", "reason"),
        [
            ("PermissionError(13, 'Permission denied')", "group docker"),
            ("FileNotFoundError(2, 'No such file or directory')", "does not run"),
            ("ConnectionRefusedError(111, 'Connection refused')", "does not run"),
            ("Read timed out. (read timeout=5)", "no answer in 5 s"),
        ],
    )
    def test_errors_of_docker_have_a_readable_reason(self, said: str, reason: str) -> None:
        assert reason in docker_module.reason_of(Exception(said), 5.0)

    def test_an_engine_that_hangs_after_a_ping_is_an_error(
        self, docker_command: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        with hanging_engine(tmp_path / "s") as address:
            docker_command(f"echo {address}")
            assert engine_answers()
            monkeypatch.setattr(docker_module, "_ASK_TIMEOUT_S", 0.3)
            with pytest.raises(DockerUnavailable, match=r"no answer in 0\.3 s") as caught:
                docker_info()
        assert "--runtime process" in caught.value.hint
        answering_engine.cache_clear()

    def test_info_is_read_without_the_slow_client(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(docker_module, "answering_engine", lambda: "unix:///s")
        monkeypatch.setitem(sys.modules, "docker", None)
        monkeypatch.setattr(http_client, "get", lambda *_, **__: Page(200, '{"Runtimes": {}}'))
        assert docker_info() == {"Runtimes": {}}

    @pytest.mark.parametrize(
        ("page", "why"),
        [(Page(500, "no disk"), "HTTP 500: no disk"), (Page(200, "<html>"), "char 0")],
    )
    def test_info_that_cannot_be_had(
        self, monkeypatch: pytest.MonkeyPatch, page: Page, why: str
    ) -> None:
        monkeypatch.setattr(docker_module, "answering_engine", lambda: "unix:///s")
        monkeypatch.setattr(http_client, "get", lambda *_, **__: page)
        with pytest.raises(DockerUnavailable, match=f"docker info failed .*{why}"):
            docker_info()

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (["name=seccomp,profile=builtin", "name=rootless"], True),
            (["name=seccomp,profile=builtin", "name=cgroupns"], False),
            ([], False),
            (None, False),
        ],
    )
    def test_rootless_docker_is_recognized(self, options: list[str] | None, expected: bool) -> None:
        assert is_rootless({"SecurityOptions": options}) is expected


class TestRunning:
    def test_output_is_returned(self, docker_command: Install) -> None:
        docker_command('echo "out $1"; echo "err $2" >&2')
        done = run_docker(("one", "two"), timeout_s=5)
        assert (done.stdout, done.stderr) == ("out one\n", "err two\n")

    def test_a_failure_says_the_last_line(self, docker_command: Install) -> None:
        docker_command("echo first >&2; echo 'last words' >&2; exit 3")
        with pytest.raises(MachineError, match="docker image pull failed: last words") as caught:
            run_docker(("image", "pull", "x"), timeout_s=5)
        assert caught.value.details == ("first", "last words")
        assert run_docker(("image",), timeout_s=5, check=False).returncode == 3

    def test_a_command_that_hangs_is_ended(self, docker_command: Install) -> None:
        docker_command("exec /bin/sleep 60")
        with pytest.raises(MachineError, match=r"did not finish within 0\.2 s"):
            run_docker(("info",), timeout_s=0.2)

    def test_a_hanging_engine_is_one_that_does_not_answer(
        self, docker_command: Install, kept: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`plan` and `down` go on without it."""
        docker_command("exec /bin/sleep 60")
        monkeypatch.setattr(docker_module, "_ASK_TIMEOUT_S", 0.2)
        assert not docker_answers(kept)
        assert not engine_answers()

    def test_nothing_is_read_from_the_terminal(self, docker_command: Install) -> None:
        docker_command('read word; echo "read: $word"')
        assert run_docker(("x",), timeout_s=5).stdout == "read: \n"


@pytest.mark.parametrize(
    "tail",
    ["See 'docker run --help'.", "\nRun 'docker run --help' for more information"],
    ids=["20.10", "28"],
)
def test_dockers_refusal_is_reported_and_not_its_help(docker_command: Install, tail: str) -> None:
    docker_command(f'echo "docker: no GPU here.\n{tail}" >&2; exit 125')
    found = code_of_image("sha256:1", "python3", "an/image:1", None, gpus=True)
    assert found.trouble == "docker: no GPU here."
    with pytest.raises(MachineError, match="docker: no GPU here"):
        run_docker(("run", "image"), timeout_s=5)
