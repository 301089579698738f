"""Makes the demo's model: a tiny random Qwen3 that exercises the whole path on a CPU and says nothing sensible.

    python -m entrypoint.demo OUT

Standard library only. The weights are Gaussian (seed 0), the tokenizer is one token per byte, so any text goes in and
some text comes out. About 0.3 MB in OUT: config, weights, tokenizer, chat template, generation defaults. The folder is
filled under a temporary name and renamed, so a half-written model never looks whole.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import sys
import tempfile
from pathlib import Path

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 2, 1, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 512
MAX_LEN = 4096

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_symbols() -> list[str]:
    """The printable stand-in of each byte 0..255 in byte-level BPE (GPT-2's table: visible Latin-1 stays, the rest moves up)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(b) if b in visible else chr(next(moved)) for b in range(256)]


def tokenizer() -> dict:
    """A `tokenizer.json`: byte-level BPE without merges, the special tokens first."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *_byte_symbols()])}
    added = [
        {
            "id": i,
            "content": t,
            "special": True,
            "normalized": False,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
        }
        for i, t in enumerate(SPECIAL)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def tensors() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's weights."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for n in range(LAYERS):
        p = f"model.layers.{n}."
        shapes |= {
            p + "input_layernorm.weight": (HIDDEN,),
            p + "post_attention_layernorm.weight": (HIDDEN,),
            p + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            p + "self_attn.q_norm.weight": (HEAD_DIM,),
            p + "self_attn.k_norm.weight": (HEAD_DIM,),
            p + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            p + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            p + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return shapes


def _weights() -> bytes:
    """One safetensors file: 8-byte header length, JSON header, then bf16 data."""
    rng = random.Random(0)
    header: dict[str, dict] = {}
    data = bytearray()
    for name, shape in tensors().items():
        count = 1
        for n in shape:
            count *= n
        values = [1.0] * count if len(shape) == 1 else [rng.gauss(0, 0.08) for _ in range(count)]
        start = len(data)
        # bf16 is the upper half of a little-endian float32
        packed = struct.pack(f"<{count}f", *values)
        for i in range(count):
            data += packed[4 * i + 2 : 4 * i + 4]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(data)


def make(out: Path) -> bool:
    """Write the model to `out` unless it is there already; returns whether it was written."""
    if (out / "config.json").is_file():
        return False
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": MAX_LEN,
        "chat_template": CHAT_TEMPLATE,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=out.name + ".partial-", dir=out.parent))
    try:
        for name, value in {
            "config.json": config,
            "tokenizer.json": tokenizer(),
            "tokenizer_config.json": tokenizer_config,
            "generation_config.json": {
                "eos_token_id": [2],
                "pad_token_id": 0,
                "temperature": 1.0,
                "top_p": 0.95,
                "top_k": 20,
            },
        }.items():
            (work / name).write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
        (work / "model.safetensors").write_bytes(_weights())
        work.chmod(0o755)
        if out.exists() and not any(out.iterdir()):
            out.rmdir()
        os.replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m entrypoint.demo OUT")
    print("written" if make(Path(sys.argv[1])) else "already there")
