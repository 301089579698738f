"""The table on disk and the gather of its rows: the same bytes as a plain numpy lookup, and a refusal for every bad file.

The checkpoints are one from the maker (real layout and names) and ones of random bytes in many cuts. The prepared file is
made by the kit's own `prepare`, in this process; the engine's package opens it in the engine's Python.
"""

import json
import os
from pathlib import Path

import pytest

from entrypoint import table as kit
from tests.support.table_shards import PREFIX, write_file, write_table

LOOKUP = r"""
import json, os, re, sys
from pathlib import Path
import numpy as np
from flashnext import table_gather, table_store
from flashnext.table_gather import Gatherer

folder, flat, rows, columns = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
table_gather.WINDOW = int(sys.argv[5])


def plain(folder):
    # Every shard through safetensors' own reader, one after another.
    from safetensors import safe_open
    shards = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as f:
            for name in f.keys():
                found = re.search(r"layers\.1\.ple\..*\.shard_(\d+)\.weight$", name)
                if found:
                    shards[int(found[1])] = f.get_tensor(name).view(__import__("torch").uint8).numpy()
    return np.concatenate([shards[n] for n in range(len(shards))])


want = plain(folder)
assert want.shape == (rows, 2 * columns), want.shape
draw = np.random.default_rng(7)
cut = -(-rows // 128)
edges = np.arange(0, rows, cut)
patterns = {
    "one": np.array([rows - 1]),
    "first and last": np.array([0, rows - 1, 0, rows - 1]),
    "edges of shards": np.concatenate([edges, np.maximum(edges - 1, 0), np.minimum(edges + 1, rows - 1)]),
    "all the same": np.full(5000, rows // 3),
    "two, in turn": np.tile([rows - 1, 0], 3000),
    "up": np.arange(rows), "down": np.arange(rows)[::-1].copy(),
    "repeats at every place": np.repeat(draw.permutation(rows), 3),
}
for tokens in (1, 2, 3, 4, 31, 512, 513, 8192):
    patterns[f"{tokens} tokens"] = draw.integers(0, rows, tokens * 16)
out = {}
for backing, table in {
    "checkpoint": table_store.open_checkpoint(folder, "layers.1.", rows, columns),
    "flat": table_store.open_flat(flat, rows, columns),
}.items():
    gatherer = Gatherer(table)
    out[backing] = {"identity": table.identity()}
    for temperature in ("cold", "warm"):
        for name, ids in patterns.items():
            if temperature == "cold":
                for descriptor in set(table.descriptors):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            buffer = np.full((len(ids) + 2, 2 * columns), 0xA5, np.uint8)
            counts = gatherer.gather(ids.astype(np.int64), buffer[1:-1])
            assert np.array_equal(buffer[1:-1], want[ids]), (backing, name, temperature)
            assert (buffer[[0, -1]] == 0xA5).all(), "a byte outside the buffer was written"
            assert counts.rows == len(ids), counts
            if len(ids) < table_gather.WINDOW:
                assert counts.distinct == len(np.unique(ids)), counts
            for _ in range(5):
                # Read once more: what the kernel gave back meanwhile (a busy machine), and pages that its read-ahead marked.
                if temperature == "warm" and counts.cold:
                    counts = gatherer.gather(ids.astype(np.int64), buffer[1:-1])
            if temperature == "warm":
                assert counts.cold == 0, (name, counts)
                assert np.array_equal(buffer[1:-1], want[ids]), (backing, name, "again")
            out[backing][f"{name}, {temperature}"] = counts
    assert gatherer.gather(np.empty(0, np.int64), np.empty((0, 2 * columns), np.uint8)) == (0, 0, 0)
    refused = []
    for bad in ([-1], [rows], [0, 5, rows], [2**62]):
        try:
            gatherer.gather(np.array(bad, np.int64), np.empty((len(bad), 2 * columns), np.uint8))
        except IndexError as error:
            refused.append(str(error))
    out[backing]["refused"] = refused
    table.close()
    try:
        table.close()
        os.fstat(table.descriptors[0])
    except OSError:
        out[backing]["closed"] = True
print(json.dumps(out))
"""

