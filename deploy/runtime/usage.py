"""CPU time and memory of services during a `with` block."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import psutil

_EVERY_S = 0.5


class UsageMeter:
    """Measures services, given by name and main process.

    Attributes:
        cpu_s: user and system seconds of each, its descendants included.
        peak_rss_bytes: the most that each held resident, shared pages counted in each process.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._trees = {name: _tree(pid) for name, pid in pids.items()}
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self.cpu_s: dict[str, float] = {}
        self.peak_rss_bytes: dict[str, int] = {}

    def __enter__(self) -> UsageMeter:
        self._before = {name: _cpu_s(tree) for name, tree in self._trees.items()}
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._sampler.join()
        for name, tree in self._trees.items():
            self.cpu_s[name] = round(max(0.0, _cpu_s(tree) - self._before[name]), 3)

    def _sample(self) -> None:
        while True:
            for name, tree in self._trees.items():
                held = self.peak_rss_bytes.get(name, 0)
                self.peak_rss_bytes[name] = max(held, resident_bytes(tree))
            if self._ended.wait(_EVERY_S):
                return


def _tree(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants; nothing if it is gone, or another machine's."""
    with suppress(psutil.Error, ValueError):
        if pid:
            process = psutil.Process(pid)
            return [process, *process.children(recursive=True)]
    return []


def _cpu_s(tree: Sequence[psutil.Process]) -> float:
    total = 0.0
    for process in tree:
        with suppress(psutil.Error):
            used = process.cpu_times()
            total += used.user + used.system
    return total


def resident_bytes(processes: Iterable[psutil.Process]) -> int:
    """Return the resident memory of processes, shared pages counted in each."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total
