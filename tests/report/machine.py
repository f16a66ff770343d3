"""The machine that a run was on, in one line."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from deploy.runtime.host import available_memory_mib, machine_memory_mib
from deploy.runtime.observe.host import see_host

_LEVELS = {"AVX2": "avx2", "AVX-512": "avx512f", "AMX": "amx_tile"}


def machine(root: Path = Path("/")) -> str:
    """Return processor, instruction sets, cores, memory, load and versions."""
    seen = see_host(root)
    model = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    levels = [level for level, flag in _LEVELS.items() if flag in seen.cpu_flags]
    free, memory = available_memory_mib() / 1024, machine_memory_mib() / 1024
    load = _text(root / "proc/loadavg").split()[:3]
    facts = (
        model[1].strip() if model else platform.machine(),
        " ".join(levels) or "no AVX2",
        f"{seen.cpus} of {os.cpu_count()} cores",
        f"{memory:.1f} GiB, {free:.1f} free",
        f"load {' '.join(load)}",
        f"Linux {platform.release()}",
        f"Debian {_text(root / 'etc/debian_version').strip() or 'no'}",
        f"Python {platform.python_version()}",
    )
    return ", ".join(facts)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