MAKE = "import pathlib, sys, checkpoints; checkpoints.write(sys.argv[1], pathlib.Path(sys.argv[2]), wrapper=True)"


def looked_up(run_patched, tmp_path, folder, rows, columns, window):
    kit.prepare(folder, tmp_path / "table")
    out = run_patched(LOOKUP, str(folder), str(tmp_path / "table"), str(rows), str(columns), str(window)).value
    identity = kit.identity_of_source(kit.read_source(folder))
    for backing in ("checkpoint", "flat"):
        assert out[backing]["identity"] == identity, "the engine and the kit compute the same"
        assert out[backing]["closed"]
        assert out[backing]["refused"] == [f"row {bad} of a table of {rows}" for bad in (-1, rows, rows, 2**62)]
    return out


def test_checkpoint_of_the_maker(run_patched, run_pristine, tmp_path):
    run_pristine(MAKE + "; print()", "mixed", str(tmp_path / "model"))
    source = kit.read_source(tmp_path / "model")
    assert len(source.pieces) == 128
    looked_up(run_patched, tmp_path, tmp_path / "model", source.rows, source.columns, 8192)


@pytest.mark.parametrize(
    "shape, window",
    [
        (dict(rows=20_000, files=5), 8192),  # rows of 320 bytes: some lie across two pages
        (dict(rows=20_000, files=1, index=False), 64),  # many windows, repeats across their ends
        (dict(rows=130, columns=16, files=2), 8192),  # 2 rows a shard, the last 63 empty
    ],
)
def test_cuts_of_a_table(run_patched, tmp_path, shape, window):
    write_table(tmp_path / "model", **shape)
    looked_up(run_patched, tmp_path, tmp_path / "model", shape["rows"], shape.get("columns", 160), window)


OPEN = r"""
import json, os, sys
from flashnext import table_store
out = {}
for name, (kind, path, rows, columns, identity) in json.loads(sys.argv[1]).items():
    before = len(os.listdir("/proc/self/fd"))
    try:
        if kind == "flat":
            table = table_store.open_flat(path, rows, columns, source_identity=identity)
        else:
            table = table_store.open_checkpoint(path, "layers.1.", rows, columns)
        out[name] = "opened"
        table.close()
    except table_store.TableError as error:
        out[name] = str(error)
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"
print(json.dumps(out))
"""
ROWS, COLUMNS = 1000, 32
NBYTES = ROWS * COLUMNS * 2


