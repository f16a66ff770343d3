"""The tiny model: the same bytes everywhere, whole or made again, and shaped for its purpose."""

from __future__ import annotations

import hashlib
import importlib
import json
import stat
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from deploy.errors import MachineError
from deploy.tiny_model import ensure_tiny_model, model_folder, model_folder_name, recipe, tokenizer
from deploy.tiny_model.weights import (
    Constant,
    EvenValues,
    Opposite,
    Tensor,
    bfloat16_bits,
    tensor_bytes,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return model_folder.model_files()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return ensure_tiny_model(tmp_path / "cache")


@pytest.mark.parametrize("name", sorted(model_folder.DIGESTS))
def test_each_file_has_its_pinned_digest(files: dict[str, bytes], name: str) -> None:
    assert hashlib.sha256(files[name]).hexdigest() == model_folder.DIGESTS[name]


def test_every_file_is_pinned_and_together_they_are_small(files: dict[str, bytes]) -> None:
    assert set(files) == set(model_folder.DIGESTS)
    assert sum(map(len, files.values())) < 30e6


def test_the_folder_holds_exactly_the_files(folder: Path, files: dict[str, bytes]) -> None:
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert folder.name == model_folder_name()


def test_any_user_can_read_the_folder(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o644}


def test_a_whole_folder_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folder, "model_files", lambda: pytest.fail("made again"))
    assert ensure_tiny_model(folder.parent) == folder


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", sorted(model_folder.DIGESTS))
@pytest.mark.parametrize("damage", [_truncate, _alter, Path.unlink])
def test_a_damaged_folder_is_made_again(folder: Path, name: str, damage) -> None:  # type: ignore[no-untyped-def]
    damage(folder / name)
    assert not model_folder.is_whole(folder)
    assert ensure_tiny_model(folder.parent) == folder
    assert model_folder.is_whole(folder)


def test_nothing_is_left_beside_the_folder_but_its_lock(folder: Path) -> None:
    _alter(folder / "config.json")
    ensure_tiny_model(folder.parent)
    assert {path.name for path in folder.parent.iterdir()} <= {folder.name, f".{folder.name}.lock"}


