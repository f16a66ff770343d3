"""An engine of a golden in the eyes of vLLM's own code: parsed arguments, configuration, steps."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# Where vLLM keeps the parser of its server, the newest first.
_PARSERS = (
    "vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",
)  # fmt: skip

# The shape of Qwen3-0.6B, with a context that every golden's --max-model-len is below.
_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 131072,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


def make_model(folder: Path) -> Path:
    """Write the configuration of a model without weights; return its folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_MODEL))
    return folder


def changed(argv: Sequence[str], **options: str) -> list[str]:
    """Return arguments with other values of options that they have."""
    argv = list(argv)
    for name, value in options.items():
        argv[argv.index("--" + name.replace("_", "-")) + 1] = value
    return argv


def parsed(argv: Sequence[str]) -> Any:
    """Return what the server's own parser makes of its arguments, validated as at a start."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    module = _parser_module()
    arguments = module.make_arg_parser(FlexibleArgumentParser()).parse_args(list(argv))
    module.validate_parsed_serve_args(arguments)
    return arguments


def _parser_module() -> Any:
    for name in _PARSERS[:-1]:
        with suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return importlib.import_module(_PARSERS[-1])


def configuration(argv: Sequence[str]) -> Any:
    """Return the configuration that the server makes of its arguments, before it starts a core."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    return AsyncEngineArgs.from_cli_args(parsed(argv)).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER
    )
