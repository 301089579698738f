"""Which tensors a Qwen4Exp model consists of, with their shapes: from the numbers of config.json, never from constants.

Rule order of `parts`, the text model: vocabulary, then each decoder layer (attention of its type, table, experts,
hyper-connections), then mixer (its norm is the last one) and head. `draft_parts` and `vision_parts` list what text serving
leaves unread. Names follow transformers' modules, those of the draft head vLLM's; `tests/engine/test_architecture.py` holds
all of them against both. `prefix` is what a checkpoint writes before `layers` (text, draft) or `blocks` (vision).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from .checkpoint import TextConfig
from .errors import Exit, Refusal

FUSED = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("linear_attn", ("in_proj_qkv", "in_proj_z")),
    ("linear_attn", ("in_proj_b", "in_proj_a")),
    ("mlp.shared_expert", ("gate_proj", "up_proj")),
)
"""Shards that the engine merges into one matrix, so that they must have one scheme: (module below the layer, shards)."""

EXPERT_SHARDS = (("gate_proj", False), ("up_proj", False), ("down_proj", True))


# What bounds the loops below: a slip in config.json must end in a refusal, not in hours of counting.
_MOST_BLOCKS = 1_000
_MOST = {
    "num_hidden_layers": 1_000,
    "num_experts": 16_384,
    "split_ngram_parts": 65_536,
    "ngram_size": 16,
    "heads_per_ngram": 256,
    "ngram_vocab_size_base": 1 << 34,
}


class Part(NamedTuple):
    """One weight, or that of all experts of a layer (`count` of them, with `*` for the number in the name).

    `kind`: linear (the engine may read it quantized), experts, embed, head (the same), plain (never quantized), bare (the
    name is the tensor's own, without `.weight` behind it), optional (bare, and may be missing). `shape` of a matrix is
    [outputs, inputs].
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    count: int = 1

    @property
    def elements(self) -> int:
        return math.prod(self.shape) * self.count

    def names(self) -> list[str]:
        """The name of each."""
        if self.kind != "experts":
            return [self.name]
        head, _, tail = self.name.partition("*")
        return [f"{head}{n}{tail}" for n in range(self.count)]


QUANTIZABLE = frozenset({"linear", "experts", "embed", "head"})


def is_target(model_type: str | None, architectures: tuple[str, ...]) -> bool:
    """Whether the text model is the one that this module knows."""
    return (model_type or "").startswith("qwen4_exp") or any("Qwen4Exp" in name for name in architectures)


def table_heads(text: TextConfig) -> int:
    """N-gram heads of one table: one row each per token."""
    return (text.need("ngram_size") - 1) * text.need("heads_per_ngram")


@cache
def _primes(base: int, count: int) -> tuple[int, ...]:
    found: list[int] = []
    at = max(2, base)
    while len(found) < count:
        if all(at % d for d in range(2, math.isqrt(at) + 1)):
            found.append(at)
        at += 1
    return tuple(found)


def table_shape(text: TextConfig, index: int = 0) -> tuple[int, int]:
    """(rows, values a row) of the `index`-th table: each head's vocabulary is the next prime, their sum is padded.

    Source: vLLM 0.30.0, models/qwen4_exp (n-gram vocabularies are consecutive primes from `ngram_vocab_size_base`).
    """
    heads = table_heads(text)
    rows = sum(_primes(text.need("ngram_vocab_size_base"), heads * (index + 1))[heads * index :])
    multiple = text.make_ngram_vocab_size_divisible_by or 128
    return -(-rows // multiple) * multiple, text.need("ple_embed_dim") // heads


def parts(text: TextConfig, prefix: str) -> Iterator[Part]:
    """Every weight of the text model. Raises Refusal (code 4) where config.json lacks a number."""
    for name, most in _MOST.items():
        if not 0 < text.need(name) <= most:
            raise Refusal(
                f"config.json: {name} is {text.need(name):,}, which no model of this family has",
                "take config.json from the model's repository",
                Exit.CHECKPOINT,
            )
    hidden = text.need("hidden_size")
    yield Part(f"{prefix}embed_tokens", (text.need("vocab_size"), hidden), "embed")
    attention = set(text.attention_layers if text.attention_layers is not None else text.need("layer_types"))
    tables = sorted(text.ple_layers)
    for layer in range(text.need("num_hidden_layers")):
        at = f"{prefix}layers.{layer}"
        yield from _attention(text, at) if layer in attention else _linear_attention(text, at)
        if layer in tables:
            yield from _table(text, at, tables.index(layer))
        yield from _moe(text, f"{at}.mlp")
        yield from _connections(text, at)
    yield from _mixer(text, prefix)
    if not text.tie_word_embeddings:
        yield Part("lm_head", (text.need("vocab_size"), hidden), "head")


def draft_parts(text: TextConfig, prefix: str = "mtp.") -> Iterator[Part]:
    """Every weight of the draft head (MTP): attention layers without a table, on the text model's numbers.

    Source: vLLM 0.30.0, models/qwen4_exp/nvidia/mtp.py. Raises Refusal (code 4) where config.json lacks a number.
    """
    hidden, streams = text.need("hidden_size"), text.need("hc_count")
    for name in ("fc_embedding", "fc_hidden"):
        yield Part(f"{prefix}{name}", (hidden, hidden), "linear")
    yield Part(f"{prefix}pre_fc_norm_embedding", (hidden,), "plain")
    yield Part(f"{prefix}pre_fc_norm_hidden", (hidden * streams,), "plain")
    for layer in range(min(_MOST_BLOCKS, 1 if text.mtp_num_hidden_layers is None else text.mtp_num_hidden_layers)):
        at = f"{prefix}layers.{layer}"
        yield from _attention(text, at)
        yield from _moe(text, f"{at}.mlp")
        yield from _connections(text, at)
    yield from _mixer(text, prefix)
    for name in ("embed_tokens", "shared_head.head"):
        yield Part(f"{prefix}{name}.weight", (text.need("vocab_size"), hidden), "optional")


def vision_parts(vision: Mapping[str, Any], prefix: str = "model.visual.") -> Iterator[Part]:
    """Every weight of the vision tower, from the raw vision_config. Raises KeyError that names a number it lacks."""

    def number(name: str) -> int:
        value = vision.get(name)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise KeyError(name)
        return value

    def biased(name: str, *shape: int) -> Iterator[Part]:
        yield Part(f"{prefix}{name}", shape, "plain")
        yield Part(f"{prefix}{name}.bias", shape[:1], "bare")

    hidden, inner, patch = number("hidden_size"), number("intermediate_size"), number("patch_size")
    merged = hidden * number("spatial_merge_size") ** 2
    yield from biased("patch_embed.proj", hidden, number("in_channels"), number("temporal_patch_size"), patch, patch)
    yield Part(f"{prefix}pos_embed", (number("num_position_embeddings"), hidden), "plain")
    for block in range(min(_MOST_BLOCKS, number("depth"))):
        at = f"blocks.{block}."
        for norm in ("norm1", "norm2"):
            yield from biased(f"{at}{norm}", hidden)
        yield from biased(f"{at}attn.qkv", 3 * hidden, hidden)
        yield from biased(f"{at}attn.proj", hidden, hidden)
        yield from biased(f"{at}mlp.linear_fc1", inner, hidden)
        yield from biased(f"{at}mlp.linear_fc2", hidden, inner)
    yield from biased("merger.norm", hidden)
    yield from biased("merger.linear_fc1", merged, merged)
    yield from biased("merger.linear_fc2", number("out_hidden_size"), merged)


def _connections(text: TextConfig, at: str) -> Iterator[Part]:
    streams, wide = text.need("hc_count"), text.need("hidden_size") * text.need("hc_count")
    for block in ("attn", "mlp"):
        yield from _mixing(text, f"{at}.{block}_hyper_connection")
        yield Part(f"{at}.{block}_hyper_connection.block_inject_weight", (streams, wide), "linear")


def _mixer(text: TextConfig, prefix: str) -> Iterator[Part]:
    streams, wide = text.need("hc_count"), text.need("hidden_size") * text.need("hc_count")
    yield from _mixing(text, f"{prefix}hyper_connection_mixer")
    # There is nothing left to inject into; the engine drops it where an export has it.
    yield Part(f"{prefix}hyper_connection_mixer.block_inject_weight.weight", (streams, wide), "optional")


def _mixing(text: TextConfig, at: str) -> Iterator[Part]:
    wide, low = text.need("hidden_size") * text.need("hc_count"), text.need("hc_lowrank")
    yield Part(f"{at}.hc_norm", (wide,), "plain")
    yield Part(f"{at}.input_mix_weight_down", (low, wide), "linear")
    yield Part(f"{at}.input_mix_weight_up", (wide, low), "linear")


def _attention(text: TextConfig, at: str) -> Iterator[Part]:
    hidden, width = text.need("hidden_size"), text.need("head_dim")
    query, key = text.need("num_attention_heads") * width, text.need("num_key_value_heads") * width
    index = text.need("indexer_head_dim")
    at += ".self_attn"
    yield Part(f"{at}.q_proj", (2 * query, hidden), "linear")  # queries and their output gates
    yield Part(f"{at}.k_proj", (key, hidden), "linear")
    yield Part(f"{at}.v_proj", (key, hidden), "linear")
    yield Part(f"{at}.o_proj", (hidden, query), "linear")
    for norm in ("q_norm", "k_norm"):
        yield Part(f"{at}.{norm}", (width,), "plain")
    rows = (text.need("indexer_n_heads") + (text.indexer_kv_heads or 1)) * index
    yield Part(f"{at}.indexer.index_qk_proj", (rows, hidden), "linear")
    for norm in ("q_layernorm", "k_layernorm"):
        yield Part(f"{at}.indexer.{norm}", (index,), "plain")


def _linear_attention(text: TextConfig, at: str) -> Iterator[Part]:
    hidden, heads = text.need("hidden_size"), text.need("linear_num_value_heads")
    key = text.need("linear_num_key_heads") * text.need("linear_key_head_dim")
    value = heads * text.need("linear_value_head_dim")
    at += ".linear_attn"
    yield Part(f"{at}.in_proj_qkv", (2 * key + value, hidden), "linear")
    yield Part(f"{at}.in_proj_z", (value, hidden), "linear")
    yield Part(f"{at}.in_proj_b", (heads, hidden), "linear")
    yield Part(f"{at}.in_proj_a", (heads, hidden), "linear")
    yield Part(f"{at}.out_proj", (hidden, value), "linear")
    yield Part(f"{at}.conv1d", (2 * key + value, 1, text.need("linear_conv_kernel_dim")), "plain")
    yield Part(f"{at}.norm", (text.need("linear_value_head_dim"),), "plain")
    yield Part(f"{at}.A_log", (heads,), "bare")
    yield Part(f"{at}.dt_bias", (heads,), "bare")


def _table(text: TextConfig, at: str, index: int) -> Iterator[Part]:
    hidden, dim = text.need("hidden_size"), text.need("ple_embed_dim")
    wide = hidden * text.need("hc_count")
    at += ".ple"
    rows, values = table_shape(text, index)
    shards = text.need("split_ngram_parts")
    each = -(-rows // shards)
    for shard in range(shards):
        count = max(0, min(each, rows - shard * each))
        yield Part(f"{at}.ple_embedding.ngram_embedding.shard_{shard}", (count, values), "plain")
    yield Part(f"{at}.key_proj", (wide, dim), "linear")
    yield Part(f"{at}.value_proj", (hidden, dim), "linear")
    for norm in ("norm_key", "norm_query", "norm_conv"):
        yield Part(f"{at}.{norm}", (wide,), "plain")
    yield Part(f"{at}.conv1d", (wide, 1, text.need("ple_conv_kernel_size")), "plain")
    heads = table_heads(text)
    for name, count in (
        ("layer_multipliers", text.need("ngram_size")),
        ("ngram_heads_vocab_sizes", heads),
        ("ngram_heads_offsets", heads),
    ):
        yield Part(f"{at}.ple_embedding.{name}", (count,), "optional")


def _moe(text: TextConfig, at: str) -> Iterator[Part]:
    hidden, inner = text.need("hidden_size"), text.need("moe_intermediate_size")
    shared = text.shared_expert_intermediate_size
    for shard, back in EXPERT_SHARDS:
        shape = (hidden, inner) if back else (inner, hidden)
        yield Part(f"{at}.experts.*.{shard}", shape, "experts", text.need("num_experts"))
    yield Part(f"{at}.gate", (text.need("num_experts"), hidden), "plain")
    if shared:
        for shard, back in EXPERT_SHARDS:
            yield Part(f"{at}.shared_expert.{shard}", (hidden, shared) if back else (shared, hidden), "linear")
        yield Part(f"{at}.shared_expert_gate", (1, hidden), "plain")