def test_processes_that_make_it_at_once_agree(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from deploy.tiny_model import ensure_tiny_model;"
        "print(ensure_tiny_model(Path(sys.argv[1])))"
    )
    argv = (sys.executable, "-c", code, str(tmp_path))
    makers = [subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = {maker.communicate(timeout=60)[0].strip() for maker in makers}
    assert answers == {str(tmp_path / model_folder_name())}
    assert [maker.returncode for maker in makers] == [0] * 4
    assert model_folder.is_whole(tmp_path / model_folder_name())


def test_a_place_that_cannot_be_written_is_a_machine_error(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")
    with pytest.raises(MachineError, match="cannot be made"):
        ensure_tiny_model(occupied)


def test_wrong_bytes_after_the_making_are_a_machine_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        model_folder, "model_files", lambda: dict.fromkeys(model_folder.DIGESTS, b"wrong")
    )
    with pytest.raises(MachineError, match="expected bytes"):
        ensure_tiny_model(tmp_path)


def _nearest_by_float(value: float) -> int:
    """Round through float32's bits, another way to the same answer for such small numerators."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int(bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@pytest.mark.parametrize("denominator", [1, 256, 2**40])
def test_rounding_is_to_nearest_even(denominator: int) -> None:
    for numerator in (*range(-1100, 1100), 0xFFFF, 0x10001, -0xFF80, 0xFF7F):
        expected = _nearest_by_float(numerator / denominator) if numerator else 0
        assert bfloat16_bits(numerator, denominator) == expected, numerator


def test_values_outside_the_range_are_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        bfloat16_bits(2**128, 1)
    with pytest.raises(ValueError, match="outside"):
        bfloat16_bits(1, 2**127)


def _values(tensor: Tensor, seed: str = "s") -> list[float]:
    codes = struct.unpack(f"<{tensor.shape[0]}H", tensor_bytes(tensor, seed=seed))
    return [struct.unpack("<f", struct.pack("<I", code << 16))[0] for code in codes]


def test_runs_are_what_they_say() -> None:
    tensor = Tensor(
        "t", (2006,), (Constant(3, -1.5), EvenValues(1000, 2.0), Opposite(1000), EvenValues(3, 0.0))
    )
    values = _values(tensor)
    assert values[:3] == [-1.5] * 3
    assert values[1003:2003] == [-value for value in values[3:1003]]
    assert values[2003:] == [0.0] * 3
    assert -2 < min(values[3:1003]) < -1.9 and 1.9 < max(values[3:1003]) < 2


def test_seed_and_name_both_change_the_values() -> None:
    runs = (EvenValues(8, 1.0),)
    one, two = Tensor("one", (8,), runs), Tensor("two", (8,), runs)
    assert len({tuple(_values(one)), tuple(_values(two)), tuple(_values(one, "other"))}) == 3


def test_runs_must_fill_the_shape() -> None:
    with pytest.raises(ValueError, match="runs of 8"):
        tensor_bytes(Tensor("t", (9,), (EvenValues(8, 1.0),)), seed="s")


def test_the_weights_file_is_laid_out_as_its_header_says(files: dict[str, bytes]) -> None:
    content = files["model.safetensors"]
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    del header["__metadata__"]
    spans = [entry["data_offsets"] for entry in header.values()]
    assert length % 8 == 0
    assert spans[0][0] == 0 and spans[-1][1] == len(content) - 8 - length
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert header["model.layers.0.self_attn.k_proj.weight"]["shape"] == [128, 256]


def test_the_shape_suits_the_tests_that_use_it(files: dict[str, bytes]) -> None:
    config = json.loads(files["config.json"])
    assert config["num_key_value_heads"] == 2  # so that three ranks cannot share them
    assert config["max_position_embeddings"] >= 8192
    assert config["vocab_size"] == tokenizer.VOCABULARY_SIZE == 260


def test_only_printable_tokens_have_logits_of_their_own() -> None:
    table = next(tensor for tensor in recipe.tensors() if tensor.name == "lm_head.weight")
    noisy = {row for row, run in enumerate(table.runs[1::2]) if isinstance(run, EvenValues)}
    assert bytes(sorted(noisy)).decode("ascii").strip("\n").isprintable()
    assert len(noisy) == 96


def test_a_byte_is_its_own_token_id(folder: Path) -> None:
    tokenizers = importlib.import_module("tokenizers")
    loaded = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "".join(map(chr, range(128))) + "ö ✓"
    assert loaded.encode(text).ids == list(text.encode())
    assert loaded.decode(list(text.encode())) == text
    assert loaded.token_to_id(tokenizer.END) == tokenizer.END_ID == 257
    assert loaded.get_vocab_size() == tokenizer.VOCABULARY_SIZE


def test_the_byte_names_are_distinct_and_never_blank() -> None:
    vocabulary = tokenizer.tokenizer_json()["model"]["vocab"]  # type: ignore[index]
    assert sorted(vocabulary.values()) == list(range(260))
    assert all(name.isprintable() and " " not in name for name in vocabulary)


def test_the_chat_template_marks_turns() -> None:
    jinja2 = importlib.import_module("jinja2")
    template = jinja2.Template(tokenizer.CHAT_TEMPLATE)
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages=messages, add_generation_prompt=True) == (
        "<|begin|><|turn|>user\nhi<|done|>\n<|turn|>assistant\n"
    )


def test_making_it_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from deploy.tiny_model import model_folder; model_folder.model_files();"
        "print(sorted({'torch', 'numpy', 'safetensors', 'transformers'} & set(sys.modules)))"
    )
    shown = subprocess.run(
        (sys.executable, "-c", code),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown.stdout.strip() == "[]"
