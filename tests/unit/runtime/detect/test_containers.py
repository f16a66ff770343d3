"""How Docker gives GPUs to containers, from the daemon's own words and spec files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.runtime.detect.containers import container_gpus, parse_spec, read_cdi_kinds
from tests.unit.runtime.detect.conftest import Machine, recorded


def info(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(recorded(f"docker/{name}.json"))
    return read


class TestDaemon:
    @pytest.mark.parametrize(
        ("name", "ways"),
        [
            ("runtime", ("nvidia",)),
            ("cdi", ("nvidia.com/gpu",)),
            ("cdi_unlisted", ("nvidia", "amd.com/gpu", "nvidia.com/gpu")),
            ("plain", ()),
        ],
    )
    def test_ways_to_pass_gpus_are_read_from_docker_info(
        self, name: str, ways: tuple[str, ...]
    ) -> None:
        kinds = ["nvidia.com/gpu", "amd.com/gpu", "vendor.com/nic"]
        assert container_gpus(info(name), kinds) == ways

    def test_docker_was_not_asked(self) -> None:
        assert container_gpus(None, ["nvidia.com/gpu"]) == ()

    @pytest.mark.parametrize(
        "odd",
        [
            {},
            {"Runtimes": None, "DiscoveredDevices": None, "CDISpecDirs": None},
            {
                "Runtimes": "nvidia",
                "DiscoveredDevices": ["nvidia.com/gpu=0", {}, {"Source": "cdi"}],
            },
            {"DiscoveredDevices": [{"Source": "other", "ID": "nvidia.com/gpu=0"}]},
        ],
    )
    def test_odd_answers_offer_nothing(self, odd: dict[str, Any]) -> None:
        assert container_gpus(odd, []) == ()


class TestSpecFiles:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("nvidia.yaml", "nvidia.com/gpu"),
            ("amd.json", "amd.com/gpu"),
            ("no_devices.json", ""),
            ("broken.yaml", ""),
            ("broken.json", ""),
        ],
    )
    def test_the_kind_of_a_cdi_file_is_read(self, name: str, kind: str) -> None:
        assert parse_spec(recorded(f"cdi/{name}")) == kind

    @pytest.mark.parametrize("text", ["", "null", "[]", "- a", "kind: x", "!!python/name:os.x ''"])
    def test_other_text_has_no_kind(self, text: str) -> None:
        assert parse_spec(text) == ""

    def test_all_cdi_folders_are_read(self, machine: Machine) -> None:
        for name, folder in (("nvidia.yaml", "etc/cdi"), ("amd.json", "var/run/cdi")):
            (machine.root / folder).mkdir(parents=True)
            (machine.root / folder / name).write_text(recorded(f"cdi/{name}"))
        (machine.root / "etc/cdi/broken.yaml").write_bytes(b"kind: \xff\xfe")
        (machine.root / "etc/cdi/folder.json").mkdir()
        (machine.root / "etc/cdi/notes.txt").write_text(recorded("cdi/amd.json"))
        assert read_cdi_kinds({}, machine.root) == ("amd.com/gpu", "nvidia.com/gpu")
        only = {"CDISpecDirs": ["/etc/cdi"]}
        assert read_cdi_kinds(only, machine.root) == ("nvidia.com/gpu",)

    def test_missing_cdi_folders_have_no_kinds(self, machine: Machine) -> None:
        assert read_cdi_kinds(None, machine.root) == ()
