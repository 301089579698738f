"""Checkpoints that consist of headers only: true names, shapes and file sizes, and no data.

Each file is as long as its header says, but its data is a hole of the file system, so a checkpoint of 170 GB takes
some tens of MB of disk. `flashnext_tensors` gives the published model's shapes with an allocation of its own, which is:
routed experts INT4 in groups of 128; linear attention, attention, shared expert, hyper-connection matrices, embeddings
and head INT8 in groups of 128 (one group where 128 does not divide the row); everything else BF16 (A_log and dt_bias
F32); pack-quantized as compressed-tensors stores it: `weight_packed` I32, `weight_scale` BF16, `weight_shape` I64.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "F16": 16, "BF16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8}

Spec = tuple[str, tuple[int, ...]]
"""(dtype, shape) of one tensor."""


def nbytes(spec: Spec) -> int:
    dtype, shape = spec
    return math.prod(shape) * BITS[dtype] // 8


def header_of(tensors: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> tuple[bytes, int]:
    """(length + JSON, bytes of data that follow) for tensors laid out one after another in the order given."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = nbytes((dtype, shape))
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, at


def write_header_only(path: Path, tensors: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> int:
    """Write a safetensors file whose data is a hole; returns its size in bytes."""
    start, data_bytes = header_of(tensors, metadata)
    path.write_bytes(start)
    os.truncate(path, len(start) + data_bytes)
    return len(start) + data_bytes


def write_raw(path: Path, header: bytes | dict[str, Any], data_bytes: int = 0, length: int | None = None) -> Path:
    """Write a file with any header text and any stated length, for headers that are wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text)
    os.truncate(path, 8 + len(text) + data_bytes)
    return path


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, Spec],
    config: Mapping[str, Any],
    *,
    shard_bytes: int = 5_000_000_000,
    index: bool = True,
    generation: Mapping[str, Any] | None = None,
    tokenizer: bool = True,
    chat_template: str | None = "chat_template.jinja",
) -> Path:
    """A whole header-only checkpoint, cut into shards of about `shard_bytes` in the order of `tensors`."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Spec]] = [{}]
    filled = 0
    for name, spec in tensors.items():
        if filled and filled + nbytes(spec) > shard_bytes:
            parts.append({})
            filled = 0
        parts[-1][name] = spec
        filled += nbytes(spec)
    weight_map = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else "model.safetensors"
        write_header_only(folder / file, part, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    if index:
        total = sum(map(nbytes, tensors.values()))
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer:
        (folder / "tokenizer.json").write_text('{"version": "1.0"}')
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    if chat_template:
        (folder / chat_template).write_text("{{ messages }}")
    return folder


def flashnext_config(layers: int = 48, experts: int = 512, wrapper: bool = True) -> dict[str, Any]:
    """The published model's config.json (numbers of planner.md), with the text model inside the multimodal wrapper."""
    text = {
        "model_type": "qwen4_exp_text",
        "architectures": ["Qwen4ExpForCausalLM"],
        "hidden_size": 2560,
        "num_hidden_layers": layers,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": experts,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 640,
        "shared_expert_intermediate_size": 640,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
        "hc_count": 4,
        "hc_lowrank": 320,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 128,
        "ple_layer_ids": [2],
        "ple_embed_dim": 2560,
        "ple_conv_kernel_size": 4,
        "vocab_size": 248_320,
        "max_position_embeddings": 262_144,
        "mtp_num_hidden_layers": 1,
        "output_gate_type": "sigmoid",
        "torch_dtype": "bfloat16",
        "eos_token_id": [248_044, 248_046],
        "tie_word_embeddings": False,
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["re:.*mlp.experts.*"],
                "weights": {"num_bits": 4, "type": "int", "group_size": 128},
            },
            "group_1": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "group_size": 128}},
        },
        "ignore": [],
    }
    if not wrapper:
        return {**text, "quantization_config": quantization}
    del text["architectures"]
    return {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "text_config": text,
        "vision_config": VISION,
        "quantization_config": quantization,
    }


