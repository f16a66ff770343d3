"""The fingerprint of a model's folder: same bytes, same fingerprint; other bytes, another one."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.connector.pdkit_connector.identity import model_files as module
from deploy.connector.pdkit_connector.identity.model_files import (
    changed_files,
    files_digest,
    model_files,
    named_files,
    named_model,
    named_paths,
    unreadable_files,
)

MIB = 2**20
SHARD = "model-00001-of-00030.safetensors"


def write_sparse(path: Path, tensors: int, tensor_bytes: int, name: str = "layers") -> None:
    """Write safetensors with a real header and no data on the disk."""
    header = {
        f"model.{name}.{at}.weight": {
            "dtype": "U8",
            "shape": [tensor_bytes],
            "data_offsets": [at * tensor_bytes, (at + 1) * tensor_bytes],
        }
        for at in range(tensors)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + tensors * tensor_bytes)


def start_of_data(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def overwrite(path: Path, at: int, content: bytes) -> None:
    """Change bytes in place and keep the file's size and times."""
    found = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    (made / "code").mkdir(parents=True)
    for name, text in {
        "config.json": '{"rope_theta": 10000}',
        "tokenizer.json": '{"model": {"vocab": {"a": 0, "b": 1}}}',
        "tokenizer_config.json": "{}",
        "special_tokens_map.json": "{}",
        "added_tokens.json": "{}",
        "vocab.json": "{}",
        "merges.txt": "a b",
        "tekken.json": "{}",
        "tokenizer.model": "pieces",
        "hf_quant_config.json": "{}",
        "preprocessor_config.json": "{}",
        "model.safetensors.index.json": "{}",
        "modeling_mine.py": "x = 1",
        "code/layers.py": "y = 1",
        "small.bin": "weights",
        "model.tensors": "weights that tensorizer loads",
    }.items():
        (made / name).write_text(text)
    write_sparse(made / SHARD, tensors=24, tensor_bytes=8 * MIB)
    return made


def names(folder: Path) -> list[str]:
    return [name for name, *_ in model_files(folder)]


def test_every_file_that_engines_read_counts(folder: Path) -> None:
    assert names(folder) == sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    )


def test_times_paths_and_the_order_of_entries_do_not_count(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = model_files(folder)
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    assert model_files(folder) == first
    assert model_files(shutil.copytree(folder, tmp_path / "copy")) == first

    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "code").symlink_to(folder / "code")
    for at, name in enumerate(name for name in names(folder) if "/" not in name):
        make = os.link if at % 2 else os.symlink
        make(folder / name, linked / name)
    assert model_files(linked) == first
    (tmp_path / "link").symlink_to(folder)
    assert model_files(tmp_path / "link") == first
    assert files_digest(model_files(tmp_path / "copy")) == files_digest(first)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: reversed(list(scandir(path))))
    assert model_files(folder) == first


