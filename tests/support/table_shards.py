"""Checkpoint folders that hold an N-gram table and nothing else to speak of, written with the standard library.

    rows = write_table(folder, shards=7, rows=1000, columns=160, seed=1)      the table's bytes, row after row

Shards are cut as upstream cuts them (ceil(rows / shards) each, the last ones shorter or empty) and spread over `files`
files in an order of their own, with other tensors of odd sizes between them, so that no row starts where it would in a
file of its own. Values are random bytes; seed and shape decide them.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

PREFIX = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_"


def write_file(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """One safetensors file of {name: (dtype, shape, bytes)}, in the order given."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            stream.write(data)


def write_table(
    folder: Path,
    *,
    shards: int = 128,
    rows: int = 5000,
    columns: int = 160,
    files: int = 3,
    seed: int = 0,
    index: bool = True,
    prefix: str = PREFIX,
) -> bytes:
    """Write the folder; returns the whole table's BF16 bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    row_bytes = columns * 2
    table = draw.randbytes(rows * row_bytes)
    cut = -(-rows // shards)
    contents: list[dict[str, tuple[str, list[int], bytes]]] = [{} for _ in range(files)]
    for shard in draw.sample(range(shards), shards):
        piece = table[shard * cut * row_bytes : (shard + 1) * cut * row_bytes]
        target = contents[draw.randrange(files)]
        odd = 1 + draw.randrange(9)
        target[f"model.language_model.layers.1.other_{shard}"] = ("U8", [odd], bytes(odd))
        target[f"{prefix}{shard}.weight"] = ("BF16", [len(piece) // row_bytes, columns], piece)
    weight_map = {}
    for number, content in enumerate(contents, 1):
        name = f"model-{number:05}-of-{files:05}.safetensors"
        write_file(folder / name, content)
        weight_map |= dict.fromkeys(content, name)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return table
