"""Measure what the tiny model feels: wrong KV of many kinds, against bfloat16's own noise.

Each trial does what a consumer does in the check: take the KV of a prompt's whole chunks, compute
the rest of the prompt over it, and decode greedily; then the same for cuts, beginnings that end at
a quarter of a chunk. The KV is then damaged in one way, and the answers compared with those of an
engine which computed everything itself, as seen through the API: the tokens and the
log-probabilities of the five likeliest ones, up to the first token that differs. What the whole
prompt shows is beside what it and the cuts show.

Two rows are not damage but noise, to choose the tolerance by: `no_damage`, whose KV was computed
in other batches than the reference; and `float32`, the same model computed in that type. A key
carries its position, so that attention adds up the same numbers wherever they lie: that chunks or
rows moved together (`swap_chunks`, `shuffle_rows`) shows only where a cut leaves some of them out.

How a real stack does is measured by `python -m bench.check_power`; this needs none, and tells what
a change of the model's recipe would do.

Needs torch and transformers. Run from a checkout: `python scripts/tiny_model_power.py`.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deploy.tiny_model import ensure_tiny_model

CHUNK = 256  # tokens
CUT_TAIL = 8  # tokens that follow a cut
CUT_STEPS = 8  # tokens decoded after them
TOP = 5
TOP_EXPONENT_BIT = 0x4000  # of bfloat16
NEVER = -1e9

# (layers, K and V, tokens of whole chunks, KV heads, head size) -> the tensor is edited in place.
Kv = Any
Damage = Callable[[Kv, Kv, random.Random], None]


@dataclass(frozen=True)
class Answer:
    """Greedy tokens of a request, and the TOP likeliest tokens' log-probabilities at each step."""

    tokens: list[int]
    likeliest: list[dict[int, float]]


@dataclass(frozen=True)
class Difference:
    """What the API shows of two answers to one prompt."""

    logprob: float  # the largest difference before and at the first token that differs
    tokens_differ: bool


@dataclass(frozen=True)
class Shown:
    """What the answer to the whole prompt shows, and what it and the cuts show together."""

    in_full: Difference
    with_cuts: Difference


def no_damage(_kv: Kv, _other: Kv, _rng: random.Random) -> None:
    """Leave the KV alone: only its way of being computed differs."""


