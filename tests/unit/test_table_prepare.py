"""Making the prepared table: whole or not at all, whatever is killed, cut off, full, foreign or in the way."""

import fcntl
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entrypoint import demo
from entrypoint import table as table_
from entrypoint.errors import Exit, Refusal
from entrypoint.table_place import Prepared
from tests.support.table_shards import PREFIX, write_file, write_table

REPOSITORY = Path(__file__).resolve().parents[2]
MAKE = """
import sys
from pathlib import Path
from entrypoint.errors import Refusal
from entrypoint.table import prepare
print("go", flush=True)
try:
    print(prepare(Path(sys.argv[1]), Path(sys.argv[2])))
except Refusal as e:
    e.print()
    sys.exit(int(e.code))
"""


def left(file: Path) -> list[str]:
    """Names beside FILE that begin with its name."""
    return sorted(path.name for path in file.parent.iterdir() if path.name.startswith(file.name))


@pytest.mark.parametrize(
    "shape",
    [
        dict(shards=128, rows=5000),  # 125 whole shards, one of none: ceil(5000 / 128) = 40
        dict(shards=128, rows=130, columns=16),  # 2 rows a shard, the last 63 empty
        dict(shards=7, rows=1001, files=1, index=False),
        dict(shards=1, rows=300, files=1),
    ],
)
def test_file_is_the_rows_in_order(tmp_path, shape):
    want = write_table(tmp_path / "model", **shape)
    file = tmp_path / "table"
    assert table_.prepare(tmp_path / "model", file) is True
    assert file.read_bytes() == want
    assert left(file) == ["table", "table.json"]
    marker = json.loads((tmp_path / "table.json").read_text())
    assert (marker["rows"], marker["columns"], marker["dtype"]) == (shape["rows"], shape.get("columns", 160), "BF16")
    assert len(marker["sha256"]) == shape["shards"]
    before = file.stat()
    assert table_.prepare(tmp_path / "model", file) is False, "a second run has nothing to do"
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_identity_does_not_depend_on_the_cut(tmp_path):
    def identity(name, **shape):
        write_table(tmp_path / name, rows=2000, columns=32, **shape)
        return table_.identity_of_source(table_.read_source(tmp_path / name))

    same = {identity("a", shards=128, seed=5), identity("b", shards=128, files=1, seed=5, index=False)}
    assert len(same) == 1
    assert identity("c", shards=128, seed=6) not in same


def test_progress_ends_at_the_whole(tmp_path):
    want = write_table(tmp_path / "model")
    told = []
    table_.prepare(tmp_path / "model", tmp_path / "table", told.append)
    assert told[-1].done_bytes == told[-1].total_bytes == len(want)
    assert table_.Progress(25, 100, 20, 4.0).bytes_per_s == 5.0
    assert table_.Progress(25, 100, 20, 4.0).left_s == 15.0
    assert table_.Progress(25, 100, 0, 4.0).left_s is None


def test_progress_in_words():
    stream = io.StringIO()
    tell = table_.teller(stream, every_s=10)
    gib = 1 << 30
    for done, at in ((0, 0), (1, 1), (12, 10), (13, 11), (95, 80), (96, 81)):
        tell(table_.Progress(done * gib, 96 * gib, done * gib, float(at)))
    assert stream.getvalue().splitlines() == [
        "flashnext: table: 0.00 GiB of 96.00 GiB",
        "flashnext: table: 12.00 GiB of 96.00 GiB, 1.20 GiB/s, 1 min left",
        "flashnext: table: 95.00 GiB of 96.00 GiB, 1.19 GiB/s, 0 min left",
        "flashnext: table: 96.00 GiB of 96.00 GiB, 1.19 GiB/s",
    ]


def test_what_the_plan_is_told_of_a_file(tmp_path):
    """Not there, half made, made, cut off, of another checkpoint, in a folder without a table: looked at, nothing changed."""
    model, file = tmp_path / "model", tmp_path / "table"
    write_table(model)
    assert table_.look(model, file) == Prepared(file=str(file))
    partial = Path(f"{file}.partial")
    partial.write_bytes(b"x" * 10_000)
    assert table_.look(model, file).reserved_bytes >= 8192 and not table_.look(model, file).whole
    partial.unlink()
    table_.prepare(model, file)
    assert table_.look(model, file) == Prepared(file=str(file), whole=True)

    marker = Path(f"{file}.json")
    told = json.loads(marker.read_text())
    marker.unlink()
    assert "no marker" in table_.look(model, file).trouble
    Path(f"{file}.progress.json").write_text(json.dumps(told))  # killed between the rename and the marker
    copied = table_.look(model, file)
    assert (copied.whole, copied.trouble, copied.reserved_bytes) == (False, None, file.stat().st_size)
    table_.prepare(model, file)
    assert table_.look(model, file).whole

    other = tmp_path / "other"
    write_table(other, seed=7)
    assert table_.look(other, file).trouble == "its marker is of another table"
    (tmp_path / "empty").mkdir()
    assert "safetensors" in table_.look(tmp_path / "empty", file).trouble
    os.truncate(file, 77)
    assert "it has 77 bytes instead of" in table_.look(model, file).trouble


