"""How GPUs were used, as a stand-in for nvidia-smi or the kernel's files tell it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from deploy.planning.inventory import Gpu
from deploy.runtime.detect.tool import Tools
from deploy.runtime.gpu_meter import GpuMeter
from deploy.runtime.process.sessions import has_ended

CUDA = [Gpu(index, "cuda", "a GPU", 1 << 16) for index in (0, 3)]
Eventually = Callable[[Callable[[], object]], None]
Install = Callable[..., GpuMeter]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Return what makes a meter whose nvidia-smi prints lines, and then ends or stays."""

    def made(*lines: str, code: int | None = None, gpus: list[Gpu] = CUDA) -> GpuMeter:
        script = tmp_path / "nvidia-smi"
        script.write_text(
            f"#!{sys.executable} -S\n"
            "import signal, sys\n"
            f"open({str(tmp_path / 'words')!r}, 'w').write(' '.join(sys.argv[1:]))\n"
            f"print(*{lines!r}, sep='\\n', flush=True)\n"
            f"signal.pause() if {code} is None else sys.exit({code})\n"
        )
        script.chmod(0o755)
        return GpuMeter(gpus, Tools({"PATH": str(tmp_path)}))

    return made


def test_mean_and_peak_of_the_stacks_own_gpus(
    install: Install, tmp_path: Path, eventually: Eventually
) -> None:
    meter = install("0, 20, 1000", "1, 90, 99", "3, 0, 512", "0, 40, 800", "3, 100, 256")
    with meter:
        eventually(lambda: len(meter.measured) == 2 and len(meter.measured[3].busy) == 2)
        process = psutil.Process(running(meter))
    assert has_ended(process)
    found = {at: (one.utilization, one.peak_bytes) for at, one in meter.measured.items()}
    assert found == {0: (0.3, 1000 << 20), 3: (0.5, 512 << 20)}
    assert meter.trouble == ""
    words = "--query-gpu=index,utilization.gpu,memory.used --format=csv,noheader,nounits -lms 500"
    assert (tmp_path / "words").read_text() == words


def running(meter: GpuMeter) -> int:
    assert meter._process is not None
    return meter._process.pid


def test_a_tool_that_ends_leaves_what_it_said_until_then(
    install: Install, eventually: Eventually
) -> None:
    meter = install("0, 20, 1000", "3, 60, 1", "Unable to determine the device handle", code=15)
    with meter:
        assert meter._process is not None
        eventually(lambda: meter._process and meter._process.poll() is not None)
    assert meter.measured[0].utilization == 0.2
    assert meter.trouble == "nvidia-smi ended with 15: Unable to determine the device handle"


@pytest.mark.parametrize(
    "line",
    ["", "nonsense", "0, 1", "x, 1, 2", "-1, 1, 2", "9" * 5000, "\x00\ufffd", "0 20 1000"],
)
def test_nonsense_is_not_a_number(install: Install, line: str, eventually: Eventually) -> None:
    meter = install(line, "3, 7, 5")
    with meter:
        eventually(lambda: meter.measured)
    assert list(meter.measured) == [3]
    assert meter.trouble.startswith("nvidia-smi has no numbers of GPU 0")
    assert len(meter.trouble) < 300


def test_values_that_a_driver_lacks_are_unknown(install: Install, eventually: Eventually) -> None:
    """[N/A] stands for the memory of a GPU that shares the host's."""
    meter = install("3, [GPU is lost], [GPU is lost]", "0, 101, 7" + "0" * 20, "0, 55, [N/A]")
    with meter:
        eventually(lambda: meter.measured)
    assert (meter.measured[0].utilization, meter.measured[0].peak_bytes) == (0.55, None)
    assert meter.trouble == "nvidia-smi has no numbers of GPU 3"


def test_a_missing_nvidia_smi_is_reported(tmp_path: Path) -> None:
    with GpuMeter(CUDA, Tools({"PATH": str(tmp_path)}, root=tmp_path)) as meter:
        pass
    assert (meter.measured, meter.trouble) == ({}, "nvidia-smi is not installed")


def test_a_tool_that_does_not_start(tmp_path: Path) -> None:
    broken = tmp_path / "nvidia-smi"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    with GpuMeter(CUDA, Tools({"PATH": str(tmp_path)})) as meter:
        pass
    assert meter.trouble == "nvidia-smi does not start (No such file or directory)"


def test_no_tool_runs_without_gpus(install: Install, tmp_path: Path) -> None:
    meter = install("0, 1, 2", gpus=[])
    with meter:
        pass
    assert (meter.measured, meter.trouble) == ({}, "")
    assert not (tmp_path / "words").exists()


class TestAmd:
    @pytest.fixture
    def cards(self, tmp_path: Path) -> Path:
        return tmp_path / "sys/class/drm"

    def meter(self, root: Path, *nodes: str) -> GpuMeter:
        gpus = [Gpu(at, "rocm", "a GPU", 1, render_node=node) for at, node in enumerate(nodes)]
        return GpuMeter(gpus, root=root)

    def say(self, cards: Path, node: str, **files: object) -> None:
        (cards / node / "device").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (cards / node / "device" / name).write_text(f"{text}\n")

    def test_the_kernels_files_are_read(
        self, cards: Path, tmp_path: Path, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("deploy.runtime.gpu_meter._EVERY_S", 0.01)
        self.say(cards, "renderD128", gpu_busy_percent=80, mem_info_vram_used=5 << 30)
        self.say(cards, "renderD129", mem_info_vram_used=1)
        with self.meter(tmp_path, "/dev/dri/renderD128", "/dev/dri/renderD129") as meter:
            eventually(lambda: meter.measured and meter.measured[0].busy)
            self.say(cards, "renderD128", mem_info_vram_used=1 << 30)
            now = len(meter.measured[0].busy)
            eventually(lambda: len(meter.measured[0].busy) > now + 1)
        first, second = meter.measured.values()
        assert (first.utilization, first.peak_bytes) == (0.8, 5 << 30)
        assert (second.utilization, second.peak_bytes) == (None, 1)
        assert meter.trouble == ""

    def test_a_card_without_files(self, tmp_path: Path) -> None:
        with self.meter(tmp_path, "/dev/dri/renderD128", "") as meter:
            pass
        assert meter.measured == {}
        assert meter.trouble == "/sys/class/drm has no numbers of GPU 0, 1"
