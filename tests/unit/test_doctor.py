"""Doctor on made-up boxes with concrete numbers, both sides of each limit, and on the box that runs the tests."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from entrypoint import demo, disk_probe, doctor, plan
from entrypoint import table as table_
from entrypoint.checkpoint import read_checkpoint
from entrypoint.disk_probe import Piece, Probe
from entrypoint.doctor import Seen, judge, look, table_pieces
from entrypoint.errors import Exit, Refusal
from entrypoint.machine import UNLIMITED, Machine, Mount, NumaNode
from entrypoint.nvml import FakeNvml
from entrypoint.simulate import simulate
from entrypoint.units import GIB, MIB
from entrypoint.wishes import gather
from tests.support.table_shards import write_table
from tests.support.trees import Box

ROOT = Path(__file__).resolve().parents[2]
RTX_3090 = simulate("3090").gpus[0]


def seen(machine: Machine | None = None, env: dict[str, str] | None = None, **more) -> Seen:
    if "checkpoint" not in more:
        more["checkpoint_refusal"] = Refusal("no checkpoint here", "fetch it", Exit.CHECKPOINT)
    return Seen(wishes=gather({}, env or {}, None), machine=machine or simulate("3x3090", ram="125GiB"), **more)


def point(found: Seen, name: str) -> tuple[str, str, str]:
    """(verdict, detail, fix) of one point."""
    (one,) = [f for f in judge(found) if f.point == name]
    assert (one.verdict == "PASS") == (one.fix == ""), one
    assert one.code == 0 or one.verdict == "FAIL", one
    return one.verdict, one.detail, one.fix


def points(found: Seen) -> set[str]:
    return {f.point for f in judge(found)}


def cards(count: int = 3, **facts) -> Machine:
    base = simulate(f"{count}x3090", ram="125GiB")
    return dataclasses.replace(base, gpus=tuple(dataclasses.replace(gpu, **facts) for gpu in base.gpus))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("doctor") / "model"
    demo.make(out)
    return out


# --- cards ------------------------------------------------------------------------------------------------------------


def test_no_card_is_one_reason_with_its_fix_and_no_card_points():
    found = seen(Machine(gpu_error="no driver", gpu_fix="install it", ram_available_bytes=GIB))
    assert point(found, "cards") == ("FAIL", "no driver", "install it")
    assert not points(found) & {"driver", "PCIe links", "power", "cards in use", "kind of cards"}
    verdict, detail, _ = point(found, "plan")
    assert (verdict, detail) == ("FAIL", "none without the cards")


def test_cards_are_told_by_kind_and_what_is_free():
    found = seen(simulate("2x3090+1x4090", ram="125GiB"))
    verdict, detail, _ = point(found, "cards")
    assert verdict == "PASS" and detail.startswith(
        "2 x NVIDIA GeForce RTX 3090, 1 x NVIDIA GeForce RTX 4090; 23.68 GiB"
    )
    assert detail.endswith("mixed, counted in PCI order")


def test_a_lost_card_beside_others():
    machine = dataclasses.replace(cards(2), gpu_error="card 0: a card has fallen off the bus", gpu_fix="look for Xid")
    assert point(seen(machine), "lost cards") == ("WARN", machine.gpu_error, "look for Xid")
    assert "lost cards" not in points(seen(cards(2)))


@pytest.mark.parametrize(
    ("facts", "verdict", "word"),
    [
        ({}, "PASS", "compute capability 8.6"),
        ({"compute_capability": (8, 0)}, "PASS", "8.0"),
        ({"compute_capability": (7, 5)}, "FAIL", "7.5"),
        ({"compute_capability": None}, "PASS", "unknown"),
        ({"mig": True}, "FAIL", "MIG"),
        ({"free_bytes": None}, "FAIL", "free memory"),
    ],
)
def test_kind_of_cards(facts, verdict, word):
    got = point(seen(cards(**facts)), "kind of cards")
    assert got[0] == verdict and word in got[1]


@pytest.mark.parametrize(
    ("driver", "cuda", "verdict"),
    [
        ("580.65.06", (13, 0), "PASS"),
        ("590.10", (13, 1), "PASS"),
        ("579.99", (12, 9), "FAIL"),
        ("580.65.06", (12, 9), "FAIL"),
        ("580.65.06", None, "PASS"),
        (None, (13, 0), "PASS"),
        (None, (12, 8), "FAIL"),
        (None, None, "PASS"),
    ],
)
def test_driver_against_the_images_cuda(driver, cuda, verdict):
    """C23: R580 for CUDA 13, told before the engine's error 803."""
    machine = dataclasses.replace(cards(), driver_version=driver, driver_cuda_version=cuda)
    got = point(seen(machine), "driver")
    assert got[0] == verdict
    if verdict == "FAIL":
        assert "580" in got[2]


