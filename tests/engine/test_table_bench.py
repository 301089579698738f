"""The measuring tool and its yardstick: right bytes, as many numbers as it promises, and a reason where it has none.

Speed is not judged here: a small file on a busy machine says nothing. docs/table.md has what was measured.
"""

import os
import shutil

import pytest

BENCH = r"""
import json, subprocess, sys, tempfile
from pathlib import Path
import numpy as np
from flashnext import table_bench, table_yardstick

file, out = sys.argv[1], {}
with tempfile.TemporaryDirectory() as folder:
    try:
        program = table_yardstick.build(Path(folder))
        data = np.fromfile(file, np.uint8)
        draw = np.random.default_rng(3)
        for row_bytes, depth, count in ((320, 128, 5000), (320, 1, 7), (16, 8, 300), (4096, 128, 200), (9000, 4, 50)):
            last = len(data) - row_bytes
            at = np.append(draw.integers(0, last + 1, count - 2), [0, last])
            reading = table_yardstick.read(program, file, at, row_bytes, depth)
            assert np.array_equal(reading.rows, data[at[:, None] + np.arange(row_bytes)]), (row_bytes, depth)
            assert reading.seconds > 0
        try:
            table_yardstick.read(program, file, np.array([len(data) - 100]), 320)
        except table_yardstick.Unavailable as error:
            out["beyond the end"] = str(error)
    except table_yardstick.Unavailable as error:
        out["unavailable"] = str(error)
sys.argv = ["table_bench", file, "--rows", "512", "--repeat", "1"]
table_bench.main()
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def ran(run_patched, tmp_path_factory):
    """{compiler on PATH or not: (what the yardstick said, the printed table)}"""
    folder = tmp_path_factory.mktemp("bench")
    file = folder / "file"
    with file.open("wb") as stream:
        stream.write(os.urandom((8 << 20) + 1000))
        os.fsync(stream.fileno())
    found = {}
    for compiler, path in ((True, os.environ["PATH"]), (False, str(folder))):
        done = run_patched(BENCH, str(file), env={"PATH": path})
        found[compiler] = done.value, done.stdout
    return found


def test_yardstick_reads_the_right_bytes(ran):
    said, printed = ran[True]
    if "unavailable" in said:
        assert f"uring      cold {said['unavailable']}" in printed
        # Only where there is truly none, or a kernel that refuses.
        assert "io_uring_setup" in said["unavailable"] or not any(map(shutil.which, ("cc", "gcc", "clang")))
        pytest.skip(f"DID NOT RUN: no yardstick on this machine: {said['unavailable']}")
    assert said["beyond the end"].startswith("read: ")
    assert "cold: gather / yardstick, at least 0.70: " in printed


def test_without_a_compiler_its_row_says_so(ran):
    said, printed = ran[False]
    assert said == {"unavailable": "no compiler"}
    assert "uring      cold no compiler" in printed
    assert "yardstick" not in printed


def test_every_way_has_its_row(ran):
    rows = [line.split()[:2] for line in ran[False][1].splitlines()]
    for way in ("gather", "gather/16", "mmap", "pread"):
        assert [way, "cold"] in rows and [way, "warm"] in rows
    assert ["normal", "cold"] in rows and ["mapped", "warm"] in rows
    bars = [line for line in ran[False][1].splitlines() if "at least" in line]
    assert len(bars) == 3 and all(line.endswith(", met") or line.endswith(", NOT met") for line in bars)
