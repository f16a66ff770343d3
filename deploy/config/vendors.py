"""The vendor table: everything in which one vendor's stack differs from another's, one row each."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from deploy.errors import ConfigError


@dataclass(frozen=True)
class ContainerAccess:
    """How a vendor's GPUs get into a container.

    Attributes:
        driver: of a Compose device reservation; "" where device nodes are passed instead.
        nodes: device nodes beside the render node of each GPU.
        cdi_kind: of the Container Device Interface.
        security_opt: what the vendor's libraries need and Docker's defaults forbid.
        visible: the variable that numbers the container's own GPUs from 0; "" where its runtime
            sees to that.
    """

    driver: str = ""
    nodes: tuple[str, ...] = ()
    cdi_kind: str = ""
    security_opt: tuple[str, ...] = ()
    visible: str = ""


@dataclass(frozen=True)
class Pin:
    """Holds engines to the one of vLLM's paths that is proved.

    Attributes:
        what: the path.
        reason: what goes wrong, or is not proved, on the other.
        lift: the line of `deploy.yaml` that takes the other.
        args: vLLM arguments; a user's own come after them.
        env: environment; a user's own wins.
    """

    what: str
    reason: str
    lift: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Vendor:
    """One row.

    Attributes:
        slot: what `--gpus` counts on this vendor, for messages.
        has_gpus: engines run on GPUs, and `--gpus` counts those.
        default_model: what is served when no model is named.
        kv_cache_gib: KV space of one engine when none is named; None where the engine takes what
            its share of the GPU leaves.
        block_size: tokens a KV block when none is named.
        max_threads: of a rank on the host's processors; None for all that are its share.
        libraries: shared libraries that engines load and no wheel brings, and the Debian package
            of each; only where engines are processes of this machine.
        engine_base_mib: resident host memory of one rank beside weights, KV space and staging.
        engine_args: vLLM arguments of every engine.
        single_rank_args: further ones for engines with a tensor-parallel size of 1.
        engine_env: environment of every engine.
        pins: what engines are held to; KV of a stack with other pins is other KV.
        visible_devices: the variable that gives a process its GPUs.
        process_env: environment of engines that are processes of this machine.
        container: how containers get GPUs.
    """

    name: str
    slot: str
    default_model: str
    block_size: int
    engine_base_mib: int
    has_gpus: bool = True
    max_threads: int | None = None
    kv_cache_gib: float | None = None
    libraries: Mapping[str, str] = field(default_factory=dict)
    engine_args: tuple[str, ...] = ()
    single_rank_args: tuple[str, ...] = ()
    engine_env: Mapping[str, str] = field(default_factory=dict)
    pins: tuple[Pin, ...] = ()
    visible_devices: str = ""
    process_env: Mapping[str, str] = field(default_factory=dict)
    container: ContainerAccess = ContainerAccess()

    @property
    def pinned_args(self) -> tuple[str, ...]:
        """Return the arguments of all pins."""
        return tuple(arg for pin in self.pins for arg in pin.args)

    @property
    def pinned_env(self) -> dict[str, str]:
        """Return the environment of all pins."""
        return {name: value for pin in self.pins for name, value in pin.env.items()}


# Small, free to fetch, and with KV heads enough for a tensor-parallel size of 8.
_SMALL_MODEL = "Qwen/Qwen3-0.6B"

# As on CPUs, where every end-to-end test runs, until these have run on a GPU.
_GPU_PINS = (
    Pin(
        what="vLLM's first model runner",
        reason="the second one loads nothing before a full CUDA graph, which fix B22 solves but "
        "has not run on a GPU; after a failed load it computes again from the wrong token (vLLM "
        "issue 49250)",
        lift='engine: {env: {VLLM_USE_V2_MODEL_RUNNER: "1"}}',
        env={"VLLM_USE_V2_MODEL_RUNNER": "0"},
    ),
    Pin(
        what="synchronous scheduling",
        reason="a request whose load failed keeps placeholders of tokens that were never sampled: "
        "wrong tokens, or no end (vLLM issues 49250 and 45138)",
        lift="engine: {args: [--async-scheduling]}",
        args=("--no-async-scheduling",),
    ),
)
# The GPUs compute; more threads than a few take turns on the host's memory, and cost start-up time.
_HOST_THREADS = 4

VENDORS: Mapping[str, Vendor] = {
    "cuda": Vendor(
        name="cuda",
        slot="GPU",
        default_model=_SMALL_MODEL,
        block_size=16,
        engine_base_mib=6144,
        pins=_GPU_PINS,
        max_threads=_HOST_THREADS,
        visible_devices="CUDA_VISIBLE_DEVICES",
        # CUDA's own order is fastest first; indices here are nvidia-smi's.
        process_env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        container=ContainerAccess(driver="nvidia", cdi_kind="nvidia.com/gpu"),
    ),
    "rocm": Vendor(
        name="rocm",
        slot="GPU",
        default_model=_SMALL_MODEL,
        block_size=16,
        engine_base_mib=6144,
        pins=_GPU_PINS,
        max_threads=_HOST_THREADS,
        visible_devices="HIP_VISIBLE_DEVICES",
        container=ContainerAccess(
            nodes=("/dev/kfd",),
            cdi_kind="amd.com/gpu",
            # ROCm places memory by NUMA calls that Docker's default filter refuses.
            security_opt=("seccomp=unconfined",),
            visible="HIP_VISIBLE_DEVICES",
        ),
    ),
    "cpu": Vendor(
        name="cpu",
        slot="engine",
        default_model="tiny",
        block_size=32,
        engine_base_mib=2048,
        has_gpus=False,
        kv_cache_gib=0.5,
        libraries={"libnuma.so.1": "libnuma1"},
        # Compilation buys nothing on a model checked for seconds and costs minutes of start-up.
        engine_args=("--enforce-eager",),
        # The worker inside the engine's core instead of a process of its own: a third less to
        # import and to hold. By its path, for vLLM rewrites the name "uni" on CPUs.
        single_rank_args=(
            "--distributed-executor-backend",
            "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        ),
        engine_env={
            # Binding threads to cores would put every engine on the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Despite --enforce-eager the sampler is compiled, at the first request: that takes
            # seconds, and a C++ compiler, without which it takes the engine down.
            "TORCHDYNAMO_DISABLE": "1",
        },
    ),
}


# What people call a vendor, after its maker or its libraries.
_OTHER_NAMES = {"nvidia": "cuda", "amd": "rocm", "hip": "rocm", "intel": "cpu", "x86": "cpu"}


def meant_vendor(value: str) -> str:
    """Return the vendor that is likely to be meant by a name that is none, or ""."""
    name = _OTHER_NAMES.get(value.lower(), value.lower())
    near = difflib.get_close_matches(name, VENDORS, n=1)
    return near[0] if near else ""


def vendor_named(name: str) -> Vendor:
    """Return the row of a vendor.

    Raises:
        ConfigError: no such vendor.
    """
    try:
        return VENDORS[name]
    except KeyError:
        raise ConfigError(
            f"--vendor: '{name}' is not one of {', '.join(VENDORS)}",
            hint="deploy plan --vendor cpu",
        ) from None