@pytest.fixture(scope="module")
def refusals(run_patched, tmp_path_factory):
    """{case: what opening said}, all in one process."""
    base = tmp_path_factory.mktemp("bad")
    model = base / "model"
    write_table(model, rows=ROWS, columns=COLUMNS, files=2)
    write_table(base / "other", rows=ROWS, columns=COLUMNS, files=2, seed=1)
    identity = kit.identity_of_source(kit.read_source(model))
    cases = {}

    def flat(name, spoil=lambda file: None, rows=ROWS, source=identity):
        file = base / f"{name}.table"
        kit.prepare(model, file)
        spoil(file)
        cases[name] = ("flat", str(file), rows, COLUMNS, source)

    def marker(file, **change):
        path = Path(f"{file}.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    flat("good")
    flat("good, no checkpoint", source=None)
    flat("short", lambda file: os.truncate(file, NBYTES - 1))
    flat("long", lambda file: os.truncate(file, NBYTES + 1))
    flat("empty", lambda file: os.truncate(file, 0))
    flat("sparse", lambda file: (os.truncate(file, 0), os.truncate(file, NBYTES)))
    flat("no marker", lambda file: Path(f"{file}.json").unlink())
    flat("marker cut off", lambda file: os.truncate(f"{file}.json", 20))
    flat("marker of a list", lambda file: Path(f"{file}.json").write_text("[]"))
    flat("older format", lambda file: marker(file, format=0))
    flat("other rows", rows=ROWS + 1)
    flat("other bytes", lambda file: file.write_bytes(b"\1" * NBYTES))
    flat("no file", lambda file: file.unlink())
    kit.prepare(base / "other", base / "foreign.table")
    cases["foreign"] = ("flat", str(base / "foreign.table"), ROWS, COLUMNS, identity)
    half = base / "half.table"
    with open(half, "wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, NBYTES)
        stream.write(b"\1" * (NBYTES // 2))
    good = json.loads((base / "good.table.json").read_text())
    (base / "half.table.json").write_text(json.dumps(good))
    cases["half built"] = ("flat", str(half), ROWS, COLUMNS, identity)

    def checkpoint(name, spoil, **shape):
        folder = base / name
        write_table(folder, **(dict(rows=ROWS, columns=COLUMNS, files=1, index=False) | shape))
        spoil(folder, next(folder.glob("*.safetensors"), None))
        cases[name] = ("checkpoint", str(folder), ROWS, COLUMNS, None)

    def rename(file, old, new):
        file.write_bytes(file.read_bytes().replace(old, new))

    checkpoint("good checkpoint", lambda folder, file: None)
    checkpoint("good, index", lambda folder, file: None, index=True, files=4)
    checkpoint("good, drafts", lambda folder, file: write_file(
        folder / "mtp.safetensors",
        {"mtp." + PREFIX.replace("language_model.", "") + "0.weight": ("BF16", [1, 32], bytes(64))},
    ))  # fmt: skip
    checkpoint("shard short", lambda folder, file: os.truncate(file, file.stat().st_size - 1))
    checkpoint("shard long", lambda folder, file: os.truncate(file, file.stat().st_size + 1))
    checkpoint("shard empty", lambda folder, file: os.truncate(file, 0))
    checkpoint("pointer file", lambda folder, file: file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"))
    checkpoint("zeros", lambda folder, file: file.write_bytes(bytes(file.stat().st_size)))
    checkpoint("shard lost", lambda folder, file: rename(file, b"shard_17.weight", b"shard_17.weighs"))
    checkpoint(
        "last shard lost", lambda folder, file: rename(file, b"shard_127.weight", b"shard_127.weighs"), rows=1024
    )
    checkpoint("other layer", lambda folder, file: rename(file, b"layers.1.", b"layers.5."))
    checkpoint("other dtype", lambda folder, file: rename(file, b'"BF16"', b'"F16" '))
    checkpoint("other size", lambda folder, file: None, rows=ROWS + 28)
    checkpoint("part twice", lambda folder, file: write_file(
        folder / "more.safetensors", {PREFIX + "3.weight": ("BF16", [8, 32], bytes(512))}
    ))  # fmt: skip
    checkpoint("file lost", lambda folder, file: file.unlink(), index=True)
    cases["no folder"] = ("checkpoint", str(base / "nowhere"), ROWS, COLUMNS, None)
    return run_patched(OPEN, json.dumps(cases)).value


@pytest.mark.parametrize(
    "case, said",
    [
        ("good", "opened"),
        ("good, no checkpoint", "opened"),
        ("good checkpoint", "opened"),
        ("good, index", "opened"),
        ("good, drafts", "opened"),
        ("short", f"has {NBYTES - 1} bytes, and a table of {ROWS} rows has {NBYTES}"),
        ("long", f"has {NBYTES + 1} bytes, and a table of {ROWS} rows has {NBYTES}"),
        ("empty", "has 0 bytes"),
        ("sparse", "was never written at byte 0"),
        ("half built", "was never written at byte"),
        ("no marker", "so it was never finished"),
        ("marker cut off", "so it was never finished"),
        ("marker of a list", "is of another table"),
        ("older format", "is of another table"),
        ("other rows", "is of another table"),
        ("other bytes", "are not those that its marker was made for"),
        ("foreign", "was made from another checkpoint"),
        ("no file", "there is no table at"),
        ("shard short", "and its header says"),
        ("shard long", "and its header says"),
        ("shard empty", "has no safetensors header (0 bytes)"),
        ("pointer file", "has no safetensors header"),
        ("zeros", "has no safetensors header"),
        ("shard lost", "part 17 of the table is not in"),
        ("last shard lost", "is what a table of 1000 rows in 127 parts has"),
        ("other layer", "part 0 of the table is not in"),
        ("other dtype", "is F16 [8, 32], and BF16 [8, 32] is what"),
        ("other size", "is what a table of 1000 rows in 128 parts has"),
        ("part twice", "part 3 of the table is in"),
        ("file lost", "cannot read"),
        ("no folder", "is no folder"),
    ],
)
def test_opening(refusals, case, said):
    message = refusals[case]
    assert said in message
    if said != "opened":
        assert message.startswith("flashnext: ") and ". Fix: " in message and "\n" not in message


BROKEN = r"""
import json, os, sys
import numpy as np
from flashnext import table_store
from flashnext.table_gather import Gatherer
file, rows, columns = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
table = table_store.open_flat(file, rows, columns)
gatherer = Gatherer(table)
os.truncate(file, 10 * table.row_bytes + 1)
out = np.zeros((4, table.row_bytes), np.uint8)
said = {}
asked = {"gone": [3, rows - 1, 4, 5], "cut": [3, 10, 4, 5], "gone, many": [3] * 99 + [rows - 1], "cut, many": [3, 10] * 50}
for name, ids in asked.items():
    try:
        gatherer.gather(np.array(ids), np.zeros((len(ids), table.row_bytes), np.uint8))
    except OSError as error:
        said[name] = [error.errno, error.strerror, error.filename]
gatherer.gather(np.array([3, 4, 5, 9]), out)
# A descriptor that the disk would answer with an error: a folder cannot be read (EISDIR), whatever its row.
folder = os.open(os.path.dirname(file), os.O_RDONLY)
os.dup2(folder, table.descriptors[0])
for name, ids in {"disk": [1, 2, 3, 4], "disk, many": [1] * 100}.items():
    try:
        gatherer.gather(np.array(ids), np.zeros((len(ids), table.row_bytes), np.uint8))
    except OSError as error:
        said[name] = [error.errno, error.strerror, error.filename]
print(json.dumps(said))
"""


def test_error_of_the_disk_is_an_error(run_patched, tmp_path):
    """A file that shrinks under the engine, and a read that fails: OSError with the file's name; never zeros, no signal."""
    write_table(tmp_path / "model", rows=ROWS, columns=COLUMNS)
    file = tmp_path / "table"
    kit.prepare(tmp_path / "model", file)
    said = run_patched(BROKEN, str(file), str(ROWS), str(COLUMNS)).value
    at = 10 * COLUMNS * 2 + 1
    for many in ("", ", many"):
        assert said["gone" + many] == [
            5, f"row {ROWS - 1} of the table is cut off at byte {(ROWS - 1) * COLUMNS * 2}", str(file),
        ]  # fmt: skip
        assert said["cut" + many] == [5, f"row 10 of the table is cut off at byte {at}", str(file)]
        assert said["disk" + many] == [21, "reading row 1 of the table: Is a directory", str(file)]


def test_bench_runs(run_patched, tmp_path):
    """The measuring tool on a small file: every way reads the right bytes (it compares them itself)."""
    file = tmp_path / "file"
    with file.open("wb") as stream:
        stream.write(os.urandom(4 << 20))
        os.fsync(stream.fileno())
    code = "import json, sys; from flashnext.table_bench import measure; print(json.dumps(measure(sys.argv[1], 64, 320, 1)))"
    ways = run_patched(code, str(file)).value
    assert {"gather", "mmap", "pread"} <= {one["way"] for one in ways}
    assert all(one["rows_per_s"] > 0 for one in ways)
