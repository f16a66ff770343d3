"""How busy GPUs are, and how much of their memory is in use, during a `with` block.

nvidia-smi reports on NVIDIA's, one process for the whole block, since each start of it wakes the
driver. For AMD's, the kernel has files.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

from deploy.planning.inventory import Gpu
from deploy.runtime.detect.nvidia import query
from deploy.runtime.detect.tool import NOT_INSTALLED, Tools, first_line, kill, not_started
from deploy.runtime.host import text_of

_TOOL = "nvidia-smi"
_FIELDS = ("index", "utilization.gpu", "memory.used")
_CARDS = Path("sys/class/drm")
_EVERY_S = 0.5
_END_S = 1.0
_LINE_BYTES = 4096
_NUMBER = re.compile(r"\d{1,15}", re.ASCII)


@dataclass
class MeteredGpu:
    """What was seen of a GPU.

    Attributes:
        busy: percent of the time in which it computed, once per sample.
        peak_bytes: the most memory in use at once, by all processes; None if unknown.
    """

    busy: list[int] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def utilization(self) -> float | None:
        """The mean share of the time in which it computed; None if unknown."""
        return fmean(self.busy) / 100 if self.busy else None

    @property
    def is_known(self) -> bool:
        """Whether anything was said of it."""
        return bool(self.busy) or self.peak_bytes is not None


class GpuMeter:
    """Measures GPUs of one vendor; nothing if there are none."""

    def __init__(
        self, gpus: Iterable[Gpu], tools: Tools | None = None, root: Path = Path("/")
    ) -> None:
        self._gpus = tuple(gpus)
        self._tools = tools or Tools(os.environ)
        self._root = root
        self._all = {gpu.index: MeteredGpu() for gpu in self._gpus}
        self._ended = threading.Event()
        self._reader: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._problem = self._said = ""

    @property
    def measured(self) -> dict[int, MeteredGpu]:
        """The GPUs by their indices; those of which nothing is known are left out."""
        return {index: one for index, one in self._all.items() if one.is_known}

    @property
    def trouble(self) -> str:
        """Why something is unknown; "" if nothing is."""
        unknown = [str(index) for index, one in self._all.items() if not one.is_known]
        if not self._problem and not unknown:
            return ""
        source = _TOOL if self._gpus[0].vendor == "cuda" else f"/{_CARDS}"
        why = self._problem or f"has no numbers of GPU {', '.join(unknown)}"
        return f"{source} {why}{f': {self._said}' if self._said else ''}"

    def __enter__(self) -> GpuMeter:
        if self._gpus and self._gpus[0].vendor == "rocm":
            self._read_by(self._read_files)
        elif self._gpus:
            self._start_tool()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._process and (code := self._process.poll()) is not None:
            self._problem = f"ended with {code}"
        elif self._process:
            kill(self._process)
        if self._reader:
            self._reader.join(_END_S)

    def _read_by(self, read: Callable[[], None]) -> None:
        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()

    def _start_tool(self) -> None:
        path = self._tools.find(_TOOL)
        if path is None:
            self._problem = f"is {NOT_INSTALLED}"
            return
        words = (*query(_FIELDS), "-lms", f"{1e3 * _EVERY_S:.0f}")
        try:
            self._process = self._tools.start(path, *words, stderr=subprocess.STDOUT)
        except OSError as exc:
            self._problem = not_started(exc)
            return
        self._read_by(partial(self._read_lines, self._process))

    def _read_lines(self, process: subprocess.Popen[str]) -> None:
        if process.stdout is None:
            return
        with process.stdout as lines:
            for line in iter(lambda: lines.readline(_LINE_BYTES), ""):
                cells = [cell.strip() for cell in line.split(",")]
                gpu = _number(cells[0])
                if len(cells) != len(_FIELDS) or gpu is None:
                    self._said = first_line(line) or self._said
                elif gpu in self._all:
                    self._note(gpu, _number(cells[1]), _number(cells[2]), unit_bytes=1 << 20)

    def _read_files(self) -> None:
        cards = {
            gpu.index: self._root / _CARDS / Path(gpu.render_node).name / "device"
            for gpu in self._gpus
        }
        while True:
            for index, card in cards.items():
                busy, used = (
                    _number(text_of(card / name).strip())
                    for name in ("gpu_busy_percent", "mem_info_vram_used")
                )
                self._note(index, busy, used, unit_bytes=1)
            if self._ended.wait(_EVERY_S):
                return

    def _note(self, index: int, busy: int | None, used: int | None, *, unit_bytes: int) -> None:
        one = self._all[index]
        if busy is not None and busy <= 100:
            one.busy.append(busy)
        if used is not None:
            one.peak_bytes = max(one.peak_bytes or 0, used * unit_bytes)


def _number(text: str) -> int | None:
    """Return a cell's number; None for what stands in its place, such as [N/A]."""
    return int(text) if _NUMBER.fullmatch(text) else None