@pytest.mark.parametrize(
    "name",
    ["README.md", "generation_config.json", "chat_template.jinja", "chat_template.json",
     "trainer_state.json", "training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt",
     "rng_state_0.pth", ".cache/download.json", "original/params.json", "original/x.pth"],
)  # fmt: skip
def test_what_does_not_decide_kv_may_change(folder: Path, name: str) -> None:
    first = model_files(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("new")
    assert model_files(folder) == first


def test_any_small_file_of_equal_size_and_times_is_noticed(folder: Path) -> None:
    first = model_files(folder)
    for name in names(folder):
        if name == SHARD:
            continue
        kept = (folder / name).read_bytes()
        overwrite(folder / name, len(kept) - 1, b"?")
        assert list(changed_files(first, model_files(folder))) == [f"{name} was replaced"]
        (folder / name).write_bytes(kept)
    assert model_files(folder) == first


def test_one_entry_of_a_large_tokenizer_is_noticed(folder: Path) -> None:
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(b'{"token": 1}' * MIB)
    first = model_files(folder)
    overwrite(tokenizer, 5 * MIB + 3, b"?")
    assert model_files(folder) != first


def test_a_fine_tune_of_one_kind_of_tensor_is_noticed(folder: Path) -> None:
    """Equal name, size, header and times, as image layers with fixed times have them."""
    shard = folder / SHARD
    first, start = model_files(folder), start_of_data(shard)
    for tensor in range(2, 24, 6):  # one of six in each layer
        overwrite(shard, start + tensor * 8 * MIB, b"\1" * 8 * MIB)
    assert list(changed_files(first, model_files(folder))) == [f"{SHARD} was replaced"]


def test_every_tensor_is_touched_if_the_budget_allows(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    write_sparse(weights, tensors=300, tensor_bytes=MIB)
    first, start = model_files(tmp_path), start_of_data(weights)
    for tensor in (0, 7, 150, 299):
        overwrite(weights, start + tensor * MIB, b"\1" * MIB)
        assert model_files(tmp_path) != first
        overwrite(weights, start + tensor * MIB, bytes(MIB))
    assert model_files(tmp_path) == first


def test_a_renamed_tensor_is_noticed(folder: Path) -> None:
    first = model_files(folder)
    write_sparse(folder / SHARD, tensors=24, tensor_bytes=8 * MIB, name="stayer")
    assert model_files(folder) != first


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.pth", "m.gguf"])
@pytest.mark.parametrize("at", [0, 200_000, 99 * MIB, 100 * MIB - 1])
def test_head_and_tail_of_other_formats_are_read(tmp_path: Path, name: str, at: int) -> None:
    """Where GGUF has its tokenizer, and a zip of PyTorch's the checksums of its tensors."""
    weights = tmp_path / name
    with weights.open("wb") as file:
        file.truncate(100 * MIB)
    first = model_files(tmp_path)
    overwrite(weights, at - at % MIB if at == 99 * MIB else at, b"\1" * min(MIB, 100 * MIB - at))
    assert model_files(tmp_path) != first


def test_small_weights_are_read_whole(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 * MIB))
    first = model_files(tmp_path)
    overwrite(weights, 1_234_567, b"\1")
    assert model_files(tmp_path) != first


def test_a_file_more_or_less_changes_no_other(folder: Path) -> None:
    first = model_files(folder)
    (folder / "consolidated.safetensors").write_text("new")
    (folder / "vocab.json").unlink()
    changes = ["consolidated.safetensors is new", "vocab.json is gone"]
    assert list(changed_files(first, model_files(folder))) == changes


@pytest.mark.parametrize("length", [0, 1, 2**40, 2**64 - 1, 60 * MIB, 100_000_001])
def test_a_header_that_makes_no_sense_is_read_as_any_other_bytes(
    tmp_path: Path, length: int
) -> None:
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(50 * MIB)
    (found,) = model_files(tmp_path)
    assert found[:2] == ("model.safetensors", 50 * MIB)
    overwrite(weights, 50 * MIB - 1, b"\1")
    assert model_files(tmp_path) != (found,)


def test_offsets_beyond_the_file_are_survived(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    write_sparse(weights, tensors=40, tensor_bytes=MIB)
    os.truncate(weights, 20 * MIB)
    (whole,) = model_files(tmp_path)
    text = b'{"a": {"data_offsets": [999999999999999999, 0]}, "b": {"data_offsets": [5, 3]}}'
    overwrite(weights, 0, len(text).to_bytes(8, "little") + text)
    assert model_files(tmp_path) != (whole,)


def test_pipes_folders_and_broken_links_are_no_files(folder: Path) -> None:
    first = model_files(folder)
    os.mkfifo(folder / "pipe.safetensors")
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.bin").mkdir()
    (folder / "gone.json").symlink_to("nowhere")
    assert model_files(folder) == first


def test_an_empty_file_counts(folder: Path) -> None:
    first = model_files(folder)
    (folder / "more.bin").touch()
    assert list(changed_files(first, model_files(folder))) == ["more.bin is new"]


def test_a_missing_folder_has_no_files(tmp_path: Path) -> None:
    assert model_files(tmp_path / "none") == ()
    assert files_digest(model_files(tmp_path / "none")) == ""


@pytest.fixture
def after_measuring(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], None]], None]:
    """Let something happen to each file between the look at its size and the reading."""

    def install(act: Callable[[Path], None]) -> None:
        digests = module._digests

        def raced(path: Path, regions: list[tuple[int, int]]) -> str:
            act(path)
            return digests(path, regions)

        monkeypatch.setattr(module, "_digests", raced)

    return install


