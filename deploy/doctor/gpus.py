"""Rules on GPUs: their number, driver, architecture, access from containers, and free memory."""

from __future__ import annotations

import re
from collections import Counter

from deploy.doctor.docker import engine_image
from deploy.doctor.finding import Rule, Verdict, fail, ok, tried, unknown, warn
from deploy.doctor.observed import EngineCode, Seen
from deploy.planning.inventory import Gpu
from deploy.planning.plan import Plan
from deploy.stack.containers import uses_cdi

_TOOLKIT = (
    "install the NVIDIA Container Toolkit, then: sudo nvidia-ctk runtime configure "
    "--runtime=docker && sudo systemctl restart docker; or --runtime process"
)
_FIRST_DRIVER = {11: "450", 12: "525", 13: "580"}
# By this variable vLLM loads the newer CUDA libraries of its image; NVIDIA supports that on data
# centre GPUs only. With a driver that is new enough it must stay off.
COMPATIBILITY = "VLLM_ENABLE_CUDA_COMPATIBILITY"
_DATA_CENTRE = re.compile(r"\b(?:Tesla|(?:GB|GH|[ABHLV])\d{1,3}S?|T4)\b")
# NVIDIA's container runtime says so where it refuses an image.
_REFUSED = re.compile(r"unsatisfied condition: cuda>=(\d+\.\d+)")
_BY_COMPATIBILITY = f'engine: {{env: {{{COMPATIBILITY}: "1"}}}} in deploy.yaml'


def planned(seen: Seen) -> tuple[Gpu, ...]:
    """Return the GPUs of the plan that were really seen, each once."""
    if seen.plan is None:
        return ()
    there = {(gpu.vendor, gpu.index): gpu for gpu in seen.inventory.gpus if gpu.name != "assumed"}
    ours = {(gpu.vendor, gpu.index) for engine in seen.plan.engines for gpu in engine.gpus}
    return tuple(gpu for key, gpu in there.items() if key in ours)


def _driver(seen: Seen) -> Verdict | None:
    if seen.gpus is None or not planned(seen):
        return None
    if planned(seen)[0].vendor == "rocm":
        return ok(f"amdgpu driver {seen.gpus.driver or '(unknown version)'}")
    image = engine_image(seen)
    needed = _cuda_of(seen.code) or (image.cuda if image else "")
    have, said = seen.gpus.cuda, f"NVIDIA driver {seen.gpus.driver or '(unknown version)'}"
    if not have:
        return unknown(f"{said}: its CUDA version is unknown ({seen.gpus.trouble})")
    if not needed:
        return ok(f"{said} runs CUDA {have}; the CUDA version of the engines is unknown")
    if _major(have) < _major(needed):
        return _older_driver(seen, f"{said} runs CUDA up to {have}", needed)
    return ok(f"{said} runs CUDA {have}; the engines are built for {needed}")


def _cuda_of(code: EngineCode | None) -> str:
    """Return the CUDA that engines are built for; "" if unknown."""
    if code is None:
        return ""
    refused = _REFUSED.search(code.trouble)
    return code.cuda or (refused[1] if refused else "")


def _older_driver(seen: Seen, said: str, needed: str) -> Verdict:
    """Return the verdict on engines that are built for a newer CUDA than the driver's."""
    said = f"{said}, but the engines are built for CUDA {needed}"
    by_libraries = all(_DATA_CENTRE.search(gpu.name) for gpu in planned(seen))
    if by_libraries and seen.spec.engine.env.get(COMPATIBILITY) == "1":
        return warn(
            f"{said}; {COMPATIBILITY} is set",
            "engines run only if their image has NVIDIA's compatibility libraries for this driver",
            "if they find no GPU, install a newer driver",
        )
    least = _FIRST_DRIVER.get(_major(needed))
    newer = (
        f"install driver {least} or newer"
        if least
        else "install a newer driver, or an image for the older CUDA: --image REF"
    )
    return fail(
        said,
        "torch finds no GPU, and every engine exits at start",
        f"{newer}; on this data centre GPU, or {_BY_COMPATIBILITY}" if by_libraries else newer,
    )


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def _arch(seen: Seen) -> Verdict | None:
    gpus = [gpu for gpu in planned(seen) if gpu.arch]
    if not gpus or seen.code is None:
        return None
    archs = seen.code.archs
    if not archs:
        why = seen.code.trouble or "its torch does not list them"
        return unknown(f"the GPUs that {seen.code.where} is built for are unknown: {why}")
    for gpu in gpus:
        if not runs_on(gpu, archs):
            return fail(
                f"GPU {gpu.index} ({gpu.name}) is {arch_name(gpu)}, but torch is built for "
                + ", ".join(archs),
                "no kernel runs on it, and engines exit at their first step",
                "use an image for this GPU: --image REF; deploy images list",
            )
    return ok(f"built for {', '.join(sorted({arch_name(gpu) for gpu in gpus}))}")