@pytest.mark.parametrize(
    ("used", "more", "verdict", "words"),
    [
        (0, {}, "PASS", ()),
        (256 * MIB - 1, {}, "PASS", ()),
        (256 * MIB, {}, "WARN", ("card 0: 0.25 GiB held by somebody",)),
        (10 * MIB, {"processes": 1}, "WARN", ("0.01 GiB held by 1 compute processes",)),
        (
            2 * GIB,
            {"processes": 2, "graphics_processes": 1, "display": True, "process_bytes": GIB},
            "WARN",
            ("2.00 GiB held by 2 compute processes, 1 that draw, a display (1.00 GiB of it",),
        ),
    ],
)
def test_cards_in_use(used, more, verdict, words):
    got = point(seen(cards(1, free_bytes=RTX_3090.free_bytes - used, **more)), "cards in use")
    assert got[0] == verdict and all(word in got[1] for word in words), got
    assert ("desktop" in got[2]) == bool(more.get("display"))


@pytest.mark.parametrize(
    ("gen", "width", "verdict", "words"),
    [
        (4, 16, "PASS", "card 0 4.0 x16, card 1"),
        (3, 16, "PASS", "3.0 x16"),
        (4, 8, "PASS", "4.0 x8"),
        (3, 8, "WARN", "PCIe 3.0 x8: 7.9 GB/s at most of the 31.5 GB/s"),
        (4, 4, "WARN", "PCIe 4.0 x4: 7.9 GB/s"),
        (3, 4, "WARN", "PCIe 3.0 x4: 3.9 GB/s"),
        (3, 1, "WARN", "1.0 GB/s at most of the 31.5 GB/s it could do; its share of a token's K/V rows takes 17.0 ms"),
        (None, 16, "PASS", "unknown"),
    ],
)
def test_links_with_numbers(gen, width, verdict, words):
    """48 MiB of rows a token over three cards: 16,777,216 B at 984,615,384 B/s is 17.0 ms on an x1 riser."""
    got = point(seen(cards(pcie_gen_max=gen, pcie_gen_card=4, pcie_width_now=width)), "PCIe links")
    assert got[0] == verdict and words in got[1], got


def test_rows_of_a_token_are_those_of_the_article():
    assert doctor.token_kv_bytes() == 2048 * 2048 * 12 == 50_331_648


@pytest.mark.parametrize(
    ("wished", "facts", "p2p", "iommu", "verdict", "words"),
    [
        (
            "auto",
            {"bar1_total_bytes": 256 * MIB},
            False,
            True,
            "PASS",
            "through host RAM, as planned; P2P reported for 0 of 1",
        ),
        ("auto", {}, None, None, "PASS", "unknown; BAR1 unknown; IOMMU unknown"),
        ("on", {"bar1_total_bytes": 32 * GIB}, True, False, "PASS", "BAR1 shows the whole memory; IOMMU off"),
        ("on", {"bar1_total_bytes": RTX_3090.total_bytes - 1}, True, False, "WARN", "BAR1 is small"),
        ("on", {"bar1_total_bytes": RTX_3090.total_bytes}, True, True, "WARN", "the IOMMU may block it"),
        ("on", {"bar1_total_bytes": 32 * GIB}, False, False, "WARN", "it is not reported"),
    ],
)
def test_copies_between_cards(wished, facts, p2p, iommu, verdict, words):
    """C22: off unless wished; wished, every reason to doubt it is named."""
    table = None if p2p is None else ((None, p2p), (p2p, None))
    machine = dataclasses.replace(cards(2, **facts), p2p=table, iommu=iommu)
    got = point(seen(machine, {"FLASHNEXT_P2P": wished}), "copies between cards")
    assert got[0] == verdict and words in got[1], got
    assert "copies between cards" not in points(seen(cards(1)))