def _packed(name: str, rows: int, columns: int, bits: int, group: int = 128) -> Iterator[tuple[str, Spec]]:
    """One quantized matrix of [rows, columns] as compressed-tensors packs it."""
    yield f"{name}.weight_packed", ("I32", (rows, columns * bits // 32))
    yield f"{name}.weight_scale", ("BF16", (rows, -(-columns // group)))
    yield f"{name}.weight_shape", ("I64", (2,))


def _moe(prefix: str, hidden: int, inner: int, experts: int) -> Iterator[tuple[str, Spec]]:
    for expert in range(experts):
        for matrix, rows, columns in (
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            yield from _packed(f"{prefix}.experts.{expert}.{matrix}", rows, columns, 4)
    yield f"{prefix}.gate.weight", ("BF16", (experts, hidden))
    for matrix, rows, columns in (
        ("gate_proj", inner, hidden),
        ("up_proj", inner, hidden),
        ("down_proj", hidden, inner),
    ):
        yield from _packed(f"{prefix}.shared_expert.{matrix}", rows, columns, 8)
    yield f"{prefix}.shared_expert_gate.weight", ("BF16", (1, hidden))


def _hyper_connection(prefix: str, hidden: int, last: bool = False) -> Iterator[tuple[str, Spec]]:
    yield f"{prefix}.hc_norm.weight", ("BF16", (4 * hidden,))
    yield from _packed(f"{prefix}.input_mix_weight_down", 320, 4 * hidden, 8)
    yield from _packed(f"{prefix}.input_mix_weight_up", 4 * hidden, 320, 8, group=320)
    if not last:
        yield f"{prefix}.block_inject_weight.weight", ("BF16", (4, 4 * hidden))


def _attention(prefix: str, hidden: int) -> Iterator[tuple[str, Spec]]:
    yield from _packed(f"{prefix}.q_proj", 2 * 24 * 256, hidden, 8)
    yield from _packed(f"{prefix}.k_proj", 2 * 256, hidden, 8)
    yield from _packed(f"{prefix}.v_proj", 2 * 256, hidden, 8)
    yield from _packed(f"{prefix}.o_proj", hidden, 24 * 256, 8)
    yield f"{prefix}.q_norm.weight", ("BF16", (256,))
    yield f"{prefix}.k_norm.weight", ("BF16", (256,))
    yield f"{prefix}.indexer.index_qk_proj.weight", ("BF16", (640, hidden))
    yield f"{prefix}.indexer.q_layernorm.weight", ("BF16", (128,))
    yield f"{prefix}.indexer.k_layernorm.weight", ("BF16", (128,))


VISION = {
    "model_type": "qwen4_exp_vision",
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 2560,
    "num_position_embeddings": 2304,
}


def _vision(prefix: str) -> Iterator[tuple[str, Spec]]:
    """The tower of VISION; every matrix and norm but the position embedding has a bias."""
    shapes = {"patch_embed.proj": (1152, 3, 2, 16, 16)}
    for block in range(27):
        at = f"blocks.{block}"
        shapes |= {f"{at}.norm1": (1152,), f"{at}.norm2": (1152,)}
        shapes |= {f"{at}.attn.qkv": (3456, 1152), f"{at}.attn.proj": (1152, 1152)}
        shapes |= {f"{at}.mlp.linear_fc1": (4304, 1152), f"{at}.mlp.linear_fc2": (1152, 4304)}
    shapes |= {"merger.norm": (1152,), "merger.linear_fc1": (4608, 4608), "merger.linear_fc2": (2560, 4608)}
    yield f"{prefix}.pos_embed.weight", ("BF16", (2304, 1152))
    for name, shape in shapes.items():
        yield f"{prefix}.{name}.weight", ("BF16", shape)
        yield f"{prefix}.{name}.bias", ("BF16", shape[:1])


def flashnext_tensors(
    layers: int = 48,
    experts: int = 512,
    *,
    table_rows: int = 320_001_536,
    table_shards: int = 128,
    mtp: bool = True,
    vision: bool = True,
    prefix: str = "model.language_model",
) -> dict[str, Spec]:
    """Every tensor of the published model in the allocation of this module's docstring: name -> (dtype, shape)."""
    hidden, inner = 2560, 640
    tensors: dict[str, Spec] = {}
    add = tensors.update
    add(_packed(f"{prefix}.embed_tokens", 248_320, hidden, 8))
    for layer in range(layers):
        at = f"{prefix}.layers.{layer}"
        if layer % 4 != 3:
            linear = f"{at}.linear_attn"
            add(_packed(f"{linear}.in_proj_qkv", 2 * 16 * 128 + 48 * 128, hidden, 8))
            add(_packed(f"{linear}.in_proj_z", 48 * 128, hidden, 8))
            tensors[f"{linear}.in_proj_b.weight"] = ("BF16", (48, hidden))
            tensors[f"{linear}.in_proj_a.weight"] = ("BF16", (48, hidden))
            tensors[f"{linear}.conv1d.weight"] = ("BF16", (10_240, 1, 4))
            tensors[f"{linear}.A_log"] = ("F32", (48,))
            tensors[f"{linear}.dt_bias"] = ("F32", (48,))
            tensors[f"{linear}.norm.weight"] = ("BF16", (128,))
            add(_packed(f"{linear}.out_proj", hidden, 48 * 128, 8))
        else:
            add(_attention(f"{at}.self_attn", hidden))
        if layer == 1:
            ple = f"{at}.ple"
            rows = -(-table_rows // table_shards)
            for shard in range(table_shards):
                count = min(rows, table_rows - shard * rows)
                name = f"{ple}.ple_embedding.ngram_embedding.shard_{shard}.weight"
                tensors[name] = ("BF16", (count, 160))
            tensors[f"{ple}.key_proj.weight"] = ("BF16", (4 * hidden, hidden))
            tensors[f"{ple}.value_proj.weight"] = ("BF16", (hidden, hidden))
            for norm in ("norm_key", "norm_query", "norm_conv"):
                tensors[f"{ple}.{norm}.weight"] = ("BF16", (4 * hidden,))
            tensors[f"{ple}.conv1d.weight"] = ("BF16", (4 * hidden, 1, 4))
        add(_moe(f"{at}.mlp", hidden, inner, experts))
        add(_hyper_connection(f"{at}.attn_hyper_connection", hidden))
        add(_hyper_connection(f"{at}.mlp_hyper_connection", hidden))
    add(_hyper_connection(f"{prefix}.hyper_connection_mixer", hidden, last=True))
    add(_packed("lm_head", 248_320, hidden, 8))
    if mtp:
        for name in ("fc_embedding", "fc_hidden"):
            tensors[f"mtp.{name}.weight"] = ("BF16", (hidden, hidden))
        tensors["mtp.pre_fc_norm_embedding.weight"] = ("BF16", (hidden,))
        tensors["mtp.pre_fc_norm_hidden.weight"] = ("BF16", (4 * hidden,))
        add(_attention("mtp.layers.0.self_attn", hidden))
        add(_moe("mtp.layers.0.mlp", hidden, inner, experts))
        add(_hyper_connection("mtp.layers.0.attn_hyper_connection", hidden))
        add(_hyper_connection("mtp.layers.0.mlp_hyper_connection", hidden))
        add(_hyper_connection("mtp.hyper_connection_mixer", hidden, last=True))
    if vision:
        add(_vision("model.visual"))
    return tensors
