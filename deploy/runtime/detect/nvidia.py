"""NVIDIA GPUs, as `nvidia-smi` lists them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from deploy.planning.inventory import Gpu
from deploy.runtime.detect.found import Found, counted, hides_all, visible_positions, without_driver
from deploy.runtime.detect.tool import NOT_INSTALLED, ToolOutput, Tools, first_line

FIELDS = ("index", "uuid", "name", "memory.total", "compute_cap", "mig.mode.current")
# Drivers before 510 lack the capability, and before 450 the MIG mode.
_OPTIONAL = FIELDS[4:]
_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')
_NONE = "No devices were found"
# Shown for the memory of a GPU that shares the host's, such as GB10's.
_SHARED = ("[N/A]", "N/A", "[Not Supported]", "Not Supported")


@dataclass(frozen=True)
class NvidiaGpu:
    """A line of nvidia-smi.

    Attributes:
        gpu: with 0 MiB where the line has no number.
        memory: the text in the place of the memory.
        mig: whether it is cut into MIG instances.
    """

    gpu: Gpu
    memory: str
    mig: bool


def query(fields: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments that make nvidia-smi print these fields, a line for each GPU."""
    return (f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")


def parse_gpus(text: str, fields: Sequence[str] = FIELDS) -> tuple[NvidiaGpu, ...]:
    """Return the GPUs that nvidia-smi printed for these fields; lines of other kinds are skipped.

    It does not quote: a name, the third field, may hold commas.
    """
    found = (_parse_line(line, fields) for line in text.splitlines())
    return tuple(sorted((gpu for gpu in found if gpu), key=lambda one: one.gpu.index))


def cells(line: str, count: int) -> list[str]:
    """Return the cells of a line; the third may hold commas. [] for other lines."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) < count:
        return []
    spare = len(parts) - count
    return [*parts[:2], ", ".join(parts[2 : 3 + spare]), *parts[3 + spare :]]


def _parse_line(line: str, fields: Sequence[str]) -> NvidiaGpu | None:
    row = cells(line, len(fields))
    if not row or not row[0].isdigit():
        return None
    values = dict(zip(fields, row, strict=True))
    memory, arch = values["memory.total"], values.get("compute_cap", "")
    if not values["uuid"].startswith("GPU-"):
        return None
    gpu = Gpu(
        index=int(values["index"]),
        vendor="cuda",
        name=values["name"],
        memory_mib=int(memory) if memory.isdigit() else 0,
        uuid=values["uuid"],
        arch=arch if re.fullmatch(r"\d+\.\d+", arch) else "",
    )
    return NvidiaGpu(gpu, memory, values.get("mig.mode.current", "") == "Enabled")


def find_nvidia(tools: Tools, host_memory_mib: int) -> Found:
    """Return the NVIDIA GPUs that this machine offers to this user."""
    answer, fields = _ask(tools)
    # It may list the GPUs and then end with an error, such as a damaged infoROM on one of them.
    listed = parse_gpus(answer.stdout, fields)
    if not listed:
        why = _why_none(answer)
        there = without_driver("cuda", tools.root) if why == NOT_INSTALLED else ()
        unusable = bool(there) or why != NOT_INSTALLED
        return Found(seen=(f"nvidia-smi: {why}", *there), unusable=unusable)
    gpus, seen = usable(listed, host_memory_mib)
    found = Found(gpus, seen, unusable=not gpus)
    return restrict(found, listed, tools.environ.get("CUDA_VISIBLE_DEVICES"))


def _why_none(answer: ToolOutput) -> str:
    if _NONE in answer.stdout + answer.stderr:
        return "no devices were found"
    said = first_line(answer.stdout) or "nothing"
    return answer.problem or f"no GPU in its output: {said}"


def _ask(tools: Tools) -> tuple[ToolOutput, tuple[str, ...]]:
    """Return nvidia-smi's answer, and the fields it is about: older drivers know fewer."""
    fields: tuple[str, ...] = FIELDS
    answer = tools.ask("nvidia-smi", *query(fields))
    for _ in _OPTIONAL:
        unknown = _UNKNOWN_FIELD.search(answer.stdout + answer.stderr)
        if unknown is None or unknown[1] not in _OPTIONAL:
            break
        fields = tuple(field for field in fields if field != unknown[1])
        answer = tools.ask("nvidia-smi", *query(fields))
    return answer, fields


def usable(
    listed: Sequence[NvidiaGpu], host_memory_mib: int
) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs that an engine can use as a whole, and lines that say what was seen.

    GPUs without memory of their own are given equal parts of the host's. One that is cut into MIG
    instances is left out: an engine on it would get an instance, with a part of the memory.
    """
    shared = [one for one in listed if one.memory in _SHARED and not one.mig]
    gpus: list[Gpu] = []
    notes: list[str] = []
    for one in listed:
        at = one.gpu.index
        if one.mig:
            notes.append(
                f"GPU {at} is left out: MIG is enabled (sudo nvidia-smi -i {at} -mig 0 ends it)"
            )
        elif one in shared:
            gpus.append(replace(one.gpu, memory_mib=host_memory_mib // len(shared)))
            notes.append(f"GPU {at} has no memory of its own and shares the host's")
        elif one.gpu.memory_mib:
            gpus.append(one.gpu)
        else:
            notes.append(f"GPU {at} is left out: its memory reads '{one.memory}'")
    none = "no GPU that is available as a whole"
    if any(one.mig for one in listed):
        none += "; engines do not run on MIG instances"
    kinds = counted((gpu.name, gpu.memory_mib) for gpu in gpus) or none
    return tuple(gpus), tuple(f"nvidia-smi: {line}" for line in (kinds, *notes))


def restrict(found: Found, listed: Sequence[NvidiaGpu], setting: str | None) -> Found:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves visible; schedulers set it."""
    if setting is None:
        return found
    places = visible_positions(setting, [one.gpu.uuid for one in listed])
    indices = {listed[place].gpu.index for place in places}
    gpus = tuple(gpu for gpu in found.gpus if gpu.index in indices)
    kept = f"{len(gpus)} of {len(found.gpus)} NVIDIA GPUs"
    note = f"CUDA_VISIBLE_DEVICES={setting}: leaves {kept}"
    if "MIG-" in setting:
        note += "; MIG instances are not used"
    unusable = not gpus and not hides_all(setting)
    return replace(found, gpus=gpus, seen=(*found.seen, note), unusable=unusable)