@pytest.mark.parametrize(
    ("count", "limit", "default", "capability", "verdict"),
    [
        (3, 350, 350, (8, 6), "WARN"),
        (3, 349, 350, (8, 6), "PASS"),
        (1, 350, 350, (8, 6), "PASS"),
        (3, 230, 230, (8, 6), "PASS"),
        (3, 300, 300, (8, 6), "WARN"),
        (3, 450, 450, (8, 9), "PASS"),
    ],
)
def test_power_advice(count, limit, default, capability, verdict):
    """C26: advised, never set."""
    machine = cards(count, power_limit_w=float(limit), power_default_w=float(default), compute_capability=capability)
    got = point(seen(machine), "power")
    assert got[0] == verdict and f"{count} cards, {count * limit:,} W" in got[1]
    if verdict == "WARN":
        assert f"nvidia-smi -pl {default * 8 // 10} " in got[2] and "never sets it" in got[2]


def test_unknown_power_is_no_point():
    assert "power" not in points(seen(cards()))


@pytest.mark.parametrize(("on", "verdict"), [(True, "PASS"), (False, "WARN")])
def test_persistence(on, verdict):
    assert point(seen(cards(persistence=on)), "persistence mode")[0] == verdict
    assert "persistence mode" not in points(seen(cards()))


def test_uvm_missing_is_said_on_linux_and_not_in_wsl():
    machine = dataclasses.replace(cards(), uvm=False)
    assert point(seen(machine), "CUDA device node")[0] == "WARN"
    assert "CUDA device node" not in points(seen(dataclasses.replace(machine, wsl=True)))
    assert "CUDA device node" not in points(seen(dataclasses.replace(machine, uvm=True)))


def test_visible_devices_that_stop_early_and_that_reorder(tmp_path):
    nvml = FakeNvml([dataclasses.replace(RTX_3090, uuid=f"GPU-{n}") for n in "abc"])
    env = {"CUDA_VISIBLE_DEVICES": "2,0"}
    found = look(gather({}, {}, None), host=Box(tmp_path).host(), nvml=nvml, environ=env)
    assert point(found, "CUDA_VISIBLE_DEVICES") == ("PASS", "cards 2, 0 of the box, in this order", "")
    env = {"CUDA_VISIBLE_DEVICES": "1,9,0"}
    found = look(gather({}, {}, None), host=Box(tmp_path).host(), nvml=nvml, environ=env)
    verdict, detail, _ = point(found, "CUDA_VISIBLE_DEVICES")
    assert verdict == "WARN" and "beyond the 3 cards" in detail
    found = look(gather({}, {}, None), host=Box(tmp_path).host(), nvml=nvml, environ={"CUDA_VISIBLE_DEVICES": ""})
    assert point(found, "cards")[0] == "FAIL" and "CUDA_VISIBLE_DEVICES" in point(found, "cards")[1]


@pytest.mark.parametrize("spec", ["MIG-5c1d2e3f-0001", "MIG-GPU-bbbb-2/7/0", "1"])
def test_a_mig_slice_is_refused_however_it_is_named(tmp_path, spec):
    """C20."""
    gpus = [
        dataclasses.replace(RTX_3090, uuid="GPU-aaaa-1"),
        dataclasses.replace(RTX_3090, uuid="GPU-bbbb-2", mig=True, mig_ids=("MIG-5c1d2e3f-0001",)),
    ]
    found = look(
        gather({}, {}, None), host=Box(tmp_path).host(), nvml=FakeNvml(gpus), environ={"CUDA_VISIBLE_DEVICES": spec}
    )
    verdict, detail, _ = point(found, "kind of cards")
    assert verdict == "FAIL" and "split into MIG slices" in detail


def test_beside_our_own_server_full_cards_are_no_mistake(tmp_path, model):
    """`docker compose exec server flashnext doctor --report F` is how a bug report starts."""
    state = tmp_path / "state.json"
    wishes = gather({"model": str(tmp_path / "none"), "state_dir": str(tmp_path)}, {}, None)
    full = [dataclasses.replace(gpu, free_bytes=GIB, processes=1) for gpu in simulate("3x3090").gpus]
    host = Box(tmp_path / "box").meminfo(total=125 * GIB, available=20 * GIB).host()

    def looked():
        return look(wishes, host=host, nvml=FakeNvml(full), environ={})

    assert point(looked(), "plan")[0] == "FAIL" and "server" not in points(looked())
    state.write_text(json.dumps({"phase": "serving", "pid": os.getpid()}))
    found = looked()
    assert "(serving)" in point(found, "server")[1]
    assert (
        point(found, "cards in use")[0] == "PASS" and "22.68 GiB held by 1 compute" in point(found, "cards in use")[1]
    )
    verdict, detail, fix = point(found, "plan")
    assert verdict == "WARN" and "beside the running server" in detail and "down" in fix
    for ended in ({"phase": "failed", "pid": None}, {"phase": "serving", "pid": 2**22 + 1}, {"phase": "serving"}, []):
        state.write_text(json.dumps(ended))
        assert looked().running is None, ended


