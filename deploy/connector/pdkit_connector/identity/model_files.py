"""The content of a model's folder, by which every start of an engine recognizes the model.

The plan has a fingerprint of the files that decide KV, and each start compares: KV of other weights
would be loaded by the same keys. Where the plan cannot see the files, as in a pod, the engine takes
its own fingerprint into its identity. Only names, sizes and bytes count: no times, no paths, no
order of a folder's entries.

The same holds for other folders and files that vLLM's arguments name, such as adapters.

Small files are hashed whole. Weights are sampled, since reading them takes minutes: their headers,
and blocks from as many tensors as the budget allows. A fine-tune touches every tensor and is
noticed. An edit of a few rows of a tensor may lie between the samples; the canaries of `deploy
check` are for that.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

# In every format: which of them is loaded depends on vLLM's options.
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")
# Every configuration and tokenizer, also those that a later vLLM reads. `*.py` is the model's own
# code, which vLLM runs with --trust-remote-code.
_SMALL = ("*.json", "*.py", "*.model", "*.tiktoken", "vocab.txt", "merges.txt")
_IRRELEVANT = (
    "generation_config.json",  # defaults for sampling: KV does not depend on them
    "chat_template.json",  # turns messages into a prompt, whose tokens are in the keys
    # What a training leaves, which vLLM does not load either.
    "trainer_state.json", "*_results.json", "training_args.bin", "optimizer.bin", "optimizer.pt",
    "scheduler.pt", "scaler.pt", "rng_state*.pth",
)  # fmt: skip
# Folders below the model's: of its own code only, as vLLM loads no weights from there.
_DEPTH = 3

# Digests of the model's folder, and of what other arguments name. Set by the plan as far as it
# knows the files, else by the engine at its start.
DIGEST_VARIABLE = "PDKIT_MODEL_FILES"
NAMED_VARIABLE = "PDKIT_NAMED_FILES"

# vLLM's arguments that may name folders or files whose content decides KV, and why it does.
NAMING_FILES: Mapping[str, str] = {
    "--hf-config-path": "its config.json replaces the model's",
    # Not the tokens of a text, which are in the keys.
    "--tokenizer": "Mistral's tokenizers decide into which pieces images are cut",
    "--lora-modules": "adapters change weights",
    "--default-mm-loras": "adapters change weights",
    "--speculative-config": "some draft models keep KV of their own",
    "-sc": "some draft models keep KV of their own",
    "--spec-model": "some draft models keep KV of their own",
    "--mm-encoder-fp8-scale-path": "scales of an encoder of images",
    "--model-loader-extra-config": "may name adapters and serialized weights",
}

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
    return _files(folder, sorted(_names(folder)))


def named_files(argv: Sequence[str]) -> tuple[ModelFile, ...]:
    """Return the files of each folder, and each file, that vLLM's arguments name, beside the model.

    Their names here are whole paths. A relative path is none: engines run in a folder of the kit's.
    """
    found: list[ModelFile] = []
    for path in named_paths(argv):
        folder = path if path.is_dir() else path.parent
        files = model_files(path) if folder == path else _files(folder, [path.name])
        found += ((str(folder / name), size, digest) for name, size, digest in files)
    return tuple(found)


def named_paths(argv: Sequence[str]) -> tuple[Path, ...]:
    """Return the absolute paths in arguments of `NAMING_FILES`, as vLLM's own parser reads them.

    It takes underscores for dashes, any beginning of a name, and `--config.key` for a key of JSON.
    """
    paths: set[Path] = set()
    reads = False
    for argument in argv:
        value = argument
        if re.match(r"--?[a-zA-Z]", argument):
            option, _, value = argument.partition("=")
            option = option.partition(".")[0].replace("_", "-")
            reads = option != "--model" and any(one.startswith(option) for one in NAMING_FILES)
        if reads:
            paths |= {Path(text) for text in _texts(value) if text.startswith("/")}
    return tuple(sorted(paths))


def _texts(value: str) -> Iterator[str]:
    """Yield a value and the parts that may be a path: of `name=value`, and of JSON."""
    yield value
    yield value.partition("=")[2]
    with contextlib.suppress(ValueError, RecursionError):
        waiting = [json.loads(value)]
        while waiting:
            one = waiting.pop()
            if isinstance(one, str):
                yield one
            elif isinstance(one, (dict, list)):
                waiting += one.values() if isinstance(one, dict) else one


def _files(folder: Path, names: Sequence[str]) -> tuple[ModelFile, ...]:
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
    """Return a fingerprint of these files; "" for none."""
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
    """Return how the files that vLLM's arguments name differ from the plan's; "" if they do not.

    "", too, if the plan names no files, as for a model that a hub gives: it is held to its
    revision.
    """
    planned, folder = environ.get(DIGEST_VARIABLE), model_folder(argv, environ)
    if planned and planned != files_digest(files := model_files(folder)):
        for name, reason in unreadable_files(files):
            return f"{folder / name} cannot be read: {reason}"
        return f"the files in {folder} have changed since this stack was started"
    planned = environ.get(NAMED_VARIABLE)
    if planned and planned != files_digest(files := named_files(argv)):
        for name, reason in unreadable_files(files):
            return f"{name} cannot be read: {reason}"
        paths = ", ".join(map(str, named_paths(argv)))
        return f"the files that arguments name ({paths}) have changed since this stack was started"
    return ""


def take_digests(argv: Sequence[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Note what the files hold now where the plan did not: it is this engine's identity then."""
    takes: Mapping[str, Callable[[], Sequence[ModelFile]]] = {
        DIGEST_VARIABLE: lambda: model_files(model_folder(argv, environ)),
        NAMED_VARIABLE: lambda: named_files(argv),
    }
    for variable, take in takes.items():
        if variable not in environ and (files := take()):
            environ[variable] = files_digest(files)


