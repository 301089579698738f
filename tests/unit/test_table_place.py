"""Where the rows of the n-gram table come from: every rule with the numbers of the published table, and one run from plan to file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from entrypoint import cli, facts, table_place
from entrypoint import plan as p
from entrypoint.boot import StateFile
from entrypoint.errors import Exit, Refusal
from entrypoint.machine import Machine, Mount
from entrypoint.prepare import told_in
from entrypoint.simulate import simulate
from entrypoint.table import Progress
from entrypoint.table_place import Prepared
from entrypoint.units import GIB
from entrypoint.wishes import gather
from tests.support import published_form as form
from tests.support.ports import free_port

TABLE_BYTES = 320_001_536 * 160 * 2
ROWS = "/var/lib/flashnext/table/rows"
SPARE = 5 * GIB


def disk(kind: str, fs_type: str = "ext4", free_bytes: int | None = None, **more) -> Mount:
    return Mount(path="/x", mount_point="/x", fs_type=fs_type, source="x", kind=kind, free_bytes=free_bytes, **more)


NFS, NVME, HDD = disk("network", "nfs4"), disk("nvme", free_bytes=400 * GIB), disk("hdd")


def box(ram="125GiB", cards="3x3090", **mounts: Mount | None) -> Machine:
    return replace(simulate(cards, ram=ram), mounts={role: m for role, m in mounts.items() if m is not None})


def make(machine: Machine, prepared: Prepared | None = None, **wishes: str) -> p.Plan:
    environ = {f"FLASHNEXT_{name}": value for name, value in wishes.items()}
    return p.make_plan(machine, p.published(), gather({}, environ, None), prepared)


def refused(machine: Machine, prepared: Prepared | None = None, **wishes: str) -> Refusal:
    with pytest.raises(Refusal) as e:
        make(machine, prepared, **wishes)
    assert "\n" not in e.value.message + e.value.fix
    return e.value


def engine_setting(plan: p.Plan) -> dict | None:
    return json.loads(plan.argv[plan.argv.index("--additional-config") + 1])["flashnext"].get("table")


def test_the_published_table():
    assert p.published().table_bytes == TABLE_BYTES == 102_400_491_520


@pytest.mark.parametrize(
    "model, data",
    [
        (NVME, NVME),
        (disk("ssd"), None),
        (disk("unknown"), NVME),
        (None, None),
        (NVME, HDD),
        (disk("memory", "tmpfs"), NVME),
    ],
    ids=["nvme", "ssd", "unknown", "not told", "hard disk of ours", "memory"],
)
def test_in_place_where_nothing_is_known_against_the_disk(model, data):
    plan = make(box(model=model, data=data))
    assert (plan.table.backing, plan.table.file, plan.table.make) == ("checkpoint", None, False)
    assert engine_setting(plan) == {"backing": "checkpoint"}
    assert "nothing is known against" in plan.table.reason and "95.37 GiB" in plan.table.reason
    assert "--safetensors-load-strategy" not in plan.argv and "VLLM_PLE_CPU_OFFLOAD" not in plan.env


SLOW = [
    (NFS, "every row is a message"),
    (HDD, "100 random reads"),
    (disk("overlay", "overlay"), "container's own layers"),
    (disk("ssd", usb=True), "on USB"),
    (disk("nvme", "btrfs", compressed=True), "128 KiB"),
    (disk("unknown", "zfs"), "whole record"),
]


@pytest.mark.parametrize("model, words", SLOW, ids=[m.fs_type + m.kind for m, _ in SLOW])
def test_a_slow_disk_and_a_better_one_of_ours_make_a_file(model, words):
    plan = make(box(model=model, data=NVME))
    assert (plan.table.backing, plan.table.file, plan.table.make) == ("file", ROWS, True)
    assert engine_setting(plan) == {"path": ROWS}
    assert words in plan.table.reason and "400.0 GiB free" in plan.table.reason
    lazy = model.kind == "network"
    assert ("--safetensors-load-strategy" in plan.argv) is lazy
    if lazy:
        assert plan.argv[plan.argv.index("--safetensors-load-strategy") + 1] == "lazy"


@pytest.mark.parametrize(
    "data, words",
    [
        (disk("nvme", free_bytes=TABLE_BYTES + SPARE - 1), "a file takes 100.37 GiB with what caches need, and"),
        (disk("nvme"), "not known"),
        (disk("nvme", free_bytes=400 * GIB, read_only=True), "cannot be written"),
        (disk("unknown", free_bytes=400 * GIB), "is not known to be better"),
        (disk("ssd", free_bytes=400 * GIB, usb=True), "is not known to be better"),
        (disk("memory", "tmpfs", free_bytes=400 * GIB), "is not known to be better"),
        (NFS, "is not known to be better"),
        (None, "of unknown kind, is not known to be better"),
    ],
)
def test_a_slow_disk_without_a_better_one_stays_in_place_and_says_so(data, words):
    plan = make(box(model=NFS, data=data))
    assert plan.table.backing == "checkpoint" and engine_setting(plan) == {"backing": "checkpoint"}
    assert "slow for random reads" in plan.table.reason and words in plan.table.reason
    assert any("RAM keeps 63% of its 95.37 GiB" in note for note in plan.notes)


def test_the_room_for_a_file_to_the_byte_and_what_a_half_made_one_has_already():
    edge = disk("nvme", free_bytes=TABLE_BYTES + SPARE)
    assert make(box(model=NFS, data=edge)).table.make
    half = Prepared(file=ROWS, reserved_bytes=TABLE_BYTES)
    assert make(box(model=NFS, data=disk("nvme", free_bytes=SPARE)), half).table.make
    assert not make(box(model=NFS, data=disk("nvme", free_bytes=SPARE - 1)), half).table.make


@pytest.mark.parametrize("model, data", [(NVME, NVME), (NFS, NVME), (NFS, NFS), (None, None)])
def test_a_finished_file_is_used(model, data):
    plan = make(box(model=model, data=data), Prepared(file=ROWS, whole=True))
    assert (plan.table.backing, plan.table.make, engine_setting(plan)) == ("file", False, {"path": ROWS})


def test_a_finished_file_on_a_hard_disk_is_not_used_beside_a_checkpoint_on_a_good_one():
    plan = make(box(model=NVME, data=HDD), Prepared(file=ROWS, whole=True))
    assert engine_setting(plan) == {"backing": "checkpoint"}


def test_a_file_of_another_table_is_left_alone_and_named():
    other = Prepared(file=ROWS, trouble="its marker is of another table")
    plan = make(box(model=NVME, data=NVME), other)
    assert engine_setting(plan) == {"backing": "checkpoint"}
    assert f"{ROWS} is not used: its marker is of another table" in plan.notes
    plan = make(box(model=NFS, data=NVME), other)
    assert engine_setting(plan) == {"backing": "checkpoint"} and "another table" in plan.table.reason
    e = refused(box(model=NVME, data=NVME), other, TABLE="prepared")
    assert e.code == Exit.TABLE and "another table" in e.message and f"{ROWS}.json" in e.fix


def test_two_disks_in_a_file_as_the_documentation_has_it(tmp_path):
    text = (Path(__file__).resolve().parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    (mounts,) = (block for block in text.split("```") if block.startswith("\nmounts:"))
    (tmp_path / "box.yaml").write_text(f"cards: 3x3090\nram: 125GiB{mounts}")
    plan = make(simulate(f"@{tmp_path / 'box.yaml'}"))
    assert plan.table.make and "network (nfs4)" in plan.table.reason and "400.0 GiB free" in plan.table.reason


# --- wishes


def test_in_place_by_wish_beside_a_finished_file_and_on_a_slow_disk():
    for model in (NVME, NFS):
        plan = make(box(model=model, data=NVME), TABLE="checkpoint")
        assert engine_setting(plan) == {"backing": "checkpoint"} and plan.table.source == "wished"
        assert "environment FLASHNEXT_TABLE" in plan.table.reason


@pytest.mark.parametrize(
    "wish, role, file", [("prepared", "data", ROWS), ("PREPARED", "data", ROWS), ("/t/rows", "table", "/t/rows")]
)
def test_a_wished_file(wish, role, file):
    plan = make(box(model=NVME, **{role: NVME}), TABLE=wish)
    assert (plan.table.make, plan.table.disk, engine_setting(plan)) == (True, role, {"path": file})
    plan = make(box(model=NVME), Prepared(file=file, whole=True), TABLE=wish)
    assert (plan.table.make, engine_setting(plan)) == (False, {"path": file})
    short = box(model=NVME, **{role: disk("nvme", free_bytes=10 * GIB)})
    e = refused(short, TABLE=wish)
    assert (
        e.code == Exit.PLAN and "takes 95.37 GiB with 5.00 GiB to spare, and its disk has 10.00 GiB free" in e.message
    )
    assert "free 90.37 GiB there" in e.fix
    assert make(short, Prepared(file=file, whole=True), TABLE=wish).table.file == file
    e = refused(box(model=NVME, **{role: disk("memory", "tmpfs", free_bytes=400 * GIB)}), TABLE=wish)
    assert "lies in RAM (tmpfs)" in e.message and "on a disk" in e.fix


def test_the_articles_name_means_the_same():
    wishes = gather({}, {"VLLM_PLE_MMAP_PATH": "/t/rows"}, None)
    assert p.make_plan(box(model=NVME), p.published(), wishes).table.file == "/t/rows"


@pytest.mark.parametrize("raw", ["rows", "check-point", "on", "ram"])
def test_a_word_that_is_none(raw):
    e = refused(box(), TABLE=raw)
    assert e.code == Exit.USAGE and "FLASHNEXT_TABLE" in e.message
    assert "one of auto, checkpoint, prepared, pinned or a path" in e.fix


def test_page_locked_takes_the_next_power_of_two_beside_the_k_v():
    """PyTorch 2.13 rounds a page-locked allocation up: 128 GiB for 95.37."""
    plan = make(box("251GiB", model=NVME), TABLE="pinned")
    assert engine_setting(plan) is None and plan.env["VLLM_PLE_CPU_OFFLOAD"] == "1"
    lines = {line.what: line.bytes for line in plan.host}
    assert lines["n-gram table, page-locked"] == 128 * GIB == plan.table.pinned_bytes
    assert lines["K/V of 12 layers, page-locked exactly"] == 51_102_351_360
    assert sum(lines.values()) == 249 * GIB and plan.host[-1].what == "left as page cache"
    on_disk = make(box("251GiB", model=NVME))
    assert on_disk.host[-1].bytes - plan.host[-1].bytes == 128 * GIB
    assert on_disk.capacity == plan.capacity, "the table takes nothing of the K/V"


def test_page_locked_to_the_byte():
    needed = 128 * GIB + 15 * GIB + 4 * GIB + 51_102_351_360
    at = box("251GiB", model=NVME)
    make(replace(at, ram_available_bytes=needed), TABLE="pinned")
    e = refused(replace(at, ram_available_bytes=needed - GIB), TABLE="pinned")
    assert e.code == Exit.PLAN and "128.00 GiB (95.37 GiB rounded up to a power of two)" in e.message
    assert "K/V 47.59 GiB" in e.message and "1.00 GiB are missing" in e.message
    assert "leave FLASHNEXT_TABLE out" in e.fix and "free 1.00 GiB" in e.fix
    # K/V on the cards need none of it
    make(replace(box("251GiB", "4x3090"), ram_available_bytes=147 * GIB), TABLE="pinned")
    assert "missing" in refused(box("125GiB", "4x3090"), TABLE="pinned").message


def test_page_locked_and_limits_of_locked_memory():
    at = replace(box("251GiB", "4x3090"), memlock_bytes=8 << 20)
    make(at)
    e = refused(at, TABLE="pinned")
    assert "the page-locked table takes 128.00 GiB" in e.message and "memlock" in e.fix
    e = refused(replace(at, memlock_bytes=None, wsl=True), TABLE="pinned")
    assert "WSL2" in e.message and "FLASHNEXT_TABLE" in e.fix


# --- hard disks and ways of loading


def test_a_hard_disk_that_ram_does_not_make_up_for():
    e = refused(box(model=HDD, data=HDD))
    assert "95.37 GiB" in e.message and "RAM keeps 63% of it" in e.message
    assert "100.37 GiB free" in e.fix and "add 35 GiB of RAM" in e.fix
    assert make(box("251GiB", model=HDD, data=HDD)).table.backing == "checkpoint"
    assert "move the file" in refused(box(model=NVME, table=disk("hdd", free_bytes=400 * GIB)), TABLE="/t/x").fix
    assert make(box("251GiB", model=HDD, data=HDD), TABLE="pinned").table.disk is None


@pytest.mark.parametrize(
    "arguments, flag",
    [
        ("--load-format fastsafetensors", "--load-format"),
        ("--safetensors-load-strategy=prefetch", "--safetensors-load-strategy"),
        ("--safetensors-load-strategy eager", "--safetensors-load-strategy"),
        ("--model-loader-extra-config '{}'", "--model-loader-extra-config"),
    ],
)
def test_ways_of_loading_that_read_the_table_are_refused(arguments, flag):
    e = refused(box("251GiB", model=NVME), EXTRA_ARGS=arguments)
    assert e.code == Exit.PLAN and flag in e.message and "n-gram table" in e.message and flag in e.fix
    assert flag in make(box("251GiB", model=NVME), EXTRA_ARGS=arguments, TABLE="pinned").argv


def test_ways_of_loading_that_leave_it_alone():
    plan = make(box(model=NFS), EXTRA_ARGS="--load-format safetensors --safetensors-load-strategy lazy")
    assert plan.argv.count("--safetensors-load-strategy") == 1


def test_a_model_without_a_table():
    none = replace(p.published(), table_bytes=0)
    plan = p.make_plan(box(model=NVME), none, gather({}, {}, None))
    assert plan.table is None and engine_setting(plan) is None and plan.as_dict()["table"] is None
    with pytest.raises(Refusal, match="no n-gram table"):
        p.make_plan(box(), none, gather({}, {"FLASHNEXT_TABLE": "pinned"}, None))


def test_paths_whose_disks_are_looked_at():
    data = {"model": "/model", "data": "/var/lib/flashnext"}
    assert table_place.paths(gather({}, {}, None)) == data
    assert table_place.paths(gather({}, {"FLASHNEXT_TABLE": "/t/x"}, None)) == {**data, "table": "/t/x"}
    assert table_place.file_of(gather({}, {"FLASHNEXT_TABLE": "pinned"}, None)) is None


# --- from plan to file


@pytest.fixture
def small(tmp_path, monkeypatch) -> Path:
    """A checkpoint of four layers with a table of 16,896 rows, one card, the checkpoint's disk a network file system."""
    form.write(tmp_path / "model")
    at = box(cards="1xRTX PRO 6000", model=NFS, data=NVME)
    monkeypatch.setattr(facts, "machine", lambda wishes: at)
    for name, value in {"MODEL": "model", "DATA": "data", "STATE_DIR": "state"}.items():
        monkeypatch.setenv(f"FLASHNEXT_{name}", str(tmp_path / value))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        cli.main(list(args))
    return e.value.code


