"""Make a small random `qwen4_exp` checkpoint in the real layout, quantized in one of several ways.

What it decides: every tensor of the checkpoint (name, shape, dtype, value) from (VARIANT, seed, shape), and the
quantization_config that goes with it. Rule order: shape -> list of tensors with a role each -> value of each from a
stream of its own -> role and variant give the scheme -> pack -> shard files, index, config, tokenizer.

Why it does not ask transformers or torch for random numbers: the same checkpoint is made on two machines (the one where
the reference ran, and the one with the GPUs), so a value is a pure function of (seed, tensor name) built from the
PCG64 bit stream, which numpy promises to keep, and exact arithmetic after it. `digest()` over the files proves it.
That names and shapes are transformers' own is a test (tests/engine/test_checkpoints.py): its model loads the dequantized
checkpoint with nothing missing and nothing left over.

Why the scales are what they are (`Tensor.gain`): with transformers' own initialisation (std 0.02) each block adds almost
nothing to the residual, logits are flat, and a wrong kernel could not be told from a right one. Here a linear map of unit
input gives about unit output times its gain; attention is peaked (q_norm and k_norm at 1.5), half the linear-attention
heads remember hundreds of tokens, the mixing gates swing, and logits have a standard deviation of about 3. So answers
differ by prompt, and each part of the model moves the log-probabilities far more than rounding does (a test shows both).

    python -m tests.support.checkpoints VARIANT OUT [--wrapper] [--seed N] [--dequantized DIR]

VARIANT is one of
  mixed            experts INT4, attention and shared expert INT6, hyper-connection, embeddings and head INT8
  int8-dense       the same with INT8 where `mixed` has INT6
  bf16             nothing quantized
  broken-target    the tensors of `mixed`; all four config groups say ["Linear"], as the AutoRound export did
  table-elsewhere  `mixed` with the table on decoder layer 6 (1-based), which PP=2 puts on the second stage
  fused-disagree   `mixed` with k_proj INT8 beside q_proj INT6: one merged projection, two schemes
  int6-embed       `mixed` with a 6-bit embed_tokens
  int6-padded      `mixed` with INT6 packed five to a word, as compressed-tensors 0.17 does
  full-shapes      config and tokenizer only: 48 layers, 512 experts, for --load-format dummy
  full-table       the same with a table of 16 million rows, and that table as a prepared file `table` of 5.1 GB
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import pathlib
from collections.abc import Iterator

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors import safe_open
from safetensors.torch import save_file

VARIANTS = (
    "mixed",
    "int8-dense",
    "bf16",
    "broken-target",
    "table-elsewhere",
    "fused-disagree",
    "int6-embed",
    "int6-padded",
    "full-shapes",
    "full-table",
)
SHARD_BYTES = 12 << 20
"""Size at which a new shard file begins: small, so that even this checkpoint has several."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The dimensions of the model; defaults are the small one.

    Real are: head dims, GQA group, indexer, low rank, streams, n-gram heads, table shards and the 3+1 layer pattern, since
    kernels are built around them. Small are: hidden size, layers, experts, heads of the linear attention, vocabulary, table.
    """

    hidden: int = 256
    layers: int = 8
    experts: int = 16
    experts_per_token: int = 4
    # above the group size: vLLM 0.30.0 permutes w13's scales by comparing the group with this width instead of with hidden_size
    # (int_wna16.py), so with 128 an INT4 layer of experts comes out 16 % wrong; the published model has 640
    moe_intermediate: int = 256
    heads: int = 24
    kv_heads: int = 2
    head_dim: int = 256
    linear_key_heads: int = 4
    linear_value_heads: int = 12
    linear_head_dim: int = 128
    conv_kernel: int = 4
    streams: int = 4
    low_rank: int = 320
    indexer_heads: int = 4
    indexer_dim: int = 128
    indexer_budget: int = 2048
    indexer_ratio: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_base: int = 1000
    table_shards: int = 128
    table_layers: tuple[int, ...] = (2,)
    vocab: int = 1024
    max_position: int = 32768
    eos: int | None = None

    @property
    def layer_types(self) -> list[str]:
        return (["linear_attention"] * 3 + ["full_attention"]) * (self.layers // 4)

    @property
    def conv_dim(self) -> int:
        return self.linear_head_dim * (2 * self.linear_key_heads + self.linear_value_heads)

    @property
    def table_rows(self) -> int:
        total = sum(table_head_sizes(self, 0))
        return -(-total // 128) * 128

    @property
    def table_dim(self) -> int:
        return self.hidden // ((self.ngram_size - 1) * self.heads_per_ngram)


TINY = Shape()
FULL = Shape(
    hidden=2560,
    layers=48,
    experts=512,
    experts_per_token=10,
    moe_intermediate=640,
    linear_key_heads=16,
    linear_value_heads=48,
    vocab=248320,
    max_position=262144,
    eos=248044,
)
"""The published model's dimensions, but for ngram_base: dummy weights do not need a table of 95 GiB."""
FULL_SHAPES = {"full-shapes": FULL, "full-table": dataclasses.replace(FULL, ngram_base=1_000_000)}
TABLE_FILE = "table"


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How one role is quantized: symmetric integers, one BF16 scale per `group` inputs."""

    bits: int
    group: int

    def args(self) -> QuantizationArgs:
        return QuantizationArgs(num_bits=self.bits, type="int", symmetric=True, strategy="group", group_size=self.group)

    def config(self) -> dict:
        """The `weights` object of a config group, spelled as exporters spell it."""
        return {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": self.group,
            "dynamic": False,
            "actorder": None,
            "observer": "minmax",
            "block_structure": None,
            "observer_kwargs": {},
        }


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of the unquantized model.

    gain: of a matrix, the standard deviation of its output for inputs of standard deviation one; of a vector, its own.
    mean: added to every value. role: which scheme applies; None for what is never quantized.
    """

    name: str
    shape: tuple[int, ...]
    gain: float = 1.0
    mean: float = 0.0
    role: str | None = None