def noise_chunk(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Replace a chunk by noise of the same size in every layer."""
    chunk = kv[:, :, _a_chunk(kv, rng)]
    noise = torch.randn(chunk.shape, generator=_torch_rng(rng))
    size = chunk.float().std(dim=(2, 3, 4), keepdim=True)
    chunk.copy_((noise * size).to(kv.dtype))


def stale_chunk(kv: Kv, other: Kv, rng: random.Random) -> None:
    """Put another prompt's chunk of the same place."""
    where = _a_chunk(kv, rng)
    kv[:, :, where] = other[:, :, where]


def stale_block(kv: Kv, other: Kv, rng: random.Random) -> None:
    """Put 32 tokens of another prompt, in one layer."""
    layer, start = rng.randrange(len(kv)), 32 * rng.randrange(kv.shape[2] // 32)
    kv[layer, :, start : start + 32] = other[layer, :, start : start + 32]


def zero_chunk(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Zero a chunk in every layer."""
    kv[:, :, _a_chunk(kv, rng)] = 0


def zero_layer(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Zero a layer."""
    kv[rng.randrange(len(kv))] = 0


def swap_layers(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Exchange two layers."""
    one, two = rng.sample(range(len(kv)), 2)
    kv[[one, two]] = kv[[two, one]]


def swap_heads(kv: Kv, _other: Kv, _rng: random.Random) -> None:
    """Exchange the two KV heads, as a mix-up of tensor-parallel ranks would."""
    kv.copy_(kv.flip(3))


def swap_key_value(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Exchange K and V of a chunk in every layer."""
    chunk = kv[:, :, _a_chunk(kv, rng)]
    chunk.copy_(chunk.flip(1))


def copy_chunk(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Put a copy of one chunk over another one."""
    one, two = _two_chunks(kv, rng)
    kv[:, :, one] = kv[:, :, two].clone()


def swap_chunks(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Exchange two chunks, K and V alike."""
    _swap(kv, slice(None), _two_chunks(kv, rng))


def swap_chunk_values(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Exchange the V of two chunks, not the K."""
    _swap(kv, slice(1, 2), _two_chunks(kv, rng))


def shuffle_rows(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Shuffle the tokens of a chunk, K and V alike."""
    _shuffle(kv, slice(None), rng)


def shuffle_value_rows(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Shuffle the tokens of a chunk in V, not in K."""
    _shuffle(kv, slice(1, 2), rng)


def swap_value_pairs(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Exchange each two neighbours' V in a chunk of one layer."""
    layer, where = rng.randrange(len(kv)), _a_chunk(kv, rng)
    rows = kv[layer, 1, where]
    rows.copy_(rows.unflatten(0, (-1, 2)).flip(1).flatten(0, 1))


def shift_rows(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Move a chunk's rows by one place in K, not in V."""
    chunk = kv[:, 0, _a_chunk(kv, rng)]
    chunk.copy_(chunk.roll(1, dims=1))


def swap_key_rows(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Exchange two tokens of a chunk in K, not in V."""
    _swap_rows(kv, 0, rng)


def swap_value_rows(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Exchange two tokens of a chunk in V, not in K."""
    _swap_rows(kv, 1, rng)


def zero_token(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Zero one token in every layer."""
    kv[:, :, rng.randrange(kv.shape[2])] = 0


def flip_key_bit(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Flip the top exponent bit of one K value."""
    _flip(kv, 0, rng)


def flip_value_bit(kv: Kv, _other: Kv, rng: random.Random) -> None:
    """Flip the top exponent bit of one V value."""
    _flip(kv, 1, rng)


DAMAGES: tuple[Damage, ...] = (
    no_damage,
    noise_chunk,
    stale_chunk,
    zero_chunk,
    copy_chunk,
    stale_block,
    zero_layer,
    swap_layers,
    swap_heads,
    swap_key_value,
    swap_chunk_values,
    shuffle_value_rows,
    swap_value_pairs,
    shift_rows,
    flip_key_bit,
    flip_value_bit,
    swap_key_rows,
    swap_value_rows,
    zero_token,
    swap_chunks,
    shuffle_rows,
)


def _chunks(kv: Kv) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, kv.shape[2], CHUNK)]


def _a_chunk(kv: Kv, rng: random.Random) -> slice:
    return rng.choice(_chunks(kv))


def _two_chunks(kv: Kv, rng: random.Random) -> list[slice]:
    return rng.sample(_chunks(kv), 2)


def _swap(kv: Kv, parts: slice, where: Sequence[slice]) -> None:
    one, two = where
    kept = kv[:, parts, one].clone()
    kv[:, parts, one] = kv[:, parts, two]
    kv[:, parts, two] = kept


def _shuffle(kv: Kv, parts: slice, rng: random.Random) -> None:
    chunk = kv[:, parts, _a_chunk(kv, rng)]
    chunk.copy_(chunk[:, :, torch.randperm(CHUNK, generator=_torch_rng(rng))])


def _swap_rows(kv: Kv, part: int, rng: random.Random) -> None:
    chunk = kv[:, part, _a_chunk(kv, rng)]
    pair = rng.sample(range(CHUNK), 2)
    chunk[:, pair] = chunk[:, pair[::-1]]


def _flip(kv: Kv, part: int, rng: random.Random) -> None:
    place = (rng.randrange(len(kv)), part, *(rng.randrange(size) for size in kv.shape[2:]))
    bits = kv.view(torch.int16)
    bits[place] ^= TOP_EXPONENT_BIT


def _torch_rng(rng: random.Random) -> Any:
    return torch.Generator().manual_seed(rng.getrandbits(63))


def prefill(model: Any, tokens: Sequence[int], step: int) -> tuple[Kv, Any]:
    """Compute a prompt in pieces of `step` tokens: its KV, and the last token's logits."""
    cache, logits = DynamicCache(), None
    for start in range(0, len(tokens), step):
        piece = torch.tensor([tokens[start : start + step]])
        logits = model(piece, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    return torch.stack([_layer_kv(layer) for layer in cache.layers]), logits


def _layer_kv(layer: Any) -> Kv:
    return torch.stack([layer.keys[0], layer.values[0]]).transpose(1, 2)


def resume(model: Any, kvs: Sequence[Kv], rest: Sequence[int], steps: int) -> list[Answer]:
    """Compute `rest` over each KV, as one batch, and decode `steps` tokens greedily."""
    cache = DynamicCache()
    for layer, kv in enumerate(torch.stack(list(kvs), dim=1)):
        both = kv.transpose(2, 3)  # requests, K and V, heads, tokens, head size
        cache.update(both[:, 0], both[:, 1], layer)
    answers = [Answer([], []) for _ in kvs]
    tokens = torch.tensor([rest] * len(kvs))
    for _ in range(steps):
        logits = model(tokens, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        for answer, row in zip(answers, torch.log_softmax(logits.float(), dim=-1), strict=True):
            _append(answer, row)
        tokens = torch.tensor([[answer.tokens[-1]] for answer in answers])
    return answers


def _append(answer: Answer, logprobs: Any) -> None:
    values, tokens = logprobs.topk(TOP)  # NaN sorts first
    answer.tokens.append(int(tokens[0]))
    answer.likeliest.append(dict(zip(tokens.tolist(), values.tolist(), strict=True)))


def compare(one: Answer, two: Answer) -> Difference:
    """Compare two answers step by step, up to the first token that differs; NaN is infinite."""
    largest = 0.0
    for step, (left, right) in enumerate(zip(one.likeliest, two.likeliest, strict=True)):
        largest = max(largest, _step_difference(left, right), _step_difference(right, left))
        if one.tokens[step] != two.tokens[step]:
            return Difference(largest, True)
    return Difference(largest, False)


def _step_difference(left: dict[int, float], right: dict[int, float]) -> float:
    """A token that the other side does not list counts as if it were its last listed one."""
    if any(math.isnan(value) for value in (*left.values(), *right.values())):
        return math.inf
    floor = min(right.values())
    pairs = ((value, right.get(token, NEVER)) for token, value in left.items())
    return max(
        abs(value - other) if other != NEVER else max(0.0, value - floor) for value, other in pairs
    )


def a_prompt(rng: random.Random, length: int) -> list[int]:
    """Return words of random letters as bytes, which are the model's token ids."""
    words: list[str] = []
    while len(" ".join(words)) < length:
        words.append("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))))
    return list(" ".join(words).encode()[:length])


def one_trial(model: Any, exact: Any, rng: random.Random, steps: int) -> dict[str, Shown]:
    """Try every damage on one prompt of 1,000 to 1,500 tokens."""
    length = rng.randint(1000, 1500)
    prompt, other = a_prompt(rng, length), a_prompt(rng, length)
    whole = (length - 1) // CHUNK * CHUNK
    reference, in_float32 = (
        resume(each, [prefill(each, prompt[:1], 1)[0]], prompt[1:], steps)[0]
        for each in (model, exact)
    )
    kv = prefill(model, prompt[:whole], 2 * CHUNK)[0]
    other_kv = prefill(model, other[:whole], 2 * CHUNK)[0]
    kvs = [kv.clone() for _ in DAMAGES]
    for damage, damaged in zip(DAMAGES, kvs, strict=True):
        damage(damaged, other_kv, rng)
    answers = resume(model, kvs, prompt[whole:], steps)
    in_full = [compare(reference, answer) for answer in answers]
    with_cuts = in_full
    for held in range(CHUNK // 4, whole + 1, CHUNK // 4):
        tail = a_prompt(rng, CUT_TAIL)
        sound, *cut = resume(model, [each[:, :, :held] for each in (kv, *kvs)], tail, CUT_STEPS)
        with_cuts = [
            larger(found, compare(sound, answer))
            for found, answer in zip(with_cuts, cut, strict=True)
        ]
    exactly = compare(in_float32, reference)
    names = [damage.__name__ for damage in DAMAGES]
    shown = zip(names, map(Shown, in_full, with_cuts), strict=True)
    return {"float32": Shown(exactly, exactly), **dict(shown)}


def larger(one: Difference, two: Difference) -> Difference:
    """Return what both together show."""
    return Difference(max(one.logprob, two.logprob), one.tokens_differ or two.tokens_differ)


def print_table(trials: Sequence[dict[str, Shown]], tolerance: float) -> None:
    """Print, for each damage, the spread of the differences and how often it is noticed."""
    spread = f"{'min':>9}{'5%':>9}{'median':>9}{'max':>9}{'noticed':>9}"
    print(f"{'':20}{'the whole prompt':>45}{'with its cuts':>45}")
    print(f"{'damage':20}{spread}{spread}")
    for name in trials[0]:
        found = [trial[name] for trial in trials]
        print(
            f"{name:20}"
            + _spread([each.in_full.logprob for each in found], tolerance)
            + _spread([each.with_cuts.logprob for each in found], tolerance)
        )


def _spread(logprobs: Sequence[float], tolerance: float) -> str:
    ranked = sorted(logprobs)
    spots = (0, len(ranked) // 20, len(ranked) // 2, -1)
    noticed = sum(value > tolerance for value in ranked) / len(ranked)
    return "".join(f"{ranked[spot]:9.4f}" for spot in spots) + f"{noticed:9.0%}"


def load(folder: Path, dtype: Any) -> Any:
    """Load the model, to compute in `dtype`."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument(
        "--steps", type=int, default=16, help="tokens decoded after the whole prompt"
    )
    parser.add_argument("--tolerance", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # for matrices this small, threads cost more than they bring
    rng = random.Random(options.seed)  # noqa: S311  (a fixed seed is the point)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        path = ensure_tiny_model(Path(folder))
        model, exact = load(path, torch.bfloat16), load(path, torch.float32)
        trials = [one_trial(model, exact, rng, options.steps) for _ in range(options.trials)]
    print_table(trials, options.tolerance)


if __name__ == "__main__":
    main()
