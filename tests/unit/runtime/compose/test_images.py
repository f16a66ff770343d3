"""Images of an engine: found, asked what is in them, pulled and built by the `docker` command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.errors import ConfigError, MissingImage
from deploy.runtime.compose.images import (
    FoundImage,
    ImageVersions,
    build_image,
    find_image,
    probe_versions,
    pull_image,
    repository_of,
)
from tests.unit.runtime.compose.conftest import FakeDocker

Install = Callable[[str], Path]


class TestFinding:
    def test_a_local_image_is_found(self, engine: FakeDocker) -> None:
        engine.all_images["a:1"] = {
            "Id": "sha256:x", "Size": 3 << 20, "Config": {"Labels": {"k": "v"}},
        }  # fmt: skip
        assert find_image("a:1") == FoundImage("a:1", "sha256:x", {"k": "v"}, 3)
        engine.all_images["a:1"]["RepoDigests"] = ["a@sha256:1", "b/a@sha256:1"]
        found = find_image("a:1")
        assert found and found.digests == ("a@sha256:1", "b/a@sha256:1")
        assert found.digests_in("a:2") == ("sha256:1",)
        assert found.digests_in("c/a:1") == ()

    def test_an_image_without_labels_is_found(self, engine: FakeDocker) -> None:
        engine.all_images["a:1"] = {"Id": "sha256:x", "Config": {"Labels": None}}
        assert find_image("a:1") == FoundImage("a:1", "sha256:x", {}, 0)

    @pytest.mark.usefixtures("engine")
    def test_a_missing_image_is_none(self) -> None:
        assert find_image("a:1") is None


@pytest.mark.parametrize(
    ("reference", "repository"),
    [
        ("redis", "docker.io/library/redis"),
        ("redis:8.4.0@sha256:0a", "docker.io/library/redis"),
        ("library/redis:8", "docker.io/library/redis"),
        ("docker.io/redis", "docker.io/library/redis"),
        ("index.docker.io/library/redis@sha256:0a", "docker.io/library/redis"),
        ("prom/prometheus:v3", "docker.io/prom/prometheus"),
        ("mirror/redis:8", "docker.io/mirror/redis"),
        ("mirror.example/redis:8", "mirror.example/redis"),
        ("mirror:5000/library/redis", "mirror:5000/library/redis"),
        ("localhost/redis@sha256:0a", "localhost/redis"),
        ("<none>@<none>", "docker.io/library/<none>"),
    ],
)
def test_repository_names_are_completed(reference: str, repository: str) -> None:
    assert repository_of(reference) == repository


class TestVersions:
    def test_versions_are_read_from_labels(self, docker_command: Install) -> None:
        docker_command("echo called >&2; exit 1")
        labels = {"dev.pdkit.vllm": "0.25.1", "dev.pdkit.lmcache": "0.5.3"}
        image = FoundImage("a:1", "sha256:x", labels, 1)
        assert probe_versions(image, "python3") == ImageVersions("0.25.1", "0.5.3")

    def test_versions_are_read_from_the_packages(self, docker_command: Install) -> None:
        docker_command(
            'case "$*" in *"--entrypoint py sha256:x -c"*) echo \'["1.0", null]\';; esac'
        )
        assert probe_versions(FoundImage("a:1", "sha256:x", {}, 1), "py") == ImageVersions(
            "1.0", None
        )

    def test_versions_are_read_without_a_network(self, docker_command: Install) -> None:
        docker_command('case "$*" in *"--rm --network none "*) echo \'["1.0", "2.0"]\';; esac')
        found = probe_versions(FoundImage("a:1", "sha256:x", {}, 1), "py")
        assert found == ImageVersions("1.0", "2.0")

    @pytest.mark.parametrize(
        "script",
        [
            "exit 125",
            "echo no json",
            "exit 0",
            "echo 5",
            "x='['; for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do x=$x$x; done; echo $x",
        ],
    )
    def test_an_image_that_cannot_be_asked(self, docker_command: Install, script: str) -> None:
        docker_command(script)
        found = probe_versions(FoundImage("a:1", "sha256:x", {}, 1), "py")
        assert found == ImageVersions(None, None)


class TestPulling:
    def test_pulling_prints_nothing_on_stdout(
        self, docker_command: Install, capfd: pytest.CaptureFixture[str]
    ) -> None:
        docker_command('echo "$*"')
        pull_image("a:1")
        captured = capfd.readouterr()
        assert captured.out == "", "stdout is the command's answer"
        assert captured.err == "pull a:1\n"

    def test_an_image_pulled_by_digest_gets_its_tag(
        self, docker_command: Install, tmp_path: Path
    ) -> None:
        docker_command(f'echo "$*" >> {tmp_path}/asked')
        pull_image("a/b:1@sha256:0a")
        pull_image("a:5000/b@sha256:0a")
        assert (tmp_path / "asked").read_text().splitlines() == [
            "pull a/b:1@sha256:0a", "tag a/b:1@sha256:0a a/b:1", "pull a:5000/b@sha256:0a",
        ]  # fmt: skip

    def test_a_failed_pull_is_an_error(self, docker_command: Install) -> None:
        docker_command("echo 'Error response from daemon: no such host' >&2; exit 1")
        with pytest.raises(
            MissingImage, match=r"a:1 is not on this machine.*no such host"
        ) as caught:
            pull_image("a:1")
        assert caught.value.hint
        assert caught.value.exit_code == 3
        assert caught.value.details == (), "what is in the message is not said again"

    def test_refused_at_length(self, docker_command: Install) -> None:
        docker_command("echo one >&2; echo two >&2; exit 1")
        with pytest.raises(MissingImage, match="two") as caught:
            pull_image("a:1", otherwise="build it")
        assert (caught.value.details, caught.value.hint) == (("one",), "build it")


class TestBuilding:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "images" / "x"
        folder.mkdir(parents=True)
        (folder / "Dockerfile").write_text("FROM scratch\n")
        return folder

    @pytest.fixture
    def wheels(self, tmp_path: Path) -> Path:
        wheels = tmp_path / "wheels"
        wheels.mkdir()
        for name in ("a_b-1-py3-none-any", "lmcache-1-cp312-x", "of_another_image-1-py3-none-any"):
            (wheels / f"{name}.whl").write_text("wheel")
        return wheels

    SHOW = (
        'echo "$*"; echo "buildkit $DOCKER_BUILDKIT"; for last; do :; done; '
        'cd "$last" && /usr/bin/find . -type f | /usr/bin/sort'
    )

    def test_an_image_is_built_from_a_folder_with_network(
        self, docker_command: Install, folder: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        docker_command(self.SHOW)
        build_image("a:1", folder, {"BASE": "b:2", "VLLM": "1"}, wheelhouse=None)
        captured = capfd.readouterr()
        assert captured.out == ""
        command, buildkit, *files = captured.err.splitlines()
        assert command.startswith("build --tag a:1 --build-arg BASE=b:2 --build-arg VLLM=1 ")
        assert buildkit == "buildkit 1"
        assert files == ["./Dockerfile"]

    def test_an_image_is_built_with_attestations(
        self, docker_command: Install, folder: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        docker_command(self.SHOW)
        build_image("a:1", folder, {"VLLM": "1"}, wheelhouse=None, attest=True)
        command = capfd.readouterr().err.splitlines()[0]
        assert command.startswith(
            "build --tag a:1 --sbom=true --provenance=mode=max --build-arg VLLM=1 "
        )
        docker_command("exit 1")
        with pytest.raises(MissingImage) as caught:
            build_image("a:1", folder, {}, wheelhouse=None, attest=True)
        assert "containerd image store" in caught.value.hint

    def test_an_image_is_built_from_wheels_without_network(
        self,
        docker_command: Install,
        folder: Path,
        wheels: Path,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        """Those that the image's files name, however they write a name."""
        docker_command(self.SHOW)
        (folder / "requirements.lock").write_text("A.b==1 \\\n    --hash=sha256:00\n")
        (folder / "Dockerfile").write_text('RUN pip download "lmcache==$LMCACHE"\n')
        build_image("a:1", folder, {}, wheelhouse=wheels)
        command, _, *files = capfd.readouterr().err.splitlines()
        assert "--network none" in command
        assert files == [
            "./Dockerfile",
            "./requirements.lock",
            "./wheelhouse/a_b-1-py3-none-any.whl",
            "./wheelhouse/lmcache-1-cp312-x.whl",
        ]
        assert not (folder / "wheelhouse").exists(), "the kit's own folder is left alone"

    def test_a_folder_of_no_wheels(
        self, docker_command: Install, folder: Path, tmp_path: Path
    ) -> None:
        docker_command("exit 1")
        with pytest.raises(ConfigError, match="holds no wheels"):
            build_image("a:1", folder, {}, wheelhouse=tmp_path)

    def test_a_failed_build_is_an_error(self, docker_command: Install, folder: Path) -> None:
        docker_command("exit 17")
        with pytest.raises(MissingImage, match=r"a:1 could not be built.*17") as caught:
            build_image("a:1", folder, {}, wheelhouse=None)
        assert "--wheelhouse" in caught.value.hint
