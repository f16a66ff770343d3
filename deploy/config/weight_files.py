"""Which weight files vLLM loads of a model that has its weights in several formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

_TRAINER_STATE = (
    "training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt",
)  # fmt: skip

# Returns the files that an index names, by the name of the index.
ReadIndex = Callable[[str], Collection[str]]


@dataclass(frozen=True)
class _Format:
    """One format: its files, and the index that names those which belong together."""

    pattern: str
    index: str = ""


_MISTRAL = _Format("consolidated*.safetensors", "consolidated.safetensors.index.json")
_SAFETENSORS = _Format("*.safetensors", "model.safetensors.index.json")
_BIN, _PT = _Format("*.bin"), _Format("*.pt")
_HUGGING_FACE = (_SAFETENSORS, _BIN, _PT)
_UNUSUAL = (_Format("*.pth"), _Format("*.gguf"))
# In the order in which vLLM's DefaultModelLoader looks for them, by its `--load-format`; the first
# of which there are files is loaded.
_AUTO = (_MISTRAL, *_HUGGING_FACE, *_UNUSUAL)
_FORMATS = {
    "auto": _AUTO,
    "hf": _HUGGING_FACE,
    "safetensors": (_SAFETENSORS,),
    "fastsafetensors": (_SAFETENSORS,),
    "instanttensor": (_SAFETENSORS,),
    "runai_streamer": (_SAFETENSORS,),
    "mistral": (_MISTRAL,),
    "pt": (_PT,),
    "npcache": (_BIN,),
}
# Saved by vLLM itself, each rank's part in files of its own: an index beside them is of the
# checkpoint that they were made from. All other formats are as 'auto'.
_SAVED_BY_RANK = {
    "sharded_state": (_Format("*.safetensors"),),
    "runai_streamer_sharded": (_Format("*.safetensors"),),
}


@dataclass(frozen=True)
class ChosenWeights:
    """The weight files that vLLM loads.

    Attributes:
        files: their names, sorted; all are there.
        missing: names of files that the index lists and that are not there.
        complete: `files` are all that vLLM would download, too: none in subfolders.
    """

    files: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    complete: bool = False


def chosen_weights(
    names: Iterable[str], read_index: ReadIndex, load_format: str = "auto"
) -> ChosenWeights:
    """Choose among the files of a model's folder as vLLM does.

    Mistral's models have the same weights twice: `consolidated.safetensors` and shards that an
    index names. Others have them in safetensors and as pickles.
    """
    there = sorted(name for name in names if "/" not in name)
    for one in {**_FORMATS, **_SAVED_BY_RANK}.get(load_format, _AUTO):
        found = [name for name in there if fnmatch(name, one.pattern)]
        found = [name for name in found if name not in _TRAINER_STATE]
        if not found:
            continue
        if one.index not in there:
            return ChosenWeights(tuple(found), complete=one is _MISTRAL)
        indexed = read_index(one.index)
        files = tuple(name for name in found if name in indexed)
        return ChosenWeights(files, tuple(sorted({*indexed} - {*found})), complete=True)
    return ChosenWeights()


def reads_checkpoint(load_format: str) -> bool:
    """Tell whether vLLM loads a checkpoint as published, with every file that its index names."""
    return load_format in _FORMATS


def weights_in(folder: Path, load_format: str = "auto") -> ChosenWeights:
    """Choose among the files of a folder; an index that cannot be understood names none.

    Raises:
        OSError: the folder cannot be read.
    """
    names = [file.name for file in folder.iterdir() if file.is_file()]
    return chosen_weights(names, lambda name: indexed_files(folder / name), load_format)


def indexed_files(index: Path) -> Collection[str]:
    """Return the files that an index names; none if it cannot be understood."""
    try:
        return indexed_in(index.read_bytes())
    except OSError:
        return ()


def indexed_in(content: bytes) -> Collection[str]:
    """Return the files that the content of an index names; none if it cannot be understood."""
    try:
        return {str(name) for name in json.loads(content)["weight_map"].values()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ()
