"""Keys of the store: shared by all engines of a stack, and by no other kind of KV."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from deploy.planning.inventory import Inventory
from deploy.stack import namespace
from deploy.stack.container_layout import ContainerLayout
from deploy.stack.layout import Layout
from deploy.stack.namespace import UNSEEDED_ARGS, UNSEEDED_ENV, hash_seed, seeded
from deploy.workflows.prepare import Prepared
from deploy.workflows.software import Containers
from tests.unit.conftest import HOME, KIT
from tests.unit.stack.cases import FOLDER_MODEL, TOKEN, machine_with
from tests.unit.stack.conftest import Case

Make = Callable[..., Case]


def seeds(prepared: Prepared) -> set[str]:
    return {
        service.env["PYTHONHASHSEED"]
        for service in prepared.stack.services
        if service.role in ("producer", "consumer")
    }


def seed(prepared: Prepared) -> str:
    (only,) = seeds(prepared)
    return only


USUAL: dict[str, Any] = {"given": FOLDER_MODEL}
DIFFERENT: dict[str, dict[str, Any]] = {
    "the stack": {"name": "other"},
    "the vendor": {"vendor": "rocm"},
    "the image": {"image": "mine/vllm:1"},
    "the model": {"given": replace(FOLDER_MODEL, ref="/data/models/Other")},
    "the model's content": {"given": replace(FOLDER_MODEL, version="fedcba9876543210")},
    "the type of numbers": {"engine": {"dtype": "float16"}},
    "the number of ranks": {"tp": 2},
    "the block": {"engine": {"block_size": 32}},
    "the chunk": {"lmcache": {"chunk_size": 512}},
    # Models with LongRoPE choose their frequencies by it.
    "the context": {"engine": {"max_model_len": 4096}},
    "the context that memory leaves": {"engine": {"kv_cache_gib": 5}},
    "layer by layer": {"layerwise": True},
    "an argument": {"engine": {"args": ["--kv-cache-dtype", "fp8"]}},
    "another argument": {"engine": {"args": ["--kv-cache-dtype", "auto"]}},
    "a pin taken off": {"engine": {"args": ["--async-scheduling"]}},
    "another pin taken off": {"engine": {"env": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}},
    "a variable": {"engine": {"env": {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}}},
}
ALIKE: dict[str, dict[str, Any]] = {
    "ports": {"port": 9000},
    "the address": {"bind": "0.0.0.0", "allow_keyless": True},  # noqa: S104 - not bound here
    "patience": {"timeouts": {"ready_s": 5}},
    "the number of engines": {"topology": "2p3d"},
    "the store's size": {"redis": {"memory_gib": 9}},
    "the staging": {"lmcache": {"staging_gib": 1}},
    "the space": {"engine": {"kv_cache_gib": 20}},
    "the share": {"engine": {"gpu_memory": 0.5}},
    "the collector of traces": {"tracing": {"otlp_endpoint": "http://172.17.0.1:4318"}},
    "what consumers save": {"save_decode_cache": True},
    "which GPUs": {"machine": machine_with("cuda", 4, 5)},
    "how GPUs are given": {"gpu_access": "cdi"},
    "the other images": {"redis": {"image": "redis:7"}, "router": {"image": "mine/router:1"}},
    "one GPU for all": {"gpus": 1},
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_other_kv_has_other_keys(contained: Make, change: str) -> None:
    fields = {**USUAL, **DIFFERENT[change]}
    assert seed(contained(**fields).prepared) != seed(contained(**USUAL).prepared)


def test_different_kv_has_different_keys(contained: Make) -> None:
    every = [seed(contained(**{**USUAL, **fields}).prepared) for fields in DIFFERENT.values()]
    assert len(set(every)) == len(DIFFERENT)


@pytest.mark.parametrize("change", ALIKE)
def test_the_same_kv_has_the_same_keys(contained: Make, change: str) -> None:
    fields = {**USUAL, **ALIKE[change]}
    assert seed(contained(**fields).prepared) == seed(contained(**USUAL).prepared)


PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "LMCache's server": {"connector": "lmcache-mp"},
    "traces": {"tracing": {"otlp_endpoint": "http://172.17.0.1:4318"}},
    "aggregated": {"topology": "2a+redis"},
}


@pytest.mark.parametrize(
    ("vendor", "kind"),
    [
        (vendor, kind)
        for vendor in ("cpu", "cuda", "rocm")
        for kind in PLANS
        # LMCache's server cannot reach engines in other containers there.
        if (vendor, kind) != ("rocm", "LMCache's server")
    ],
)
def test_engines_of_a_stack_agree(contained: Make, vendor: str, kind: str) -> None:
    made = contained(**{"vendor": vendor, "topology": "2p3d", **USUAL, **PLANS[kind]}).prepared
    every = [seeded(engine, made.plan, made.layout) for engine in made.plan.engines]
    assert all(one == every[0] for one in every)


def test_hosts_of_a_stack_agree(prepared: Callable[..., Prepared]) -> None:
    """One has the producers, the other the consumers, more cores and other ports and folders."""

    def host(cpus: int, port: int, **fields: Any) -> Prepared:
        return prepared(
            given=FOLDER_MODEL,
            machine=Inventory(cpus=cpus, memory_mib=65536),
            redis={"url_file": "/home/user/redis-url"},
            port=port,
            **fields,
        )

    engines = [{"role": "producer", "url": "http://10.0.0.1:8010"}]
    bound = {"engine": {"bind": "10.0.0.1", "key_file": "/home/user/engine-key"}}
    first = host(8, 8000, producers=1, consumers=0, **bound)
    second = host(
        32,
        9000,
        producers=0,
        consumers=2,
        router={"engines": engines},
        engine={"key_file": "/home/user/engine-key"},
    )
    assert hash_seed(first.plan, first.layout) == hash_seed(second.plan, second.layout)


def options_of(argv: Iterable[str]) -> set[str]:
    return {argument for argument in argv if argument.startswith("-")}


@pytest.mark.parametrize("runtime", ["process", "compose"])
@pytest.mark.parametrize("vendor", ["cpu", "cuda", "rocm"])
def test_what_the_plan_gives_engines_is_in_the_seed_or_a_named_exception(
    contained: Make, runtime: str, vendor: str
) -> None:
    made = contained(vendor=vendor, runtime=runtime, **USUAL).prepared
    found = seeded(made.plan.engines[0], made.plan, made.layout)
    hashed = {option for option, *_ in found["planned_args"]}
    for service in made.stack.services:
        if service.role in ("producer", "consumer"):
            assert options_of(service.argv) - hashed <= UNSEEDED_ARGS.keys()
            assert service.env.keys() - found["env"].keys() <= UNSEEDED_ENV.keys()
    assert {"--max-model-len", "--dtype", "--block-size", "--tensor-parallel-size"} <= hashed
    assert not hashed & UNSEEDED_ARGS.keys() and not found["env"].keys() & UNSEEDED_ENV.keys()


def test_a_new_argument_or_variable_of_the_plan_is_in_the_seed(
    contained: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = contained(**USUAL).prepared
    argv, env = namespace.planned_argv, namespace.engine_env
    before = hash_seed(made.plan, made.layout)
    monkeypatch.setattr(namespace, "planned_argv", lambda *args: (*argv(*args), "--new", "1"))
    with_argument = hash_seed(made.plan, made.layout)
    monkeypatch.setattr(namespace, "engine_env", lambda *args: {**env(*args), "NEW": "1"})
    assert len({before, with_argument, hash_seed(made.plan, made.layout)}) == 3


def test_every_exception_is_something_that_engines_get(
    contained: Make, prepared: Callable[..., Prepared]
) -> None:
    every = [
        *(contained(vendor=vendor, **fields).prepared for vendor, fields in [
            *(("cuda", fields) for fields in PLANS.values()),
            ("cuda", {"runtime": "process"}),
            ("rocm", {}),
            ("cuda", {"model": "owner/name", "environ": {"HF_TOKEN": TOKEN}}),
        ]),
        prepared(),
    ]  # fmt: skip
    engines = [
        service
        for made in every
        for service in made.stack.services
        if service.env.get("PYTHONPATH")
    ]
    args = {option for service in engines for option in options_of(service.argv)}
    assert UNSEEDED_ARGS.keys() <= args
    assert UNSEEDED_ENV.keys() <= {name for service in engines for name in service.env}
    assert all({**UNSEEDED_ARGS, **UNSEEDED_ENV}.values())


def test_every_seed_is_one_that_python_takes(contained: Make) -> None:
    for fields in DIFFERENT.values():
        assert 0 <= int(seed(contained(**{**USUAL, **fields}).prepared)) < 2**32


def test_the_order_of_variables_does_not_count(contained: Make) -> None:
    one, other = ({"A": "1", "B": "2"}, {"B": "2", "A": "1"})
    first, second = (contained(engine={"env": env}, **USUAL).prepared for env in (one, other))
    assert seed(first) == seed(second)


def test_the_content_of_an_image_counts_beside_its_name(contained: Make) -> None:
    """The same tag, pulled or built again, may hold another version."""
    made = contained(**USUAL).prepared
    software = made.facts.software
    assert isinstance(software, Containers)

    def layout(engine_id: str) -> Layout:
        images = replace(software.images, engine_id=engine_id)
        run_dir = HOME.stack("pdkit").run_dir
        return ContainerLayout(run_dir, images, "1:1", KIT, HOME.cache)

    one, same, other = (
        hash_seed(made.plan, layout(text)) for text in ("sha256:a", "sha256:a", "sha256:b")
    )
    assert one == same != other


def test_stacks_with_other_pins_do_not_share_keys(contained: Make) -> None:
    made = contained(**USUAL).prepared
    vendor = made.plan.vendor
    rows = [
        vendor,
        *(replace(vendor, pins=(pin,)) for pin in vendor.pins),
        replace(vendor, pins=()),
    ]
    layout = ContainerLayout(
        HOME.stack("pdkit").run_dir,
        made.facts.software.images,
        "1:1",
        KIT,
        HOME.cache,
    )
    every = {hash_seed(replace(made.plan, vendor=row), layout) for row in rows}
    assert len(every) == len(rows)


def test_processes_and_containers_do_not_share_keys(
    contained: Make, prepared: Callable[..., Prepared]
) -> None:
    machine = Inventory(cpus=16, memory_mib=65536)
    alike = {"vendor": "cpu", "machine": machine, "given": FOLDER_MODEL}
    assert seed(prepared(**alike)) != seed(contained(**alike).prepared)
