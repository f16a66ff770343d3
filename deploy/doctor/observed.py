"""What was observed of a machine and of the stack to run on it: the values that rules judge.

None means not examined, or unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deploy.config.spec import StackSpec
from deploy.planning.break_even import LastBenchmark
from deploy.planning.connector import ConnectorChoice
from deploy.planning.inventory import Inventory
from deploy.planning.plan import Plan
from deploy.planning.redis_memory import RedisMemory


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step that `up` takes too.

    Attributes:
        says: the message if it went well.
        trouble: the error's message; "" if it went well.
        fix: the error's hint.
        details: the error's, cut to what a line can hold.
        usage: the spec is wrong, rather than the machine.
        unknown: why it could not be looked at; "" if it could.
    """

    says: str = ""
    trouble: str = ""
    fix: str = ""
    details: tuple[str, ...] = ()
    usage: bool = False
    unknown: str = ""


@dataclass(frozen=True)
class DockerSeen:
    """The Docker engine of this machine.

    Attributes:
        chosen: up would run containers.
        version: of the engine, such as '28.0.1'; "" if it does not answer.
        compose: the plugin's version.
        trouble, fix: why Docker cannot be used; "" if it can.
        installed: there is a `docker` command.
    """

    chosen: bool
    version: str = ""
    compose: str = ""
    rootless: bool = False
    trouble: str = ""
    fix: str = ""
    installed: bool = False


@dataclass(frozen=True)
class ImageSeen:
    """An image that the stack runs.

    Attributes:
        size_mib: what it takes unpacked; None if unknown.
        size_sure: that size was seen, rather than estimated.
        get: the command that gets it.
        cuda: the CUDA release it is built for, such as '13.0'; "" if none is known.
        archs: GPUs that it is built for, such as 'gfx942'; empty if unknown.
    """

    reference: str
    here: bool
    size_mib: int | None = None
    size_sure: bool = False
    get: str = ""
    cuda: str = ""
    archs: tuple[str, ...] = ()


@dataclass(frozen=True)
class GpuMemoryUse:
    """How much of a GPU's memory is in use, and by whom ('pid 123 (python), 4000 MiB')."""

    vendor: str
    index: int
    used_mib: int | None = None
    holders: tuple[str, ...] = ()


@dataclass(frozen=True)
class GpusSeen:
    """The drivers of GPUs, and what is done with them at present.

    Attributes:
        driver: the version of the vendor's kernel driver; "" if unknown.
        cuda: the newest CUDA that it runs, such as '13.0'.
        closed: device nodes that this user may not open.
        trouble: why the vendor's tool reported nothing.
    """

    driver: str = ""
    cuda: str = ""
    uses: tuple[GpuMemoryUse, ...] = ()
    closed: tuple[str, ...] = ()
    nodes: Mapping[int, int] = field(default_factory=dict)
    trouble: str = ""


@dataclass(frozen=True)
class HostSeen:
    """The kernel's settings and this process's limits, which its children have too.

    Attributes:
        open_files: how many at most; None without a limit.
        locked_kib: memory that may be locked; None without a limit.
        huge_pages: 'always', 'madvise' or 'never'.
        shm_free_mib: of /dev/shm.
        numa: node → its processors, as the kernel lists them ('0-31').
        numa_balancing: the kernel moves pages between nodes by itself.
        cpus: processors that this process may use; `cpu_quota` is what a control group leaves.
        now: seconds since 1970, by this machine's clock.
        synced: by a time server; None if unknown.
    """

    open_files: int | None = None
    locked_kib: int | None = None
    huge_pages: str = ""
    overcommit: int | None = None
    shm_free_mib: int | None = None
    architecture: str = ""
    cpu_flags: frozenset[str] = frozenset()
    numa: Mapping[int, str] = field(default_factory=dict)
    numa_balancing: bool = False
    cpus: int = 1
    cpu_quota: float | None = None
    now: float | None = None
    synced: bool | None = None


@dataclass(frozen=True)
class FolderSeen:
    """A folder that something will be written below.

    Attributes:
        path: the folder itself, which need not be there yet.
        free_mib: for this user; None if unknown.
        writable: this user may write there; None if another user does.
    """

    path: str
    free_mib: int | None
    writable: bool | None = None


@dataclass(frozen=True)
class DisksSeen:
    """Where images, the hub's models and the kit's own files lie."""

    state: FolderSeen
    images: FolderSeen | None = None
    hub: FolderSeen | None = None


@dataclass(frozen=True)
class HubSeen:
    """A model of the hub.

    Attributes:
        cached: its config.json and weights are here.
        offline: engines are told to leave the hub alone.
        asked: the hub was asked; `trouble` is its error, "" without one.
        refused: it has the model, but denies it to this user.
        proxies: variables that name a proxy, and are not set in the engines' containers.
    """

    cached: bool
    offline: bool
    cache: str
    address: str = ""
    asked: bool = False
    trouble: str = ""
    refused: bool = False
    proxies: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineCode:
    """What an interpreter or image contains, as far as the kit depends on it.

    Attributes:
        cuda: what its torch is built for; "" if it is not.
        archs: GPUs that its torch is built for: 'sm_90', 'compute_120', 'gfx942'.
        native: LMCache's extension module; "" if there is none.
        native_trouble: why it does not load; "" if it does.
        native_archs: GPUs of AMD that it is built for; empty if it does not say.
        plugs: plug-in point → it is there.
        trouble: why nothing could be asked.
    """

    where: str
    vllm: str = ""
    lmcache: str = ""
    torch: str = ""
    cuda: str = ""
    archs: tuple[str, ...] = ()
    native: str = ""
    native_trouble: str = ""
    native_archs: tuple[str, ...] = ()
    plugs: Mapping[str, bool] = field(default_factory=dict)
    trouble: str = ""


@dataclass(frozen=True)
class RedisSeen:
    """A server of the user's own Redis; None is what its user may not see."""

    version: str | None = None
    max_memory_bytes: int | None = None
    policy: str | None = None
    append_only: bool | None = None
    snapshots: str | None = None

    @property
    def memory(self) -> RedisMemory:
        """How much it may hold, and what it does then."""
        return RedisMemory(None, self.max_memory_bytes, self.policy)


@dataclass(frozen=True)
class StackSeen:
    """What an earlier run of this name left.

    Attributes:
        running: services that run.
        missing: services that do not.
        left: processes or containers with the stack's mark that no state file knows.
        locked: another command works on it.
        state: there is a state file.
        reports: how many of its engines report what they run.
        apart: rows in which these differ from each other, with each engine's value.
        unplanned: rows in which all of them differ from the plan alike.
    """

    running: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    left: int = 0
    locked: bool = False
    state: bool = False
    reports: int = 0
    apart: tuple[str, ...] = ()
    unplanned: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """Everything that rules judge.

    Attributes:
        outcomes: step that `up` takes too → its outcome.
        measured: result of the last benchmark of this model on this machine.
        connector: how engines share KV, and how else they could; `up` does not try that out.
    """

    spec: StackSpec
    inventory: Inventory
    plan: Plan | None = None
    outcomes: Mapping[str, StepOutcome] = field(default_factory=dict)
    docker: DockerSeen | None = None
    images: tuple[ImageSeen, ...] = ()
    gpus: GpusSeen | None = None
    host: HostSeen | None = None
    disks: DisksSeen | None = None
    hub: HubSeen | None = None
    code: EngineCode | None = None
    redis: tuple[RedisSeen, ...] = ()
    stack: StackSeen | None = None
    measured: LastBenchmark | None = None
    connector: ConnectorChoice | None = None
