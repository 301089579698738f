"""What the plan reads of a checkpoint: the shapes its arithmetic needs, and the bytes of its weights by place and category.

Rule order of `model_of`: the vision tower (`--language-model-only`), the draft head and the table's rows are not on the cards; what
belongs to a decoder layer goes where the layer goes; the embedding to the first stage; head, last mixer and last norm to the
last one. Quantized tensors count as they are stored. A tied head is the embedding once more, on the last stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from .budget import BF16_BYTES, FP32_BYTES, Shapes
from .checkpoint import Checkpoint, TextConfig, read_text_config
from .data import data
from .errors import Exit, Refusal

# What a line of the budget sums up, in the order of the lines; every other category of a layer is "router and norms".
KINDS: dict[str, tuple[str, ...]] = {
    "experts": ("experts",),
    "dense": ("linear_attention", "attention", "indexer", "shared_experts", "mlp"),
    "hyper-connection": ("hyper_connection",),
    "table layer's own weights": ("ple",),
}
REST = "router and norms"
_NOT_ON_CARDS = frozenset({"table", "vision", "mtp"})


@dataclass(frozen=True, kw_only=True)
class Model:
    """A checkpoint in the plan's terms.

    `layers[n]` are the bytes of decoder layer n on its card by category, `last` those that follow the layers (head, last mixer);
    None where the checkpoint was not read (a model on the CPU). `origin` says in words where the numbers come from.
    """

    path: str
    origin: str
    architecture: str | None
    model_type: str | None
    text: TextConfig
    layers: tuple[Mapping[str, int], ...] | None = None
    embed_bytes: int | None = None
    last: Mapping[str, int] | None = None
    table_bytes: int | None = None
    sampling: Mapping[str, float] | None = None  # what generation_config.json sets of it; None: not known

    @property
    def layer_bytes(self) -> tuple[int, ...] | None:
        return None if self.layers is None else tuple(sum(layer.values()) for layer in self.layers)

    @property
    def head_bytes(self) -> int | None:
        return None if self.last is None else sum(self.last.values())


def is_target(model: Model) -> bool:
    return (model.model_type or "").startswith("qwen4_exp") or "Qwen4Exp" in (model.architecture or "")


@cache
def published() -> Model:
    """The published checkpoint as a `Model`, for plans without one at hand (`published.yaml`)."""
    doc = data("published")
    config = dict(doc["text_config"])
    config["layer_types"] = config["layer_types"]["repeat"] * config["layer_types"]["times"]
    text = read_text_config(config, "published.yaml")
    w = doc["weights"]
    full = set(text.attention_layers or ())
    layers = tuple(
        {
            **w["layer"],
            **w["full_attention" if at in full else "linear_attention"],
            **(w["table_layer"] if at in text.ple_layers else {}),
        }
        for at in range(text.need("num_hidden_layers"))
    )
    return Model(
        path="/model",
        origin="the published checkpoint's account (no checkpoint was read)",
        architecture=doc["architectures"][0],
        model_type=doc["model_type"],
        text=text,
        layers=layers,
        embed_bytes=w["embed_bytes"],
        last=w["last"],
        table_bytes=w["table_bytes"],
    )


def published_sampling() -> Mapping[str, float]:
    """Sampling defaults that the model's publisher recommends for thinking mode."""
    return data("published")["sampling"]


def model_of(checkpoint: Checkpoint) -> Model:
    """A checkpoint's facts in the plan's terms."""
    layers = embed = last = table = None
    if checkpoint.has_weights:
        w = checkpoint.weights
        layers = tuple({c: n for c, n in layer.items() if c not in _NOT_ON_CARDS} for layer in w.layers)
        embed, table = w.outside.get("embed", 0), w.of("table")
        last = {c: n for c, n in w.outside.items() if c not in {*_NOT_ON_CARDS, "embed"}}
        last.setdefault("head", embed)
    return Model(
        path=checkpoint.path,
        origin="the checkpoint's headers",
        architecture=checkpoint.architectures[0] if checkpoint.architectures else None,
        model_type=checkpoint.model_type,
        text=checkpoint.text,
        layers=layers,
        embed_bytes=embed,
        last=last,
        table_bytes=table,
        sampling={k: v for k, v in (checkpoint.generation or {}).items() if k in published_sampling()},
    )


def shapes(text: TextConfig) -> Shapes:
    """The numbers of a text config that the arithmetic needs. Raises Refusal (code 4) naming a missing key."""
    layers = text.need("num_hidden_layers")
    full = set(text.attention_layers or ())
    if not full:
        raise Refusal(
            "config.json names no full-attention layer (layer_types)",
            "use the config.json of the published checkpoint",
            Exit.CHECKPOINT,
        )
    return Shapes(
        layer_types=tuple("full_attention" if i in full else "linear_attention" for i in range(layers)),
        max_position=text.need("max_position_embeddings"),
        num_key_value_heads=text.need("num_key_value_heads"),
        head_dim=text.need("head_dim"),
        linear_num_key_heads=text.need("linear_num_key_heads"),
        linear_num_value_heads=text.need("linear_num_value_heads"),
        linear_key_head_dim=text.need("linear_key_head_dim"),
        linear_value_head_dim=text.need("linear_value_head_dim"),
        linear_conv_kernel=text.need("linear_conv_kernel_dim"),
        ssm_bytes=FP32_BYTES if "32" in (text.mamba_ssm_dtype or "float32") else BF16_BYTES,
        indexer_head_dim=text.need("indexer_head_dim"),
        indexer_compress_ratio=text.need("indexer_compress_ratio"),
        indexer_budget=text.need("indexer_budget"),
        hidden=text.need("hidden_size"),
        hc_count=text.need("hc_count"),
        attention_heads=text.need("num_attention_heads"),
        experts=text.need("num_experts"),
        experts_per_token=text.need("num_experts_per_tok"),
        moe_inner=text.need("moe_intermediate_size"),
        table_layer_ids=text.ple_layer_ids or (),
    )
