"""Every rule, by what it says of machines that are sound and of such that are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from deploy.config.model import Model
from deploy.config.shape import ModelShape
from deploy.config.spec import StackSpec
from deploy.doctor.finding import Finding, Verdict
from deploy.doctor.gpus import runs_on
from deploy.doctor.observed import (
    DisksSeen,
    DockerSeen,
    EngineCode,
    FolderSeen,
    GpuMemoryUse,
    GpusSeen,
    HostSeen,
    HubSeen,
    ImageSeen,
    RedisSeen,
    Seen,
    StackSeen,
    StepOutcome,
)
from deploy.doctor.rules import RULES, failed, findings, warned
from deploy.planning.break_even import LastBenchmark
from deploy.planning.connector import connector_choice
from deploy.planning.inventory import Gpu, Inventory
from deploy.planning.plan import Plan, make_plan
from tests.unit.conftest import MACHINE, TINY
from tests.unit.stack.cases import machine_with

BY_ID = {rule.id: rule for rule in RULES}
HUB_MODEL = Model("owner/model", "owner/model", "hub", TINY.shape, 10 * 2**30)
LARGE = Model("/m", "m", "folder", ModelShape(80, 64, 8, 128, 131072), 2**30)
PLUGS = {"vLLM's kv_connector_module_path": True, "LMCache's storage_plugins": True}
CODE = EngineCode("/venv/bin/python", "0.25.1", "0.5.3", "2.11.0", plugs=PLUGS)
CUDA_CODE = replace(CODE, cuda="13.0", archs=("sm_90",), native="lmcache.c_ops")
ROCM_CODE = replace(CODE, archs=("gfx942:sramecc+",), native="lmcache.c_ops")
# What NVIDIA's container runtime says of an image.
REFUSED = (
    "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=13.0, please update "
    "your driver to a newer version, or use an earlier cuda container: unknown."
)
IMAGE = ImageSeen("pdkit/vllm-cuda:1", True, 20 * 1024, True, "deploy images build cuda", "13.0")
DISK = FolderSeen("/var/lib/docker", 100 * 1024)
X86 = HostSeen(architecture="x86_64", cpu_flags=frozenset({"avx2", "avx512f", "amx_bf16"}))
TWO_NODES = {0: "0-7", 1: "8-15"}
REDIS = RedisSeen("7.2.4", 8 * 2**30, "allkeys-lru", False, "")
FREE_GPUS = GpusSeen("580.65", "13.0", (GpuMemoryUse("cuda", 0, 400), GpuMemoryUse("cuda", 1, 400)))
OLD_DRIVER = {"gpus": replace(FREE_GPUS, cuda="12.8"), "code": CUDA_CODE}
COMPATIBLE = {"env": {"VLLM_ENABLE_CUDA_COMPATIBILITY": "1"}}
BAD = StepOutcome(trouble="it is broken", fix="fix it", details=("a detail",))


@dataclass(frozen=True)
class Case:
    """What was seen, and what a rule is to say of it: status, and words of the message or fix."""

    rule: str
    status: str
    words: str
    seen: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    machine: Inventory = MACHINE
    model: Model = TINY


def cuda(rule: str, status: str, words: str, seen: dict[str, Any], **fields: Any) -> Case:
    ways = fields.pop("ways", ("nvidia",))
    machine = machine_with("cuda", 0, 1, container_gpus=ways)
    return Case(rule, status, words, seen, {"vendor": "cuda", "gpus": 2, **fields}, machine)


def one_gpu(status: str, words: str, use: GpuMemoryUse, *, running: tuple[str, ...] = ()) -> Case:
    """Two engines share a GPU, of which some run."""
    seen = {**taken(use), "stack": StackSeen(running=running)}
    fields = {"vendor": "cuda", "gpus": 1}
    return Case("gpu.memory", status, words, seen, fields, machine_with("cuda", 0))


def rocm(rule: str, status: str, words: str, seen: dict[str, Any], **fields: Any) -> Case:
    machine = machine_with("rocm", 0, 1)
    return Case(rule, status, words, seen, {"vendor": "rocm", "gpus": 2, **fields}, machine)


def tried_cases(rule: str, step: str, *, brings_usage: bool = False) -> list[Case]:
    good, bad = {step: StepOutcome(says="all is well")}, {step: replace(BAD, usage=brings_usage)}
    dark = {step: StepOutcome(unknown="nobody could look")}
    return [
        Case(rule, "ok", "all is well", {"outcomes": good}),
        Case(rule, "fail", "it is broken; a detail", {"outcomes": bad}),
        Case(rule, "unknown", "nobody could look", {"outcomes": dark}),
    ]


def docker(**values: Any) -> dict[str, Any]:
    return {"docker": DockerSeen(**{"chosen": True, "installed": True, **values})}


def taken(*uses: GpuMemoryUse) -> dict[str, Any]:
    return {"gpus": replace(FREE_GPUS, uses=uses)}


def numa(**at: int) -> dict[str, Any]:
    return {"gpus": replace(FREE_GPUS, nodes={int(name[1:]): node for name, node in at.items()})}


def host(**values: Any) -> dict[str, Any]:
    return {"host": replace(X86, **values)}


def disks(**places: FolderSeen) -> dict[str, Any]:
    return {"disks": DisksSeen(**{"state": DISK, **places})}


def hub_case(status: str, words: str, *, rule: str = "hub.model", **values: Any) -> Case:
    fields = values.pop("fields", {})
    seen = HubSeen(**{"cached": False, "offline": False, "cache": "/hub", **values})
    return Case(rule, status, words, {"hub": seen}, fields, model=HUB_MODEL)


def hub_disk(status: str, words: str, place: FolderSeen, *, cached: bool = False) -> Case:
    seen = {"hub": HubSeen(cached=cached, offline=False, cache="/hub"), **disks(hub=place)}
    return Case("disk.hub", status, words, seen, model=HUB_MODEL)


def redis(rule: str, status: str, words: str, **values: Any) -> Case:
    seen = {"redis": (replace(REDIS, **values),)}
    return Case(rule, status, words, seen, {"redis": {"url_file": "/home/user/url"}})


MISSING = replace(IMAGE, here=False)
HOLDER = "pid 7 (python), 60000 MiB"
COMPOSE = {"runtime": "compose"}

CASES = [
    Case("docker.engine", "ok", "28.0.1 answers, Compose 2.30", docker(
        version="28.0.1", compose="2.30")),
    Case("docker.engine", "ok", "Docker is not installed", docker(
        chosen=False, installed=False, trouble="no command")),
    Case("docker.engine", "warn", "starts processes instead", docker(
        chosen=False, trouble="no Docker engine answers", fix="start it")),
    Case("docker.engine", "warn", "untested with Docker before 20.10", docker(
        version="19.03.5", compose="2.20")),
    Case("docker.engine", "fail", "no Docker engine answers", docker(
        trouble="no Docker engine answers", fix="start it")),
    Case("docker.images", "ok", "all present: pdkit/vllm-cuda:1", {"images": (IMAGE,)}),
    Case("docker.images", "warn", "deploy images build cuda", {"images": (IMAGE, MISSING)}),
    *tried_cases("docker.project", "project"),
    *tried_cases("gpu.enough", "gpus"),
    cuda("gpu.driver", "ok", "runs CUDA 13.0; the engines are built for 13.0",
         {"gpus": FREE_GPUS, "images": (IMAGE,)}),
    cuda("gpu.driver", "ok", "the CUDA version of the engines is unknown", {"gpus": FREE_GPUS}),
    cuda("gpu.driver", "fail", "up to 12.4, but the engines are built for CUDA 13.0",
         {"gpus": replace(FREE_GPUS, cuda="12.4"), "images": (IMAGE,)}),
    cuda("gpu.driver", "fail", "install driver 580 or newer",
         {"gpus": replace(FREE_GPUS, cuda="12.8"), "code": CUDA_CODE}),
    cuda("gpu.driver", "fail", "up to 12.4, but the engines are built for CUDA 13.0",
         {"gpus": replace(FREE_GPUS, cuda="12.4"), "code": replace(CODE, trouble=REFUSED)}),
    cuda("gpu.driver", "fail", "VLLM_ENABLE_CUDA_COMPATIBILITY", OLD_DRIVER),
    cuda("gpu.driver", "warn", "NVIDIA's compatibility libraries", OLD_DRIVER, engine=COMPATIBLE),
    cuda("gpu.driver", "unknown", "no answer in 5 s",
         {"gpus": GpusSeen(trouble="no answer in 5 s"), "images": (IMAGE,)}),
    rocm("gpu.driver", "ok", "amdgpu driver 6.12", {"gpus": GpusSeen(driver="6.12")}),
    cuda("gpu.arch", "ok", "built for sm_90", {"code": CUDA_CODE}),
    cuda("gpu.arch", "fail", "is sm_90, but torch is built for sm_80",
         {"code": replace(CUDA_CODE, archs=("sm_80",))}),
    cuda("gpu.arch", "unknown", "its torch does not list them", {"code": CODE}),
    rocm("gpu.arch", "ok", "gfx942", {"code": ROCM_CODE}),
    rocm("gpu.arch", "fail", "is gfx942", {"code": replace(ROCM_CODE, archs=("gfx90a",))}),
    cuda("gpu.containers", "ok", "by nvidia", {}, **COMPOSE),
    cuda("gpu.containers", "ok", "by nvidia.com/gpu", {}, ways=("nvidia.com/gpu",), **COMPOSE),
    cuda("gpu.containers", "fail", "no nvidia runtime and no CDI", {}, ways=(), **COMPOSE),
    cuda("gpu.containers", "fail", "nvidia-ctk cdi generate", {}, gpu_access="cdi", **COMPOSE),
    rocm("gpu.containers", "ok", "by /dev/kfd", {}, **COMPOSE),
    rocm("gpu.rights", "ok", "may open /dev/kfd", {"gpus": GpusSeen()}),
    rocm("gpu.rights", "fail", "may not open /dev/kfd, /dev/dri/renderD128",
         {"gpus": GpusSeen(closed=("/dev/kfd", "/dev/dri/renderD128"))}),
    rocm("gpu.rights", "ok", "the groups 44, 993", {"gpus": GpusSeen(), **docker()}, **COMPOSE),
    rocm("gpu.rights", "fail", "rootless Docker cannot pass on the groups",
         {"gpus": GpusSeen(), **docker(rootless=True)},
         **COMPOSE),
    cuda("gpu.memory", "ok", "least on GPU 0, with 81159 MiB", {"gpus": FREE_GPUS}),
    cuda("gpu.memory", "ok", "in use by this stack's engines",
         {**taken(GpuMemoryUse("cuda", 0, 80000), GpuMemoryUse("cuda", 1, 80000)),
          "stack": StackSeen(running=("redis", "producer-0", "consumer-0"))}),
    cuda("gpu.memory", "fail", "GPU 0 has 1559 of 81559 MiB free",
         {**taken(GpuMemoryUse("cuda", 0, 80000, (HOLDER,)), GpuMemoryUse("cuda", 1, 1)),
          "stack": StackSeen(running=("redis",))}),
    cuda("gpu.memory", "fail", "GPU 1 has 21559 of 81559 MiB free",
         {**taken(GpuMemoryUse("cuda", 0, 80000, (HOLDER,)),
                  GpuMemoryUse("cuda", 1, 60000, (HOLDER,))),
          "stack": StackSeen(running=("redis", "producer-0"))}),
    cuda("gpu.memory", "ok", "least on GPU 1, with 81558 MiB",
         {**taken(GpuMemoryUse("cuda", 0, 80000, (HOLDER,)), GpuMemoryUse("cuda", 1, 1)),
          "stack": StackSeen(running=("redis", "producer-0"))}),
    one_gpu("ok", "least on GPU 0, with 41559 MiB", GpuMemoryUse("cuda", 0, 40000, (HOLDER,)),
            running=("redis", "producer-0")),
    one_gpu("fail", "but its engines need 36701", GpuMemoryUse("cuda", 0, 60000, (HOLDER,)),
            running=("redis", "producer-0")),
    one_gpu("fail", "but its engines need 73403", GpuMemoryUse("cuda", 0, 60000, (HOLDER,))),
    cuda("gpu.memory", "fail", "GPU 1 has 21559 of 81559 MiB free",
         taken(GpuMemoryUse("cuda", 0, 1), GpuMemoryUse("cuda", 1, 60000, (HOLDER,)))),
    cuda("gpu.memory", "fail", "gpu_memory: 0.25",
         taken(GpuMemoryUse("cuda", 0, 60000, (HOLDER,)))),
    cuda("gpu.memory", "warn", "pid 8 (x)",
         taken(GpuMemoryUse("cuda", 0, 900, ("pid 8 (x)",)), GpuMemoryUse("cuda", 1, 1))),
    cuda("gpu.memory", "unknown", "GPU 1", taken(GpuMemoryUse("cuda", 0, 1))),
    cuda("gpu.numa", "ok", "producer-0 on node 0, consumer-0 on node 1", numa(g0=0, g1=1)),
    Case("gpu.numa", "warn", "producer-0 on node 0+1", numa(g0=0, g1=1, g2=1, g3=1),
         {"vendor": "cuda", "gpus": 4, "tp": 2}, machine_with("cuda", 0, 1, 2, 3)),
    *tried_cases("ports.free", "ports"),
    *tried_cases("memory.host", "memory"),
    *tried_cases("memory.plan", "plan"),
    Case("memory.store", "ok", "a prompt has"),
    Case("memory.store", "warn", "Redis holds 2560 tokens of KV", {},
         {"redis": {"memory_gib": 1}, "engine": {"kv_cache_gib": 40}},
         model=LARGE, machine=replace(MACHINE, memory_mib=1 << 20)),
    Case("disk.images", "ok", "all images are on this machine",
         {"images": (IMAGE,), **disks(images=DISK)}),
    Case("disk.images", "ok", "take 20.0 GiB", {"images": (MISSING,), **disks(images=DISK)}),
    Case("disk.images", "fail", "5.0 GiB free",
         {"images": (MISSING,), **disks(images=FolderSeen("/d", 5120))}),
    Case("disk.images", "warn", "(estimated)",
         {"images": (replace(MISSING, size_sure=False),), **disks(images=FolderSeen("/d", 5120))}),
    Case("disk.images", "warn", "may fill the disk",
         {"images": (MISSING,), **disks(images=FolderSeen("/d", 30 * 1024))}),
    Case("disk.images", "unknown", "is not visible from here",
         {"images": (MISSING,), **disks(images=FolderSeen("/d", None))}),
    Case("disk.images", "unknown", "size of your own image",
         {"images": (replace(MISSING, size_mib=None),), **disks(images=DISK)}),
    hub_disk("ok", "takes 11.0 GiB", replace(DISK, writable=True)),
    hub_disk("ok", "the model is on this machine", DISK, cached=True),
    hub_disk("fail", "but only 100 MiB free at /hub", FolderSeen("/hub", 100)),
    hub_disk("fail", "may not write to /hub", FolderSeen("/hub", 99999, writable=False)),
    hub_disk("unknown", "an unknown number", FolderSeen("/hub", None)),
    Case("disk.state", "ok", "100.0 GiB free", disks()),
    Case("disk.state", "warn", "only 900 MiB", disks(state=FolderSeen("/s", 900))),
    Case("disk.state", "fail", "only 10 MiB", disks(state=FolderSeen("/s", 10))),
    Case("disk.state", "fail", "may not write to /s", disks(state=FolderSeen("/s", 9999, False))),
    Case(
        "disk.state", "unknown", "free space at /s is unknown", disks(state=FolderSeen("/s", None))
    ),
    Case("host.files", "ok", "at most 4096 open files", host(open_files=4096)),
    Case("host.files", "ok", "no limit", host(open_files=None)),
    Case("host.files", "warn", "at most 1024 open files", host(open_files=1024)),
    Case("host.files", "warn", "at most 65 open files", host(open_files=65)),
    Case("host.files", "fail", "at most 64 open files", host(open_files=64)),
    cuda("host.locks", "ok", "may be locked", host(locked_kib=None)),
    cuda("host.locks", "warn", "8192 KiB may be locked", host(locked_kib=8192)),
    Case("host.huge_pages", "ok", "madvise", host(huge_pages="madvise")),
    Case("host.huge_pages", "ok", "your own Redis runs elsewhere", host(huge_pages="always"),
         {"redis": {"url_file": "/url"}}),
    Case("host.huge_pages", "warn", "echo madvise", host(huge_pages="always")),
    Case("host.overcommit", "ok", "is 0", host(overcommit=0)),
    Case("host.overcommit", "warn", "is 2", host(overcommit=2)),
    Case("host.shm", "ok", "64 MiB free", host(shm_free_mib=64)),
    Case("host.shm", "warn", "32 MiB free", host(shm_free_mib=32)),
    Case("host.shm", "ok", "takes 1536", host(shm_free_mib=2048), {"connector": "lmcache-mp"}),
    Case(
        "host.shm", "fail", "the KV of the engines and of one more that restarts takes 1536",
        host(shm_free_mib=1400),
        {"connector": "lmcache-mp"},
    ),
    Case("host.shm", "warn", "4 ranks may use 4096", host(shm_free_mib=64), {"tp": 2}),
    Case(
        "host.shm", "warn", "4 ranks may use 7168", host(shm_free_mib=7000),
        {"connector": "lmcache-mp", "tp": 2},
    ),
    Case("host.numa", "ok", "one NUMA node", host(numa={0: "0-15"})),
    Case("host.numa", "ok", "node 1: CPUs 8-15", host(numa=TWO_NODES, numa_balancing=True)),
    cuda("host.numa", "warn", "moves pages", host(numa=TWO_NODES, numa_balancing=True)),
    Case("host.cpu", "ok", "AVX-512, AMX", host()),
    Case("host.cpu", "warn", "AVX2 but no AVX-512", host(cpu_flags=frozenset({"avx2"}))),
    Case("host.cpu", "fail", "no AVX2", host(cpu_flags=frozenset({"sse"}))),
    Case("host.cpu", "unknown", "aarch64", host(architecture="aarch64")),
    Case("host.quota", "ok", "8 CPUs", host(cpus=8)),
    Case("host.quota", "warn", 'OMP_NUM_THREADS: "2"', host(cpus=16, cpu_quota=4.0)),
    Case("host.clock", "ok", "synchronized with a time server", host(now=1.8e9, synced=True)),
    Case("host.clock", "ok", "synchronization unknown", host(now=1.8e9)),
    Case("host.clock", "warn", "not synchronized with a time server",
         host(now=1.8e9, synced=False)),
    Case("host.clock", "warn", "before pdkit's first release", host(now=0.0)),
    hub_case("ok", "is in /hub", cached=True),
    hub_case("ok", "up downloads it"),
    hub_case("ok", "https://h has it", asked=True, address="https://h"),
    hub_case("warn", "does not answer", asked=True, trouble="https://h does not answer"),
    hub_case("fail", "HF_HUB_OFFLINE", offline=True),
    hub_case("fail", "Hugging Face refuses owner/model", asked=True, refused=True, trouble="403"),
    hub_case("ok", "through HTTPS_PROXY", rule="hub.proxies", proxies=("HTTPS_PROXY",)),
    hub_case("warn", "not in the engines' containers", rule="hub.proxies",
             proxies=("HTTPS_PROXY",), fields=COMPOSE),
    *tried_cases("engine.programs", "programs"),
    *tried_cases("engine.versions", "versions", brings_usage=True),
    Case("engine.plug_ins", "ok", "vLLM 0.25.1", {"code": CODE}),
    Case("engine.plug_ins", "fail", "lack LMCache's storage_plugins",
         {"code": replace(CODE, plugs={**PLUGS, "LMCache's storage_plugins": False})}),
    Case("engine.plug_ins", "ok", "vLLM 0.25.1",
         {"code": replace(CODE, plugs={**PLUGS, "LMCache's storage_plugins": False})},
         {"redis": {"client": "lmcache"}}),
    Case("engine.connector", "ok", "LMCache's server, works here too: docs/how-to/multiprocess-"),
    Case("engine.connector", "ok", "would be refused here: --layerwise: true does not ", {},
         {"layerwise": True}),
    Case("engine.connector", "ok", "issues/4025); no release without it is known", {}, COMPOSE),
    Case("engine.native", "ok", "not needed", {"code": replace(CODE, native_trouble="no CUDA")}),
    Case("engine.native", "unknown", "it hangs", {"code": EngineCode("/py", trouble="it hangs")}),
    cuda("engine.native", "ok", "c_ops loads", {"code": CUDA_CODE}),
    cuda("engine.native", "warn", "undefined symbol",
         {"code": replace(CUDA_CODE, native_trouble="undefined symbol")}),
    cuda("engine.native", "warn", "does not load: it is missing", {"code": CODE}),
    rocm("engine.native", "ok", "loads", {"code": replace(ROCM_CODE, native_archs=("gfx942",))}),
    rocm("engine.native", "fail", "LMCACHE_ROCM_ARCH='gfx942'",
         {"code": replace(ROCM_CODE, native_archs=("gfx90a",))}),
    rocm("engine.native", "warn", "would be built for gfx90a",
         {"images": (replace(MISSING, archs=("gfx90a",)),)}),
    *tried_cases("engine.fixes", "fixes"),
    *tried_cases("redis.answers", "redis", brings_usage=True),
    redis("redis.policy", "ok", "allkeys-lru"),
    Case("redis.break_even", "ok", "from 512 tokens on",
         {"measured": LastBenchmark({"one": None, "two": 512}, "2026-11-22T10:00:00", "/bench/a")}),
    Case("redis.break_even", "warn", "measured here on 2026-11-22: computing KV is faster",
         {"measured": LastBenchmark({"one": None}, "2026-11-22T10:00:00", "/bench/a")}),
    redis("redis.policy", "warn", "policy of your Redis is noeviction", policy="noeviction"),
    redis("redis.policy", "warn", "no maxmemory", max_memory_bytes=0),
    redis("redis.policy", "unknown", "does not let this user see maxmemory-policy", policy=None),
    redis("redis.size", "ok", "8.0 GiB"),
    redis("redis.size", "warn", "0.5 GiB", max_memory_bytes=2**29),
    redis("redis.persistence", "ok", "nothing is written"),
    redis("redis.persistence", "ok", "may not see whether it takes snapshots", snapshots=None),
    redis("redis.persistence", "warn", "appendonly yes", append_only=True),
    redis("redis.persistence", "warn", 'save "3600 1"', snapshots="3600 1"),
    redis("redis.persistence", "unknown", "does not let this user see whether it writes",
          append_only=None),
    redis("redis.version", "ok", "7.2.4"),
    redis("redis.version", "warn", "4.0.9", version="4.0.9"),
    Case("stack.up", "ok", "no stack 'pdkit' yet", {"stack": StackSeen()}),
    Case("stack.up", "ok", "is up already", {"stack": StackSeen(running=("redis",))}),
    Case("stack.up", "ok", "starts router",
         {"stack": StackSeen(running=("redis",), missing=("router",))}),
    Case("stack.up", "ok", "was started before", {"stack": StackSeen(state=True)}),
    Case("stack.up", "warn", "deploy down --name pdkit", {"stack": StackSeen(left=2)}),
    Case("stack.up", "fail", "it is broken", {"outcomes": {"state": BAD}}),
    Case("stack.lock", "ok", "no other command", {"stack": StackSeen()}),
    Case("stack.lock", "fail", "another deploy command", {"stack": StackSeen(locked=True)}),
    Case("stack.engines", "ok", "run what was planned", {"stack": StackSeen(reports=2)}),
    Case("stack.engines", "warn", "the engines differ: vllm: producer-0 1; consumer-0 2",
         {"stack": StackSeen(reports=2, apart=("vllm: producer-0 1; consumer-0 2",))}),
    Case("stack.engines", "warn", "what was planned: vllm: producer-0, consumer-0 2 (1 was planned",
         {"stack": StackSeen(
             reports=2, unplanned=("vllm: producer-0, consumer-0 2 (1 was planned)",))}),
]  # fmt: skip


def seen_in(case: Case) -> Seen:
    fields = {"vendor": "cpu", "runtime": "process", **case.fields}
    spec = StackSpec.model_validate(fields)
    plan: Plan = make_plan(spec, case.model, case.machine)
    connector = connector_choice(plan, case.machine, asked=spec.connector is not None)
    return Seen(spec=spec, inventory=case.machine, plan=plan, connector=connector, **case.seen)


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA L40S", True),
        ("Tesla V100-SXM2-32GB", True),
        ("NVIDIA GeForce RTX 4090", False),
        ("NVIDIA RTX A6000", False),
    ],
)
def test_newer_libraries_are_for_data_centre_gpus(name: str, takes: bool) -> None:
    case = cuda("gpu.driver", "", "", OLD_DRIVER, engine=COMPATIBLE)
    gpus = tuple(replace(gpu, name=name) for gpu in case.machine.gpus)
    verdict = BY_ID["gpu.driver"].judge(
        seen_in(replace(case, machine=replace(case.machine, gpus=gpus)))
    )
    assert verdict is not None
    assert verdict.status == ("warn" if takes else "fail")
    assert ("VLLM_ENABLE" in verdict.message) is takes and "VLLM_ENABLE" not in verdict.fix


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule} {case.status} {case.words}")
def test_each_case_has_its_status_and_words(case: Case) -> None:
    verdict = BY_ID[case.rule].judge(seen_in(case))
    assert verdict is not None
    assert verdict.status == case.status, verdict
    assert case.words in f"{verdict.message} | {verdict.why} | {verdict.fix}"
    if case.status in ("warn", "fail"):
        assert verdict.why and verdict.fix, "what it does, and what to do"
    else:
        assert not verdict.fix


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
class TestTheTable:
    def test_every_status_of_the_reference_has_a_case_and_no_other(self, rule: Any) -> None:
        had = {case.status for case in CASES if case.rule == rule.id} - {"unknown"}
        documented = {"fail": rule.fails, "warn": rule.warns, "ok": "always"}
        assert had == {status for status, said in documented.items() if said}

    def test_a_rule_is_silent_without_data(self, rule: Any) -> None:
        bare = Seen(StackSpec(), MACHINE)
        assert rule.judge(bare) is None

    def test_the_reference_describes_it(self, rule: Any) -> None:
        assert rule.looks_at and (rule.fix or not (rule.fails or rule.warns))


def test_ids_are_unique_and_name_their_area() -> None:
    assert len(BY_ID) == len(RULES)
    assert all(rule.id.count(".") == 1 for rule in RULES)


def test_findings_about_the_spec_come_first() -> None:
    def one(name: str, *, usage: bool, status: Any = "fail") -> Finding:
        return Finding(id=name, area="host", status=status, message="m", usage=usage)

    found = [one("a", usage=False), one("b", usage=True), one("c", usage=False, status="warn")]
    assert [finding.id for finding in failed(found)] == ["b", "a"]
    assert [finding.id for finding in warned(found)] == ["c"]


def test_assumed_gpus_are_not_judged() -> None:
    assumed = replace(machine_with("cuda", 0, 1))
    gpus = tuple(replace(gpu, name="assumed") for gpu in assumed.gpus)
    case = cuda("gpu.containers", "fail", "", {"gpus": FREE_GPUS}, ways=(), **COMPOSE)
    found = findings(seen_in(replace(case, machine=replace(case.machine, gpus=gpus))))
    assert not [one for one in found if one.area == "gpu"]


@pytest.mark.parametrize(
    ("arch", "built", "runs"),
    [
        ("9.0", ("sm_80", "sm_90"), True),
        ("8.9", ("sm_86",), True),
        ("8.6", ("sm_89",), False),
        ("12.0", ("sm_90",), False),
        ("12.0", ("sm_90", "compute_90"), True),
        ("9.0", ("compute_100",), False),
        ("10.3", ("sm_100",), True),
        ("10.3", ("sm_100a",), False),
        ("10.0", ("sm_100a",), True),
        ("9.0", ("nonsense",), False),
    ],
)
def test_code_runs_on_matching_gpu_architectures(
    arch: str, built: tuple[str, ...], runs: bool
) -> None:
    assert runs_on(Gpu(0, "cuda", "x", 1, arch=arch), built) is runs


@pytest.mark.parametrize("fields", [{"connector": "lmcache-mp"}, {"topology": "2a"}])
def test_engines_without_lmcache_inside_get_no_note_on_its_end(fields: dict[str, Any]) -> None:
    assert BY_ID["engine.connector"].judge(seen_in(Case("", "", "", {}, fields))) is None


def test_a_verdict_says_ok_without_a_fix() -> None:
    judge: Callable[[Seen], Verdict | None] = BY_ID["ports.free"].judge
    verdict = judge(Seen(StackSpec(), MACHINE, outcomes={"ports": StepOutcome(says="free")}))
    assert verdict == Verdict("ok", "free")
