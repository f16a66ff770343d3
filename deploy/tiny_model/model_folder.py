"""The tiny model's folder: made once, verified at each use, and made again when damaged."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from deploy.errors import MachineError
from deploy.tiny_model.shape import (
    MAX_POSITIONS,
    SEED,
    VERSION,
    config_json,
    generation_config_json,
)
from deploy.tiny_model.tokenizer import tokenizer_config_json, tokenizer_json

# Pinned, so that a change of recipe is deliberate (raise VERSION with it) and every machine's
# bytes can be compared with these.
DIGESTS: Mapping[str, str] = {
    "config.json": "cb78396def21638d2c09e7134c258f7defad347879067dd00a20d35deac89017",
    "generation_config.json": "814238c5923aec69df03419fb2a8c6238533f6df76b0e0f46d76cfe49bdec3ae",
    "model.safetensors": "753f7f1be9007d011d362f9f554dc52f9c242475d379e9f68ef3cc154dc3fc48",
    "tokenizer.json": "bb11b23138aceeaf99e2b8917ed434b573105de884e6a2d6290594961e972e40",
    "tokenizer_config.json": "af5f3bfa378053f57e7a14ec0022564c41fe2f27a12d15d32775bed4b0e9580a",
}

_LOCK_TIMEOUT_S = 60.0  # making the model takes about a tenth of a second


def model_folder_name() -> str:
    """Return the folder's name, which carries the recipe's version and a digest of all files."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(DIGESTS.items()))
    return f"tiny-llama-v{VERSION}-{hashlib.sha256(lines.encode()).hexdigest()[:12]}"


def ensure_tiny_model(cache_dir: Path) -> Path:
    """Return the folder of the tiny model under `cache_dir`, making it where it is not whole.

    Safe while other processes do the same. The folder can be read by any user, for a container's
    user is not ours.

    Raises:
        MachineError: the folder cannot be written, or holds wrong bytes right after the writing.
    """
    folder = cache_dir.absolute() / model_folder_name()
    if is_whole(folder):
        return folder
    try:
        _make_under_lock(folder)
    except OSError as exc:
        raise MachineError(
            f"the tiny model cannot be made in {cache_dir}: {exc}",
            hint="free some space there, or make the folder writable",
        ) from exc
    if not is_whole(folder):
        raise MachineError(
            f"the tiny model in {folder} does not have the expected bytes after being made",
            hint="check this machine's disk and memory",
        )
    return folder


def is_whole(folder: Path) -> bool:
    """Tell whether every file of the model is there with exactly the expected bytes."""
    return all(_digest_of(folder / name) == digest for name, digest in DIGESTS.items())


def model_files() -> dict[str, bytes]:
    """Return every file of the model by name; about 5 MB in all."""
    from deploy.tiny_model.recipe import tensors
    from deploy.tiny_model.weights import safetensors_bytes

    return {
        "config.json": _json_bytes(config_json()),
        "generation_config.json": _json_bytes(generation_config_json()),
        "model.safetensors": safetensors_bytes(tensors(), seed=SEED),
        "tokenizer.json": _json_bytes(tokenizer_json()),
        "tokenizer_config.json": _json_bytes(tokenizer_config_json(max_length=MAX_POSITIONS)),
    }


def _make_under_lock(folder: Path) -> None:
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    # FileLock's Timeout is an OSError, so the caller translates it with the others.
    with FileLock(folder.parent / f".{folder.name}.lock", timeout=_LOCK_TIMEOUT_S):
        if not is_whole(folder):  # another process may have made it while we waited
            _replace(folder, model_files())


def _replace(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files beside the folder, then put them in its place by a rename."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fresh = scratch / "fresh"
        fresh.mkdir()
        for name, content in files.items():
            (fresh / name).write_bytes(content)
            (fresh / name).chmod(0o644)
        fresh.chmod(0o755)
        if folder.exists():
            folder.rename(scratch / "damaged")  # an engine that has it open keeps its files
        fresh.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _digest_of(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=True) + "\n").encode()
