"""`--inventory FILE`: what it may say, and what is said of what it may not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from deploy.errors import ConfigError
from deploy.planning.inventory import Gpu, Inventory
from deploy.runtime.detect.inventory_file import read_inventory
from tests.unit.runtime.detect.conftest import Machine, recorded

HOST = "cpus: 64\nmemory_mib: 262144\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "machine.yaml"


def read(file: Path, text: str) -> Inventory:
    file.write_text(text)
    return read_inventory(file)


class TestForms:
    def test_a_machine_without_gpus_is_read(self, file: Path) -> None:
        assert read(file, HOST) == Inventory(cpus=64, memory_mib=262144)
        assert read(file, HOST + "gpus:\nseen: null\n") == Inventory(cpus=64, memory_mib=262144)

    def test_equal_gpus_are_read_from_a_count(self, file: Path) -> None:
        found = read(
            file, HOST + "gpus: {vendor: rocm, count: 8, memory_mib: 196608, name: MI300X}"
        )
        assert len(found.gpus) == 8
        assert found.gpus[7] == Gpu(7, "rocm", "MI300X", 196608, render_node="/dev/dri/renderD135")
        assert found.gpu_groups == (44, 109)

    def test_equal_cuda_gpus_have_no_render_nodes_and_no_groups(self, file: Path) -> None:
        found = read(file, HOST + "gpus: {vendor: cuda, count: 2, memory_mib: 81559, arch: 9.0}")
        assert found.gpus[1] == Gpu(1, "cuda", "", 81559, arch="9.0")
        assert found.gpu_groups == ()

    def test_a_list_of_gpus_is_read(self, file: Path) -> None:
        found = read(
            file,
            HOST
            + "gpus:\n- {vendor: rocm, memory_mib: 65520, name: MI210, render_node: /dev/dri/x}\n"
            + "- {vendor: rocm, memory_mib: 65520}\n- {vendor: cuda, memory_mib: 1, index: 0}\n"
            + "gpu_groups: [993]\n",
        )
        assert [gpu.render_node for gpu in found.gpus] == ["/dev/dri/x", "/dev/dri/renderD129", ""]
        assert [gpu.index for gpu in found.gpus] == [0, 1, 0]
        assert found.gpu_groups == (993,)

    def test_numbers_where_texts_are_meant(self, file: Path) -> None:
        found = read(
            file, HOST + "gpus: [{vendor: cuda, memory_mib: 24564, name: 4090, arch: 8.9}]"
        )
        assert (found.gpus[0].name, found.gpus[0].arch) == ("4090", "8.9")


class TestRecords:
    @pytest.mark.parametrize("write", [yaml.safe_dump, json.dumps])
    @pytest.mark.parametrize("vendor", ["cuda", "rocm", "both", "none"])
    def test_a_detected_inventory_is_read_back(
        self, machine: Machine, file: Path, write: object, vendor: str
    ) -> None:
        if vendor in ("cuda", "both"):
            machine.prints("nvidia-smi", recorded("nvidia/a100x4_mig.csv"))
        if vendor in ("rocm", "both"):
            machine.kernel_lists(*[("mi300x", 196592)] * 2)
            machine.prints("amd-smi", recorded("amd/mi300x_x8.amd-smi.json"))
        found = machine.detect(json.loads(recorded("docker/cdi.json")))
        # As the state file holds it: tuples are lists there.
        plain = json.loads(json.dumps(asdict(found)))
        assert callable(write)
        assert read(file, write(plain)) == found

    def test_a_rocm_inventory_without_groups_or_render_nodes_is_read(self, file: Path) -> None:
        bare = Inventory(1, 1, gpus=(Gpu(0, "rocm", "", 1),))
        assert read(file, json.dumps(asdict(bare))) == bare


class TestRefusals:
    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("memory_mib: 1", "cpus: is missing: expected a number such as 64"),
            ("cpus: 64", "memory_mib: is missing"),
            ("cpus: 0\nmemory_mib: 1", "cpus: 0 is not valid: expected a whole number of at least"),
            ("cpus: true\nmemory_mib: 1", "cpus: True is not valid"),
            ("cpus: 1.5\nmemory_mib: 1", "cpus: 1.5 is not valid"),
            (
                "cpus: 1\nmemory_mib: 64 GiB",
                "memory_mib: '64 GiB' is not valid: expected a whole number of MiB, without a",
            ),
            ("cpus: 1\nmemory_mib: '1024'", "memory_mib: '1024' is not valid"),
            ("cpus: 1\nmemory_mib: -5", "memory_mib: -5 is not valid"),
            (HOST + "gpu: []", "unknown key 'gpu'; did you mean 'gpus'?"),
            (HOST + "zzz: 1", "unknown key 'zzz'; known keys: cpus, memory_mib, gpus"),
            (HOST + "1: 1", "unknown key '1'; known keys"),
            (HOST + "gpus: 8", "gpus: 8 is not valid: expected a list, such as [{vendor: cuda"),
            (HOST + "gpus: eight", "gpus: 'eight' is not valid"),
            (HOST + "gpus: [8]", "gpus[0]: 8 is not a GPU"),
            (HOST + "gpus: [{memory_mib: 1}]", "gpus[0].vendor: is missing: expected cuda or rocm"),
            (HOST + "gpus: [{vendor: amd, memory_mib: 1}]", "gpus[0].vendor: 'amd' is not valid"),
            (HOST + "gpus: [{vendor: [], memory_mib: 1}]", "gpus[0].vendor: [] is not valid"),
            (HOST + "gpus: [{vendor: cuda}]", "gpus[0].memory_mib: is missing"),
            (HOST + "gpus: [{vendor: cuda, memory_mib: 80 GB}]", "gpus[0].memory_mib: '80 GB' is"),
            (HOST + "gpus: [{vendor: cuda, memory_mib: 1, index: -1}]", "gpus[0].index: -1 is not"),
            (HOST + "gpus: [{vendor: cuda, memory_mib: 1, memory: 2}]", "unknown key 'gpus[0].mem"),
            (HOST + "gpus: [{vendor: cuda, memory_mib: 1, name: [a]}]", "gpus[0].name: ['a'] is"),
            (
                HOST
                + "gpus: [{vendor: cuda, memory_mib: 1}, {vendor: cuda, memory_mib: 1, index: 0}]",
                "gpus[1].index: another cuda GPU has index 0, too",
            ),
            (HOST + "gpus: {vendor: cuda, memory_mib: 1}", "gpus.count: is missing"),
            (HOST + "gpus: {vendor: cuda, memory_mib: 1, count: 0}", "gpus.count: 0 is not valid"),
            (
                HOST + "gpus: {vendor: cuda, memory_mib: 1, count: 99999}",
                "gpus.count: 99999 is more",
            ),
            (HOST + "gpus: {vendor: tpu, memory_mib: 1, count: 1}", "gpus.vendor: 'tpu' is not"),
            (
                HOST + "gpus: {vendor: cuda, memory_mb: 1, count: 1}",
                "unknown key 'gpus.memory_mb'; did you mean 'memory_mib'?",
            ),
            (HOST + "gpu_groups: 44", "gpu_groups: 44 is not valid: expected a list"),
            (HOST + "gpu_groups: [render]", "gpu_groups[0]: 'render' is not valid"),
            (HOST + "container_gpus: nvidia", "container_gpus: 'nvidia' is not valid: expected a"),
            (HOST + "seen: [[1]]", "seen[0]: [1] is not valid: expected a string"),
            ("", "does not describe a machine"),
            ("- cpus: 1", "does not describe a machine"),
            ("cpus: [", "not valid YAML, line 1"),
            ("cpus: !!python/name:os.system ''", "not valid YAML"),
        ],
    )
    def test_file_field_value_and_what_is_right(self, file: Path, text: str, says: str) -> None:
        with pytest.raises(ConfigError) as caught:
            read(file, text)
        assert caught.value.message.startswith(f"--inventory {file}: ")
        assert says in caught.value.message
        assert caught.value.hint
        assert caught.value.exit_code == 2

    def test_a_missing_file_is_refused(self, file: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            read_inventory(file)

    def test_a_file_that_is_not_text_is_refused(self, file: Path) -> None:
        file.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="not valid YAML"):
            read_inventory(file)