# --- host -------------------------------------------------------------------------------------------------------------


def test_numa_with_cards_on_one_and_on_two_nodes():
    nodes = (
        NumaNode(node=0, total_bytes=64 * GIB, free_bytes=60 * GIB),
        NumaNode(node=1, total_bytes=64 * GIB, free_bytes=GIB),
    )
    one = dataclasses.replace(cards(2, numa_node=0), numa=nodes)
    assert point(seen(one), "NUMA")[0] == "PASS"
    two = dataclasses.replace(one, gpus=(one.gpus[0], dataclasses.replace(one.gpus[1], numa_node=1)))
    verdict, detail, fix = point(seen(two), "NUMA")
    assert (
        verdict == "WARN"
        and "card 1 on node 1" in detail
        and "node 1 1.0 GiB of 64.0 GiB free" in detail
        and "node 0" in fix
    )
    assert "NUMA" not in points(seen(dataclasses.replace(one, numa=nodes[:1])))


@pytest.mark.parametrize(("cpus", "verdict"), [(5, "PASS"), (4, "WARN"), (1, "WARN")])
def test_cpus_for_three_cards(cpus, verdict):
    assert point(seen(dataclasses.replace(cards(3), cpu_count=cpus)), "CPUs")[0] == verdict


@pytest.mark.parametrize(
    ("limit", "verdict", "words"),
    [
        (None, "PASS", "123.00 GiB available of 125.00 GiB"),
        ("123GiB", "PASS", "does not bind"),
        ("122GiB", "WARN", "the container's limit is 122.00 GiB"),
        ("16GiB", "WARN", "the machine has 123.00 GiB available"),
    ],
)
def test_ram_and_the_containers_limit(limit, verdict, words):
    """C13."""
    got = point(seen(simulate("3x3090", ram="125GiB", cgroup=limit)), "RAM")
    assert got[0] == verdict and words in got[1]


def test_a_limit_of_the_kernels_largest_number_is_none(tmp_path):
    box = Box(tmp_path).meminfo(total=1000 * GIB, available=900 * GIB)
    box.cgroup1(
        "memory", "/", {"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": GIB, "memory.stat": ""}
    )
    found = look(gather({}, {}, None), host=box.host(), nvml=FakeNvml(), environ={})
    assert point(found, "RAM")[:2] == ("PASS", "900.00 GiB available of 1,000.00 GiB")


class Planned:
    """What a point reads of a plan: its capacity."""

    def __init__(self, **capacity):
        self.capacity, self.stages, self.notes, self.device, self.table = capacity, (1, 2, 3), (), "cuda", None


@pytest.mark.parametrize(
    ("limit", "pool", "verdict", "words"),
    [
        (UNLIMITED, 48 * GIB, "PASS", "no limit"),
        (48 * GIB, 48 * GIB, "PASS", "the plan locks 48.00 GiB"),
        (48 * GIB - 1, 48 * GIB, "WARN", "the plan locks 48.00 GiB"),
        (8 * MIB, 48 * GIB, "WARN", "8 MiB may be locked"),
        (8 * MIB, None, "WARN", "8 MiB may be locked"),
        (None, 48 * GIB, "PASS", "unknown"),
    ],
)
def test_memlock_against_the_pool(limit, pool, verdict, words):
    """C17."""
    machine = dataclasses.replace(cards(), memlock_bytes=limit, ipc_lock=False)
    got = point(seen(machine, plan=Planned(host_pool_bytes=pool)), "memlock")
    assert got[0] == verdict and words in got[1]


def test_the_capability_overrides_memlock():
    assert point(seen(dataclasses.replace(cards(), memlock_bytes=8 * MIB, ipc_lock=True)), "memlock")[0] == "PASS"