@pytest.mark.slow
def test_fifty_kills(tmp_path):
    """kill -9 at random moments of a run of this very table: each state is whole or taken up, and the end is whole."""
    want = write_table(tmp_path / "model", shards=128, rows=20_000)
    draw = random.Random(20261130)
    kills = resumed = 0
    file = tmp_path / "data" / "table"
    file.parent.mkdir()
    span = 0.5
    while kills < 50:
        begun = time.monotonic()
        run = subprocess.Popen(
            [sys.executable, "-c", MAKE, str(tmp_path / "model"), str(file)],
            cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert run.stdout.readline() == "go\n"
        begun = time.monotonic()
        try:
            # Short delays too: a kill right at the start must not lose what is there.
            run.wait(timeout=span * draw.random() ** 2)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
        run.stdout.close()
        if run.returncode == -signal.SIGKILL:
            kills += 1
            state = table_._read_json(Path(f"{file}.progress.json"))
            done = len(state["sha256"]) if state else 0
            resumed += 0 < done < 128
            if done and not file.exists():
                written = want[: done * 157 * 320]  # ceil(20000 / 128) rows a shard
                assert Path(f"{file}.partial").read_bytes().startswith(written)
            if file.exists() and Path(f"{file}.json").exists():
                assert file.read_bytes() == want
        else:
            assert run.returncode == 0
            span = max(0.05, min(span, time.monotonic() - begun))
            assert file.read_bytes() == want
            assert [name for name in left(file) if not name.endswith(".new")] == ["table", "table.json"]
            for name in left(file):
                (file.parent / name).unlink()
    assert resumed >= 10, "the kills fell where there was something to take up"
    table_.prepare(tmp_path / "model", file)
    assert file.read_bytes() == want


def test_killed_between_rename_and_marker(tmp_path):
    want = write_table(tmp_path / "model")
    file = tmp_path / "table"
    table_.prepare(tmp_path / "model", file)
    marker = json.loads(Path(f"{file}.json").read_text())
    Path(f"{file}.json").unlink()
    with pytest.raises(Refusal, match="never finished"):
        table_.prepare(tmp_path / "model", file)
    Path(f"{file}.progress.json").write_text(json.dumps(marker))
    assert table_.prepare(tmp_path / "model", file) is True
    assert file.read_bytes() == want
    assert json.loads(Path(f"{file}.json").read_text()) == marker


def test_partial_of_another_table_is_begun_again(tmp_path):
    write_table(tmp_path / "other", seed=1)
    want = write_table(tmp_path / "model", seed=2)
    file, progress = tmp_path / "table", tmp_path / "table.progress.json"
    other = table_.read_source(tmp_path / "other")
    shape = table_._shape(other, table_.identity_of_source(other))
    Path(f"{file}.partial").write_bytes(b"\1" * len(want))
    progress.write_text(json.dumps(shape | {"sha256": ["0" * 64] * 100}))
    assert table_.prepare(tmp_path / "model", file) is True
    assert file.read_bytes() == want


def test_progress_that_lies_is_found_out(tmp_path):
    """A partial whose first half never reached the disk, although the progress says so (a drive that lies to fsync)."""
    want = write_table(tmp_path / "model")
    file, marker = tmp_path / "table", tmp_path / "table.json"
    source = table_.read_source(tmp_path / "model")
    shape = table_._shape(source, table_.identity_of_source(source))
    Path(f"{file}.partial").write_bytes(b"\1" * len(want))
    Path(f"{file}.progress.json").write_text(json.dumps(shape | {"sha256": ["0" * 64] * 60}))
    with pytest.raises(Refusal, match="its rows are not those of this checkpoint"):
        table_.prepare(tmp_path / "model", file)
    assert not marker.exists()


@pytest.mark.parametrize(
    "spoil, why",
    [
        (lambda file: os.truncate(file, file.stat().st_size - 1), "has .* bytes instead of"),
        (lambda file: file.open("ab").write(b"x"), "has .* bytes instead of"),
        (lambda file: (os.truncate(file, 0), os.truncate(file, 5000 * 320)), "never written at byte 0"),
        (lambda file: file.write_bytes(b"\1" * file.stat().st_size), "its rows are not those of this checkpoint"),
    ],
    ids=["short", "long", "sparse", "other bytes"],
)
def test_file_that_is_not_whole(tmp_path, spoil, why):
    write_table(tmp_path / "model")
    file = tmp_path / "table"
    table_.prepare(tmp_path / "model", file)
    spoil(file)
    was = file.read_bytes()
    with pytest.raises(Refusal, match=why) as refused:
        table_.prepare(tmp_path / "model", file)
    assert refused.value.code == Exit.TABLE
    assert "remove" in refused.value.fix
    assert file.read_bytes() == was, "nothing of the user's is overwritten"


def test_table_of_another_checkpoint(tmp_path):
    write_table(tmp_path / "model", seed=1)
    write_table(tmp_path / "other", seed=2)
    table_.prepare(tmp_path / "other", tmp_path / "table")
    with pytest.raises(Refusal, match="its marker is of another table"):
        table_.prepare(tmp_path / "model", tmp_path / "table")


def test_file_that_is_not_ours(tmp_path):
    write_table(tmp_path / "model")
    (tmp_path / "table").write_bytes(b"mine")
    with pytest.raises(Refusal, match="it has no marker"):
        table_.prepare(tmp_path / "model", tmp_path / "table")
    assert (tmp_path / "table").read_bytes() == b"mine"


def test_two_makers(tmp_path):
    write_table(tmp_path / "model")
    with open(tmp_path / "table.partial", "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Refusal, match="is being written by another process"):
            table_.prepare(tmp_path / "model", tmp_path / "table")
        assert (tmp_path / "table.partial").exists()


@pytest.mark.parametrize("gone", [3, 7])
def test_shard_is_missing(tmp_path, gone):
    """Only config.json tells that the last one is missing."""
    write_table(tmp_path / "model", shards=8, rows=1000, files=1, index=False)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"text_config": {"split_ngram_parts": 8}}))
    path = next((tmp_path / "model").glob("*.safetensors"))
    path.write_bytes(path.read_bytes().replace(f".shard_{gone}.weight".encode(), f".shard_{gone}.weighs".encode()))
    with pytest.raises(Refusal, match=f"shard {gone} of 8"):
        table_.prepare(tmp_path / "model", tmp_path / "table")