def test_a_file_that_vanishes_while_it_is_read_does_not_count(
    tmp_path: Path, after_measuring: Callable[[Callable[[Path], None]], None]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("weights")
    after_measuring(lambda path: path.unlink() if path.suffix == ".safetensors" else None)
    assert names(tmp_path) == ["config.json"]


def test_a_file_that_is_truncated_while_it_is_read_is_another(
    folder: Path, after_measuring: Callable[[Callable[[Path], None]], None]
) -> None:
    first = model_files(folder)
    after_measuring(lambda path: os.truncate(path, 3))
    assert SHARD in names(folder)
    assert f"{SHARD} was replaced" in changed_files(first, model_files(folder))


def test_a_file_that_cannot_be_read_is_named_with_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, opened = model_files(folder), os.open

    def refuse(path: Path, *more: int) -> int:
        if Path(path).name == SHARD:
            raise PermissionError(13, "Permission denied")
        return opened(path, *more)

    monkeypatch.setattr(os, "open", refuse)
    now = model_files(folder)
    assert list(unreadable_files(now)) == [(SHARD, "Permission denied")]
    assert list(changed_files(first, now)) == [f"{SHARD} cannot be read: Permission denied"]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Note the bytes of each read."""
    noted: list[int] = []
    pread = os.pread

    def counted(file: int, length: int, at: int) -> bytes:
        noted.append(length)
        return pread(file, length, at)

    monkeypatch.setattr(os, "pread", counted)
    yield noted


def test_little_is_read_of_140_gb(tmp_path: Path, reads: list[int]) -> None:
    """By the bytes and the number of reads: seconds depend on the machine."""
    for at in range(1, 31):
        shard = tmp_path / f"model-{at:05}-of-00030.safetensors"
        write_sparse(shard, tensors=24, tensor_bytes=4_700_000_000 // 24)
    (tmp_path / "tokenizer.json").write_bytes(bytes(9 * MIB))
    assert len(model_files(tmp_path)) == 31
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 140_000_000_000
    assert Counter(reads)[4096] == 30 * 17
    assert sum(reads) < 9 * MIB + 3 * MIB
    assert len(reads) < 700


def test_the_work_does_not_grow_with_the_size_of_a_file(tmp_path: Path, reads: list[int]) -> None:
    for name in ("model.safetensors", "model.gguf", "pytorch_model.bin"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, 10**12)
    model_files(tmp_path)
    assert sum(reads) < 24 * MIB
    assert len(reads) < 1700


@pytest.mark.parametrize(
    ("args", "paths"),
    [
        (["--hf-config-path", "/a"], ["/a"]),
        (["--hf_config_path=/a"], ["/a"]),
        (["--hf-conf", "/a"], ["/a"]),
        (["--tokenizer", "/a", "--tokenizer-mode", "auto"], ["/a"]),
        (
            ["--lora-modules", "one=/a", '{"name": "two", "path": "/b"}', "--seed", "1"],
            ["/a", "/b"],
        ),
        (["--lora-modules=one=/a"], ["/a"]),
        (["--default-mm-loras", '{"audio": "/a", "image": "/b"}'], ["/a", "/b"]),
        (["--speculative-config", '{"model": "/a", "num_speculative_tokens": 2}'], ["/a"]),
        (["--speculative-config.model", "/a"], ["/a"]),
        (["-sc", '{"model": "/a"}'], ["/a"]),
        (["-sc.model=/a"], ["/a"]),
        (["--mm-encoder-fp8-scale-path", "/a.json"], ["/a.json"]),
        # A hub's names, a relative path, the model itself, and what decides no KV.
        (["--tokenizer", "owner/name", "--lora-modules", "one=adapters/one"], []),
        (["--model", "/a", "--chat-template", "/a.jinja", "--download-dir", "/b"], []),
        (["--speculative-config", '{"model": "/a"'], []),
    ],
)
def test_folders_and_files_that_arguments_name(args: list[str], paths: list[str]) -> None:
    assert [str(path) for path in named_paths(args)] == paths


def test_the_content_of_what_arguments_name_counts(tmp_path: Path) -> None:
    adapter, scales = tmp_path / "adapter", tmp_path / "scales.txt"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
        (adapter / name).write_text(name)
    scales.write_text("1.0")
    args = ["--lora-modules", f"one={adapter}", "--mm-encoder-fp8-scale-path", str(scales)]
    first = named_files(args)
    assert [name for name, *_ in first] == [
        str(adapter / "adapter_config.json"),
        str(adapter / "adapter_model.safetensors"),
        str(scales),
    ]
    (adapter / "README.md").write_text("new")
    assert named_files(args) == first
    overwrite(scales, 0, b"2")
    overwrite(adapter / "adapter_model.safetensors", 0, b"A")
    assert list(changed_files(first, named_files(args))) == [
        f"{adapter / 'adapter_model.safetensors'} was replaced", f"{scales} was replaced"
    ]  # fmt: skip
    scales.unlink()
    assert f"{scales} is gone" in changed_files(first, named_files(args))


def test_of_several_models_in_the_arguments_the_last_counts_as_for_vllm() -> None:
    assert named_model(["--model", "/a", "--port", "1", "--model", "/b"]) == "/b"
    assert named_model(["--model=/a"]) == "/a"
    assert named_model([]) == ""