def _containers(seen: Seen) -> Verdict | None:
    plan = seen.plan
    if plan is None or plan.runtime != "compose" or not planned(seen):
        return None
    access, ways = plan.vendor.container, plan.container_gpus
    by_cdi = uses_cdi(plan)
    if by_cdi and access.cdi_kind not in ways:
        return fail(
            f"gpu_access is cdi, but Docker knows no device {access.cdi_kind}",
            "engines' containers cannot be created",
            f"sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, with Docker 25 or newer; "
            f"or remove gpu_access ({_known(ways)})",
        )
    if not by_cdi and access.driver and access.driver not in ways:
        return fail(
            f"Docker cannot give GPUs to containers here ({_known(ways)})",
            "engines' containers cannot be created",
            _TOOLKIT,
        )
    how = access.cdi_kind if by_cdi else access.driver or ", ".join(access.nodes)
    return ok(f"containers get GPUs by {how}")


def _known(ways: tuple[str, ...]) -> str:
    return f"Docker offers {', '.join(ways)}" if ways else "no nvidia runtime and no CDI"


def _rights(seen: Seen) -> Verdict | None:
    plan = seen.plan
    if plan is None or seen.gpus is None or plan.vendor.name != "rocm" or not planned(seen):
        return None
    if plan.runtime == "compose":
        if seen.docker and seen.docker.rootless:
            return fail(
                "rootless Docker cannot pass on the groups of /dev/kfd",
                "engines see no GPU in their containers",
                "use rootful Docker, or --runtime process",
            )
        if not plan.gpu_groups:
            return unknown("the groups of /dev/kfd and the render nodes could not be read")
        return ok(f"containers get the groups {', '.join(map(str, plan.gpu_groups))}")
    if seen.gpus.closed:
        return fail(
            f"this user may not open {', '.join(seen.gpus.closed)}",
            "engines see no GPU",
            "sudo usermod -aG render,video $USER, then log in again",
        )
    return ok("this user may open /dev/kfd and the render nodes")


def memory(seen: Seen) -> Verdict | None:
    plan = seen.plan
    if plan is None or seen.gpus is None or plan.gpu_share is None:
        return None
    missing, running = _engines_on(seen, plan)
    uses = {(use.vendor, use.index): use for use in seen.gpus.uses}
    busy: list[str] = []
    least: tuple[int, str] | None = None
    for gpu in planned(seen):
        sharers = missing[gpu.index]
        if not sharers:
            continue  # the stack's own engines hold it
        use = uses.get((gpu.vendor, gpu.index))
        if use is None or use.used_mib is None:
            return unknown(f"memory use of GPU {gpu.index} is unknown ({seen.gpus.trouble or '-'})")
        wanted, free = int(gpu.memory_mib * plan.gpu_share * sharers), gpu.memory_mib - use.used_mib
        who = f" ({'; '.join(use.holders)})" if use.holders else ""
        if wanted > free:
            return _no_room(gpu, wanted, free, who)
        if use.holders and not running[gpu.index]:
            busy.append(f"GPU {gpu.index}: {use.used_mib} MiB in use{who}")
        if least is None or free < least[0]:
            least = (free, f"GPU {gpu.index}, with {free} MiB")
    if busy:
        return warn(
            ", ".join(busy),
            "other programs slow the engines and may take memory they need",
            "stop them, or hide that GPU with CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES)",
        )
    if least is None:
        return ok("in use by this stack's engines") if running else None
    return ok(f"enough free memory; least on {least[1]}")


