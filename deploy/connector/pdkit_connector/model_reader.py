"""What the installed vLLM makes of models' config.json.

`python -m pdkit_connector.model_reader FOLDER...` prints a JSON object for each folder, one a line.
It loads no weights and asks no hub: it makes vLLM's own configuration of a folder that holds
config.json, builds the model without memory for its weights (PyTorch's device `meta`) and asks each
layer for its KV cache, as an engine does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# vLLM's classes of a layer's KV → their kind. Others are called by their own names.
_KINDS = {
    "FullAttentionSpec": "full",
    "SinkFullAttentionSpec": "full",
    "MLAAttentionSpec": "mla",
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "chunk",
    "MambaSpec": "state",
    "CrossAttentionSpec": "cross",
}
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_NO_USAGE_STATS": "1",
}


def main(argv: list[str] | None = None) -> int:
    """Read models and print what vLLM makes of them; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pdkit_connector.model_reader")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--hf-overrides", default="{}", help="JSON, as vLLM's option")
    options = parser.parse_args(argv)
    os.environ.update(_QUIET)
    overrides = json.loads(options.hf_overrides)
    for folder in options.folders:
        with contextlib.redirect_stdout(sys.stderr):  # vLLM logs to stdout
            answer = read_model(folder, overrides)
        print(json.dumps(answer), flush=True)
    return 0


