"""The vendor table: everything that differs between vendors, one row each."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from deploy.errors import ConfigError


@dataclass(frozen=True)
class ContainerAccess:
    """How a vendor's GPUs get into a container.

    Attributes:
        driver: driver of a Compose device reservation; "" if device nodes are passed instead.
        nodes: device nodes besides the render node of each GPU.
        cdi_kind: kind in the Container Device Interface.
        seccomp: system call filter in `compose`, where Docker's own forbids what libraries need.
        visible: variable that numbers the container's GPUs from 0; "" if its runtime does.
    """

    driver: str = ""
    nodes: tuple[str, ...] = ()
    cdi_kind: str = ""
    seccomp: str = ""
    visible: str = ""


@dataclass(frozen=True)
class ServerAccess:
    """How LMCache's server reaches the KV of a vendor's engines.

    Attributes:
        base_mib: its resident host memory besides KV.
        not_in_containers: why it cannot reach it from another container; "" if it can.
    """

    base_mib: int
    not_in_containers: str = ""


@dataclass(frozen=True)
class Pin:
    """Keeps engines on the code path of vLLM that is tested.

    Attributes:
        what: the path.
        reason: what goes wrong, or is untested, on the other path.
        lift: the line of `deploy.yaml` that selects the other path.
        args: vLLM arguments; the user's come after them.
        env: environment; the user's takes precedence.
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
        default_model: default of `--model`.
        kv_cache_gib: default KV space of one engine; None if the engine takes what its share of
            the GPU leaves.
        block_size: default tokens per KV block.
        max_threads: CPU threads of a rank; None for its whole share.
        libraries: shared libraries that engines load and no wheel contains, with the Debian
            package of each; only for engines that run as processes of this machine.
        engine_base_mib: resident host memory of one rank besides weights, KV space and staging.
        engine_args: vLLM arguments of every engine.
        single_rank_args: extra ones for engines with a tensor-parallel size of 1.
        engine_env: environment of every engine.
        pins: code paths that engines are kept on; stacks with other pins do not share KV.
        visible_devices: variable that gives a process its GPUs.
        process_env: environment of engines that run as processes of this machine.
        container: how containers get GPUs.
        server: how LMCache's server reaches KV.
    """

    name: str
    slot: str
    default_model: str
    block_size: int
    engine_base_mib: int
    server: ServerAccess
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


# Small, open, and with enough KV heads for a tensor-parallel size of 8.
_SMALL_MODEL = "Qwen/Qwen3-0.6B"

# The combination that the end-to-end tests run on CPUs. On an H200 each of the other three gave a
# wrong answer after a failed load, and right ones otherwise (docs/results/gpu-nvidia-h200.md).
_GPU_PINS = (
    Pin(
        what="vLLM's first model runner",
        reason="after a failed load the second one recomputes from the wrong token, and the answer "
        "is wrong (vLLM issue 49250); without fix B22 it also loads no KV for a step that runs as "
        "one full CUDA graph",
        lift='engine: {env: {VLLM_USE_V2_MODEL_RUNNER: "1"}}',
        env={"VLLM_USE_V2_MODEL_RUNNER": "0"},
    ),
    Pin(
        what="synchronous scheduling",
        reason="a request whose load failed keeps placeholders of tokens that were never sampled: "
        "its answer is wrong, or never ends (vLLM issues 49250 and 45138)",
        lift="engine: {args: [--async-scheduling]}",
        args=("--no-async-scheduling",),
    ),
)
# The GPUs compute; more than a few threads contend for memory and slow down the start.
_HOST_THREADS = 4

# The same, and the libraries and a context of each GPU; not measured.
_GPU_SERVER_MIB = 4096

VENDORS: Mapping[str, Vendor] = {
    "cuda": Vendor(
        name="cuda",
        slot="GPU",
        default_model=_SMALL_MODEL,
        block_size=16,
        engine_base_mib=6144,
        server=ServerAccess(base_mib=_GPU_SERVER_MIB),
        pins=_GPU_PINS,
        max_threads=_HOST_THREADS,
        visible_devices="CUDA_VISIBLE_DEVICES",
        process_env={
            # CUDA orders GPUs fastest first by default; indices here are nvidia-smi's.
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            # The lock file leaves FlashInfer out: it compiles with nvcc, which rented machines
            # rarely have. vLLM imports it for sampling without checking that it is installed.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        },
        container=ContainerAccess(driver="nvidia", cdi_kind="nvidia.com/gpu"),
    ),
    "rocm": Vendor(
        name="rocm",
        slot="GPU",
        default_model=_SMALL_MODEL,
        block_size=16,
        engine_base_mib=6144,
        server=ServerAccess(
            base_mib=_GPU_SERVER_MIB,
            not_in_containers="HIP opens memory of another process only in the same process and "
            "network namespaces (https://github.com/ROCm/rocm-aic/pull/88)",
        ),
        pins=_GPU_PINS,
        max_threads=_HOST_THREADS,
        visible_devices="HIP_VISIBLE_DEVICES",
        container=ContainerAccess(
            nodes=("/dev/kfd",),
            cdi_kind="amd.com/gpu",
            # ROCm places memory with NUMA calls that Docker's default seccomp profile blocks.
            seccomp="seccomp-rocm.json",
            visible="HIP_VISIBLE_DEVICES",
        ),
    ),
    "cpu": Vendor(
        name="cpu",
        slot="engine",
        default_model="tiny",
        block_size=32,
        engine_base_mib=2048,
        # Python, torch and LMCache; 0.46 GiB were measured.
        server=ServerAccess(base_mib=768),
        has_gpus=False,
        kv_cache_gib=0.5,
        libraries={"libnuma.so.1": "libnuma1"},
        # Compilation takes minutes at start and gains nothing for a short check.
        engine_args=("--enforce-eager",),
        # Run the worker inside the engine core instead of a separate process: a third less to
        # import and to keep in memory. By path, because vLLM rewrites the name "uni" on CPUs.
        single_rank_args=(
            "--distributed-executor-backend",
            "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        ),
        engine_env={
            # Binding threads to cores would put every engine on the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Despite --enforce-eager the sampler is compiled at the first request: that takes
            # seconds, and without a C++ compiler it crashes the engine.
            "TORCHDYNAMO_DISABLE": "1",
        },
    ),
}


# Other names of a vendor: its maker or its libraries.
_OTHER_NAMES = {"nvidia": "cuda", "amd": "rocm", "hip": "rocm", "intel": "cpu", "x86": "cpu"}


def meant_vendor(value: str) -> str:
    """Return the vendor that an unknown name most likely means, or ""."""
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
            f"'{name}' is not one of {', '.join(VENDORS)}",
            setting="vendor",
            retry=({"--vendor": "cpu"},),
        ) from None
