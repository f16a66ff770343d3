"""Keys of the store: shared by all engines of a stack, and by no other kind of KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deploy.planning.inventory import Inventory
from deploy.stack.container_layout import ContainerLayout
from deploy.stack.layout import Layout
from deploy.stack.namespace import hash_seed
from deploy.workflows.prepare import Prepared
from deploy.workflows.software import Containers
from tests.unit.conftest import HOME, KIT
from tests.unit.stack.cases import FOLDER_MODEL, machine_with
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
    "the space": {"engine": {"kv_cache_gib": 5}},
    "the share": {"engine": {"gpu_memory": 0.5}},
    "the context": {"engine": {"max_model_len": 4096}},
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


def test_engines_of_a_stack_agree(contained: Make, prepared: Callable[..., Prepared]) -> None:
    assert len(seeds(contained(topology="2p3d", **USUAL).prepared)) == 1
    assert len(seeds(prepared(topology="2p3d"))) == 1


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
