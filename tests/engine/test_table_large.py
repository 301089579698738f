"""A table of more than 2 GiB, made for the purpose: both backings give numpy's bytes for 1 to 8,192 tokens.

Its rows follow from their numbers (tests/support/large_table.py), so what is right is computed, not read. The largest file
of the checkpoint and the prepared file pass 2 GiB, where a 32-bit byte would turn negative. About 4.5 GB of disk, given
back afterwards.
"""

import json
import shutil

import pytest

from entrypoint import table as kit
from tests.engine.conftest import cannot_run

ROWS = 7_000_003  # 2.09 GiB; 54,688 rows a shard, the last one shorter
NEEDED_BYTES = 6_000_000_000

WRITE = """
import json, sys
from pathlib import Path
import large_table
print(json.dumps(large_table.write(Path(sys.argv[1]), int(sys.argv[2]))))
"""

LOOKUP = r"""
import json, os, sys, time
from pathlib import Path
import numpy as np
from flashnext import table_store
from flashnext.table_gather import Gatherer
from large_table import COLUMNS, ROW_BYTES, rows_of

folder, flat, rows = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
draw = np.random.default_rng(11)
cut = -(-rows // 128)
edges = np.arange(0, rows, cut)
middle = (1 << 31) // ROW_BYTES
patterns = {
    "first and last": np.array([0, rows - 1, 0, rows - 1]),
    "edges of shards": np.concatenate([edges, edges[1:] - 1, edges + 1]),
    "around byte 2**31": np.arange(middle - 500, middle + 500),
    "two far apart, in turn": np.tile([rows - 1, 0], 3000),
    "in a row": np.arange(rows - 4096, rows),
    "repeats at every place": np.repeat(draw.integers(0, rows, 2000), 3),
}
for tokens in (1, 2, 3, 4, 31, 512, 513, 8192):
    patterns[f"{tokens} tokens"] = draw.integers(0, rows, tokens * 16)
out = {}
for backing, table in {
    "checkpoint": table_store.open_checkpoint(folder, "layers.1.", rows, COLUMNS),
    "flat": table_store.open_flat(flat, rows, COLUMNS),
}.items():
    gatherer, checked, cold = Gatherer(table), 0, 0
    last = max(table.place(int(row))[2] for row in np.minimum(edges + cut - 1, rows - 1)) + ROW_BYTES
    for temperature in ("cold", "warm"):
        for ids in patterns.values():
            if temperature == "cold":
                for descriptor in set(table.descriptors):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            buffer = np.full((len(ids) + 2, ROW_BYTES), 0xA5, np.uint8)
            counts = gatherer.gather(ids.astype(np.int64), buffer[1:-1])
            assert np.array_equal(buffer[1:-1], rows_of(ids)), (backing, temperature, len(ids))
            assert (buffer[[0, -1]] == 0xA5).all(), "a byte outside the buffer was written"
            checked += counts.rows
            cold += counts.cold if temperature == "cold" else 0
    blocks = sum(os.stat(file).st_blocks * 512 for file in {part.file for part in table.parts})
    out[backing] = {"checked": checked, "cold": cold, "last byte": last, "bytes on disk": blocks,
                    "files": len(set(table.descriptors)), "identity": table.identity()}
    table.close()
print(json.dumps(out))
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with room; empty again afterwards."""
    free = shutil.disk_usage(tmp_path).free
    if free < NEEDED_BYTES:
        cannot_run(f"{tmp_path} has {free:,} bytes free, and the large table needs {NEEDED_BYTES:,}")
    yield tmp_path
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_two_gibibytes(run_patched, folder):
    hashes = run_patched(WRITE, str(folder / "model"), str(ROWS)).value
    kit.prepare(folder / "model", folder / "table")
    assert (folder / "table").stat().st_size == ROWS * 320 > 2 << 30
    assert json.loads((folder / "table.json").read_text())["sha256"] == hashes, "every byte of the prepared file"
    seen = run_patched(LOOKUP, str(folder / "model"), str(folder / "table"), str(ROWS)).value
    assert seen["checkpoint"]["files"] == 2 and seen["flat"]["files"] == 1
    assert seen["checkpoint"]["identity"] == seen["flat"]["identity"]
    for backing in ("checkpoint", "flat"):
        assert seen[backing]["checked"] > 300_000
        assert seen[backing]["cold"] > 100_000, "the first pass met the disk"
        assert seen[backing]["last byte"] > 1 << 31
        assert seen[backing]["bytes on disk"] >= ROWS * 320, "not sparse"