def test_prepare_makes_the_file_that_the_plan_reads(small, capsys):
    file = small / "data" / "table" / "rows"
    assert run("plan", "--json") == 0
    planned = json.loads(capsys.readouterr().out)["table"]
    assert (planned["backing"], planned["file"], planned["make"]) == ("file", str(file), True) and not file.exists()

    assert run("prepare", "--json") == 0
    told = capsys.readouterr()
    assert "flashnext: table: 0.01 GiB of 0.01 GiB" in told.err
    assert file.stat().st_size == planned["table_bytes"] == 16_896 * 320
    assert Path(f"{file}.json").exists()

    assert run("plan") == 0
    assert "which is there and is the whole table of this checkpoint" in " ".join(capsys.readouterr().out.split())
    with file.open("r+b") as stream:
        stream.truncate(77)
    assert run("plan", "--json") == 0
    after = json.loads(capsys.readouterr().out)["table"]
    assert after["backing"] == "checkpoint" and "it has 77 bytes" in after["reason"]
    assert run("prepare", "--table", "prepared") == 5
    error, fix = capsys.readouterr().err.splitlines()
    assert error.startswith("ERROR: table: ") and "77 bytes" in error and fix.startswith("Fix: remove")


def test_serve_makes_it_before_the_engine_starts(small, capsys, monkeypatch):
    """There is no vLLM on this PATH, which is found out after the table is made."""
    monkeypatch.setenv("PATH", str(small))
    assert run("serve", "--port", str(free_port())) == 6
    assert "no `vllm` on PATH" in capsys.readouterr().err
    assert (small / "data" / "table" / "rows").stat().st_size == 16_896 * 320
    state = json.loads((small / "state" / "state.json").read_text())
    assert state["phase"] == "failed" and state["exit_code"] == 6


def test_progress_of_the_file_stands_in_the_state(tmp_path):
    state, lines = StateFile(tmp_path, "127.0.0.1", 8000), []
    state.update("preparing")
    told_in(state, lines.append)(Progress(25, 100, 25, 1.0))
    found = json.loads((tmp_path / "state.json").read_text())
    assert (found["phase"], found["label"], found["progress"]) == ("preparing", "making the table file", 0.25)
    assert [line.done_bytes for line in lines] == [25]