TARGETS: dict[str, list[str]] = {
    "experts": [r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"],
    "dense": [
        r"re:.*\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$",
        r"re:.*\.self_attn\.(q|k|v|o)_proj$",
        r"re:.*\.mlp\.shared_expert\.(gate|up|down)_proj$",
    ],
    "hc_up": [r"re:.*hyper_connection(_mixer)?\.input_mix_weight_up$"],
    "hc_down": [r"re:.*hyper_connection(_mixer)?\.input_mix_weight_down$", r"re:.*embed_tokens$", r"re:.*lm_head$"],
}
"""Config group -> targets, in the order in which the groups are written. Suffix expressions, since a path in a target
is renamed by the engine and an expression is not; `hc_down` also carries embed_tokens and lm_head (the same scheme)."""

ROLE_GROUP = {"experts": "experts", "dense": "dense", "hc_up": "hc_up", "hc_down": "hc_down", "vocab": "hc_down"}


def schemes(variant: str) -> dict[str, Scheme]:
    """Role -> scheme. Empty for bf16. The low rank of 320 is 2.5 groups of 128: 64 divides it."""
    if variant == "bf16":
        return {}
    dense = Scheme(8 if variant == "int8-dense" else 6, 128)
    out = {
        "experts": Scheme(4, 128),
        "dense": dense,
        "hc_up": Scheme(8, 64),
        "hc_down": Scheme(8, 128),
        "vocab": Scheme(8, 128),
    }
    if variant == "fused-disagree":
        out["k_proj"] = Scheme(8, 128)
    if variant == "int6-embed":
        out["embed"] = Scheme(6, 128)
    return out


def quantization_config(shape: Shape, variant: str, prefix: str = "model.") -> dict | None:
    """The quantization_config of config.json, or None. `ignore` names every linear layer that stays BF16, as exports do."""
    by_role = schemes(variant)
    if not by_role:
        return None
    targets = {group: list(names) for group, names in TARGETS.items()}
    groups = [(by_role[name], targets[name]) for name in TARGETS]
    if variant == "fused-disagree":
        targets["dense"][1] = r"re:.*\.self_attn\.(q|v|o)_proj$"
        groups.insert(2, (by_role["k_proj"], [r"re:.*\.self_attn\.k_proj$"]))
    if variant == "int6-embed":
        targets["hc_down"].remove(r"re:.*embed_tokens$")
        groups.append((by_role["embed"], [r"re:.*embed_tokens$"]))
    if variant == "broken-target":
        groups = [(scheme, ["Linear"]) for scheme, _ in groups]
    return {
        "config_groups": {
            f"group_{n}": {
                "targets": names,
                "weights": scheme.config(),
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
            for n, (scheme, names) in enumerate(groups)
        },
        "format": "pack-quantized",
        "global_compression_ratio": None,
        "ignore": ignored(shape, prefix),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def ignored(shape: Shape, prefix: str) -> list[str]:
    """Module names of the linear layers without a role, sorted as they appear."""
    linear = (
        "gate",
        "shared_expert_gate",
        "in_proj_a",
        "in_proj_b",
        "index_qk_proj",
        "block_inject_weight",
        "key_proj",
        "value_proj",
    )
    names = []
    for tensor in tensors(shape, prefix):
        module = tensor.name.removesuffix(".weight")
        if tensor.role is None and module.rsplit(".", 1)[-1] in linear:
            names.append(module)
    return names


def tensors(shape: Shape, prefix: str = "model.") -> Iterator[Tensor]:
    """Every weight of the unquantized model but the table's hash constants. `prefix` is what stands before `layers`."""
    hidden, wide = shape.hidden, shape.hidden * shape.streams

    def hyper(at: str, inject: bool) -> Iterator[Tensor]:
        yield Tensor(f"{at}.hc_norm.weight", (wide,), 0.2)
        yield Tensor(f"{at}.input_mix_weight_down.weight", (shape.low_rank, wide), 2.0, role="hc_down")
        yield Tensor(f"{at}.input_mix_weight_up.weight", (wide, shape.low_rank), 2.0, role="hc_up")
        if inject:
            yield Tensor(f"{at}.block_inject_weight.weight", (shape.streams, wide), 4.0)

    yield Tensor(f"{prefix}embed_tokens.weight", (shape.vocab, hidden), math.sqrt(hidden), role="vocab")
    for n, kind in enumerate(shape.layer_types):
        at = f"{prefix}layers.{n}"
        if n + 1 in shape.table_layers:
            for norm in ("norm_conv", "norm_key", "norm_query"):
                yield Tensor(f"{at}.ple.{norm}.weight", (wide,), 0.1)
            yield Tensor(f"{at}.ple.conv1d.weight", (wide, 1, 4), 1.0)
            yield Tensor(f"{at}.ple.key_proj.weight", (wide, hidden), 1.0)
            yield Tensor(f"{at}.ple.value_proj.weight", (hidden, hidden), 1.0)
            rows = -(-shape.table_rows // shape.table_shards)
            for part in range(shape.table_shards):
                count = max(0, min(rows, shape.table_rows - part * rows))
                name = f"{at}.ple.ple_embedding.ngram_embedding.shard_{part}.weight"
                yield Tensor(name, (count, shape.table_dim), math.sqrt(shape.table_dim))
        yield from hyper(f"{at}.attn_hyper_connection", inject=True)
        if kind == "linear_attention":
            at_attn = f"{at}.linear_attn"
            value = shape.linear_value_heads * shape.linear_head_dim
            yield Tensor(f"{at_attn}.A_log", (shape.linear_value_heads,))
            yield Tensor(f"{at_attn}.dt_bias", (shape.linear_value_heads,), 0.3, 1.0)
            yield Tensor(f"{at_attn}.conv1d.weight", (shape.conv_dim, 1, shape.conv_kernel), 1.5)
            yield Tensor(f"{at_attn}.in_proj_a.weight", (shape.linear_value_heads, hidden), 1.0)
            yield Tensor(f"{at_attn}.in_proj_b.weight", (shape.linear_value_heads, hidden), 1.0)
            yield Tensor(f"{at_attn}.in_proj_qkv.weight", (shape.conv_dim, hidden), 1.0, role="dense")
            yield Tensor(f"{at_attn}.in_proj_z.weight", (value, hidden), 1.0, role="dense")
            yield Tensor(f"{at_attn}.norm.weight", (shape.linear_head_dim,), 0.1, 1.0)
            yield Tensor(f"{at_attn}.out_proj.weight", (hidden, value), 0.75, role="dense")
        else:
            at_attn = f"{at}.self_attn"
            query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
            index = (shape.indexer_heads + 1) * shape.indexer_dim
            yield Tensor(f"{at_attn}.indexer.index_qk_proj.weight", (index, hidden), 2.0)
            yield Tensor(f"{at_attn}.indexer.k_layernorm.weight", (shape.indexer_dim,), 0.1)
            yield Tensor(f"{at_attn}.indexer.q_layernorm.weight", (shape.indexer_dim,), 0.1)
            yield Tensor(f"{at_attn}.k_norm.weight", (shape.head_dim,), 0.1, 0.5)
            yield Tensor(f"{at_attn}.q_norm.weight", (shape.head_dim,), 0.1, 0.5)
            yield Tensor(f"{at_attn}.q_proj.weight", (2 * query, hidden), 2.0, role="dense")
            yield Tensor(f"{at_attn}.k_proj.weight", (key, hidden), 2.0, role="dense")
            yield Tensor(f"{at_attn}.v_proj.weight", (key, hidden), 2.0, role="dense")
            yield Tensor(f"{at_attn}.o_proj.weight", (hidden, query), 1.5, role="dense")
        yield from hyper(f"{at}.mlp_hyper_connection", inject=True)
        yield Tensor(f"{at}.mlp.gate.weight", (shape.experts, hidden), 4.0)
        yield Tensor(f"{at}.mlp.shared_expert_gate.weight", (1, hidden), 2.0)
        experts = [f"{at}.mlp.experts.{e}" for e in range(shape.experts)]
        for expert, role in [(f"{at}.mlp.shared_expert", "dense"), *((e, "experts") for e in experts)]:
            yield Tensor(f"{expert}.gate_proj.weight", (shape.moe_intermediate, hidden), 1.0, role=role)
            yield Tensor(f"{expert}.up_proj.weight", (shape.moe_intermediate, hidden), 1.0, role=role)
            yield Tensor(f"{expert}.down_proj.weight", (hidden, shape.moe_intermediate), 1.0, role=role)
    yield from hyper(f"{prefix}hyper_connection_mixer", inject=False)
    yield Tensor("lm_head.weight", (shape.vocab, hidden), 6.0, role="vocab")


def bell(seed: int, name: str, count: int) -> np.ndarray:
    """`count` float64 values of mean 0 and variance 1, a pure function of (seed, name): sums of four 16-bit uniforms."""
    state = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    halves = np.random.PCG64(state).random_raw(count).astype("<u8").view("<u2").reshape(count, 4)
    return (halves.sum(axis=1, dtype=np.int32) - 4 * 32767.5) / math.sqrt(4 * (65536**2 - 1) / 12)


def value(tensor: Tensor, seed: int) -> torch.Tensor:
    """The BF16 value of one tensor. A_log is spread evenly: half-lives of a head from one token to some hundreds."""
    if tensor.name.endswith(".A_log"):
        heads = tensor.shape[0]
        data = np.log(np.array([0.002 * 2000.0 ** (h / (heads - 1)) for h in range(heads)]))
    else:
        std = tensor.gain / math.sqrt(math.prod(tensor.shape[1:]))
        data = bell(seed, tensor.name, math.prod(tensor.shape)) * std + tensor.mean
    return torch.from_numpy(data.astype(np.float32)).reshape(tensor.shape).to(torch.bfloat16)


def table_head_sizes(shape: Shape, index: int) -> list[int]:
    """Vocabulary of each n-gram head of the `index`-th table: the next primes from the base on."""

    def prime(n: int) -> bool:
        return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))

    heads = (shape.ngram_size - 1) * shape.heads_per_ngram
    found, at = [], shape.ngram_base - 1
    while len(found) < heads * (index + 1):
        at += 1
        if prime(at):
            found.append(at)
    return found[heads * index :]


def table_constants(shape: Shape, prefix: str) -> dict[str, torch.Tensor]:
    """The three int64 tensors beside each table: hash multipliers, vocabulary and first row of each head.

    The multipliers are the model's own definition (splitmix64 over seed 1234): odd, below 2**63 / vocabulary.
    """
    mask = (1 << 64) - 1

    def mix(v: int) -> int:
        v = (v + 0x9E3779B97F4A7C15) & mask
        v = ((v ^ (v >> 30)) * 0xBF58476D1CE4E5B9) & mask
        v = ((v ^ (v >> 27)) * 0x94D049BB133111EB) & mask
        return v ^ (v >> 31)

    out = {}
    for index, layer in enumerate(sorted(shape.table_layers)):
        at = f"{prefix}layers.{layer - 1}.ple.ple_embedding"
        half = max(1, (((1 << 63) - 1) // shape.vocab) // 2)
        base = 1234 + 10007 * index
        odd = [2 * (mix((base + 0x9E3779B97F4A7C15 * (n + 1)) & mask) % half) + 1 for n in range(shape.ngram_size)]
        sizes = table_head_sizes(shape, index)
        out[f"{at}.layer_multipliers"] = torch.tensor(odd, dtype=torch.int64)
        out[f"{at}.ngram_heads_vocab_sizes"] = torch.tensor(sizes, dtype=torch.int64)
        first = [sum(sizes[:n]) for n in range(len(sizes))]
        out[f"{at}.ngram_heads_offsets"] = torch.tensor(first, dtype=torch.int64)
    return out


def pack_dense(q: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [rows, cols] -> int32 [rows, ceil(cols * bits / 32)], values offset to unsigned, lowest bits first, no gaps.

    For 4 and 8 bits this is compressed-tensors' own layout. For 6 bits it is the one that vLLM 0.30 reads (and newer
    compressed-tensors writes: its pull request 732); 0.17 leaves two bits of every word empty.
    """
    rows, cols = q.shape
    per_period = 32 // math.gcd(bits, 32)
    unsigned = torch.nn.functional.pad(q.to(torch.int64) + (1 << (bits - 1)), (0, -cols % per_period))
    unsigned = unsigned.unflatten(1, (-1, per_period))
    words = torch.zeros(rows, unsigned.shape[1], per_period * bits // 32 + 1, dtype=torch.int64)
    for n in range(per_period):
        spread = unsigned[:, :, n] << (n * bits % 32)
        words[:, :, n * bits // 32] |= spread & 0xFFFFFFFF
        words[:, :, n * bits // 32 + 1] |= spread >> 32
    words = words[:, :, :-1].flatten(1)[:, : -(-cols * bits // 32)]
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def unpack_dense(packed: torch.Tensor, bits: int, cols: int) -> torch.Tensor:
    """The inverse of pack_dense: int32 [rows, words] -> int8 [rows, cols]."""
    words = packed.to(torch.int64) & 0xFFFFFFFF
    words = torch.cat([words, torch.zeros_like(words[:, :1])], dim=1)
    at = torch.arange(cols, dtype=torch.int64) * bits
    word, shift = at // 32, at % 32
    both = words[:, word] | (words[:, word + 1] << 32)
    return (((both >> shift) & ((1 << bits) - 1)) - (1 << (bits - 1))).to(torch.int8)


def quantized(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to nearest: int8 [out, in] and BF16 scales [out, in / group]."""
    if weight.shape[1] % scheme.group:
        raise ValueError(f"{weight.shape[1]} inputs are not a multiple of the group of {scheme.group}")
    args = scheme.args()
    wide = weight.float()
    grouped = wide.unflatten(1, (-1, scheme.group))
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    scale = scale.to(torch.bfloat16)
    return quantize(x=wide, scale=scale.float(), zero_point=None, args=args, dtype=torch.int8), scale


def dequantized(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [out, in]; exact, since 8 bits times the 8 bits of a BF16 scale fit."""
    return (q.float().unflatten(1, (scale.shape[1], -1)) * scale.float().unsqueeze(-1)).flatten(1)


def packed(q: torch.Tensor, bits: int, padded: bool) -> torch.Tensor:
    return pack_to_int32(q, bits) if padded or 32 % bits == 0 else pack_dense(q, bits)


def scheme_of(tensor: Tensor, by_role: dict[str, Scheme]) -> Scheme | None:
    if tensor.role is None or not by_role:
        return None
    if tensor.name.endswith("self_attn.k_proj.weight"):
        return by_role.get("k_proj", by_role[tensor.role])
    if tensor.name.endswith("embed_tokens.weight"):
        return by_role.get("embed", by_role[tensor.role])
    return by_role[tensor.role]


def shape_of(variant: str) -> Shape:
    if variant in FULL_SHAPES:
        return FULL_SHAPES[variant]
    base = dataclasses.replace(TINY, eos=tokenizer().token_to_id("<|endoftext|>"))
    return dataclasses.replace(base, table_layers=(6,)) if variant == "table-elsewhere" else base


def weights(variant: str, seed: int, prefix: str) -> Iterator[tuple[str, dict[str, torch.Tensor], torch.Tensor]]:
    """(name of the weight, what the checkpoint stores for it, the float32 value that this stands for)."""
    shape, by_role = shape_of(variant), schemes(variant)
    for tensor in tensors(shape, prefix):
        # The seed's stream is named without the wrapper's prefix, so that both forms hold the same model.
        data = value(dataclasses.replace(tensor, name=tensor.name.replace(prefix, "model.", 1)), seed)
        scheme = scheme_of(tensor, by_role)
        if scheme is None:
            yield tensor.name, {tensor.name: data}, data.float()
            continue
        q, scale = quantized(data, scheme)
        stored = {
            f"{tensor.name}_packed": packed(q, scheme.bits, padded=variant == "int6-padded"),
            f"{tensor.name}_scale": scale,
            f"{tensor.name}_shape": torch.tensor(data.shape, dtype=torch.int64),
        }
        yield tensor.name, stored, dequantized(q, scale)
    for name, data in table_constants(shape, prefix).items():
        yield name, {name: data}, data


WORDS = (
    " the of and to in is that for it as was with be by on not he his but at are this have from or had an they which you were"
    " all her she there would their we him been has when who will no more if out so up said what its about than into them can"
    " only other time new some could these two may first then do any like my now over such our man me even most made after also"
    " did many before must through back years where much your way well down should because each just those people how too little"
    " state good very make world still own see men work long get here between both life being under never day same another know"
    " while last might us great old year off come since against go came right used take three"
)


def tokenizer():
    """A byte-level BPE: 256 bytes, one merge per new prefix of WORDS, three special tokens. No training, so no ties."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    byte_chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: n for n, char in enumerate(byte_chars)}
    merges: list[tuple[str, str]] = []
    space = "\u0120"
    for word in dict.fromkeys(WORDS.split()):
        text = space + word
        for end in range(2, len(text) + 1):
            if text[:end] not in vocab and len(vocab) < 1000:
                vocab[text[:end]] = len(vocab)
                merges.append((text[: end - 1], text[end - 1]))
    built = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    built.add_special_tokens([AddedToken(text, special=True) for text in special])
    return built


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text_config(shape: Shape) -> dict:
    """config.json of the text model as published checkpoints spell it (`full_attention`, not `indexed_attention`)."""
    return {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": shape.eos,
        "hc_count": shape.streams,
        "hc_lowrank": shape.low_rank,
        "head_dim": shape.head_dim,
        "heads_per_ngram": shape.heads_per_ngram,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "indexer_budget": shape.indexer_budget,
        "indexer_compress_ratio": shape.indexer_ratio,
        "indexer_head_dim": shape.indexer_dim,
        "indexer_kv_heads": 1,
        "indexer_n_heads": shape.indexer_heads,
        "initializer_range": 0.02,
        "intermediate_size": shape.moe_intermediate,
        "layer_types": shape.layer_types,
        "linear_conv_kernel_dim": shape.conv_kernel,
        "linear_key_head_dim": shape.linear_head_dim,
        "linear_num_key_heads": shape.linear_key_heads,
        "linear_num_value_heads": shape.linear_value_heads,
        "linear_value_head_dim": shape.linear_head_dim,
        "make_ngram_vocab_size_divisible_by": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": shape.max_position,
        "moe_intermediate_size": shape.moe_intermediate,
        "ngram_size": shape.ngram_size,
        "ngram_vocab_size_base": shape.ngram_base,
        "norm_topk_prob": True,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "output_gate_type": "sigmoid",
        "ple_conv_kernel_size": 4,
        "ple_embed_dim": shape.hidden,
        "ple_layer_ids": list(shape.table_layers),
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000.0, "rope_type": "default"},
        "seed": 1234,
        "shared_expert_intermediate_size": shape.moe_intermediate,
        "split_ngram_parts": shape.table_shards,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": shape.vocab,
    }


def wrapper_config(shape: Shape) -> dict:
    """The multimodal wrapper around it: text_config inside, three-axis rotary positions, a vision tower of one layer."""
    text = text_config(shape)
    del text["architectures"]
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    first = shape.eos + 3
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "dtype": "bfloat16",
        "image_token_id": first,
        "video_token_id": first + 1,
        "vision_start_token_id": first + 2,
        "vision_end_token_id": first + 3,
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": 1,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 64,
            "in_channels": 3,
            "intermediate_size": 128,
            "model_type": "qwen4_exp",
            "num_heads": 2,
            "num_position_embeddings": 16,
            "out_hidden_size": shape.hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def unused_tensors(shape: Shape) -> dict[str, torch.Tensor]:
    """What a real wrapper also holds and text-only serving must skip: a piece of the vision tower and of the draft head."""
    return {
        "model.visual.patch_embed.proj.bias": torch.zeros(64, dtype=torch.bfloat16),
        "mtp.fc.weight": torch.zeros(shape.hidden, 2 * shape.hidden, dtype=torch.bfloat16),
    }


def dump(path: pathlib.Path, data: dict) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_sharded(out: pathlib.Path, named: Iterator[tuple[str, torch.Tensor]]) -> None:
    """model-0000N-of-0000M.safetensors of about SHARD_BYTES each, and their index."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    room, total = SHARD_BYTES, 0
    for name, data in named:
        size = data.numel() * data.element_size()
        if size > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = data.contiguous()
        room -= size
        total += size
    where = {}
    for n, shard in enumerate(shards, 1):
        file = f"model-{n:05}-of-{len(shards):05}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    dump(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def write_side_files(out: pathlib.Path, shape: Shape, config: dict) -> None:
    """config.json, generation_config.json, tokenizer and chat template."""
    out.mkdir(parents=True, exist_ok=True)
    dump(out / "config.json", config)
    eos = shape.eos
    dump(
        out / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": [eos + 2, eos],
            "pad_token_id": eos,
            "temperature": 1.0,
            "top_k": 20,
            "top_p": 0.95,
        },
    )
    tokenizer().save(str(out / "tokenizer.json"))
    dump(
        out / "tokenizer_config.json",
        {
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": shape.max_position,
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def write(
    variant: str, out: pathlib.Path, seed: int = 0, wrapper: bool = False, plain: pathlib.Path | None = None
) -> None:
    """Write the checkpoint into `out` and, where `plain` names a folder, the float32 weights that it stands for."""
    shape = shape_of(variant)
    prefix = "model.language_model." if wrapper else "model."
    config = wrapper_config(shape) if wrapper else text_config(shape)
    quantization = quantization_config(shape, variant, prefix)
    write_side_files(out, shape, config | ({"quantization_config": quantization} if quantization else {}))
    if variant in FULL_SHAPES:
        if variant == "full-table":
            write_flat_table(out / TABLE_FILE, shape.table_rows, shape.table_dim)
        return
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, parts, meaning in weights(variant, seed, prefix):
        stored |= parts
        if plain:
            values[name] = meaning
    save_sharded(out, iter((stored | (unused_tensors(shape) if wrapper else {})).items()))
    if plain:
        write_side_files(plain, shape, config | {"dtype": "float32"})
        save_sharded(plain, iter(values.items()))


def write_flat_table(file: pathlib.Path, rows: int, columns: int) -> None:
    """A prepared table of small finite values, and its marker: what `flashnext prepare` leaves, without a checkpoint to make it from."""
    from flashnext import table_store

    piece = value(Tensor("piece of a table", (1 << 16, columns), gain=0.02), 0).view(torch.uint8).numpy().tobytes()
    left = rows * columns * 2
    with file.open("wb") as stream:
        while left:
            left -= stream.write(piece[:left])
    whole = table_store.Table([table_store.Part(str(file), 0, rows)], rows, columns, "BF16")
    marker = {"format": table_store.MARKER_FORMAT, "dtype": "BF16", "rows": rows, "columns": columns}
    table_store.marker_of(file).write_text(json.dumps(marker | {"identity": whole.identity()}))
    whole.close()


def digest(folder: pathlib.Path) -> str:
    """sha256 over every tensor of a checkpoint: name, dtype, shape and bytes, by name. Independent of the sharding."""
    total = hashlib.sha256()
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    open_files = {file: safe_open(folder / file, "pt") for file in set(index.values())}
    for name in sorted(index):
        data = open_files[index[name]].get_tensor(name)
        total.update(f"{name} {data.dtype} {tuple(data.shape)}\n".encode())
        total.update(data.contiguous().view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    return total.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--wrapper", action="store_true", help="write Qwen4ExpForConditionalGeneration with text_config inside"
    )
    parser.add_argument(
        "--dequantized", type=pathlib.Path, metavar="DIR", help="also write the float32 weights it stands for"
    )
    opt = parser.parse_args()
    write(opt.variant, opt.out, opt.seed, opt.wrapper, opt.dequantized)
    size = sum(file.stat().st_size for file in opt.out.glob("*.safetensors"))
    print(f"{opt.out}: {opt.variant}, {size / 1e6:.1f} MB of tensors" + (f", sha256 {digest(opt.out)}" if size else ""))


if __name__ == "__main__":
    main()
