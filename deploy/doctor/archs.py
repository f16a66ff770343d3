"""Which GPUs compiled code runs on."""

from __future__ import annotations

import re

from deploy.planning.inventory import Gpu


def arch_name(gpu: Gpu) -> str:
    """Return what compilers call a GPU's architecture: gfx942, sm_90."""
    return gpu.arch if gpu.vendor == "rocm" else f"sm_{gpu.arch.replace('.', '')}"


def runs_on(gpu: Gpu, archs: tuple[str, ...]) -> bool:
    """Return whether code for these GPUs runs on this one.

    CUDA machine code runs on the same major capability and the same or a newer minor one; with a
    letter suffix only on exactly that one; `compute_…` is compiled for any newer GPU on load.
    """
    if gpu.vendor == "rocm":
        return gpu.arch in {one.partition(":")[0] for one in archs}
    major, _, minor = gpu.arch.partition(".")
    capability = (int(major), int(minor))
    for one in archs:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", one)
        if found is None:
            continue
        kind, letter, built = found[1], found[4], (int(found[2]), int(found[3]))
        if letter:
            fits = built == capability
        elif kind == "compute":
            fits = built <= capability
        else:
            fits = built[0] == capability[0] and built <= capability
        if fits:
            return True
    return False