@pytest.mark.parametrize(("size", "verdict"), [(64 * MIB, "FAIL"), (GIB - 1, "FAIL"), (GIB, "PASS"), (None, "PASS")])
def test_shared_memory(size, verdict):
    """C18: the plan's own rule, both sides."""
    assert point(seen(dataclasses.replace(cards(), shm_total_bytes=size)), "/dev/shm")[0] == verdict


def test_wsl_is_said_with_what_it_costs():
    assert point(seen(dataclasses.replace(cards(), wsl=True)), "system")[0] == "WARN"
    assert point(seen(dataclasses.replace(cards(), kernel="6.8.0")), "system") == ("PASS", "kernel 6.8.0", "")


# --- disks ------------------------------------------------------------------------------------------------------------


def on_disk(role: str, **facts) -> Machine:
    base = {"path": "/x", "mount_point": "/x", "fs_type": "ext4", "source": "/dev/x", "kind": "nvme"}
    return dataclasses.replace(cards(), mounts={role: Mount(**{**base, **facts})})


@pytest.mark.parametrize(
    ("facts", "verdict", "words"),
    [
        ({"disks": ("nvme0n1", "nvme1n1")}, "PASS", "nvme (ext4 on nvme0n1, nvme1n1)"),
        ({"kind": "ssd"}, "PASS", "ssd (ext4)"),
        ({"kind": "unknown", "fs_type": "ext4"}, "PASS", "unknown"),
        ({"kind": "memory", "fs_type": "tmpfs"}, "PASS", "memory"),
        ({"kind": "hdd"}, "WARN", "100 random reads a second"),
        ({"kind": "network", "fs_type": "nfs4"}, "WARN", "network (nfs4)"),
        ({"kind": "network", "fs_type": "9p"}, "WARN", "every row is a message"),
        ({"kind": "overlay", "fs_type": "overlay"}, "WARN", "container's own layers"),
        ({"kind": "ssd", "usb": True}, "WARN", "on USB"),
        ({"fs_type": "btrfs", "compressed": True}, "WARN", "128 KiB"),
        ({"fs_type": "btrfs", "compressed": False}, "PASS", "btrfs"),
        ({"kind": "unknown", "fs_type": "zfs"}, "WARN", "whole record"),
    ],
)
def test_disk_of_the_checkpoint(facts, verdict, words):
    """C32: the kind, and why it matters."""
    got = point(seen(on_disk("model", **facts)), "disk of the checkpoint")
    assert got[0] == verdict and words in got[1], got


@pytest.mark.parametrize(
    ("wish", "free_bytes", "verdict", "words"),
    [
        ("auto", 400 * GIB, "PASS", "every row is a message; n-gram table from the prepared file /var/lib"),
        ("auto", 10 * GIB, "WARN", "every row is a message"),
        ("checkpoint", 400 * GIB, "WARN", "every row is a message"),
        ("pinned", 10 * GIB, "PASS", "n-gram table page-locked in host RAM"),
    ],
)
def test_a_slow_disk_is_no_matter_where_the_plan_reads_the_table_elsewhere(wish, free_bytes, verdict, words):
    base = {"path": "/x", "mount_point": "/x", "source": "/dev/x"}
    disks = {
        "model": Mount(**base, kind="network", fs_type="nfs4"),
        "data": Mount(**base, kind="nvme", fs_type="ext4", free_bytes=free_bytes),
    }
    machine = dataclasses.replace(simulate("3x3090", ram="251GiB"), mounts=disks)
    made = plan.make_plan(machine, plan.published(), gather({}, {"FLASHNEXT_TABLE": wish}, None))
    found = seen(machine, plan=made)
    got = point(found, "disk of the checkpoint")
    assert got[0] == verdict and words in got[1], got
    assert f"n-gram table {made.table.words}" in point(found, "plan")[1]


def test_memlock_counts_a_page_locked_table():
    machine = dataclasses.replace(simulate("4x3090", ram="251GiB"), memlock_bytes=128 * GIB)
    wishes = gather({}, {"FLASHNEXT_TABLE": "pinned"}, None)
    made = plan.make_plan(machine, plan.published(), wishes)
    assert point(seen(machine, plan=made), "memlock") == (
        "PASS",
        "131,072 MiB may be locked, and the plan locks 128.00 GiB",
        "",
    )


def probed(**facts) -> Probe:
    return Probe(**{"rows_s": 2000.0, "rows_deep_s": 30_000.0, "longest_s": 0.0021, "reads": 1024, **facts})