@pytest.mark.parametrize("piece", [[100, 160], [125, 32]])
def test_shard_of_another_shape(tmp_path, piece):
    write_table(tmp_path / "model", shards=8, rows=1000, files=1, index=False)
    write_file(
        tmp_path / "model" / "more.safetensors", {PREFIX + "8.weight": ("BF16", piece, bytes(piece[0] * piece[1] * 2))}
    )
    with pytest.raises(Refusal, match=r"shard 0 is BF16 \[125, 160\], not|shard 8 is BF16 \[125, 32\], not"):
        table_.prepare(tmp_path / "model", tmp_path / "table")


def test_model_without_a_table(tmp_path):
    write_table(tmp_path / "model", prefix="model.layers.1.mlp.shard_")
    with pytest.raises(Refusal, match="has no N-gram table"):
        table_.prepare(tmp_path / "model", tmp_path / "table")


def test_disk_full(tmp_path):
    """A tmpfs of 1 MiB in a mount namespace of its own, a table of 1.5 MiB: code 5, two lines, no file, space given back."""
    write_table(tmp_path / "model")
    small = tmp_path / "small"
    small.mkdir()
    unshare = shutil.which("unshare")
    mount = ["unshare", "--user", "--map-root-user", "--mount"]
    if unshare is None or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("DID NOT RUN: no user and mount namespaces here (unshare --user --mount)")
    script = 'mount -t tmpfs -o size=1m none "$1" && "$2" -c "$3" "$4" "$1/table"; code=$?; ls "$1"; exit $code'
    run = subprocess.run(
        [*mount, "sh", "-c", script, "sh", str(small), sys.executable, MAKE, str(tmp_path / "model")],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 5, run.stderr
    assert run.stdout == "go\n", "nothing is left there"
    error, fix = run.stderr.splitlines()
    assert error.startswith("ERROR: table: cannot write ") and error.endswith(": the disk is full")
    assert fix.startswith("Fix: free space there")


def test_no_folder(tmp_path):
    write_table(tmp_path / "model")
    with pytest.raises(Refusal, match="is not there"):
        table_.prepare(tmp_path / "model", tmp_path / "nowhere" / "table")


@pytest.mark.parametrize("command, said", [("prepare", "has no N-gram table"), ("serve", "has no N-gram table")])
def test_command_line_asks_for_the_table(tmp_path, command, said):
    """The demo's model has none, so a wish for its table ends there: code 5 and two lines, before any engine is started."""
    assert demo.make(tmp_path / "model")
    env = {k: v for k, v in os.environ.items() if not k.startswith("FLASHNEXT_")} | {
        "FLASHNEXT_DEVICE": "cpu",
        "FLASHNEXT_MODEL": str(tmp_path / "model"),
        "FLASHNEXT_DATA": str(tmp_path / "data"),
        "FLASHNEXT_STATE_DIR": str(tmp_path / "state"),
        "FLASHNEXT_TABLE": str(tmp_path / "data" / "table" / "rows"),
    }
    run = subprocess.run(
        [sys.executable, "-m", "entrypoint", command], env=env, cwd=REPOSITORY, capture_output=True, text=True
    )
    assert run.returncode == 5, run.stderr
    error, fix = run.stderr.splitlines()
    assert error.startswith("ERROR: table: ") and said in error and fix.startswith("Fix: ")
