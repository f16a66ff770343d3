"""The content of a model's folder, by which every start of an engine recognizes the model.

The plan has a fingerprint of the files that decide KV, and each start compares: KV of other weights
would be loaded by the same keys. Only names, sizes and bytes count: no times, no paths, no order of
a folder's entries.

Small files are hashed whole. Weights are sampled, since reading them takes minutes: their headers,
and blocks from as many tensors as the budget allows. A fine-tune touches every tensor and is
noticed. An edit of a few rows of a tensor may lie between the samples; the canaries of `deploy
check` are for that.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

# In every format: which of them is loaded depends on vLLM's options.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
# Every configuration and tokenizer, also those that a later vLLM reads. `*.py` is the model's own
# code, which vLLM runs with --trust-remote-code.
_SMALL = ("*.json", "*.py", "*.model", "*.tiktoken", "vocab.txt", "merges.txt")
_IRRELEVANT = (
    "generation_config.json",  # defaults for sampling: KV does not depend on them
    "chat_template.json",  # turns messages into a prompt, whose tokens are in the keys
    # What a training leaves.
    "trainer_state.json", "*_results.json",
)  # fmt: skip
# Folders below the model's: of its own code only, as vLLM loads no weights from there.
_DEPTH = 3

# Set in every engine whose model is in a folder.
DIGEST_VARIABLE = "PDKIT_MODEL_FILES"

# Name, size in bytes and digest of the content.
ModelFile = tuple[str, int, str]

_MIB = 2**20
_BLOCK = 4096
_BLOCKS = 512  # of all weights together, each at least `_LEAST`
_LEAST = 8
_NUMBERED = 4  # weights with a number in their name, of which it does not say how many there are
_WHOLE = 64 * _MIB  # other files up to this size are read whole
_WHOLE_PER_BLOCK = 32 * 2**10  # weights, too, if they are no longer than this for each block
# GGUF begins with the tokenizer and the list of tensors; a zip of PyTorch's ends with a list of
# its entries and their checksums.
_GGUF_HEAD = 16 * _MIB
_ENDS = 256 * 2**10
_MOST_HEADER = 100_000_000  # by the format of safetensors
_OFFSETS = re.compile(rb'"data_offsets"\s*:\s*\[\s*(\d{1,18})\s*,\s*(\d{1,18})\s*\]')
_SHARDS = re.compile(r"-of-(\d{1,6})\b")
_GOLDEN = 0.6180339887498949

# Network disks take milliseconds for a read, during which a thread only waits.
_THREADS = 32
_READS = 8  # of one file by one thread

_UNREADABLE = "unreadable: "

# Offset and length of what is read of a file.
_Region = tuple[int, int]


def model_files(folder: Path) -> tuple[ModelFile, ...]:
    """Return the files that are there, by name; none if there is no such folder.

    A file that cannot be read has the reason in place of its digest.
    """
    names = sorted(_names(folder))
    if not names:
        return ()
    with ThreadPoolExecutor(_THREADS) as pool:
        measured = list(pool.map(lambda name: _measured(folder, name), names))
        jobs = [
            (name, regions[at : at + _READS])
            for name, (_, regions) in zip(names, measured, strict=True)
            for at in range(0, len(regions), _READS)
        ]
        read = pool.map(lambda job: _digests(folder / job[0], job[1]), jobs)
        digests: dict[str, list[str]] = {}
        for (name, _), found in zip(jobs, read, strict=True):
            digests.setdefault(name, []).append(found)
    return tuple(
        file
        for name, (size, _) in zip(names, measured, strict=True)
        if (file := _model_file(name, size, digests.get(name, [])))
    )


def files_digest(files: Sequence[ModelFile]) -> str:
    """Return what distinguishes these files from others; "" for none."""
    if not files:
        return ""
    return hashlib.sha256(repr([tuple(file) for file in files]).encode()).hexdigest()[:16]


def changed_files(before: Sequence[ModelFile], now: Sequence[ModelFile]) -> Iterator[str]:
    """Yield each file that is not as it was, and how."""
    was, found = ({file[0]: file for file in files} for files in (before, now))
    unreadable = dict(unreadable_files(now))
    for name in sorted({*was, *found}):
        if name not in found:
            yield f"{name} is gone"
        elif name in unreadable:
            yield f"{name} cannot be read: {unreadable[name]}"
        elif name not in was:
            yield f"{name} is new"
        elif was[name] != found[name]:
            yield f"{name} was replaced"


def unreadable_files(files: Sequence[ModelFile]) -> Iterator[tuple[str, str]]:
    """Yield the name of each file that could not be read, and why."""
    for name, _, digest in files:
        if digest.startswith(_UNREADABLE):
            yield name, digest.removeprefix(_UNREADABLE)


def difference_to_plan(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """Return how the model folder in vLLM's arguments differs from the plan's; "" if it does not.

    "", too, if the plan names no files, as for a model of a hub, which is held to its revision.
    """
    planned, folder = environ.get(DIGEST_VARIABLE), Path(named_model(argv))
    if not planned or planned == files_digest(files := model_files(folder)):
        return ""
    for name, reason in unreadable_files(files):
        return f"{folder / name} cannot be read: {reason}"
    return f"the files in {folder} have changed since this stack was started"


def named_model(argv: Sequence[str]) -> str:
    """Return the model in vLLM's arguments, as the plan writes them; "" if there is none."""
    return next((value for name, value in itertools.pairwise(argv) if name == "--model"), "")