@pytest.mark.parametrize(
    ("probe", "verdict", "words"),
    [
        (
            probed(),
            "PASS",
            "2,000 rows/s one by one, 30,000 with 16 at a time (longest read 2.1 ms); cold, that is 1,875.0",
        ),
        (probed(rows_deep_s=2560.0), "PASS", "160.0 tokens/s"),
        (probed(rows_deep_s=2559.0), "WARN", "below the 160"),
        (probed(rows_s=5.0, rows_deep_s=5.0, longest_s=0.4), "WARN", "0.3 tokens/s"),
        (probed(direct=False), "PASS", "through the page cache: at most that"),
        (Probe(trouble="no answer within 5 s"), "FAIL", "no answer"),
        (Probe(trouble="12.0 MB are too little to tell a disk's speed"), "WARN", "too little"),
    ],
)
def test_random_reads_with_numbers(probe, verdict, words):
    found = seen(probe=probe)
    got = point(found, "random reads of the table")
    assert got[0] == verdict and words in got[1], got
    (one,) = [f for f in judge(found) if f.point == "random reads of the table"]
    assert one.code == (5 if verdict == "FAIL" else 0)


@pytest.mark.parametrize(
    ("facts", "verdict", "words"),
    [
        ({"free_bytes": 5 * GIB}, "PASS", "5.0 GiB free"),
        ({"free_bytes": 5 * GIB - 1}, "WARN", "kernels are compiled into it"),
        ({"kind": "memory", "fs_type": "tmpfs", "free_bytes": 50 * GIB}, "WARN", "gone after a restart"),
        ({"read_only": True, "free_bytes": 50 * GIB}, "WARN", "cannot be written"),
    ],
)
def test_our_own_folder(facts, verdict, words):
    got = point(seen(on_disk("data", **facts)), "our own folder")
    assert got[0] == verdict and words in got[1]


def test_our_folder_that_cannot_be_written_stops_a_container_only():
    machine = on_disk("data", free_bytes=50 * GIB)
    assert point(seen(machine, data_writable=False), "our own folder")[0] == "WARN"
    found = seen(dataclasses.replace(machine, container=True), data_writable=False)
    (one,) = [f for f in judge(found) if f.point == "our own folder"]
    assert (one.verdict, one.code) == ("FAIL", 5)


def test_writable_looks_at_the_nearest_parent_that_is_there(tmp_path):
    assert doctor._writable(tmp_path / "not" / "yet") is True
    (tmp_path / "file").write_text("")
    assert doctor._writable(tmp_path / "file" / "x") is False


# --- checkpoint, table, plan ------------------------------------------------------------------------------------------


def safetensors(path: Path, tensors: dict[str, int]) -> None:
    """A file of U8 tensors: name -> bytes."""
    header, at = {}, 0
    for name, nbytes in tensors.items():
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for nbytes in tensors.values():
            out.write(b"\x01" * nbytes)


def test_the_tables_bytes_are_found_in_the_headers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "model_type": "x"}))
    shard = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_{}.weight"
    safetensors(
        tmp_path / "model.safetensors", {"model.embed_tokens.weight": 100, shard.format(0): 4000, shard.format(1): 3000}
    )
    found = read_checkpoint(tmp_path)
    start = found.tensors["model.embed_tokens.weight"].offset + 100
    assert table_pieces(found) == [
        Piece(tmp_path / "model.safetensors", start, 4000),
        Piece(tmp_path / "model.safetensors", start + 4000, 3000),
    ]
    prepared = tmp_path / "table.bin"
    assert table_pieces(found, prepared)[0].file.name == "model.safetensors"
    prepared.write_bytes(b"x" * 10)
    assert table_pieces(found, prepared) == [Piece(prepared, 0, 10)]


def test_everything_is_read_once(tmp_path, model, monkeypatch):
    """The headers, the box and the disk: one reading each, however many points use them."""
    calls = []
    for owner, name in ((doctor.facts, "read_checkpoint"), (doctor, "read_machine"), (doctor.lint, "examine")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, _real=real, _name=name, **k: (calls.append(_name), _real(*a, **k))[1]
        )
    wishes = gather({"model": str(model), "data": str(tmp_path)}, {"FLASHNEXT_DEVICE": "cpu"}, None)
    findings = doctor.examine(wishes)
    assert sorted(calls) == ["examine", "read_checkpoint", "read_machine"]
    assert {f.point: f.verdict for f in findings}["plan"] == "PASS"


