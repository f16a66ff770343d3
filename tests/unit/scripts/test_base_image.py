"""`scripts/base-image`: a base is made of what Debian has signed, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.scripts.conftest import ROOT, Machine

SCRIPT = ROOT / "scripts" / "base-image"
_DOCKER = """
case $1 in
image) exit 1 ;;
import) cat >/dev/null; echo "docker $*" >>"$STUB_STATE/asked" ;;
esac
"""
_DEBOOTSTRAP = """
echo "debootstrap $*" >>"$STUB_STATE/asked"
if [ -e "$STUB_STATE/forged" ]; then echo "E: Invalid Release signature"; exit 1; fi
"""
_APT = """
case $* in *install*)
    cp "$STUB_STATE/debootstrap" "$STUB_BIN/debootstrap"
    ln -sf "$STUB_BIN/tar" "$STUB_BIN/gpgv"
    touch "$STUB_KEYRING"
    ;;
esac
"""


@pytest.fixture
def keyring(tmp_path: Path) -> Path:
    return tmp_path / "keyring.gpg"


@pytest.fixture
def debian(machine: Machine, keyring: Path) -> Machine:
    """A machine with Docker and a mirror, and nothing to make a system with."""
    machine.command("docker", _DOCKER)
    machine.command("tar", "")
    machine.command("debootstrap", _DEBOOTSTRAP)
    (machine.bin / "debootstrap").rename(machine.state / "debootstrap")
    (machine.state / "apt-get").write_text(_APT)
    machine.environ |= {
        "STUB_BIN": str(machine.bin),
        "STUB_KEYRING": str(keyring),
        "PDKIT_DEBIAN_KEYRING": str(keyring),
        "PDKIT_DEBIAN_MIRROR": "http://mirror/debian",
    }
    return machine


def test_signatures_are_required(debian: Machine, keyring: Path) -> None:
    ended = debian.run(SCRIPT)
    assert ended.returncode == 0, ended.stderr
    packages, made, imported = debian.asked
    assert packages.endswith("--no-install-recommends debootstrap gpgv debian-archive-keyring")
    assert made.startswith(f"debootstrap --force-check-gpg --keyring={keyring} ")
    assert made.endswith(" http://mirror/debian")
    assert imported.endswith(" - pdkit/base:bookworm")


def test_keys_that_are_missing_are_installed(debian: Machine, keyring: Path) -> None:
    debian.run(SCRIPT)
    keyring.unlink()
    debian.run(SCRIPT)
    assert "debian-archive-keyring" in debian.asked[0]
    debian.run(SCRIPT)
    assert debian.asked[0].startswith("debootstrap "), "all is there"


def test_nothing_is_imported_that_debian_did_not_sign(debian: Machine) -> None:
    (debian.state / "forged").touch()
    ended = debian.run(SCRIPT)
    assert ended.returncode == 3
    assert "Invalid Release signature" in ended.stderr
    assert not any(line.startswith("docker ") for line in debian.asked)