def named_model(argv: Sequence[str]) -> str:
    """Return the model in vLLM's arguments; "" if there is none."""
    return _option(argv, "--model")


def model_folder(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the model in vLLM's arguments, which may be missing.

    Of a hub's model, it is the snapshot in the cache, if engines may not ask the hub: somebody may
    have changed its files by hand. A hub would add files, so the folder is none then.
    """
    model = named_model(argv)
    if model.startswith("/") or not is_offline(environ):
        return Path(model)
    return cached_snapshot(*_cached(argv, environ))


def named_revision(argv: Sequence[str]) -> str:
    """Return the branch, tag or commit of the model in vLLM's arguments; "" if there is none."""
    return _option(argv, "--revision")


def commit_in_cache(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> str:
    """Return the commit of the model in vLLM's arguments that the hub's cache has; "" if none."""
    return cached_commit(*_cached(argv, environ))


def _cached(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Path, str, str]:
    cache = Path(_option(argv, "--download-dir") or _hub_cache(environ))
    return cache, named_model(argv), named_revision(argv) or "main"


def cached_model(cache: Path, model: str) -> Path:
    """Return the folder of a model in the hub's cache, which may be missing."""
    return cache / f"models--{model.replace('/', '--')}"


def cached_commit(cache: Path, model: str, revision: str) -> str:
    """Return the commit that the hub's cache has of a model's branch or tag; "" if none."""
    try:
        return (cached_model(cache, model) / "refs" / revision).read_text("utf-8").strip()
    except OSError:
        return ""


def cached_snapshot(cache: Path, model: str, revision: str) -> Path:
    """Return the folder of the files of a model's branch, tag or commit, which may be missing."""
    commit = cached_commit(cache, model, revision) or revision
    return cached_model(cache, model) / "snapshots" / commit


def _option(argv: Sequence[str], name: str) -> str:
    """Return the last value of an option, as vLLM takes it; "" if it is not given."""
    found = ""
    for argument, following in itertools.pairwise((*argv, "")):
        option, equals, value = argument.partition("=")
        if option.replace("_", "-") == name:
            found = value if equals else following
    return found


def is_offline(environ: Mapping[str, str]) -> bool:
    """Tell whether the hub's client is told to use its cache only."""
    return environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of the hub's cache, as its client finds it."""
    if named := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named)
    caches = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/"), ".cache"))
    return Path(environ.get("HF_HOME") or caches / "huggingface", "hub")


def entries(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> object:
    """Return a mark that changes with any file that counts, without reading one."""
    folders = [model_folder(argv, environ), *named_paths(argv)]
    files = (file for one in folders for file in (one, *(one / name for name in _names(one))))
    return sorted((str(file), *_stat(file)) for file in files)


def _stat(file: Path) -> tuple[int, ...]:
    try:
        of = file.stat()
    except OSError:
        return ()
    return of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns


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