def test_the_probe_gets_the_tables_bytes(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "model_type": "x"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    shard = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight"
    safetensors(tmp_path / "model.safetensors", {"a": 7, shard: 80 * MIB})
    given = []

    def prober(pieces):
        given.extend(pieces)
        return disk_probe.probe(pieces, reads=30)

    wishes = gather({"model": str(tmp_path), "data": str(tmp_path)}, {}, None)
    found = look(wishes, nvml=FakeNvml(), prober=prober)
    assert [(p.file.name, p.nbytes) for p in given] == [("model.safetensors", 80 * MIB)]
    assert found.probe.trouble is None and found.probe.rows_deep_s > 0


def test_the_probe_reads_a_prepared_file_only_where_it_is_whole_and_used(tmp_path):
    folder, file = tmp_path / "model", tmp_path / "data" / "table" / "rows"
    write_table(folder)
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], "model_type": "x"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    file.parent.mkdir(parents=True)

    def pieces(**wishes: str) -> set[str]:
        given = []
        asked = gather({"model": str(folder), "data": str(tmp_path / "data"), **wishes}, {}, None)
        look(asked, nvml=FakeNvml(), prober=lambda some: given.extend(some) or disk_probe.probe(some))
        return {piece.file.name for piece in given}

    shards = {path.name for path in folder.glob("*.safetensors")}
    assert pieces() == shards
    table_.prepare(folder, file)
    assert pieces() == pieces(table="prepared") == pieces(table=str(file)) == {"rows"}
    assert pieces(table="checkpoint") == shards
    Path(f"{file}.json").unlink()
    assert pieces() == shards


def test_without_a_checkpoint_the_plan_is_for_the_published_one(tmp_path):
    nvml = FakeNvml(simulate("3x3090").gpus, driver_version="580.95.05", driver_cuda_version=(13, 0))
    host = Box(tmp_path).meminfo(total=125 * GIB, available=120 * GIB).capacity("/dev/shm", 8 * GIB, 8 * GIB).host()
    found = look(gather({"model": str(tmp_path / "none")}, {}, None), host=host, nvml=nvml, environ={})
    assert found.on_published and found.plan is not None
    verdict, detail, _ = point(found, "plan")
    assert verdict == "WARN" and "262,144 tokens" in detail and "for the published checkpoint" in detail
    assert point(found, "checkpoint")[0] == "FAIL"
    one = FakeNvml(simulate("1x3090").gpus)
    refused = look(gather({"model": str(tmp_path / "none")}, {}, None), host=host, nvml=one, environ={})
    assert point(refused, "plan")[0] == "FAIL" and "for the published checkpoint" in point(refused, "plan")[1]


def test_a_checkpoint_with_mistakes_that_are_mended_is_a_warning(model):
    from entrypoint import lint

    found = read_checkpoint(model)

    def with_findings(*findings):
        return seen(checkpoint=found, lint=lint.Report(path=str(model), findings=findings))

    mended = lint.Finding(verdict="ERROR", check="groups", message="m", fix="f", repair="config")
    bad = lint.Finding(verdict="ERROR", check="packing", message="odd words", fix="export again")
    verdict, detail, _ = point(with_findings(mended), "checkpoint")
    assert verdict == "WARN" and "1 mistakes that prepare and serve mend in a copy" in detail
    assert point(with_findings(mended, bad), "checkpoint") == ("FAIL", "packing: odd words", "export again")
    assert point(with_findings(), "checkpoint")[0] == "PASS"


# --- the command ------------------------------------------------------------------------------------------------------


def run(*args, env=None, cwd=None):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHNEXT_", "CUDA_"))}
    return subprocess.run(
        [sys.executable, "-m", "entrypoint", "doctor", *map(str, args)],
        env={**clean, "PYTHONPATH": str(ROOT), **(env or {})},
        capture_output=True,
        text=True,
        cwd=cwd or ROOT,
    )