def _engines_on(seen: Seen, plan: Plan) -> tuple[Counter[int], Counter[int]]:
    """Return by GPU how many of the plan's engines on it are still to start, and how many run."""
    up = seen.stack.running if seen.stack else ()
    missing, running = Counter[int](), Counter[int]()
    for engine in plan.engines:
        (running if engine.name in up else missing).update(engine.devices)
    return missing, running


def _no_room(gpu: Gpu, wanted_mib: int, free_mib: int, who: str) -> Verdict:
    fits = max(0, int(100 * (free_mib - 512) / gpu.memory_mib)) / 100
    lower = f", or engine: {{gpu_memory: {fits:g}}} in deploy.yaml" if fits >= 0.2 else ""
    return fail(
        f"GPU {gpu.index} has {free_mib} of {gpu.memory_mib} MiB free, but its engines need "
        f"{wanted_mib}{who}",
        "vLLM exits if less memory is free than its share",
        f"stop what uses it, or hide that GPU with CUDA_VISIBLE_DEVICES{lower}",
    )


def _numa(seen: Seen) -> Verdict | None:
    plan, gpus = seen.plan, seen.gpus
    if plan is None or gpus is None or not planned(seen) or len(set(gpus.nodes.values())) < 2:
        return None
    lies = {
        engine.name: sorted({gpus.nodes[index] for index in engine.devices if index in gpus.nodes})
        for engine in plan.engines
    }
    split = [name for name, nodes in lies.items() if len(nodes) > 1]
    shown = ", ".join(f"{name} on node {'+'.join(map(str, at))}" for name, at in lies.items())
    if split:
        return warn(
            shown,
            "traffic and KV between ranks of one engine cross NUMA nodes",
            "a smaller --tp, or GPUs of one node with CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES)",
        )
    return ok(shown)


RULES = (
    Rule(
        "gpu.enough",
        tried("gpus", "the engines have no GPU to run on"),
        looks_at="the GPUs that the drivers report, minus those that your other stacks use",
        fails="fewer than the plan needs; the message lists what each probe found",
        fix="fewer `--gpus`, `--vendor cpu`, or repair the driver",
    ),
    Rule(
        "gpu.driver",
        _driver,
        looks_at="the driver and the CUDA it runs, against what the image or interpreter is built "
        "for",
        fails="the driver's CUDA is an older major version",
        warns="the same, with `VLLM_ENABLE_CUDA_COMPATIBILITY` set on a data centre GPU",
        fix="a newer driver, `--image REF` for the older CUDA, or that variable",
    ),
    Rule(
        "gpu.arch",
        _arch,
        looks_at="whether the engines' torch is built for these GPUs (CUDA capability, gfx target)",
        fails="it is not",
        fix="an image for this GPU (`deploy images list`)",
    ),
    Rule(
        "gpu.containers",
        _containers,
        looks_at="how Docker gives GPUs to containers: the nvidia runtime, or CDI specs in "
        "`/etc/cdi` and `/var/run/cdi`",
        fails="neither is available",
        fix="the NVIDIA Container Toolkit, or `--runtime process`",
    ),
    Rule(
        "gpu.rights",
        _rights,
        looks_at="ROCm: `/dev/kfd`, `/dev/dri/renderD*` and the groups that own them",
        fails="this user may not open them, or rootless Docker cannot pass on the groups",
        fix="`sudo usermod -aG render,video $USER`",
    ),
    Rule(
        "gpu.memory",
        memory,
        looks_at="the memory that other programs use on the plan's GPUs, and which they are",
        fails="less is free than the engines' share",
        warns="other programs compute on a GPU of the plan",
        fix="stop them, hide the GPU, or set a smaller `engine.gpu_memory`",
    ),
    Rule(
        "gpu.numa",
        _numa,
        looks_at="on machines with several NUMA nodes: the node of each engine's GPUs",
        warns="the ranks of one engine are on several nodes",
        fix="a smaller `--tp`, or other GPUs",
    ),
)


def arch_name(gpu: Gpu) -> str:
    """Return the architecture of a GPU as compilers name it: gfx942, sm_90."""
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
