"""Ways out that errors of planning suggest: each leads to a plan, and says what it gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deploy.config.model import Model
from deploy.config.shape import ModelShape, OtherLayers
from deploy.errors import ConfigError, MissingGpus, NotEnoughMemory, PdkitError
from deploy.output.plan_view import plan_view
from deploy.planning.inventory import Gpu, Inventory
from deploy.planning.notes import plan_notes
from deploy.planning.plan import Plan

Make = Callable[..., Plan]

GB = 10**9


def model(name: str, gb: float, *shape: int | None) -> Model:
    return Model(f"owner/{name}", name, "hub", ModelShape(*shape), int(gb * GB))  # type: ignore[arg-type]


# Layers, attention heads, KV heads, head size, positions and, with MLA, numbers of a token.
MODELS = [
    model("qwen3-4b", 8.04, 36, 32, 8, 128, 40960),
    model("llama-8b", 16.07, 32, 32, 8, 128, 131072),
    model("phi-4-mini", 7.67, 32, 24, 8, 128, 131072),
    model("qwen3-30b-a3b", 61.07, 48, 32, 4, 128, 40960),
    model("gpt-oss-120b", 65.25, 36, 64, 8, 64, 131072),
    model("falcon-40b", 83.7, 60, 128, 8, 64, 2048),
    model("llama-70b", 141.1, 80, 64, 8, 128, 131072),
    model("minimax-m2", 230.0, 62, 48, 8, 128, 196608),
    model("kimi-k2", 595.0, 61, 64, 64, 128, 262144, 576),
    model("deepseek-v3", 688.6, 61, 128, 128, 128, 163840, 576),
]
MACHINES = [(1, 24), (1, 80), (2, 48), (4, 80), (8, 80), (8, 141), (8, 192)]
ASKED: list[dict[str, Any]] = [
    {},
    {"gpus": 1},
    {"gpus": 8},
    {"gpus": 3, "tp": 2},
    {"topology": "1p3d"},
    {"topology": "4p4d", "tp": 2},
    {"topology": "4a"},
    {"topology": "2a+redis", "tp": 4},
    {"tp": 16},
    {"tp": 3},
]
FIELDS = {
    "--connector": "connector", "--gpus": "gpus", "--topology": "topology", "--tp": "tp",
    "--producers": "producers", "--consumers": "consumers",
}  # fmt: skip


def machine(count: int, gib: int) -> Inventory:
    gpus = tuple(Gpu(index, "cuda", "a GPU", gib * 1024) for index in range(count))
    return Inventory(cpus=64, memory_mib=1 << 20, gpus=gpus)


def found(plan: Make, of: Model, on: Inventory, asked: dict[str, Any]) -> Plan | PdkitError:
    try:
        return plan(model=of, machine=on, vendor="cuda", **asked)
    except PdkitError as exc:
        return exc


def changed(asked: dict[str, Any], changes: Any) -> dict[str, Any]:
    new = {FIELDS[option]: value for option, value in changes.items()}
    return {name: value for name, value in {**asked, **new}.items() if value is not None}


@pytest.mark.parametrize("of", MODELS, ids=lambda of: of.served_name)
def test_each_suggestion_is_a_plan(plan: Make, of: Model) -> None:
    """From wherever a user starts: one step, or the model does not fit this machine."""
    ended: list[str] = []
    for size, asked in itertools.product(MACHINES, ASKED):
        first = found(plan, of, machine(*size), asked)
        if isinstance(first, Plan):
            continue
        assert isinstance(first, (MissingGpus, NotEnoughMemory, ConfigError))
        if not first.retry:
            assert "does not fit this machine" in first.message, (size, asked, first.message)
            ended.append("does not fit")
        for changes, gives in zip(first.retry, first.gives, strict=True):
            after = found(plan, of, machine(*size), changed(asked, changes))
            assert isinstance(after, Plan), (size, asked, changes, after)
            assert gives == f"fits, context of {after.max_model_len:,} tokens"
            ended.append("fits")
    assert "fits" in ended


LLAMA_8B, LLAMA_70B, DEEPSEEK = MODELS[1], MODELS[6], MODELS[-1]


@pytest.mark.parametrize(
    ("of", "size", "asked", "hint"),
    [
        (LLAMA_70B, (4, 80), {}, "--tp 2 (fits, context of 19,"),
        (LLAMA_70B, (8, 80), {"gpus": 8}, "--tp 2 (fits"),
        (LLAMA_70B, (4, 80), {"gpus": 8}, "--topology 1p1d --tp 2 (fits"),
        (LLAMA_8B, (1, 24), {}, "--topology 1a (fits, context of 26,"),
        (DEEPSEEK, (8, 141), {}, "--topology 1a --tp 8 (fits, context of 163,840 tokens)"),
        (LLAMA_8B, (2, 80), {"topology": "4a"}, "--topology 2a (fits"),
    ],
)
def test_the_nearest_way_out(
    plan: Make, of: Model, size: tuple[int, int], asked: dict[str, Any], hint: str
) -> None:
    error = found(plan, of, machine(*size), asked)
    assert isinstance(error, PdkitError)
    assert hint in error.hint


def test_a_model_that_fits_in_no_way_names_the_smallest_machine(plan: Make) -> None:
    error = found(plan, DEEPSEEK, machine(8, 80), {})
    assert isinstance(error, NotEnoughMemory)
    assert "the model does not fit this machine (8 GPUs of 80 GiB) in any split" in error.message
    assert "the least that holds it: 8 GPUs of 96 GiB or 4 GPUs of 192 GiB" in error.message
    assert error.hint == "a smaller --model, or deploy plan --inventory FILE for another machine"
    assert isinstance(found(plan, DEEPSEEK, machine(8, 96), {"topology": "1a", "tp": 8}), Plan)
    assert isinstance(found(plan, DEEPSEEK, machine(4, 192), {"topology": "1a", "tp": 4}), Plan)
    assert isinstance(
        found(plan, DEEPSEEK, machine(4, 141), {"topology": "1a", "tp": 4}), PdkitError
    )


def test_another_wrong_setting_is_named_instead(plan: Make) -> None:
    """It stops every plan, so that nobody can say what fits before it is corrected."""
    chunk = {"lmcache": {"chunk_size": 100}}
    error = found(plan, LLAMA_70B, machine(4, 80), {"gpus": 3, "tp": 2, **chunk})
    assert isinstance(error, ConfigError)
    assert error.message.startswith("lmcache.chunk_size: 100 is not a multiple")
    assert error.hint == "set lmcache.chunk_size to 96"


@pytest.mark.parametrize(
    "other",
    [{"layerwise": True}, {"save_decode_cache": True}, {"connector": "lmcache-mp"},
     {"engine": {"max_model_len": 131072}}, {"engine": {"gpu_memory": 0.5}}],
)  # fmt: skip
@pytest.mark.parametrize("of", MODELS, ids=lambda of: of.served_name)
def test_suggestions_hold_with_other_settings(plan: Make, of: Model, other: dict[str, Any]) -> None:
    """A setting that only some splits can have led in circles."""
    for size in MACHINES:
        first = found(plan, of, machine(*size), other)
        if isinstance(first, Plan):
            continue
        if not first.retry:
            assert first.hint
            continue
        for changes in first.retry:
            after = found(plan, of, machine(*size), changed(other, changes))
            assert isinstance(after, Plan), (size, other, changes, after)


def test_a_context_that_is_asked_for_finds_its_split(plan: Make) -> None:
    asked = {"engine": {"max_model_len": 131072}}
    error = found(plan, LLAMA_70B, machine(8, 80), asked)
    assert isinstance(error, PdkitError)
    assert "--tp 4 (fits, context of 131,072 tokens)" in error.hint


def test_little_room_beside_the_weights_has_a_way_out(plan: Make) -> None:
    tight = replace(LLAMA_8B, weight_bytes=int(8.36 * GB))
    error = found(plan, tight, machine(1, 24), {})
    assert isinstance(error, NotEnoughMemory), error
    assert "--topology 1a (fits" in error.hint


def test_kv_of_several_sizes_can_go_through_the_server(plan: Make) -> None:
    assert LLAMA_8B.shape
    two = replace(LLAMA_8B, shape=replace(LLAMA_8B.shape, others=(OtherLayers(4, 2, 1024),)))
    error = found(plan, two, machine(4, 80), {})
    assert isinstance(error, ConfigError)
    assert "--connector lmcache-mp (fits" in error.hint
    assert "--topology 1a (fits" in error.hint


def test_less_of_a_gpu_than_the_default_is_named(plan: Make) -> None:
    error = found(plan, LLAMA_8B, machine(1, 24), {"topology": "1a", "engine": {"gpu_memory": 0.6}})
    assert isinstance(error, NotEnoughMemory)
    assert error.hint == "set engine.gpu_memory to 0.9, or leave it out"


def test_gpus_of_another_vendor_are_suggested(plan: Make) -> None:
    with pytest.raises(MissingGpus) as caught:
        plan(model=LLAMA_8B, machine=machine(2, 80), vendor="rocm")
    assert "--vendor cuda" in caught.value.hint


def test_a_short_context_is_noted_with_a_split_that_has_a_longer(plan: Make) -> None:
    qwen = MODELS[0]
    made = plan(model=qwen, machine=machine(1, 24), vendor="cuda")
    (note,) = [line for line in plan_notes(made, machine(1, 24)) if line.startswith("context")]
    assert made.max_model_len is not None and made.max_model_len < 4096
    assert note == (
        f"context: {made.max_model_len:,} of the model's 40,960 tokens, as no more KV fits; with "
        "--topology 1a: 40,960"
    )
    asked = plan(model=qwen, machine=machine(1, 24), vendor="cuda", engine={"max_model_len": 1024})
    assert not [line for line in plan_notes(asked, machine(1, 24)) if line.startswith("context")]


def test_engines_on_cpus_hold_their_weights(plan: Make) -> None:
    """An 8B model was planned as if it had none, and was killed while it loaded."""
    bare = plan(model=model("small", 0, 32, 32, 8, 128, 131072), engine={"dtype": "bfloat16"})
    made = plan(model=LLAMA_8B, engine={"dtype": "bfloat16"})
    wide = plan(model=LLAMA_8B, engine={"dtype": "float32"})
    weights = LLAMA_8B.weight_bytes or 0
    of_weights = [one.engines[0].memory_mib - bare.engines[0].memory_mib for one in (made, wide)]
    assert of_weights == pytest.approx([weights / 2**20, 2 * weights / 2**20], rel=0.001)
    gpu = plan(model=LLAMA_8B, machine=machine(2, 80), vendor="cuda")
    assert gpu.engines[0].memory_mib < weights // 2**20


def test_ranks_on_cpus_share_the_kv_heads(plan: Make) -> None:
    one, two = (plan(model=LLAMA_8B, tp=tp, engine={"kv_cache_gib": 4}) for tp in (1, 2))
    assert one.max_model_len and two.max_model_len
    assert two.max_model_len == pytest.approx(2 * one.max_model_len, rel=0.01)


@pytest.mark.parametrize(
    ("of", "seconds"), [(LLAMA_8B, 600), (LLAMA_70B, 764.4), (DEEPSEEK, 2954.4)]
)
def test_large_weights_have_time_to_be_read(plan: Make, of: Model, seconds: float) -> None:
    fields = {"machine": machine(8, 192), "vendor": "cuda", "topology": "1a", "tp": 8}
    assert plan(model=of, **fields).ready_s == pytest.approx(seconds)
    assert plan(model=of, timeouts={"ready_s": 5}, **fields).ready_s == 5


def test_a_plan_knows_the_smallest_machines_for_its_model(
    plan: Make, prepared: Callable[..., Any]
) -> None:
    on = machine(8, 80)
    made = prepared(given=LLAMA_8B, machine=on, vendor="cuda")
    assert made.smallest_machines == ["2 GPUs of 16 GiB", "1 GPU of 24 GiB"]
    assert "least    2 GPUs of 16 GiB or 1 GPU of 24 GiB, for one engine" in plan_view(made)
    alone = {"vendor": "cuda", "topology": "1a"}
    assert plan(model=LLAMA_8B, machine=machine(2, 16), tp=2, **alone)
    assert plan(model=LLAMA_8B, machine=machine(1, 24), **alone)
    with pytest.raises(NotEnoughMemory):
        plan(model=LLAMA_8B, machine=machine(1, 16), **alone)
    assert prepared(given=LLAMA_8B).smallest_machines == [], "on CPUs"
    unknown = replace(LLAMA_8B, weight_bytes=None)
    assert prepared(given=unknown, machine=on, vendor="cuda").smallest_machines == []