def test_this_box_for_real(tmp_path, model):
    """Without a card: a truthful FAIL with its reason, everything else still looked at."""
    done = run("--json", env={"FLASHNEXT_MODEL": str(model), "FLASHNEXT_DATA": str(tmp_path)}, cwd=tmp_path)
    found = {f["point"]: f for f in json.loads(done.stdout)}
    assert not done.stderr, done.stderr
    assert {"system", "cards", "RAM", "memlock", "/dev/shm", "disk of the checkpoint", "our own folder", "plan"} <= set(
        found
    )
    if Path("/dev/nvidiactl").exists():
        assert found["cards"]["verdict"] == "PASS" and "driver" in found
    else:
        assert found["cards"]["verdict"] == "FAIL" and "libnvidia-ml.so.1" in found["cards"]["detail"]
        assert done.returncode == 3 and "driver" not in found
    assert found["checkpoint"]["verdict"] == "PASS"


def test_the_demo_passes_on_any_box(tmp_path, model):
    env = {"FLASHNEXT_MODEL": str(model), "FLASHNEXT_DATA": str(tmp_path), "FLASHNEXT_DEVICE": "cpu"}
    done = run(env=env, cwd=tmp_path)
    assert done.returncode == 0 and "FAIL" not in done.stdout.replace("0 FAIL", ""), done.stdout


def test_a_report_holds_no_planted_secret_and_plans_again(tmp_path):
    """Every way in: environment, wishes, key file, model path, host and user names."""
    home = tmp_path / "home" / "alice"
    folder = home / "very-secret-models"
    demo.make(folder)
    key = home / "key"
    key.write_text("planted-api-key-42\n")
    env = {
        "HOME": str(home),
        "USER": "alice",
        "HOSTNAME": "planted-host",
        "HF_TOKEN": "hf_PlantedPlantedPlanted1",
        "NCCL_SOCKET_IFNAME": "192.168.17.23",
        "VLLM_API_KEY": "planted-engine-key",
        "AWS_SECRET_ACCESS_KEY": "planted-aws",
        "FLASHNEXT_MODEL": str(folder),
        "FLASHNEXT_DATA": str(home / "data"),
        "FLASHNEXT_DEVICE": "cpu",
        "FLASHNEXT_API_KEY_FILE": str(key),
        "FLASHNEXT_MODEL_NAME": "alice-model",
        "FLASHNEXT_EXTRA_ARGS": "--served-by alice@planted.example",
    }
    file = tmp_path / "report.json"
    done = run("--report", file, env=env, cwd=tmp_path)
    text = file.read_text()
    for planted in ("planted", "Planted", "alice", "very-secret", "192.168.17.23", str(home)):
        assert planted not in text, (planted, text)
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text)
    assert str(file) in done.stdout + done.stderr
    content = json.loads(text)
    assert content["schema"] == 1 and content["machine"]["mem_total_bytes"] > 0
    assert {f["point"] for f in content["findings"]} >= {"system", "checkpoint", "plan"}
    assert content["checkpoint"]["tensors"] > 0 and "NCCL_SOCKET_IFNAME" in content["environment"]
    assert "AWS_SECRET_ACCESS_KEY" not in content["environment"]
    box = simulate(f"@{file}")
    assert box.mem_total_bytes == content["machine"]["mem_total_bytes"]

    again = run("--report", file, env=env, cwd=tmp_path)
    lines = again.stderr.strip().splitlines()
    assert again.returncode == 2 and [line.split(":")[0] for line in lines] == ["ERROR", "Fix"], again.stderr
    assert file.read_text() == text


def test_a_gpu_box_can_be_planned_again_from_its_report(tmp_path):
    gpus = [
        dataclasses.replace(gpu, uuid=f"GPU-8f1a000{n}-1111", pci_bus_id=f"00000000:0{n}:00.0")
        for n, gpu in enumerate(simulate("2x3090+1x4090").gpus)
    ]
    host = Box(tmp_path).meminfo(total=125 * GIB, available=120 * GIB).capacity("/dev/shm", 8 * GIB, 8 * GIB).host()
    nvml = FakeNvml(gpus, driver_version="580.95.05", p2p=((None, True, True),) * 3)
    found = look(gather({"model": str(tmp_path / "none")}, {}, None), host=host, nvml=nvml, environ={})
    file = tmp_path / "report.json"
    doctor.write_report(file, found, judge(found), {})
    assert "8f1a" not in file.read_text()
    box = simulate(f"@{file}")
    hidden = [dataclasses.replace(gpu, uuid=f"<gpu-{n + 1}>") for n, gpu in enumerate(found.machine.gpus)]
    assert list(box.gpus) == hidden
    assert (box.ram_available_bytes, box.p2p, box.driver_version) == (120 * GIB, found.machine.p2p, "580.95.05")
