"""What `scripts/test` installs, and that nothing of it is started as a service."""

from __future__ import annotations

import pytest

from tests.unit.scripts.conftest import ROOT, Machine

SCRIPT = ROOT / "scripts" / "test"
# It fails, so that the script ends there.
_APT = """
case $* in *install*)
    bash "$PDKIT_POLICY_RC_D" >>"$STUB_STATE/asked"
    echo "policy $?" >>"$STUB_STATE/asked"
    exit 1
    ;;
esac
"""


@pytest.fixture
def bare(machine: Machine) -> Machine:
    """A machine with nothing, as a container of Debian's is."""
    (machine.state / "apt-get").write_text(_APT)
    machine.environ["PDKIT_POLICY_RC_D"] = str(machine.folder / "policy-rc.d")
    return machine


def test_no_service_is_started(bare: Machine) -> None:
    ended = bare.run(SCRIPT, "lint")
    assert ended.returncode == 3, ended.stderr
    assert "could not be installed: curl redis-server prometheus" in ended.stderr
    installed, policy = bare.asked
    assert "--no-install-recommends curl redis-server prometheus" in installed
    assert policy == "policy 101", "Debian's word for no"
    assert not (bare.folder / "policy-rc.d").exists(), "later installations are the user's"


def test_a_policy_of_the_machine_stays(bare: Machine) -> None:
    own = bare.folder / "policy-rc.d"
    own.write_text("echo own; exit 7")
    assert bare.run(SCRIPT, "lint").returncode == 3
    assert bare.asked[1:] == ["own", "policy 7"]
    assert own.read_text() == "echo own; exit 7"


@pytest.mark.parametrize(
    ("parts", "plays"),
    [((), False), (("full",), True), (("lint", "e2e-kubernetes"), True), (("e2e-docker",), False)],
)
def test_a_full_run_plays_an_export_with_podman(
    bare: Machine, parts: tuple[str, ...], plays: bool
) -> None:
    assert bare.run(SCRIPT, *parts).returncode == 3
    assert ("podman catatonit netavark aardvark-dns" in bare.asked[0]) == plays


def test_the_redis_of_an_activated_environment_is_not_the_system_s(bare: Machine) -> None:
    """The wheel's is older than what the tests ask of a Redis."""
    own = bare.folder / "activated"
    (own / "bin").mkdir(parents=True)
    (own / "bin" / "redis-server").write_text("#!/bin/sh\n")
    (own / "bin" / "redis-server").chmod(0o755)
    bare.environ |= {"VIRTUAL_ENV": str(own), "PATH": f"{own}/bin:{bare.bin}"}
    assert bare.run(SCRIPT, "lint").returncode == 3
    assert "curl redis-server prometheus" in bare.asked[0]
