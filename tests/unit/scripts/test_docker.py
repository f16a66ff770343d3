"""`scripts/docker`: what it installs by release, user and what is there, and what it refuses."""

from __future__ import annotations

import pytest

from tests.unit.scripts.conftest import ROOT, Machine

SCRIPT = ROOT / "scripts" / "docker"

# Docker looks for plugins in the user's folder before those of the system.
_DOCKER = """
plugin() {
    local folder
    for folder in "$HOME/.docker/cli-plugins" "$STUB_STATE/plugins"; do
        if [ -e "$folder/docker-$1" ]; then cat "$folder/docker-$1"; exit 0; fi
    done
    echo "docker: '$1' is not a docker command." >&2
    exit 1
}
case $1 in
info)
    if [ -e "$STUB_STATE/forbidden" ]; then
        echo "permission denied while trying to connect to the Docker daemon socket" >&2
        exit 1
    fi
    [ -z "${DOCKER_HOST:-}" ] && [ -e "$STUB_STATE/answers" ] || exit 1
    touch "$STUB_STATE/asked-info"
    ;;
*) plugin "$1" ;;
esac
"""
# It stays until it was asked for, so that nobody takes it for ended.
_DOCKERD = """
echo dockerd >>"$STUB_STATE/asked"
if [ -e "$STUB_STATE/dockerd-fails" ]; then echo "failed to start daemon: no cgroups"; exit 1; fi
touch "$STUB_STATE/answers"
until [ -e "$STUB_STATE/asked-info" ]; do sleep 0.02; done
"""
_APT = """
plugins=$STUB_STATE/plugins
case $* in
*--print-uris*) echo "'http://mirror/debian/dists/bookworm/InRelease' mirror_InRelease 0" ;;
*download*) touch docker-compose.deb docker-buildx.deb; cat "$APT_CONFIG" >"$STUB_STATE/apt.conf" ;;
*install*)
    case $* in *docker.io*)
        cp "$STUB_STATE/docker" "$STUB_BIN/docker"; cp "$STUB_STATE/dockerd" "$STUB_BIN/dockerd" ;;
    esac
    case $* in *docker-compose*) echo 2.26.1 >"$plugins/docker-compose" ;; esac
    case $* in *docker-buildx*) echo 0.13.1 >"$plugins/docker-buildx" ;; esac
    ;;
esac
"""
_INSTALL = """
echo "install into ${2#*=}" >>"$STUB_STATE/asked"
echo 2.26.1 >"$STUB_STATE/plugins/docker-compose"
echo 0.13.1 >"$STUB_STATE/plugins/docker-buildx"
"""

FROM_TRIXIE = [
    "apt-get download -qq docker-compose docker-buildx",
    "install into /usr/local/lib/docker/cli-plugins",
]


def installs(*packages: str) -> str:
    return f"apt-get install -y -qq --no-install-recommends {' '.join(packages)}"


@pytest.fixture
def bare(machine: Machine) -> Machine:
    """A machine without Docker, whose apt has it."""
    (machine.state / "plugins").mkdir()
    machine.environ["STUB_BIN"] = str(machine.bin)
    for name, body in (("docker", _DOCKER), ("dockerd", _DOCKERD), ("install", _INSTALL)):
        machine.command(name, body)
    for name in ("docker", "dockerd"):
        (machine.bin / name).rename(machine.state / name)
    (machine.state / "apt-get").write_text(_APT)
    machine.command("dpkg-deb", "true")
    return machine


def give(machine: Machine, *, compose: str = "2.26.1", buildx: bool = True) -> Machine:
    """Install Docker's engine, which answers, and its plugins in the system."""
    for name in ("docker", "dockerd"):
        (machine.state / name).rename(machine.bin / name)
    (machine.state / "answers").touch()
    if compose:
        (machine.state / "plugins" / "docker-compose").write_text(f"{compose}\n")
    if buildx:
        (machine.state / "plugins" / "docker-buildx").touch()
    return machine


def own_compose(machine: Machine, version: str = "2.30.0") -> None:
    """Put Compose into the folder of the machine's user."""
    folder = machine.home / ".docker" / "cli-plugins"
    folder.mkdir(parents=True)
    (folder / "docker-compose").write_text(f"{version}\n")


def on(machine: Machine, suite: str) -> Machine:
    machine.release = f"ID=debian\nVERSION_CODENAME={suite}\n"
    return machine


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("release", ["ID=debian\nVERSION_CODENAME=trixie\n", "ID=fedora\n"])
class TestComplete:
    def test_a_complete_system_installs_nothing(
        self, bare: Machine, uid: int, release: str
    ) -> None:
        give(bare, compose="2.20.0")
        bare.uid, bare.release = uid, release
        assert (bare.run(SCRIPT).returncode, bare.asked) == (0, [])

    def test_a_plugin_in_the_users_folder_counts(
        self, bare: Machine, uid: int, release: str
    ) -> None:
        own_compose(give(bare, compose=""))
        bare.uid, bare.release = uid, release
        assert (bare.run(SCRIPT).returncode, bare.asked) == (0, [])


