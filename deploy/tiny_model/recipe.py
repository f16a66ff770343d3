"""The scales of the tiny model, which make it feel every region of its KV.

Attention to a thousand tokens averages their values: what differs between prompts shrinks, what
all share (the mean of the values) stays and would decide every token. So the two query heads of a
KV head have opposite output weights. What reaches the hidden state is the difference of two
averages; the shared part cancels, and the rest is scaled up again by what the averaging cost.
The scaling magnifies bfloat16's rounding no more than the signal: both are relative.
`python -m bench.check_power` measures the outcome; run it after a change here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from deploy.tiny_model.shape import HEAD_DIM, HIDDEN, INTERMEDIATE, KV_HEADS, LAYERS, QUERY_HEADS
from deploy.tiny_model.tokenizer import VOCABULARY_SIZE
from deploy.tiny_model.weights import Constant, EvenValues, Opposite, Run, Tensor

# Only these bytes can win greedily, so that any output is printable text.
PRINTABLE = frozenset({0x0A, *range(0x20, 0x7F)})


@dataclass(frozen=True)
class Head:
    """Amplitudes of one query head: the part that follows the content, and the constant part."""

    query: float
    position: float


@dataclass(frozen=True)
class Layer:
    """Amplitudes of one layer.

    `key_position` is the constant part of every key on the fastest `position_pairs` rotary pairs:
    against a head's `position` it makes a score that falls with distance. `outputs` has one
    number a KV head: the output weights of its first query head, opposite to its second's.
    """

    heads: tuple[Head, ...]
    outputs: tuple[float, ...]
    key: float
    key_position: float
    position_pairs: int
    value: float
    gate: float
    up: float
    down: float


@dataclass(frozen=True)
class Recipe:
    """All amplitudes of the model.

    `anchor` is a constant that the last layer puts on the first hidden channel. Through it the
    two offsets lower the logits: of printable bytes so far that the likeliest ones come near zero,
    where bfloat16's steps are fine and ties rare; of all other tokens further, out of reach.
    """

    embedding: float
    layers: tuple[Layer, ...]
    logits: float
    anchor: float
    printable_offset: float
    other_offset: float


_LAYER = Layer(
    heads=(
        Head(query=0.5, position=128.0),  # the last few tokens ...
        Head(query=0.5, position=0.0),  # ... less the mean of all
        # Two choices by content, each of some dozens of tokens: few enough that a single wrong row
        # is felt by some of an answer's tokens, and enough that each row is chosen by some.
        Head(query=3.0, position=0.0),
        Head(query=3.0, position=0.0),
    ),
    outputs=(1.0, 16.0),
    # Small keys and values, undone by the queries and outputs: no |K| or |V| reaches 2, so that a
    # flip of the top exponent bit always makes one huge, never quietly near zero.
    key=2**-7,
    key_position=2**-4,
    position_pairs=8,
    value=2**-7,
    gate=0.109375,
    up=0.109375,
    down=0.109375,
)
RECIPE = Recipe(
    embedding=1.0,
    layers=(_LAYER,) * LAYERS,
    # As large as rounding allows: log-probabilities of one prompt computed in different batches
    # then differ by up to about half of the check's tolerance.
    logits=0.5,
    anchor=16.0,
    printable_offset=-2.625,
    other_offset=-4.625,
)


def tensors(recipe: Recipe = RECIPE) -> tuple[Tensor, ...]:
    """Return every weight of the model, under the names that Llama checkpoints use."""
    last = len(recipe.layers) - 1
    layers = chain.from_iterable(
        _layer_tensors(f"model.layers.{i}.", layer, recipe.anchor if i == last else 0.0)
        for i, layer in enumerate(recipe.layers)
    )
    table = (VOCABULARY_SIZE, HIDDEN)
    rows = (_logit_row(token, recipe) for token in range(VOCABULARY_SIZE))
    logits = tuple(chain.from_iterable(rows))
    return (
        _noise("model.embed_tokens.weight", table, recipe.embedding),
        *layers,
        _norm("model.norm.weight"),
        Tensor("lm_head.weight", table, logits),
    )


def _layer_tensors(prefix: str, layer: Layer, anchor: float) -> Iterator[Tensor]:
    yield _norm(prefix + "input_layernorm.weight")
    yield from _attention_tensors(prefix + "self_attn.", layer)
    yield Tensor(prefix + "self_attn.o_proj.bias", (HIDDEN,), _first_channel(anchor, 0.0))
    yield Tensor(prefix + "post_attention_layernorm.weight", (HIDDEN,), _first_channel(0.0, 1.0))
    yield _noise(prefix + "mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN), layer.gate)
    yield _noise(prefix + "mlp.up_proj.weight", (INTERMEDIATE, HIDDEN), layer.up)
    yield _noise(prefix + "mlp.down_proj.weight", (HIDDEN, INTERMEDIATE), layer.down)


def _attention_tensors(prefix: str, layer: Layer) -> Iterator[Tensor]:
    wide, narrow = QUERY_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    query_rows = tuple(EvenValues(HEAD_DIM * HIDDEN, head.query) for head in layer.heads)
    output_row = tuple(chain.from_iterable(map(_pair_of_outputs, layer.outputs)))
    yield Tensor(prefix + "q_proj.weight", (wide, HIDDEN), query_rows)
    yield _noise(prefix + "k_proj.weight", (narrow, HIDDEN), layer.key)
    yield _noise(prefix + "v_proj.weight", (narrow, HIDDEN), layer.value)
    yield Tensor(prefix + "o_proj.weight", (HIDDEN, wide), output_row * HIDDEN)
    positions = [_position_bias(head.position, layer.position_pairs) for head in layer.heads]
    yield Tensor(prefix + "q_proj.bias", (wide,), tuple(chain.from_iterable(positions)))
    key_position = _position_bias(layer.key_position, layer.position_pairs)
    yield Tensor(prefix + "k_proj.bias", (narrow,), key_position * KV_HEADS)
    yield Tensor(prefix + "v_proj.bias", (narrow,), (Constant(narrow, 0.0),))


def _pair_of_outputs(amplitude: float) -> tuple[Run, Run]:
    return EvenValues(HEAD_DIM, amplitude), Opposite(HEAD_DIM)


def _position_bias(value: float, pairs: int) -> tuple[Constant, Constant]:
    """Return one head's bias: `value` on the first member of its fastest rotary pairs."""
    return Constant(pairs, value), Constant(HEAD_DIM - pairs, 0.0)


def _noise(name: str, shape: tuple[int, int], amplitude: float) -> Tensor:
    return Tensor(name, shape, (EvenValues(shape[0] * shape[1], amplitude),))


def _norm(name: str) -> Tensor:
    return Tensor(name, (HIDDEN,), (Constant(HIDDEN, 1.0),))


def _first_channel(first: float, others: float) -> tuple[Constant, Constant]:
    return Constant(1, first), Constant(HIDDEN - 1, others)


def _logit_row(token: int, recipe: Recipe) -> tuple[Run, Run]:
    if token in PRINTABLE:
        return Constant(1, recipe.printable_offset), EvenValues(HIDDEN - 1, recipe.logits)
    return Constant(1, recipe.other_offset), Constant(HIDDEN - 1, 0.0)
