"""Test which kinds of models run: `python -m bench.model_kinds [KIND ...]`.

Makes a tiny random model of each kind, starts a 1p1d stack on CPUs with it and runs
the whole check, or shows by which sentence `deploy up` refuses it. With two LoRA adapters it also
asks for the same prompt with each, on both engines.

Exits with 1 if a kind does otherwise than docs/reference/model-kinds.md says.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench.kit import deploy_command, deploy_json, free_ports
from deploy.runtime.home import Home
from deploy.tiny_model import ensure_tiny_model
from deploy.verify.equivalence import compare
from deploy.workflows.running import require_stack

NAME = "kinds"
ADAPTERS = ("first", "second")
_SIZES = {
    "vocab_size": 260, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
_HEAD = {"head_dim": 64}
_MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "q_lora_rank": None, "first_k_dense_replace": 4,
}  # fmt: skip
_INT8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
    "config_groups": {"all": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        "input_activations": {
            "num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True,
        },
    }},
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """One kind of model.

    Attributes:
        architecture: of transformers, with its configuration's class.
        config: what its config.json has beside the sizes.
        engine: settings of deploy.yaml under `engine`.
        refused: words of the sentence by which it is refused; "" if it must run.
    """

    architecture: tuple[str, str] = ("LlamaForCausalLM", "LlamaConfig")
    config: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""


_WINDOW = 256
KINDS: Mapping[str, Kind] = {
    "dense": Kind(config=_HEAD),
    "fp8-kv": Kind(config=_HEAD, engine={"args": ["--kv-cache-dtype", "fp8"]}),
    "int8-weights": Kind(config=_HEAD),
    "lora": Kind(config=_HEAD),
    "window-and-full": Kind(
        ("Gemma3ForCausalLM", "Gemma3TextConfig"),
        {**_HEAD, "sliding_window": _WINDOW, "layer_types": ["sliding_attention"] * 3
            + ["full_attention"]},
    ),
    "window-off": Kind(
        ("MistralForCausalLM", "MistralConfig"), {**_HEAD, "sliding_window": 2048},
        {"args": ["--disable-sliding-window"], "max_model_len": 2048},
    ),
    "window": Kind(
        ("MistralForCausalLM", "MistralConfig"), {**_HEAD, "sliding_window": _WINDOW},
        refused="sliding window",
    ),
    "mla": Kind(("DeepseekV2ForCausalLM", "DeepseekV2Config"), _MLA, refused="has MLA"),
}  # fmt: skip


def make(kind: str, folder: Path) -> Path:
    """Write a model of a kind, and its adapters where it has some; return its folder."""
    import torch
    import transformers

    of, tiny = KINDS[kind], ensure_tiny_model(folder)
    torch.manual_seed(1)
    model_class, config_class = (getattr(transformers, name) for name in of.architecture)
    config = config_class(**{**_SIZES, **of.config})
    model = model_class(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:  # so that attention chooses, and logits stay below 32
                weight.normal_(std=0.1 if "_proj" in name or config.tie_word_embeddings else 0.3)
    path = folder / kind
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, path / name)
    if kind == "int8-weights":
        _quantize(path)
    if kind == "lora":
        for number, name in enumerate(ADAPTERS):
            _write_adapter(folder / name, number)
    return path


def _quantize(path: Path) -> None:
    """Replace each layer's matrices by 8-bit numbers and a scale a row."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    for name in [name for name in weights if "_proj.weight" in name]:
        weight = weights[name].float()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        weights[name] = (weight / scale).round().to(torch.int8)
        weights[f"{name}_scale"] = scale.to(torch.bfloat16)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text("utf-8"))
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": _INT8}))


def _write_adapter(path: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(100 + seed)
    path.mkdir()
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{part}.lora_{side}.weight": torch.randn(
            shape, dtype=torch.bfloat16
        ) * 0.2
        for layer in range(_SIZES["num_hidden_layers"])
        for part, out in (("k_proj", 128), ("v_proj", 128))
        for side, shape in (("A", (8, _SIZES["hidden_size"])), ("B", (out, 8)))
    }  # fmt: skip
    save_file(weights, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["k_proj", "v_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))


def spec(kind: str, folder: Path, port: int) -> dict[str, Any]:
    """Return the deploy.yaml of a kind's stack."""
    engine = {"dtype": "bfloat16", "kv_cache_gib": 0.5, **KINDS[kind].engine}
    if kind == "lora":
        modules = [f"{name}={folder / name}" for name in ADAPTERS]
        engine["args"] = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", *modules]
    return {
        "name": NAME, "port": port, "vendor": "cpu", "runtime": "process", "topology": "1p1d",
        "model": str(folder / kind), "engine": engine,
        "lmcache": {"staging_gib": 0.25}, "redis": {"memory_gib": 0.5},
    }  # fmt: skip


@contextlib.contextmanager
def running(kind: str, home: Path) -> Iterator[str]:
    """Bring up a kind's stack, check it, and end it; yields by what sentence it was refused."""
    make(kind, home)
    file = home / "stack.yaml"
    file.write_text(yaml.safe_dump(spec(kind, home, free_ports())), encoding="utf-8")
    told = deploy_json(home, "up", "-f", str(file), "--no-check")
    if told["status"] != "ok":
        yield str(told["errors"][0]["message"])
        return
    try:
        yield ""
    finally:
        deploy_command(home, "down", "--name", NAME)


def prove(kind: str, home: Path) -> str:
    """Return what is wrong with the result of a kind; "" if nothing is."""
    with running(kind, home) as refused:
        if refused or KINDS[kind].refused:
            wanted = KINDS[kind].refused
            return "" if wanted and wanted in refused else f"refused: {refused or 'not at all'}"
        checked = deploy_json(home, "check", "--name", NAME)["data"]
        wrong = checked["failures"] or (mixed(home) if kind == "lora" else [])
        same = checked["equivalence"]
        print(
            f"{kind}: {same['compared']} answers compared, {same['max_logprob_diff']:.4f} the "
            f"largest difference, {checked['hit_rate']['eligible_rate']:.1%} eligible hit rate"
        )
        return "; ".join(wrong)


def mixed(home: Path) -> list[str]:
    """Ask for one prompt with each adapter and with none; return whose KV was mixed."""
    running = require_stack(Home.from_environ({"PDKIT_HOME": str(home)}), NAME)
    prompt = random.Random(1).choices(range(33, 127), k=1109)  # noqa: S311 - no secret
    names = ("lora", *ADAPTERS)
    with running.api(running.stack.service("producer-0")) as producer:
        computed = {name: producer.complete(name, prompt, max_tokens=16) for name in names}
    with running.api(running.stack.service("consumer-0")) as consumer:
        answers = {name: consumer.complete(name, prompt, max_tokens=16) for name in names}
    wrong = [
        f"{name}: another answer"
        for name in names
        if not compare(computed[name], answers[name]).matches
    ]
    wrong += [f"{name} loaded KV" for name in ADAPTERS if answers[name].cached_tokens]
    wrong += [
        f"{one} and {other} answer alike, so equal answers show nothing"
        for one, other in itertools.combinations(names, 2)
        if compare(computed[one], computed[other]).matches
    ]
    return wrong if answers["lora"].cached_tokens else [*wrong, "the model itself loaded nothing"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=list(KINDS), help=f"of: {', '.join(KINDS)}")
    failed = False
    for kind in parser.parse_args().kinds:
        with tempfile.TemporaryDirectory(prefix="pdkit-kinds-") as home:
            wrong = prove(kind, Path(home))
        print(f"{kind}: {wrong or 'as it must be'}", flush=True)
        failed = failed or bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