def read_model(folder: Path, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what vLLM makes of the config.json in a folder.

    `trouble` is why vLLM refuses it; without it, `layers` is None where vLLM could not build the
    model here, for the reason in `unbuilt`.
    """
    logging.disable(logging.ERROR)
    import vllm

    _inspect_here()
    answer: dict[str, Any] = {"vllm": vllm.__version__}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = [name for name in config.get("architectures") or () if isinstance(name, str)]
    if unloadable := _why_unloadable(names):
        return {**answer, "architecture": " or ".join(names), "trouble": unloadable}
    try:
        model = _model_config(folder, overrides or {})
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is vLLM's verdict
        return {**answer, "architecture": " or ".join(names), "trouble": _first_line(exc)}
    answer |= {
        "architecture": model.architecture,
        "trouble": "",
        "generates": model.runner_type == "generate" and not model.is_encoder_decoder,
        "quantization": model.quantization,
        "max_positions": _positions(model),
        "attention_heads": model.model_arch_config.total_num_attention_heads,
        "mla": bool(model.use_mla),
        "state": bool(model.is_hybrid or model.is_attention_free),
        "sparse": hasattr(model.hf_text_config, "index_topk"),
    }
    try:
        layers, groups = _kv_layers(folder, overrides or {})
        return {**answer, "layers": layers, "groups": groups, "unbuilt": ""}
    except Exception as exc:  # noqa: BLE001 - such as kernels that this machine lacks
        return {**answer, "layers": None, "groups": None, "unbuilt": _first_line(exc)}


def _inspect_here() -> None:
    """Have vLLM inspect model classes in this process, which is for that alone.

    It starts a process for each class, which takes as long as all the rest.
    """
    from vllm.model_executor.models import registry

    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda inspect: inspect()


def _why_unloadable(names: list[str]) -> str:
    """Return why none of the architectures can be loaded; "" if one can, or it is not known."""
    from vllm.model_executor.models import ModelRegistry

    known = [ModelRegistry.models[name] for name in names if name in ModelRegistry.models]
    if not known or not hasattr(known[0], "load_model_cls"):
        return ""
    try:
        known[0].load_model_cls()
    except ImportError as exc:
        return f"its code cannot be imported: {_first_line(exc)}"
    except Exception:  # noqa: BLE001 - vLLM itself says it better
        return ""
    return ""


def _model_config(folder: Path, overrides: dict[str, Any], **more: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        load_format="dummy",
        enforce_eager=True,
        hf_overrides=overrides,
        **more,
    ).create_model_config()


def _kv_layers(folder: Path, overrides: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Return the layers that keep something of a prompt, alike ones together, and into how many
    groups vLLM puts them where a connector wants all layers alike.
    """
    with _unquantized(folder) as plain:
        return _layers_of(_model_config(plain, overrides))


def _layers_of(model: Any) -> tuple[list[dict[str, Any]], int]:
    """Build the model, which may read its folder meanwhile, and collect its layers."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    config = VllmConfig(model_config=model)
    config.cache_config.sliding_window = _window_of_all(model)
    default = torch.get_default_dtype()
    try:
        with set_current_vllm_config(config), _one_rank():
            torch.set_default_dtype(torch.bfloat16)
            with _on_meta():
                built = initialize_model(config)  # noqa: F841 - layers live as long as it
        specs = _specs(config)
    finally:
        torch.set_default_dtype(default)
    alike = Counter(_described(spec) for spec in specs.values())
    layers = [{"count": count, **dict(layer)} for layer, count in alike.items()]
    return layers, _groups(config, specs)


def _positions(model: Any) -> int:
    """Return the longest context that vLLM takes; with LongRoPE its default is shorter."""
    derived, _ = model.model_arch_config.derived_max_model_len_and_key
    return max(int(model.max_model_len), 0 if derived == float("inf") else int(derived))


def _window_of_all(model: Any) -> int | None:
    """Return the window that vLLM gives every layer without its own (EngineArgs does the same)."""
    types = getattr(model.hf_text_config, "layer_types", None)
    mixed = types is not None and set(types) != {"sliding_attention"}
    return None if mixed else model.get_sliding_window()


@contextlib.contextmanager
def _unquantized(folder: Path) -> Iterator[Path]:
    """Yield a folder with the same config.json, without its quantization of weights.

    KV is the same, and no kernel is looked for that this machine may lack.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
            part.pop("compression_config", None)
    with tempfile.TemporaryDirectory() as plain:
        (Path(plain) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(plain)


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """Give vLLM the process groups of a single rank, which layers ask for."""
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"file://{folder}/rendezvous",
            backend="gloo",
        )
        try:
            initialize_model_parallel(1, 1)
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


@contextlib.contextmanager
def _on_meta() -> Iterator[None]:
    """Have modules take no memory, also those that are moved to a device while they are built."""
    import torch

    moved = torch.nn.Module.to
    torch.nn.Module.to = lambda module, *_, **__: module
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.nn.Module.to = moved


def _specs(config: Any) -> dict[str, Any]:
    """Return the KV of each layer by its name, as the engine's model runner collects it."""
    found = {}
    for name, layer in config.compilation_config.static_forward_context.items():
        if not hasattr(layer, "get_kv_cache_spec"):
            continue
        if getattr(layer, "kv_sharing_target_layer_name", None):
            continue  # it uses the KV of another layer
        if (spec := layer.get_kv_cache_spec(config)) is not None:
            found[name] = spec
    return found


def _described(spec: Any) -> tuple[tuple[str, Any], ...]:
    """Return a layer's KV: its kind, bytes a token and of which size its numbers are."""
    import torch

    name = type(spec).__name__
    kind = _KINDS.get(name, name)
    if kind == "state":
        return (("kind", kind), ("bytes", spec.page_size_bytes))
    dtype = getattr(spec, "dtype", torch.bfloat16)
    return (
        ("kind", "index" if kind == "mla" and dtype == torch.uint8 else kind),
        ("heads", getattr(spec, "num_kv_heads", 1)),
        ("bytes", getattr(spec, "real_page_size_bytes", spec.page_size_bytes) / spec.block_size),
        ("item_bytes", dtype.itemsize),
        *((("window", window),) if (window := _window(spec)) else ()),
    )


def _window(spec: Any) -> int | None:
    return getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)


def _groups(config: Any, specs: dict[str, Any]) -> int:
    """Return the groups of KV without vLLM's hybrid manager; 0 if vLLM cannot do without it."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    try:
        return len(get_kv_cache_groups(config, dict(specs)))
    except (ValueError, NotImplementedError, AssertionError):
        return 0


def _first_line(exc: BaseException) -> str:
    """Return what an exception says, without pydantic's frame around it."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("Value error, ")), "")
    text = said.removeprefix("Value error, ").partition(" [type=")[0] or (lines or [""])[0]
    return f"{type(exc).__name__}: {text}" if not said else text


if __name__ == "__main__":
    sys.exit(main())
