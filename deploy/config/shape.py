"""How much KV a model keeps for a token, and how long a context may be: vLLM's answer, or ours.

vLLM's own answer counts (pdkit_connector.model_reader). Without engines the kit estimates it from
config.json, by what the families below are known to do, and says nothing of any other.
`tests/atlas` holds public models on which both must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.config.kinds import kind_of, text_of

# Types that vLLM runs with multi-head latent attention in every layer. Others with such a rank,
# like MiniCPM3, keep K and V of every head.
_MLA_TYPES = frozenset({
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2",
    "longcat_flash", "mistral4", "pangu_ultra_moe",
})  # fmt: skip
# Of these, an indexer keeps a row of 8-bit numbers a token and layer, with a scale for each 128.
_INDEXED_TYPES = frozenset({"deepseek_v32", "glm_moe_dsa"})
_SCALED_NUMBERS, _SCALE_BYTES = 128, 4
# Entries by which a model keeps something else than K and V of the same heads in every layer.
# Only families that are named here are known with them.
_UNUSUAL = (
    "attention_k_eq_v", "block_configs", "compress_ratios", "cross_attention_layers",
    "global_head_dim", "index_head_dim", "index_n_heads", "index_topk", "kv_lora_rank",
    "layer_group_size", "num_attention_groups", "num_global_key_value_heads",
    "num_kv_shared_layers", "per_layer_config", "swa_head_dim", "v_head_dim",
)  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
_POSITIONS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
# Rotations whose config.json already has the context that they reach.
_SCALED_ROTATIONS = frozenset({
    "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default",
    "mrope", "proportional",
})  # fmt: skip
# What transformers takes where a config.json of the family leaves it out.
_LLAMA = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096,
    "max_position_embeddings": 2048,
}  # fmt: skip
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "falcon": {"max_position_embeddings": 2048, "multi_query": True},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4},
    "gemma3_text": {
        "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 2304,
        "num_hidden_layers": 26, "max_position_embeddings": 131072,
    },
    "gemma3n_text": {
        "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 2048,
        "num_hidden_layers": 35, "max_position_embeddings": 32768, "num_kv_shared_layers": 15,
    },
    "gpt_bigcode": {"multi_query": True},
    "llama": _LLAMA,
}  # fmt: skip


@dataclass(frozen=True)
class OtherLayers:
    """Layers that keep other KV than those that a shape counts first.

    Attributes:
        numbers: that one of its KV heads keeps per token.
        item_bytes: of a number; None: of the data type.
    """

    layers: int
    heads: int
    numbers: int
    item_bytes: int | None = None

    def bytes_per_token(self, dtype_bytes: int, ranks: int = 1) -> int:
        """Return the bytes of KV of one token on each of so many ranks, over these layers."""
        all_heads = self.layers * self.heads * self.numbers * (self.item_bytes or dtype_bytes)
        return all_heads // min(ranks, self.heads)


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that decide KV size and which splits are possible.

    Attributes:
        layers: that keep KV of their own.
        latent_dim: multi-head latent attention (MLA): numbers that a layer keeps per token
            instead of K and V of every head; None for all other models.
        others: layers, or parts of layers, whose KV is unlike that of `layers`.
        reader: the vLLM whose answer this is; "" for the kit's estimate.
        groups: into how many groups vLLM puts layers where all must be alike; None if unknown.
    """

    layers: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int | None
    latent_dim: int | None = None
    others: tuple[OtherLayers, ...] = ()
    reader: str = ""
    groups: int | None = None

    @property
    def all_layers(self) -> int:
        """The layers that keep KV; an indexer is a part of one."""
        return self.layers + sum(one.layers for one in self.others if one.item_bytes is None)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Return the bytes of KV of one token, over all layers."""
        return self.rank_kv_bytes_per_token(dtype_bytes, 1)

    def kv_parts(self, tp: int) -> int:
        """Return into how many parts ranks divide KV: at most one per KV head, 1 for MLA."""
        return 1 if self.latent_dim else min(tp, self.kv_heads)

    def rank_kv_bytes_per_token(self, dtype_bytes: int, tp: int) -> int:
        """Return the bytes of KV of one token on each rank."""
        a_layer = self.latent_dim or 2 * self.kv_heads * self.head_dim
        alike = self.layers * a_layer * dtype_bytes // self.kv_parts(tp)
        return alike + sum(one.bytes_per_token(dtype_bytes, tp) for one in self.others)

    def storing_ranks(self, tp: int) -> int:
        """Return the number of ranks that store KV; with MLA one, because all hold the same."""
        return 1 if self.latent_dim else tp

    def divides(self, tp: int) -> bool:
        """Tell whether attention splits evenly over ranks."""
        heads = [] if self.latent_dim else [self.kv_heads, *(one.heads for one in self.others)]
        fits_kv = all(count % tp == 0 or tp % count == 0 for count in heads)
        return fits_kv and self.attention_heads % tp == 0


def estimated_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """Return what config.json says of KV; None if its family's KV is not known.

    Raises:
        TypeError, ValueError: a value is not a number.
    """
    given = text_of(config)
    family = given.get("model_type")
    text = {**_DEFAULTS.get(str(family), {}), **{k: v for k, v in given.items() if v is not None}}
    heads, layers = _first(text, _HEADS), _first(text, _LAYERS)
    hidden = _first(text, _HIDDEN)
    if not (heads and layers and hidden) or kind_of(config).state:
        return None
    if min(heads, layers, hidden) < 0:
        raise ValueError(f"{min(heads, layers, hidden)} is below 0")
    positions = _positions(config, text)
    if family in _MLA_TYPES and text.get("kv_lora_rank"):
        return _latent(text, layers, heads, positions)
    if str(family).startswith("gemma4"):
        return _gemma4(text, layers, heads, positions)
    if any(text.get(key) for key in _UNUSUAL) and family not in ("gemma3n_text", "minicpm3"):
        return None
    layers -= int(text.get("num_kv_shared_layers") or 0)
    if layers <= 0:
        raise ValueError(f"{layers} layers keep KV of their own")
    head_dim = int(text.get("head_dim") or hidden // heads)
    if family == "minicpm3":  # V is padded to the size of K, a part of which is rotated
        head_dim = int(text["qk_nope_head_dim"]) + int(text["qk_rope_head_dim"])
    return ModelShape(layers, heads, _kv_heads(text, heads), head_dim, positions)


def read_shape(reading: Mapping[str, Any]) -> ModelShape | None:
    """Return what vLLM says (pdkit_connector.model_reader); None if it could not say it.

    Layers that keep a state are left out: they keep nothing of a single token.
    """
    layers = [one for one in reading.get("layers") or () if one["kind"] != "state"]
    if not layers:
        return None
    first = max(layers, key=lambda one: one["count"] * (one["item_bytes"] > 1))
    latent = int(first["bytes"]) // first["item_bytes"] if first["kind"] == "mla" else None
    # Windows and full attention of the same heads keep the same KV of a token.
    alike = [one for one in layers if _kept_by(one) == _kept_by(first)]
    return ModelShape(
        layers=sum(one["count"] for one in alike),
        attention_heads=int(reading["attention_heads"]),
        kv_heads=first["heads"],
        head_dim=int(first["bytes"]) // (2 * first["item_bytes"] * first["heads"]),
        max_positions=reading["max_positions"],
        latent_dim=latent,
        others=tuple(_other(one) for one in layers if one not in alike),
        reader=str(reading["vllm"]),
        groups=reading.get("groups"),
    )


def _kept_by(layer: Mapping[str, Any]) -> tuple[bool, Any, Any, Any]:
    return layer["kind"] == "mla", layer["heads"], layer["bytes"], layer["item_bytes"]


def _other(layer: Mapping[str, Any]) -> OtherLayers:
    item = layer["item_bytes"]
    numbers = int(layer["bytes"]) // (item * layer["heads"])
    return OtherLayers(layer["count"], layer["heads"], numbers, item if item == 1 else None)


def _latent(text: Mapping[str, Any], layers: int, heads: int, positions: int | None) -> ModelShape:
    """Return the shape of an MLA model: a layer keeps a latent and a rotated K of each token."""
    latent = int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0)
    others: tuple[OtherLayers, ...] = ()
    if text.get("model_type") in _INDEXED_TYPES:
        numbers = int(text.get("index_head_dim") or _SCALED_NUMBERS)
        scales = numbers // _SCALED_NUMBERS * _SCALE_BYTES
        others = (OtherLayers(layers, 1, numbers + scales, item_bytes=1),)
    return ModelShape(layers, heads, heads, latent, positions, latent, others)


def _gemma4(
    text: Mapping[str, Any], layers: int, heads: int, positions: int | None
) -> ModelShape | None:
    """Return the shape of a Gemma 4: layers of full attention have other heads than windows.

    The last layers use the KV of earlier ones.
    """
    kinds = text.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or not text.get("head_dim"):
        return None
    own = kinds[: layers - int(text.get("num_kv_shared_layers") or 0)]
    windows = own.count("sliding_attention")
    kv_heads = int(text.get("num_key_value_heads") or heads)
    few = text.get("attention_k_eq_v") and text.get("num_global_key_value_heads")
    full = OtherLayers(
        len(own) - windows, int(few or kv_heads), 2 * int(text.get("global_head_dim") or 512)
    )
    return ModelShape(windows, heads, kv_heads, int(text["head_dim"]), positions, others=(full,))


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    return _first(text, _KV_HEADS) or heads


def _positions(config: Mapping[str, Any], text: Mapping[str, Any]) -> int | None:
    """Return the longest context, as vLLM derives it; None if config.json does not say it."""
    found = [int(text[key]) for key in _POSITIONS if text.get(key)]
    if not found:
        return None
    longest = int(text.get("model_max_length") or min(found))
    if "gemma3" in str(config.get("model_type")):
        return longest  # in the file it is scaled already
    factors = [one.get("factor") or 1 for one in _rotations(config, text) if _stretches(one)]
    return int(longest * float(factors[-1])) if factors else longest


def _rotations(config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for part in (config, text):
        for key in ("rope_scaling", "rope_parameters"):
            if isinstance(rotation := part.get(key), dict):
                nested = [one for one in rotation.values() if isinstance(one, dict)]
                yield from nested or [rotation]


def _stretches(rotation: Mapping[str, Any]) -> bool:
    name = rotation.get("rope_type") or rotation.get("type") or "default"
    return name not in _SCALED_ROTATIONS


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((int(config[name]) for name in names if config.get(name)), None)
