"""The engines of a plan: their roles, ports and what they may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from deploy.config.fields import MP
from deploy.config.spec import SettledSpec
from deploy.config.vendors import Vendor
from deploy.planning.address import host_port
from deploy.planning.inventory import Gpu, Inventory
from deploy.planning.limits import TransferLimits
from deploy.planning.memory import MIB, KvSpace
from deploy.planning.topology import FIRST_ENGINE_OFFSET, Topology

Role = Literal["producer", "consumer", "aggregated"]
ENGINE_ROLES: tuple[Role, ...] = ("producer", "consumer", "aggregated")
PREFILL: tuple[Role, ...] = ("producer", "aggregated")
# Also those that answer clients, each request once.
DECODE: tuple[Role, ...] = ("consumer", "aggregated")


@dataclass(frozen=True)
class EnginePlan:
    """One vLLM engine: its role, its port and what it may use.

    Attributes:
        port: on its host.
        gpus: its own, or the one it shares; empty on CPUs.
        memory_mib: expected resident host memory, all ranks together.
        host: address on which it listens, or of the other host that has it.
        remote: another host has it, and this one only uses it.
    """

    name: str
    role: Role
    port: int
    gpus: tuple[Gpu, ...]
    cpu_threads: int
    memory_mib: int
    host: str = "127.0.0.1"
    remote: bool = False

    @property
    def url(self) -> str:
        """Where other hosts reach it."""
        return f"http://{host_port(self.host, self.port)}"

    @property
    def devices(self) -> tuple[int, ...]:
        """The indices of its GPUs."""
        return tuple(gpu.index for gpu in self.gpus)


def engine_memory_mib(
    spec: SettledSpec,
    vendor: Vendor,
    space: KvSpace,
    limits: TransferLimits | None,
    weight_bytes: int,
) -> int:
    """Return the host memory of an engine; without limits it has no staging memory.

    Args:
        weight_bytes: of the model's weights, all ranks together, as an engine on CPUs holds them.
    """
    if spec.connector == MP:
        limits = None  # LMCache's server takes KV from where it is
    in_host = 0 if vendor.has_gpus else (space.told_bytes or 0) // MIB
    weights_mib = 0 if vendor.has_gpus else weight_bytes // MIB
    staging_mib = round(limits.ranks * limits.staging_gib * 1024) if limits else 0
    return weights_mib + spec.tp * (vendor.engine_base_mib + in_host) + staging_mib


def plan_engines(
    spec: SettledSpec,
    vendor: Vendor,
    topology: Topology,
    inventory: Inventory,
    gpus: tuple[tuple[Gpu, ...], ...],
    memory_mib: int,
) -> tuple[EnginePlan, ...]:
    """Name the engines, and give each its port, GPUs and threads."""
    names: list[tuple[Role, str]] = [
        *(("producer", f"producer-{index}") for index in range(topology.producers)),
        *(("consumer", f"consumer-{index}") for index in range(topology.consumers)),
        *(("aggregated", f"engine-{index}") for index in range(topology.aggregated)),
    ]
    threads = max(1, inventory.cpus // (topology.engines * spec.tp))
    if vendor.max_threads is not None:
        threads = min(threads, vendor.max_threads)
    return tuple(
        EnginePlan(
            name,
            role,
            spec.port + FIRST_ENGINE_OFFSET + index,
            own,
            threads,
            memory_mib,
            host=spec.engine.bind,
        )
        for index, ((role, name), own) in enumerate(zip(names, gpus, strict=True))
    )


def remote_engines(spec: SettledSpec, topology: Topology) -> tuple[EnginePlan, ...]:
    """Return the engines of other hosts; their numbers follow those of this one's."""
    number = {"producer": topology.producers, "consumer": topology.consumers}
    found = []
    for one in spec.router.engines:
        name = f"{one.role}-{number[one.role]}"
        number[one.role] += 1
        found.append(EnginePlan(name, one.role, one.port, (), 0, 0, host=one.host, remote=True))
    return tuple(found)
