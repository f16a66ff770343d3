"""Every golden's engines in the eyes of vLLM's own parser and configuration, and of LMCache's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from deploy.config.catalog import load_catalog
from tests.conftest import REPO
from tests.gpu.goldens import engines, files_of
from tests.gpu.pairs import installed, pinned

Facts = dict[str, Any]


def test_it_is_the_pairs_own_code(facts: Facts) -> None:
    folder = installed(facts["pair"])
    assert all(Path(file).is_relative_to(folder) for file in facts["code"].values())
    assert facts["releases"] == pinned(facts["pair"])


def test_the_catalogues_gpu_images_hold_the_catalogues_pair() -> None:
    images = load_catalog().engines
    for vendor in ("cuda", "rocm"):
        assert {"vllm": images[vendor].vllm, "lmcache": images[vendor].lmcache} == pinned(
            "catalogue"
        )


def test_every_golden_of_a_vendor_is_looked_at(facts: Facts) -> None:
    """vLLM's own parser took each engine's arguments, or there were no facts."""
    vendor = facts["vendor"]
    files = {f"{file.parent.name}/{file.stem}" for file in files_of(vendor)}
    assert {
        "compose/" + vendor + "-1p1d",
        "compose/" + vendor + "-tp2",
        "process/" + vendor + "-1p1d",
    } <= files
    assert {name.split()[0] for name in facts["engines"]} == files
    assert len(facts["engines"]) == len(engines(vendor))


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def sharing(facts: Facts) -> dict[str, Facts]:
    """Return the engines that share KV."""
    return {name: engine for name, engine in facts["engines"].items() if engine["transfer"]}


def test_engines_that_share_no_kv_run_as_without_the_kit(facts: Facts) -> None:
    """Else the aggregated baseline of a benchmark would be slower than it has to be."""
    alone = {name: e for name, e in facts["engines"].items() if not e["transfer"]}
    assert {"2a" in name for name in alone} == ({True} if facts["vendor"] == "cuda" else set())
    for name, engine in alone.items():
        assert (engine["second_runner"], engine["asynchronous"]) == (True, True), name
        assert engine["prefix_caching"] is True, name


def test_every_row_of_the_identity_is_known_and_as_planned(facts: Facts) -> None:
    """Else engines of this vLLM would look alike, or each stack would warn."""
    for name, engine in sharing(facts).items():
        identity = engine["identity"]
        assert "unknown" not in identity["rows"].values(), name
        assert identity["unplanned"] == {}, name
        assert identity["rows"]["vllm"] == facts["releases"]["vllm"].partition("+")[0], name


def test_engines_of_a_stack_have_one_identity(facts: Facts) -> None:
    names: dict[str, set[str]] = {}
    for name, engine in sharing(facts).items():
        names.setdefault(name.split()[0], set()).add(engine["identity"]["key_name"])
    assert names and all(len(found) == 1 for found in names.values()), names


def test_engines_take_the_paths_that_are_proved(facts: Facts) -> None:
    for name, engine in sharing(facts).items():
        layerwise = "layerwise" in name
        assert engine["second_runner"] is False, name
        assert engine["asynchronous"] is False, name
        # A replayed graph calls no hook of a layer.
        assert engine["graphs"] == ("PIECEWISE" if layerwise else "FULL_AND_PIECEWISE"), name
        assert engine["prefix_caching"] is True, name
        assert engine["chunked_prefill"] is True, name


def test_engines_that_run_as_processes_need_no_flashinfer(facts: Facts) -> None:
    """images/cuda/process.lock leaves it out."""
    sampler = facts["sampler"]
    assert sampler["rendered"] == "forward_native"
    if facts["vendor"] == "cuda":
        assert "flashinfer" in sampler["unset"]["failed"]


def test_numbers_are_those_of_the_plan(facts: Facts) -> None:
    for name, engine in facts["engines"].items():
        argv = engine["argv"]
        assert engine["block_size"] == int(option(argv, "--block-size")), name
        assert engine["dtype"] == f"torch.{option(argv, '--dtype')}", name
        assert engine["cache_dtype"] == "auto", name
        if "--max-model-len" in argv:
            assert engine["max_model_len"] == int(option(argv, "--max-model-len")), name


# By vLLM's release and the GPU's memory; the limits of staging and stores follow from it.
BATCHED_TOKENS = {("newest", "rocm"): 16384}


def test_tokens_of_a_step(facts: Facts) -> None:
    wanted = BATCHED_TOKENS.get((facts["pair"], facts["vendor"]), 8192)
    assert {engine["batched_tokens"] for engine in facts["engines"].values()} == {wanted}


def test_ranks_are_processes_of_one_machine(facts: Facts) -> None:
    executors = {tp: found["executor"] for tp, found in facts["ranks"].items()}
    assert executors == {"1": "uni", "2": "mp", "4": "mp"}
    assert not any(found["second_runner"] for found in facts["ranks"].values())
    assert not any(found["asynchronous"] for found in facts["ranks"].values())


def test_without_the_pins_vllm_takes_the_other_paths(facts: Facts) -> None:
    for found in (facts["unpinned"], facts["lifted"]):
        assert (found["second_runner"], found["asynchronous"]) == (True, True)


def test_kv_transfer(facts: Facts) -> None:
    for name, engine in sharing(facts).items():
        consumes = "kv_both" if "save-decode-cache" in name else "kv_consumer"
        stores = "kv_both" if " engine-" in name else "kv_producer"
        assert engine["transfer"] == {
            "connector": "PatchedLMCacheConnector",
            "module": "pdkit_connector.connector",
            "role": consumes if " consumer-" in name else stores,
            "failures": "recompute",
        }, name


def test_lmcache_takes_every_setting(facts: Facts) -> None:
    for golden, settings in facts["settings"].items():
        assert {"chunk_size", "extra_config", "use_layerwise"} <= set(settings), golden
        for name, value in settings.items():
            assert value["taken"] == value["given"], (golden, name)


def test_every_metric_that_the_kit_reads_is_vllms(facts: Facts) -> None:
    sources = (REPO / "deploy").rglob("*.py")
    named = {
        name
        for source in sources
        for name in re.findall(r'"(vllm:\w+)"', source.read_text(encoding="utf-8"))
    }
    assert len(named) >= 10
    assert named <= set(facts["metrics"])
    assert "vllm:nothing_of_the_kind" not in facts["metrics"]
