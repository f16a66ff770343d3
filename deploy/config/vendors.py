"""The vendor table: everything in which one vendor's stack differs from another's, one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deploy.errors import ConfigError


@dataclass(frozen=True)
class Vendor:
    """One row.

    Attributes:
        slot: what `--gpus` counts on this vendor, for messages.
        default_model: what is served when no model is named.
        kv_cache_gib: KV space of one engine when none is named.
        libraries: shared libraries that engines load and no wheel brings, and the Debian package
            of each.
        engine_base_mib: resident memory of one engine beside weights, KV space and staging.
        engine_args: vLLM arguments of every engine.
        single_rank_args: further ones for engines with a tensor-parallel size of 1.
        engine_env: environment of every engine.
    """

    name: str
    slot: str
    default_model: str
    kv_cache_gib: float
    engine_base_mib: int
    libraries: Mapping[str, str] = field(default_factory=dict)
    engine_args: tuple[str, ...] = ()
    single_rank_args: tuple[str, ...] = ()
    engine_env: Mapping[str, str] = field(default_factory=dict)


VENDORS: Mapping[str, Vendor] = {
    "cpu": Vendor(
        name="cpu",
        slot="engine",
        default_model="tiny",
        kv_cache_gib=0.5,
        engine_base_mib=2048,
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


def vendor_named(name: str) -> Vendor:
    """Return the row of a vendor; 'auto' is the one that every machine can run.

    Raises:
        ConfigError: no such vendor.
    """
    try:
        return VENDORS["cpu" if name == "auto" else name]
    except KeyError:
        raise ConfigError(
            f"--vendor: '{name}' is not one of {', '.join(VENDORS)}",
            hint="deploy plan --vendor cpu",
        ) from None
