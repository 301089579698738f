"""A header-only checkpoint of the published model's form whose config agrees with its weights, small or whole.

The allocation is that of tests/support/headers.py; `write` takes a function that changes the tensors or the config before
they are written, which is how a test makes one thing wrong. `python -m tests.support.published_form FOLDER` writes the
whole one with a tokenizer of the published size, for measuring.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from entrypoint.checkpoint import read_header
from tests.support import headers

EOS = [248_046, 248_044]
TABLE_ROWS_OF_1000 = 16_896
"""The 16 primes from 1009 to 1097 sum to 16,826; the next multiple of 128."""


def weights(bits: int, group: int | None) -> dict[str, Any]:
    strategy = "group" if group else "channel"
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": strategy,
        "group_size": group,
        "dynamic": False,
    }


def quantization() -> dict[str, Any]:
    groups = [
        (weights(4, 128), [r"re:.*\.mlp\.experts\.\d+\.(gate|up|down)_proj$"]),
        (
            weights(8, 128),
            [
                r"re:.*\.linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$",
                r"re:.*\.self_attn\.(q|k|v|o)_proj$",
                r"re:.*\.mlp\.shared_expert\.(gate|up|down)_proj$",
                r"re:.*hyper_connection(_mixer)?\.input_mix_weight_down$",
                r"re:.*embed_tokens$",
                r"re:.*lm_head$",
            ],
        ),
        (weights(8, None), [r"re:.*hyper_connection(_mixer)?\.input_mix_weight_up$"]),
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            f"group_{n}": {"targets": targets, "weights": args} for n, (args, targets) in enumerate(groups)
        },
        "ignore": [],
    }


def tokenizer() -> dict[str, Any]:
    return {
        "version": "1.0",
        "added_tokens": [{"id": 248_044, "content": "<|endoftext|>"}, {"id": 248_046, "content": "<|im_end|>"}],
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
    }


def generation() -> dict[str, Any]:
    return {"do_sample": True, "eos_token_id": EOS, "temperature": 1.0, "top_p": 0.95, "top_k": 20, "min_p": 0.0}


def write(
    folder: Path,
    change: Callable[[dict[str, Any], dict[str, Any]], None] | None = None,
    *,
    whole: bool = False,
    wrapper: bool = True,
    generation_config: dict[str, Any] | None = None,
    shard_bytes: int = 5_000_000_000,
) -> Path:
    """`change(tensors, config)` edits both in place. Not `whole`: 4 layers, 8 experts, a table of 16,896 rows."""
    layers, experts = (48, 512) if whole else (4, 8)
    rows = 320_001_536 if whole else TABLE_ROWS_OF_1000
    prefix = "model.language_model" if wrapper else "model"
    tensors = headers.flashnext_tensors(layers, experts, table_rows=rows, prefix=prefix, vision=wrapper)
    config = headers.flashnext_config(layers, experts, wrapper)
    if not whole:
        (config["text_config"] if wrapper else config)["ngram_vocab_size_base"] = 1000
    config["quantization_config"] = quantization()
    if change:
        change(tensors, config)
    headers.write_checkpoint(
        folder,
        tensors,
        config,
        shard_bytes=shard_bytes,
        generation=generation() if generation_config is None else generation_config,
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    return folder


def fill_weight_shapes(folder: Path, shape_of: Callable[[str], tuple[int, int]]) -> None:
    """Write the data of every `weight_shape`, which a header-only file leaves zero."""
    for path in folder.glob("*.safetensors"):
        _, tensors = read_header(path)
        with path.open("r+b") as file:
            for name, tensor in tensors.items():
                if name.endswith(".weight_shape"):
                    file.seek(tensor.offset)
                    file.write(struct.pack("<2q", *shape_of(name.removesuffix(".weight_shape"))))


def write_published(folder: Path) -> Path:
    """The whole checkpoint, and a tokenizer.json with as many tokens and merges as the published one."""
    write(folder, whole=True)
    vocabulary = {f"{'abcdefghij'[n % 10]}{n}": n for n in range(248_044)}
    merges = [[f"{n}", f"{n}x"] for n in range(248_000)]
    content = tokenizer() | {"model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=1))
    return folder


if __name__ == "__main__":
    print(write_published(Path(sys.argv[1])))