def _names(folder: Path, below: str = "", depth: int = 0) -> Iterator[str]:
    try:
        entries = [entry for entry in os.scandir(folder / below) if entry.name[0] != "."]
    except OSError:
        return
    for entry in entries:
        if (not below and _counts(entry.name)) or fnmatchcase(entry.name, "*.py"):
            yield f"{below}{entry.name}"
        elif depth < _DEPTH and _is_folder(entry):
            yield from _names(folder, f"{below}{entry.name}/", depth + 1)


def _counts(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in (*WEIGHTS, *_SMALL)) and not any(
        fnmatchcase(name, pattern) for pattern in _IRRELEVANT
    )


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _model_file(name: str, size: int | str, digests: Sequence[str]) -> ModelFile | None:
    """Return None for what is not a file, and for a file that is replaced at this moment."""
    if isinstance(size, str):
        digests, size = [size], 0
    if "" in digests:
        return None
    if failed := next((one for one in digests if one.startswith(_UNREADABLE)), ""):
        return name, size, failed
    return name, size, hashlib.sha256("".join(digests).encode()).hexdigest()[:32]


def _measured(folder: Path, name: str) -> tuple[int | str, list[_Region]]:
    """Return a file's size and what to read of it; in place of its size "" or why there is none."""
    try:
        with _Opened(folder / name) as opened:
            if opened.size is None:
                return "", []
            return opened.size, _regions(name, opened)
    except FileNotFoundError:
        return "", []
    except OSError as exc:
        return f"{_UNREADABLE}{exc.strerror}", []


def _digests(path: Path, regions: Sequence[_Region]) -> str:
    """Return digests of a file's regions; "" or why there are none."""
    try:
        with _Opened(path) as opened:
            return "".join(opened.digest(region) for region in regions)
    except FileNotFoundError:
        return ""
    except OSError as exc:
        return f"{_UNREADABLE}{exc.strerror}"


class _Opened:
    """A file that is open for reading; `size` is None if it is a folder, pipe or device."""

    def __init__(self, path: Path) -> None:
        # Opening a pipe would wait for its writer.
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(self._file)
        self.size = found.st_size if stat.S_ISREG(found.st_mode) else None

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, region: _Region) -> Iterator[bytes]:
        """Yield what is there of a region; the file may have become shorter meanwhile."""
        at, end = region[0], sum(region)
        while at < end and (piece := os.pread(self._file, min(end - at, _MIB), at)):
            yield piece
            at += len(piece)

    def digest(self, region: _Region) -> str:
        made = hashlib.sha256(repr(region).encode())
        for piece in self.read(region):
            made.update(piece)
        return made.hexdigest()


def _regions(name: str, opened: _Opened) -> list[_Region]:
    """Choose what is read of a file, by its name, size and header only."""
    size = opened.size or 0
    weights = any(fnmatchcase(name, pattern) for pattern in WEIGHTS)
    blocks = _blocks(name) if weights else _BLOCKS
    if size <= (blocks * _WHOLE_PER_BLOCK if weights else _WHOLE):
        return [(0, size)]
    if name.endswith(".safetensors") and (head := _safetensors_head(opened, size)):
        return [(0, len(head)), *_of_tensors(head, size, blocks)]
    begin = _GGUF_HEAD if name.endswith(".gguf") else _ENDS
    step = (size - _BLOCK) / (blocks - 1)
    spread = [(int(at * step), _BLOCK) for at in range(blocks)]
    return [(0, min(begin, size)), (max(0, size - _ENDS), _ENDS), *spread]


def _blocks(name: str) -> int:
    """Return a file's share of the blocks, which other files in the folder do not change."""
    if named := _SHARDS.search(name):
        shards = int(named[1])
    else:
        shards = _NUMBERED if re.search(r"\d", name) else 1
    return max(_LEAST, _BLOCKS // max(1, shards))


def _safetensors_head(opened: _Opened, size: int) -> bytes:
    """Return the length and the JSON at the begin of a file; b"" if that is not what is there."""
    length = int.from_bytes(b"".join(opened.read((0, 8))), "little")
    if not 2 <= length <= min(size - 8, _MOST_HEADER):
        return b""
    return b"".join(opened.read((0, 8 + length)))


def _of_tensors(head: bytes, size: int, blocks: int) -> Iterator[_Region]:
    """Yield blocks of as many tensors as possible, and several of each if there are fewer.

    Not by a fixed step: it may be that of the layers, so that all are of the same kind of tensor.
    """
    start, room = len(head), size - len(head)
    tensors = [
        (min(int(begin), room), min(int(end), room)) for begin, end in _OFFSETS.findall(head)
    ] or [(0, room)]
    count = len(tensors)
    step = max(1, round(count * _GOLDEN))
    while math.gcd(step, count) != 1:
        step += 1
    for at in range(blocks):
        begin, end = tensors[at * step % count]
        within = int((at * _GOLDEN % 1) * max(0, end - begin - _BLOCK))
        yield start + begin + within, max(0, min(_BLOCK, end - begin))
