"""A table of gigabytes whose every row follows from its number, so that nothing has to be kept to know what is right.

    hashes = write(folder, rows)        a checkpoint folder in 128 shards of rows of 320 bytes; sha256 of each shard
    want = rows_of(ids)                 uint8 [n, 320]

Needs numpy and nothing else, so the engine's Python runs it, in a container too. Each 8 bytes of a row are a hash of
their place in the table (multiply, xor-shift, twice); every byte is written, and the files are on the disk and out of the
page cache when `write` returns.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
from pathlib import Path

import numpy as np

COLUMNS = 160
ROW_BYTES = 2 * COLUMNS
SHARDS = 128
WORDS = ROW_BYTES // 8
CHUNK_ROWS = 4096  # 1.25 MiB: stays in the processor's cache
PREFIX = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_"


def rows_of(ids: np.ndarray) -> np.ndarray:
    """uint8 [n, 320] for row numbers [n]."""
    out = np.empty((len(ids), WORDS), np.uint64)
    for begin in range(0, len(ids), CHUNK_ROWS):
        word = out[begin : begin + CHUNK_ROWS]
        np.add.outer(ids[begin : begin + CHUNK_ROWS].astype(np.uint64) * np.uint64(WORDS), _WITHIN, out=word)
        word *= np.uint64(0x9E3779B97F4A7C15)
        word ^= word >> np.uint64(32)
        word *= np.uint64(0xD6E8FEB86659FD93)
        word ^= word >> np.uint64(29)
    return out.view(np.uint8)


_WITHIN = np.arange(1, WORDS + 1, dtype=np.uint64)


def write(folder: Path, rows: int) -> list[str]:
    """Two files: the first has all shards but five, in an order of its own, between tensors of odd sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(rows)
    order = draw.sample(range(SHARDS), SHARDS)
    cut = -(-rows // SHARDS)
    hashes, weight_map = {}, {}
    for number, shards in enumerate((order[:-5], order[-5:]), 1):
        name = f"model-{number:05}-of-00002.safetensors"
        header: dict[str, dict] = {}
        at = 0
        odd = {shard: 1 + draw.randrange(9) for shard in shards}
        for shard in shards:
            count = max(0, min(cut, rows - shard * cut))
            for tensor, dtype, shape, nbytes in (
                (f"model.language_model.layers.1.other_{shard}", "U8", [odd[shard]], odd[shard]),
                (f"{PREFIX}{shard}.weight", "BF16", [count, COLUMNS], count * ROW_BYTES),
            ):
                header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
                at += nbytes
        weight_map |= dict.fromkeys(header, name)
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            for shard in shards:
                stream.write(bytes(odd[shard]))
                total = hashlib.sha256()
                end = min(rows, (shard + 1) * cut)
                for begin in range(shard * cut, end, CHUNK_ROWS):
                    data = rows_of(np.arange(begin, min(begin + CHUNK_ROWS, end)))
                    total.update(data)
                    stream.write(data)
                hashes[shard] = total.hexdigest()
            stream.flush()
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return [hashes[shard] for shard in range(SHARDS)]
