"""The files of a model's folder that decide what its KV means.

The plan has them as they were when the stack was started, and each start compares: KV of other
weights would be loaded by the same keys.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# In every format: which of them is loaded depends on vLLM's options.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
# `*.py` is the model's own code, which vLLM runs with --trust-remote-code.
_NAMES = (
    "config.json", "params.json", "hf_quant_config.json", "quantize_config.json", "*.index.json",
    "preprocessor_config.json", "processor_config.json", "*.py",
)  # fmt: skip

# Set in every engine whose model is in a folder.
DIGEST_VARIABLE = "PDKIT_MODEL_FILES"

# Name, size in bytes and modification time in nanoseconds; reading contents takes minutes.
ModelFile = tuple[str, int, int]


def model_files(folder: Path) -> tuple[ModelFile, ...]:
    """Return the files that are there; none if there is no such folder."""
    paths = sorted({path for pattern in (*_NAMES, *WEIGHTS) for path in folder.glob(pattern)})
    return tuple(file for path in paths if (file := _model_file(path)))


def _model_file(path: Path) -> ModelFile | None:
    """Return None for a folder, and for a file that is replaced at this moment."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return path.name, found.st_size, found.st_mtime_ns


def files_digest(files: Sequence[ModelFile]) -> str:
    """Return what tells these files from others."""
    return hashlib.sha256(repr([tuple(file) for file in files]).encode()).hexdigest()[:16]


def changed_files(before: Sequence[ModelFile], now: Sequence[ModelFile]) -> Iterator[str]:
    """Yield each file that is not as it was, and how."""
    was, found = ({file[0]: file for file in files} for files in (before, now))
    for name in sorted({*was, *found}):
        if name not in found:
            yield f"{name} is gone"
        elif name not in was:
            yield f"{name} is new"
        elif was[name] != found[name]:
            yield f"{name} was replaced"


def is_as_planned(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the model folder in vLLM's arguments has the files that the plan was made for.

    True, too, if the plan names none, as for a model of a hub, which is held to its revision.
    """
    planned = environ.get(DIGEST_VARIABLE)
    return not planned or planned == files_digest(model_files(Path(named_model(argv))))


def named_model(argv: Sequence[str]) -> str:
    """Return the model in vLLM's arguments, as the plan writes them; "" if there is none."""
    return next((value for name, value in itertools.pairwise(argv) if name == "--model"), "")