class TestInstalled:
    def test_debian_12_gets_docker_and_newer_plugins(self, bare: Machine) -> None:
        assert on(bare, "bookworm").run(SCRIPT).returncode == 0
        assert bare.asked == [installs("docker.io"), *FROM_TRIXIE, "dockerd"]
        assert "Dir::Etc::sourcelist" in (bare.state / "apt.conf").read_text()
        assert list((bare.folder / "tmp").iterdir()) == []

    def test_debian_13_gets_docker_and_plugins(self, bare: Machine) -> None:
        assert on(bare, "trixie").run(SCRIPT).returncode == 0
        wanted = installs("docker.io", "docker-compose", "docker-buildx", "docker-cli")
        assert bare.asked == [wanted, "dockerd"]

    @pytest.mark.parametrize("suite", ["bookworm", "trixie"])
    def test_a_second_time_nothing(self, bare: Machine, suite: str) -> None:
        on(bare, suite).run(SCRIPT)
        assert (bare.run(SCRIPT).returncode, bare.asked) == (0, [])

    @pytest.mark.parametrize("compose", ["", "1.29.2", "2.3.3", "v2.19.1"])
    @pytest.mark.parametrize(
        ("suite", "wanted"), [("bookworm", FROM_TRIXIE), ("trixie", [installs("docker-compose")])]
    )
    def test_only_a_missing_compose_is_installed(
        self, bare: Machine, compose: str, suite: str, wanted: list[str]
    ) -> None:
        give(on(bare, suite), compose=compose)
        assert (bare.run(SCRIPT).returncode, bare.asked) == (0, wanted)

    @pytest.mark.parametrize(
        ("suite", "wanted"), [("bookworm", FROM_TRIXIE), ("trixie", [installs("docker-buildx")])]
    )
    def test_only_a_missing_buildx_is_installed(
        self, bare: Machine, suite: str, wanted: list[str]
    ) -> None:
        give(on(bare, suite), buildx=False)
        assert (bare.run(SCRIPT).returncode, bare.asked) == (0, wanted)

    def test_compose_of_another_user_does_not_count(self, bare: Machine) -> None:
        own_compose(give(on(bare, "trixie"), compose=""))
        ended = bare.run(SCRIPT, HOME=str(bare.folder / "root"))
        assert (ended.returncode, bare.asked) == (0, [installs("docker-compose")])


class TestRefused:
    @pytest.mark.parametrize("suite", ["bookworm", "trixie"])
    def test_a_user_without_root_gets_the_command(self, bare: Machine, suite: str) -> None:
        on(bare, suite).uid = 1000
        ended = bare.run(SCRIPT)
        assert (ended.returncode, bare.asked) == (3, [])
        assert "docker.io docker-compose docker-buildx" in ended.stderr
        assert f"try: sudo {SCRIPT}\n" in ended.stderr

    def test_a_user_without_compose(self, bare: Machine) -> None:
        give(bare, compose="").uid = 1000
        ended = bare.run(SCRIPT)
        assert (ended.returncode, bare.asked) == (3, [])
        assert "not installed: docker-compose (" in ended.stderr

    @pytest.mark.parametrize(
        "release",
        [
            "ID=ubuntu\nVERSION_CODENAME=noble\n",
            "ID=raspbian\nVERSION_CODENAME=bookworm\n",
            "ID=debian\nVERSION_CODENAME=sid\n",
            "",
        ],
    )
    def test_another_release_gets_a_link(self, bare: Machine, release: str) -> None:
        bare.release = release
        ended = bare.run(SCRIPT)
        assert (ended.returncode, bare.asked) == (3, [])
        assert "https://docs.docker.com/engine/install" in ended.stderr

    def test_a_missing_network_is_an_error(self, bare: Machine) -> None:
        (bare.state / "no-network").touch()
        ended = bare.run(SCRIPT)
        assert (ended.returncode, bare.asked) == (3, [])
        assert "error: apt-get update failed" in ended.stderr

    def test_an_old_compose_of_the_user_hides_the_new_one(self, bare: Machine) -> None:
        own_compose(give(on(bare, "trixie")), "2.3.3")
        ended = bare.run(SCRIPT)
        assert ended.returncode == 3
        assert "~/.docker/cli-plugins" in ended.stderr


class TestEngine:
    def test_a_stopped_engine_is_started(self, bare: Machine) -> None:
        (give(bare).state / "answers").unlink()
        assert (bare.run(SCRIPT).returncode, bare.asked) == (0, ["dockerd"])

    def test_does_not_start(self, bare: Machine) -> None:
        (give(bare).state / "answers").unlink()
        (bare.state / "dockerd-fails").touch()
        ended = bare.run(SCRIPT)
        assert ended.returncode == 3
        assert "failed to start daemon: no cgroups\nerror: dockerd ended" in ended.stderr

    def test_is_not_started_by_a_user(self, bare: Machine) -> None:
        (give(bare).state / "answers").unlink()
        (bare.bin / "dockerd").unlink()
        bare.uid = 1000
        ended = bare.run(SCRIPT)
        assert (ended.returncode, bare.asked) == (3, [])
        assert f"try: sudo {SCRIPT}\n" in ended.stderr

    def test_forbidden_to_the_user(self, bare: Machine) -> None:
        (give(bare).state / "forbidden").touch()
        bare.uid = 1000
        ended = bare.run(SCRIPT)
        assert (ended.returncode, bare.asked) == (3, [])
        assert "try: sudo usermod -aG docker someone, then log in again" in ended.stderr

    def test_a_remote_engine_that_does_not_answer_is_an_error(self, bare: Machine) -> None:
        ended = give(bare).run(SCRIPT, DOCKER_HOST="tcp://gone:2375")
        assert (ended.returncode, bare.asked) == (3, [])
        assert "try: unset DOCKER_HOST" in ended.stderr
