"""Facts of made-up boxes, number by number, and of the box that runs the tests."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import psutil
import pynvml
import pytest

from entrypoint.detect import read_machine
from entrypoint.host import Host, parse_cpu_list, parse_mountinfo
from entrypoint.machine import UNLIMITED, Gpu, Machine, NumaNode, pcie_bytes_s
from entrypoint.nvml import FakeNvml, Nvml, NvmlFacts
from entrypoint.units import GIB, MIB
from entrypoint.visible import visible_devices
from tests.support.trees import NO_LIMIT_V1, Box

RTX_3090 = Gpu(
    index=0,
    name="NVIDIA GeForce RTX 3090",
    compute_capability=(8, 6),
    total_bytes=25_769_803_776,
    free_bytes=25_431_113_728,
    mig=False,
    processes=0,
)


def three_cards() -> FakeNvml:
    names = ("GPU-8f1a0001-aaaa", "GPU-8f1a0002-bbbb", "GPU-77777777-cccc")
    cards = [
        dataclasses.replace(RTX_3090, uuid=uuid, pci_bus_id=f"00000000:{bus}:00.0")
        for uuid, bus in zip(names, ("0B", "41", "C1"), strict=True)
    ]
    return FakeNvml(cards, driver_version="580.95.05", driver_cuda_version=(13, 0))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_articles_box_without_a_limit(tmp_path):
    box = Box(tmp_path).meminfo(total=131_900_000 * 1024, available=128_000_000 * 1024, swap=8 * GIB)
    box.cgroup2("/user.slice/session.scope", {"memory.max": "max", "memory.current": 5 * GIB, "memory.stat": "file 1"})
    machine = read_machine(box.host(), three_cards(), {})
    assert machine.mem_total_bytes == 135_065_600_000
    assert machine.mem_available_bytes == machine.ram_available_bytes == 131_072_000_000
    assert machine.swap_total_bytes == 8_589_934_592
    assert machine.cgroup_limit_bytes is None and machine.cgroup_version is None


def test_cgroup_v2_limit_of_a_container_with_its_own_namespace(tmp_path):
    """Host of 1 TB, container of 16 GiB (C13). Page cache and reclaimable slab are not counted as used, tmpfs is."""
    counters = {"anon": GIB, "shmem": 2 * GIB, "inactive_file": 3 * GIB, "active_file": GIB, "slab_reclaimable": MIB}
    stat = "\n".join(f"{name} {size}" for name, size in counters.items())
    box = Box(tmp_path).meminfo(total=1024 * GIB, available=1000 * GIB)
    box.cgroup2("/", {"memory.max": 16 * GIB, "memory.high": "max", "memory.current": 8 * GIB, "memory.stat": stat})
    machine = read_machine(box.host(), FakeNvml(), {})
    assert (machine.cgroup_version, machine.cgroup_path) == (2, "/sys/fs/cgroup")
    assert machine.cgroup_limit_bytes == 17_179_869_184
    assert machine.cgroup_used_bytes == 8 * GIB - 4 * GIB - MIB
    assert machine.ram_available_bytes == 16 * GIB - (4 * GIB - MIB)


def test_cgroup_v2_nested_the_level_that_allows_least_binds(tmp_path):
    """The parent's limit is larger than ours, but almost used up by others."""
    box = Box(tmp_path).meminfo(total=128 * GIB, available=120 * GIB)
    box.cgroup2(
        "/system.slice/docker-abc.scope",
        {"memory.max": 48 * GIB, "memory.current": 1 * GIB, "memory.stat": "inactive_file 0"},
        {"memory.max": 64 * GIB, "memory.current": 60 * GIB, "memory.stat": "inactive_file 0"},
        {"memory.stat": "inactive_file 0"},
    )
    machine = read_machine(box.host(), FakeNvml(), {})
    assert machine.cgroup_path == "/sys/fs/cgroup/system.slice"
    assert (machine.cgroup_limit_bytes, machine.cgroup_used_bytes) == (64 * GIB, 60 * GIB)
    assert machine.ram_available_bytes == 4 * GIB


def test_cgroup_v2_high_is_a_limit_too(tmp_path):
    box = Box(tmp_path).meminfo(total=128 * GIB, available=120 * GIB)
    box.cgroup2("/x", {"memory.max": 64 * GIB, "memory.high": 32 * GIB, "memory.current": 0, "memory.stat": ""})
    assert read_machine(box.host(), FakeNvml(), {}).cgroup_limit_bytes == 32 * GIB


def test_cgroup_v1_unlimited_is_not_a_limit(tmp_path):
    box = Box(tmp_path).meminfo(total=24 * GIB, available=20 * GIB)
    files = {
        "memory.limit_in_bytes": NO_LIMIT_V1,
        "memory.usage_in_bytes": 9 * GIB,
        "memory.stat": f"hierarchical_memory_limit {NO_LIMIT_V1}",
    }
    box.cgroup1("memory", "/a/b", files, files, files)
    machine = read_machine(box.host(), FakeNvml(), {})
    assert machine.cgroup_limit_bytes is None
    assert machine.ram_available_bytes == 20 * GIB


def test_cgroup_v1_counts_the_whole_subtree(tmp_path):
    stat = f"cache {GIB}\ninactive_file 1\nactive_file 1\ntotal_inactive_file {2 * GIB}\ntotal_active_file {3 * GIB}"
    box = Box(tmp_path).meminfo(total=128 * GIB, available=120 * GIB)
    box.cgroup1(
        "memory",
        "/docker/abc",
        {"memory.limit_in_bytes": 16 * GIB, "memory.usage_in_bytes": 10 * GIB, "memory.stat": stat},
        root="/docker/abc",
    )
    machine = read_machine(box.host(), FakeNvml(), {})
    assert (machine.cgroup_version, machine.cgroup_path) == (1, "/sys/fs/cgroup/memory")
    assert machine.cgroup_used_bytes == 5 * GIB
    assert machine.ram_available_bytes == 11 * GIB


def test_cgroup_v1_hears_of_a_limit_above_the_mount(tmp_path):
    """A pod's limit that the container's own folder shows only as hierarchical_memory_limit."""
    files = {
        "memory.limit_in_bytes": NO_LIMIT_V1,
        "memory.usage_in_bytes": 2 * GIB,
        "memory.stat": f"hierarchical_memory_limit {8 * GIB}\ntotal_inactive_file {1 * GIB}\ntotal_active_file 0",
    }
    box = Box(tmp_path).meminfo(total=128 * GIB, available=120 * GIB).cgroup1("memory", "/pod", files, root="/pod")
    machine = read_machine(box.host(), FakeNvml(), {})
    assert (machine.cgroup_limit_bytes, machine.ram_available_bytes) == (8 * GIB, 7 * GIB)


def test_hybrid_box_takes_memory_from_v1(tmp_path):
    """systemd's hybrid layout: v2 under `unified` has no memory controller, v1 has the limit."""
    box = Box(tmp_path).meminfo(total=24 * GIB, available=22 * GIB)
    box.mount("/sys/fs/cgroup", "tmpfs", "tmpfs")
    box.cgroup1("pids", "/")
    box.cgroup1(
        "memory",
        "/process_api/fba6",
        {"memory.limit_in_bytes": NO_LIMIT_V1, "memory.usage_in_bytes": GIB, "memory.stat": ""},
        {"memory.limit_in_bytes": 12 * GIB, "memory.usage_in_bytes": 2 * GIB, "memory.stat": ""},
    )
    box.cgroup2("/", point="/sys/fs/cgroup/unified")
    machine = read_machine(box.host(), FakeNvml(), {})
    assert (machine.cgroup_version, machine.cgroup_path) == (1, "/sys/fs/cgroup/memory/process_api")
    assert machine.ram_available_bytes == 10 * GIB


@pytest.mark.parametrize("path", ["/../../other", "/kubepods/not-mounted-here", "/"])
def test_a_cgroup_path_that_the_mount_does_not_show_starts_at_its_root(tmp_path, path):
    box = Box(tmp_path).meminfo(total=128 * GIB, available=120 * GIB)
    box.cgroup2("/", {"memory.max": 16 * GIB, "memory.current": GIB, "memory.stat": ""})
    box.file("/proc/self/cgroup", f"0::{path}\n")
    assert read_machine(box.host(), FakeNvml(), {}).ram_available_bytes == 15 * GIB


def test_a_cgroup_that_is_over_its_limit_leaves_nothing_not_less(tmp_path):
    box = Box(tmp_path).meminfo(total=128 * GIB, available=120 * GIB)
    box.cgroup2("/", {"memory.max": GIB, "memory.current": 2 * GIB, "memory.stat": ""})
    assert read_machine(box.host(), FakeNvml(), {}).ram_available_bytes == 0


def test_unknown_stays_unknown_in_an_empty_tree(tmp_path):
    machine = read_machine(Host(tmp_path), FakeNvml(), {}, {"model": "/model"})
    unknown = (
        "mem_total_bytes mem_available_bytes cgroup_limit_bytes ram_available_bytes swap_total_bytes memlock_bytes "
        "ipc_lock shm_total_bytes shm_free_bytes cpu_count kernel iommu driver_version driver_cuda_version p2p"
    )
    assert {name: getattr(machine, name) for name in unknown.split() if getattr(machine, name) not in (None, ())} == {}
    assert (machine.gpus, machine.wsl, machine.container, machine.mounts) == ((), False, False, {})


def test_available_is_not_guessed_on_an_old_kernel(tmp_path):
    box = Box(tmp_path).meminfo(total=8 * GIB, available=None)
    machine = read_machine(box.host(), FakeNvml(), {})
    assert (machine.mem_total_bytes, machine.mem_available_bytes, machine.ram_available_bytes) == (8 * GIB, None, None)


@pytest.mark.parametrize(("soft", "expected"), [("8388608", 8_388_608), ("unlimited", UNLIMITED), ("0", 0)])
def test_memlock(tmp_path, soft, expected):
    assert Box(tmp_path).memlock(soft).host().memlock_bytes() == expected


@pytest.mark.parametrize(("mask", "expected"), [("0000000000004000", True), ("000001ffffffbfff", False), ("0", False)])
def test_ipc_lock_is_bit_14_of_the_effective_capabilities(tmp_path, mask, expected):
    assert Box(tmp_path).status(cap_eff=mask).host().ipc_lock() is expected


def test_shm_of_64_mb(tmp_path):
    box = Box(tmp_path).capacity("/dev/shm", 67_108_864, 67_104_768)
    machine = read_machine(box.host(), FakeNvml(), {})
    assert (machine.shm_total_bytes, machine.shm_free_bytes) == (67_108_864, 67_104_768)


# --- processor and system ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "count"), [("0-3,8", 5), ("7", 1), ("0-127", 128), ("", 0)])
def test_cpu_list(text, count):
    assert parse_cpu_list(text) == count


@pytest.mark.parametrize(("quota", "expected"), [("max 100000", 32), ("250000 100000", 3), ("50000 100000", 1)])
def test_cpu_count_v2(tmp_path, quota, expected):
    box = Box(tmp_path).status(cpus="0-31").cgroup2("/a", {}, {"cpu.max": quota})
    assert box.host().cpu_count() == expected


@pytest.mark.parametrize(("quota", "expected"), [(-1, 4), (200_000, 2), (1_600_000, 4)])
def test_cpu_count_v1(tmp_path, quota, expected):
    box = (
        Box(tmp_path).status(cpus="0-3").cgroup1("cpu", "/a", {"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": 100_000})
    )
    assert box.host().cpu_count() == expected


@pytest.mark.parametrize(
    ("release", "version", "expected"),
    [
        ("5.15.167.4-microsoft-standard-WSL2", None, True),
        ("4.4.0-19041-Microsoft", None, True),
        ("6.6.36", "Linux version 6.6.36 (oe-user@oe-host) (x86_64-msft-linux-gcc) microsoft/WSL2\n", True),
        ("6.8.0-85-generic", None, False),
    ],
)
def test_wsl_by_its_kernel(tmp_path, release, version, expected):
    assert Box(tmp_path).kernel(release, version).host().wsl() is expected


def test_container_marks(tmp_path):
    assert Box(tmp_path / "a").file("/.dockerenv", "").host().container()
    assert Box(tmp_path / "b").file("/run/.containerenv", "").host().container()
    assert Box(tmp_path / "c").cgroup_line("5:memory:/docker/0123").host().container()
    assert Box(tmp_path / "d").mount("/", "overlay", "overlay", super_options="rw,lowerdir=/x").host().container()
    assert not Box(tmp_path / "e").cgroup_line("0::/user.slice").mount("/", "ext4", "/dev/sda1").host().container()


def test_iommu(tmp_path):
    assert Box(tmp_path / "on").folder("/sys/class/iommu/dmar0").host().iommu() is True
    assert Box(tmp_path / "off").folder("/sys/class/iommu").host().iommu() is False


# --- disks ------------------------------------------------------------------------------------------------------------


def test_mount_kinds(tmp_path):
    """One box with every kind of place that a table has been put on (C32)."""
    box = Box(tmp_path)
    box.disk("nvme0n1", "259:0", rotational=0, parts={"nvme0n1p2": "259:2"}, model="Samsung SSD 990 PRO 4TB")
    box.disk("sda", "8:0", rotational=0, parts={"sda1": "8:1"}, vendor="ATA", model="Samsung SSD 870")
    box.disk("sdb", "8:16", rotational=1, parts={"sdb1": "8:17"}, vendor="ATA", model="WDC WD80EFZX")
    box.disk("vda", "254:0", rotational=1)
    box.disk("sdc", "8:32", rotational=1, vendor="Msft", model="Virtual Disk")
    box.disk("dm-0", "253:0", rotational=0, slaves=("nvme0n1p2",), dm_name="luks-root")
    box.disk("md0", "9:0", rotational=1, slaves=("sdb1", "sda1"))
    box.disk("zram1", "252:1", rotational=0)
    box.mount("/", "overlay", "overlay", device="0:60", super_options="rw,lowerdir=/l,upperdir=/u,workdir=/w")
    box.mount("/nvme", "ext4", "/dev/nvme0n1p2", device="259:2")
    box.mount("/ssd", "xfs", "/dev/sda1", device="8:1", options="ro,relatime")
    box.mount("/hdd", "ext4", "/dev/sdb1", device="8:17")
    box.mount("/virtio", "ext4", "/dev/vda", device="254:0")
    box.mount("/wsl", "ext4", "/dev/sdc", device="8:32")
    box.mount("/luks", "ext4", "/dev/mapper/luks-root", device="253:0")
    box.mount("/raid", "ext4", "/dev/md0", device="9:0")
    box.mount("/btrfs", "btrfs", "/dev/nvme0n1p2", device="0:44", root="/@data")
    box.mount("/btrfs-luks", "btrfs", "/dev/mapper/luks-root", device="0:45")
    box.mount("/zfs", "zfs", "tank/models", device="0:46")
    box.mount("/nfs", "nfs4", "nas:/export/models", device="0:47", super_options="rw,vers=4.2")
    box.mount("/mnt/c", "9p", "C:\\134", device="0:48", super_options="rw,dirsync,aname=drvfs;path=C:\\")
    box.mount("/smb", "cifs", "//nas/models", device="0:49")
    box.mount("/sshfs", "fuse.sshfs", "me@nas:/models", device="0:51")
    box.mount("/tmpfs", "tmpfs", "tmpfs", device="0:52", super_options="rw,size=65536k")
    box.mount("/zram", "ext4", "/dev/zram1", device="252:1")
    box.mount("/with blank", "ext4", "/dev/sdb1", device="8:17")
    box.capacity("/nvme", 4000 * GIB, 1000 * GIB)
    host = box.host()
    expected = {
        "/etc": ("overlay", None),
        "/nvme/model": ("nvme", False),
        "/ssd": ("ssd", False),
        "/hdd/a/b": ("hdd", True),
        "/virtio": ("unknown", True),
        "/wsl": ("unknown", True),
        "/luks": ("nvme", False),
        "/raid": ("hdd", True),
        "/btrfs": ("nvme", False),
        "/btrfs-luks": ("nvme", False),
        "/zfs": ("unknown", None),
        "/nfs/x": ("network", None),
        "/mnt/c/Users": ("network", None),
        "/smb": ("network", None),
        "/sshfs": ("network", None),
        "/tmpfs": ("memory", None),
        "/zram": ("memory", False),
        "/with blank/x": ("hdd", True),
        "/nvmeX": ("overlay", None),
    }
    assert {path: (m.kind, m.rotational) for path in expected if (m := host.mount_of(path))} == expected
    model = host.mount_of("/nvme/model")
    assert (model.mount_point, model.fs_type, model.source) == ("/nvme", "ext4", "/dev/nvme0n1p2")
    assert (model.total_bytes, model.free_bytes, model.device) == (4000 * GIB, 1000 * GIB, "nvme0n1p2")
    assert host.mount_of("/ssd").read_only and not model.read_only


def test_disks_under_lvm_raid_btrfs_loop_and_usb(tmp_path):
    """The file system says ext4; the speed is that of what lies below, however many layers down (C32)."""
    box = Box(tmp_path)
    box.disk("nvme0n1", "259:0", rotational=0, parts={"nvme0n1p1": "259:1"})
    box.disk("nvme1n1", "259:2", rotational=0)
    box.disk("sda", "8:0", rotational=1, parts={"sda1": "8:1"}, vendor="ATA", model="WDC WD80EFZX")
    box.disk("sdb", "8:16", rotational=0, parts={"sdb1": "8:17"}, bus="usb2/2-1/host6", model="Portable SSD T7")
    box.disk("dm-0", "253:0", rotational=0, slaves=("nvme0n1p1",), dm_name="luks")
    box.disk("dm-1", "253:1", rotational=0, slaves=("dm-0", "nvme1n1"), dm_name="vg-models")
    box.disk("dm-2", "253:2", rotational=1, slaves=("nvme1n1", "sda1"), dm_name="vg-spanned")
    box.disk("md0", "9:0", rotational=0, slaves=("nvme0n1p1", "nvme1n1"))
    box.disk("loop0", "7:0", rotational=1, backing_file="/hdd/images/models.ext4")
    box.disk("loop1", "7:1", rotational=0, backing_file="/gone (deleted)")
    box.mount("/hdd", "ext4", "/dev/sda1", device="8:1")
    box.mount("/lvm", "xfs", "/dev/mapper/vg-models", device="253:1")
    box.mount("/spanned", "ext4", "/dev/mapper/vg-spanned", device="253:2")
    box.mount("/raid0", "ext4", "/dev/md0", device="9:0")
    box.mount("/loop", "ext4", "/dev/loop0", device="7:0")
    box.mount("/lost", "ext4", "/dev/loop1", device="7:1")
    box.mount("/usb", "exfat", "/dev/sdb1", device="8:17")
    box.mount("/btrfs", "btrfs", "/dev/nvme0n1p1", device="0:44", super_options="rw,ssd,compress=zstd:3,subvolid=5")
    box.mount("/plain", "btrfs", "/dev/nvme1n1", device="0:45", super_options="rw,ssd,subvolid=5")
    box.mount("/vm", "virtiofs", "models", device="0:46")
    box.btrfs("11111111-2222-3333-4444-555555555555", "nvme0n1p1", "sda1")
    host = box.host()
    found = {
        path: host.mount_of(path)
        for path in ["/hdd", "/lvm", "/spanned", "/raid0", "/loop", "/lost", "/usb", "/btrfs", "/plain", "/vm"]
    }
    assert {path: (m.kind, m.disks, m.usb, m.compressed) for path, m in found.items()} == {
        "/hdd": ("hdd", ("sda",), False, False),
        "/lvm": ("nvme", ("nvme0n1", "nvme1n1"), False, False),
        "/spanned": ("hdd", ("nvme1n1", "sda"), False, False),
        "/raid0": ("nvme", ("nvme0n1", "nvme1n1"), False, False),
        "/loop": ("hdd", ("sda",), False, False),
        "/lost": ("ssd", ("loop1",), False, False),
        "/usb": ("ssd", ("sdb",), True, None),
        "/btrfs": ("hdd", ("nvme0n1", "sda"), False, True),
        "/plain": ("nvme", ("nvme1n1",), False, False),
        "/vm": ("network", (), None, None),
    }
    assert found["/lvm"].device == "dm-1"


def test_a_loop_file_on_its_own_mount_ends(tmp_path):
    box = (
        Box(tmp_path).disk("loop0", "7:0", rotational=0, backing_file="/a/file").mount("/a", "ext4", "x", device="7:0")
    )
    assert box.host().mount_of("/a").kind == "ssd"


def test_a_later_mount_covers_an_earlier_one(tmp_path):
    box = Box(tmp_path).mount("/data", "ext4", "/dev/x", device="8:99").mount("/data", "tmpfs", "tmpfs")
    assert box.host().mount_of("/data/table").kind == "memory"


def test_mountinfo_skips_what_is_no_mount_line():
    line = "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 propagate_from:2 - ext3 /dev/root rw,errors=continue"
    mounts = parse_mountinfo(f"garbage\n\n{line}\n1 2 3 - \n")
    assert [(m.device, m.root, m.mount_point, m.fs_type) for m in mounts] == [("98:0", "/mnt1", "/mnt2", "ext3")]


def test_roles_become_mounts(tmp_path):
    box = Box(tmp_path).mount("/", "ext4", "/dev/x", device="8:9").mount("/model", "nfs4", "nas:/m")
    machine = read_machine(box.host(), FakeNvml(), {}, {"model": "/model/a", "data": "/var/lib/flashnext"})
    assert {role: mount.kind for role, mount in machine.mounts.items()} == {"model": "network", "data": "unknown"}


# --- cards ------------------------------------------------------------------------------------------------------------


def uuids(spec: str | None) -> tuple[list[str], Machine]:
    machine = read_machine(Host("/nonexistent"), three_cards(), {} if spec is None else {"CUDA_VISIBLE_DEVICES": spec})
    assert [gpu.index for gpu in machine.gpus] == list(range(len(machine.gpus)))
    return [gpu.uuid[-4:] for gpu in machine.gpus], machine


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, ["aaaa", "bbbb", "cccc"]),
        ("0,1,2", ["aaaa", "bbbb", "cccc"]),
        ("2,0", ["cccc", "aaaa"]),
        (" 1 , 0 ", ["bbbb", "aaaa"]),
        ("1gpu", ["bbbb"]),
        ("GPU-8f1a0002-bbbb", ["bbbb"]),
        ("GPU-7,GPU-8f1a0001", ["cccc", "aaaa"]),
    ],
)
def test_visible_devices_plain(spec, expected):
    shown, machine = uuids(spec)
    assert shown == expected
    assert machine.visible_note is None and machine.gpu_error is None


@pytest.mark.parametrize(
    ("spec", "expected", "word"),
    [
        ("0,7,1", ["aaaa"], "beyond the 3 cards"),
        ("0,-1,1", ["aaaa"], "no card number"),
        ("1,,0", ["bbbb"], "no card number"),
        ("GPU-77777777,GPU-dead,GPU-8f1a0001", ["cccc"], "names no card"),
        ("GPU-77777777,0", ["cccc"], "mixes numbers and ids"),
        ("0,GPU-77777777", ["aaaa"], "mixes numbers and ids"),
    ],
)
def test_visible_devices_end_at_the_first_bad_entry(spec, expected, word):
    shown, machine = uuids(spec)
    assert shown == expected
    assert word in machine.visible_note
    assert machine.gpu_error is None


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("-1", "no card number"),
        ("none", "no card number"),
        ("all", "no card number"),
        ("0,0", "twice"),
        ("GPU-7,GPU-77777777", "twice"),
        ("GPU-8", "fits 2 cards"),
        ("GPU-", "fits 3 cards"),
        ("MIG-0123", "names no card"),
        ("99999999999999999999", "beyond the 3 cards"),
    ],
)
def test_visible_devices_that_show_nothing_are_an_error_with_a_fix(spec, word):
    shown, machine = uuids(spec)
    assert shown == []
    assert word in machine.gpu_error and "CUDA_VISIBLE_DEVICES" in machine.gpu_error
    assert machine.gpu_fix


def test_mig_in_both_spellings():
    parts = ("MIG-5c1d2e3f-0001", "MIG-5c1d2e3f-0002")
    cards = (
        dataclasses.replace(RTX_3090, uuid="GPU-aaaa-1", nvml_index=0),
        dataclasses.replace(RTX_3090, uuid="GPU-bbbb-2", nvml_index=1, mig=True, mig_ids=parts),
    )
    for spec in ("MIG-5c1d2e3f-0002", "MIG-GPU-bbbb-2/7/0", "MIG-5c1d2e3f-0001,MIG-5c1d2e3f-0002"):
        gpus, note = visible_devices(spec, cards)
        assert note is None
        assert {(gpu.uuid, gpu.mig) for gpu in gpus} == {("GPU-bbbb-2", True)}
    gpus, _ = visible_devices("0,1", cards)
    assert [gpu.mig for gpu in gpus] == [False, True]


def test_mixed_cards_keep_pci_order_and_say_so():
    fast = dataclasses.replace(RTX_3090, name="NVIDIA GeForce RTX 4090", total_bytes=24_564 * MIB)
    nvml = FakeNvml([RTX_3090, fast, RTX_3090])
    host = Host("/nonexistent")
    machine = read_machine(host, nvml, {"CUDA_VISIBLE_DEVICES": "1,2"})
    assert [gpu.name[-4:] for gpu in machine.gpus] == ["4090", "3090"]
    assert (machine.mixed, machine.cuda_order) == (True, "FASTEST_FIRST")
    assert read_machine(host, nvml, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).cuda_order == "PCI_BUS_ID"
    assert not read_machine(host, nvml, {"CUDA_VISIBLE_DEVICES": "0,2"}).mixed


def test_peer_table_follows_the_cards():
    p2p = ((None, True, False), (True, None, None), (False, None, None))
    nvml = FakeNvml([RTX_3090] * 3, p2p=p2p)
    machine = read_machine(Host("/nonexistent"), nvml, {"CUDA_VISIBLE_DEVICES": "2,0"})
    assert machine.p2p == ((None, False), (False, None))


def test_numa_node_by_bus_id(tmp_path):
    box = Box(tmp_path).file("/sys/bus/pci/devices/0000:0b:00.0/numa_node", 1)
    box.file("/sys/bus/pci/devices/0000:41:00.0/numa_node", -1)
    assert [gpu.numa_node for gpu in read_machine(box.host(), three_cards(), {}).gpus] == [1, None, None]


def test_memory_by_node(tmp_path):
    box = Box(tmp_path).numa_node(1, 64 * GIB, 3 * GIB, "16-31,48").numa_node(0, 32 * GIB, 30 * GIB, "0-15")
    box.numa_node(2, 0, 0, "")  # CPUs, or an accelerator's node, without memory
    assert read_machine(box.host(), FakeNvml(), {}).numa == (
        NumaNode(node=0, total_bytes=34_359_738_368, free_bytes=32_212_254_720, cpus=16),
        NumaNode(node=1, total_bytes=68_719_476_736, free_bytes=3_221_225_472, cpus=17),
    )


@pytest.mark.parametrize(
    ("gen", "width", "expected"),
    [
        (1, 1, 250_000_000),
        (3, 1, 984_615_384),
        (3, 16, 15_753_846_153),
        (4, 4, 7_876_923_076),
        (4, 16, 31_507_692_307),
        (5, 16, 63_015_384_615),
        (9, 16, None),
        (None, 16, None),
        (4, None, None),
    ],
)
def test_bytes_a_second_of_a_link(gen, width, expected):
    found = pcie_bytes_s(gen, width)
    assert (found and int(found)) == expected


def test_a_riser_is_the_lanes_now_an_idle_link_is_not(tmp_path):
    riser = dataclasses.replace(
        RTX_3090, pcie_gen_now=1, pcie_gen_max=3, pcie_gen_card=4, pcie_width_now=1, pcie_width_max=16
    )
    assert round(riser.pcie_bytes_s / 1e6) == 985


def test_the_kernel_tells_a_link_that_nvml_does_not(tmp_path):
    link = {
        "current_link_width": 4,
        "max_link_width": 16,
        "current_link_speed": "2.5 GT/s PCIe",
        "max_link_speed": "16.0 GT/s PCIe",
    }
    box = (
        Box(tmp_path)
        .pci("0000:0b:00.0", **link)
        .pci("0000:41:00.0", current_link_speed="Unknown", current_link_width=0)
    )
    first, second, _ = read_machine(box.host(), three_cards(), {}).gpus
    assert (first.pcie_gen_now, first.pcie_gen_max, first.pcie_width_now, first.pcie_width_max) == (1, 4, 4, 16)
    assert (second.pcie_gen_now, second.pcie_width_now) == (None, None)
    told = FakeNvml([dataclasses.replace(RTX_3090, pci_bus_id="00000000:0B:00.0", pcie_gen_max=3, pcie_width_now=8)])
    (card,) = read_machine(box.host(), told, {}).gpus
    assert (card.pcie_gen_max, card.pcie_width_now, card.pcie_width_max) == (3, 8, 16)


def test_uvm_is_a_node_of_its_own(tmp_path):
    box = Box(tmp_path)
    assert read_machine(box.host(), three_cards(), {}).uvm is False
    assert read_machine(box.file("/dev/nvidia-uvm", "").host(), three_cards(), {}).uvm is True
    assert read_machine(box.host(), FakeNvml(), {}).uvm is None


# --- NVML's answers ---------------------------------------------------------------------------------------------------


class Library:
    """Answers of an NVML library by call name: a value, or an NVML error code to fail with.

    Stands where the driver's libnvidia-ml.so.1 cannot be: errors are nvidia-ml-py's own classes.
    """

    NVMLError = pynvml.NVMLError
    nvmlMemory_v2 = pynvml.nvmlMemory_v2

    class Fails(int):
        """An NVML return code."""

    def __init__(self, **answers):
        self.answers = answers

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments):
            answer = self.answers.get(name, self.Fails(pynvml.NVML_ERROR_NOT_SUPPORTED))
            if callable(answer):
                answer = answer(*arguments)
            if isinstance(answer, self.Fails):
                raise pynvml.NVMLError(int(answer))
            return answer

        return call


class Fields:
    def __init__(self, **values):
        self.__dict__.update(values)


def memory(handle, version=None):
    if version is None:
        return Fields(total=25_769_803_776, free=25_000_000_000)
    return Fields(total=25_769_803_776, free=25_000_000_000, reserved=331_350_016)


WORKING = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlSystemGetDriverVersion": b"580.95.05",
    "nvmlSystemGetCudaDriverVersion_v2": 13_000,
    "nvmlDeviceGetCount": 2,
    "nvmlDeviceGetHandleByIndex": lambda index: f"handle {index}",
    "nvmlDeviceGetName": "NVIDIA GeForce RTX 3090",
    "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle[-1]}",
    "nvmlDeviceGetCudaComputeCapability": (8, 6),
    "nvmlDeviceGetMemoryInfo": memory,
    "nvmlDeviceGetBAR1MemoryInfo": Fields(bar1Total=268_435_456),
    "nvmlDeviceGetEnforcedPowerLimit": 280_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 350_000,
    "nvmlDeviceGetPersistenceMode": 0,
    "nvmlDeviceGetDisplayMode": 1,
    "nvmlDeviceGetDisplayActive": 0,
    "nvmlDeviceGetPciInfo": lambda handle: Fields(busId=f"00000000:0{handle[-1]}:00.0"),
    "nvmlDeviceGetCurrPcieLinkGeneration": 1,
    "nvmlDeviceGetMaxPcieLinkGeneration": 3,
    "nvmlDeviceGetGpuMaxPcieLinkGeneration": 4,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetComputeRunningProcesses": [Fields(pid=1, usedGpuMemory=700), Fields(pid=2, usedGpuMemory=None)],
    "nvmlDeviceGetGraphicsRunningProcesses": [Fields(pid=1, usedGpuMemory=700), Fields(pid=3, usedGpuMemory=55)],
    "nvmlDeviceGetP2PStatus": lambda one, other, index: 0 if index == 0 else 4,
}


def test_nvml_answers_become_a_card():
    facts = Nvml(Library(**WORKING)).facts()
    assert facts.error is None
    assert (facts.driver_version, facts.driver_cuda_version) == ("580.95.05", (13, 0))
    assert facts.p2p == ((None, False), (False, None))
    assert facts.gpus[1] == Gpu(
        index=1,
        nvml_index=1,
        name="NVIDIA GeForce RTX 3090",
        uuid="GPU-1",
        compute_capability=(8, 6),
        total_bytes=25_769_803_776,
        free_bytes=25_000_000_000,
        reserved_bytes=331_350_016,
        pci_bus_id="00000000:01:00.0",
        pcie_gen_now=1,
        pcie_gen_max=3,
        pcie_gen_card=4,
        pcie_width_now=8,
        pcie_width_max=16,
        bar1_total_bytes=268_435_456,
        power_limit_w=280.0,
        power_default_w=350.0,
        persistence=False,
        display=True,
        mig=None,
        processes=2,
        graphics_processes=2,
        process_bytes=755,
    )
    assert facts.gpus[1].used_bytes == 25_769_803_776 - 331_350_016 - 25_000_000_000


def test_processes_whose_memory_is_hidden_are_not_none_and_not_zero():
    hidden = {**WORKING, "nvmlDeviceGetComputeRunningProcesses": [Fields(pid=1, usedGpuMemory=None)]}
    hidden["nvmlDeviceGetGraphicsRunningProcesses"] = Library.Fails(pynvml.NVML_ERROR_NOT_SUPPORTED)
    card = Nvml(Library(**hidden)).facts().gpus[0]
    assert (card.processes, card.graphics_processes, card.process_bytes) == (1, None, None)
    idle = Nvml(Library(**{**hidden, "nvmlDeviceGetComputeRunningProcesses": []})).facts().gpus[0]
    assert (idle.processes, idle.process_bytes) == (0, 0)


def test_every_name_that_is_asked_for_is_one_of_the_librarys():
    """A card that does not know a call and a name that is misspelt would both be None."""
    text = (Path(__file__).parents[2] / "entrypoint" / "nvml.py").read_text()
    names = set(re.findall(r"\bnvml[A-Z]\w+", text))
    assert len(names) > 20 and {name for name in names if not hasattr(pynvml, name)} == {
        "nvmlReturn_t",
        "nvmlGpuP2PCapsIndex_t",
    }


def test_nvml_of_an_old_driver_has_no_reserve():
    def old(handle, version=None):
        return memory(handle) if version is None else Library.Fails(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

    card = Nvml(Library(**{**WORKING, "nvmlDeviceGetMemoryInfo": old})).facts().gpus[0]
    assert (card.total_bytes, card.free_bytes, card.reserved_bytes) == (25_769_803_776, 25_000_000_000, None)


def test_nvml_lists_the_parts_of_a_mig_card():
    def part(handle, slot):
        return f"part {slot}" if slot < 2 else Library.Fails(pynvml.NVML_ERROR_NOT_FOUND)

    answers = {
        "nvmlDeviceGetMigMode": (1, 1),
        "nvmlDeviceGetMaxMigDeviceCount": 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": part,
        "nvmlDeviceGetUUID": lambda handle: f"MIG-{handle[-1]}" if handle.startswith("part") else "GPU-x",
    }
    card = Nvml(Library(**{**WORKING, **answers})).facts().gpus[0]
    assert (card.mig, card.mig_ids) == (True, ("MIG-0", "MIG-1"))


@pytest.mark.parametrize(
    ("code", "word", "fix"),
    [
        (pynvml.NVML_ERROR_UNKNOWN, "Unknown Error", "restart the container"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "different versions", "reboot"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded", "modprobe"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "libnvidia-ml.so.1", "Container Toolkit"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions", "/dev/nvidia"),
        (pynvml.NVML_ERROR_TIMEOUT, "Timeout", "nvidia-smi"),
    ],
)
def test_nvml_failures_in_words(code, word, fix):
    """C24, and its relatives: a reason and a fix, no traceback."""
    facts = Nvml(Library(nvmlInit=Library.Fails(code))).facts()
    assert facts.gpus == ()
    assert word in facts.error and fix in facts.fix
    machine = read_machine(Host("/nonexistent"), Nvml(Library(nvmlInit=Library.Fails(code))), {})
    assert (machine.gpu_error, machine.gpu_fix) == (facts.error, facts.fix)


def test_one_lost_card_is_told_beside_the_others():
    def handle(index):
        return Library.Fails(pynvml.NVML_ERROR_GPU_IS_LOST) if index == 0 else f"handle {index}"

    facts = Nvml(Library(**{**WORKING, "nvmlDeviceGetHandleByIndex": handle})).facts()
    assert [gpu.nvml_index for gpu in facts.gpus] == [1]
    assert facts.error.startswith("card 0: ") and "lost" in facts.error


def test_a_failure_half_way_is_words_too():
    facts = Nvml(Library(nvmlInit=None, nvmlDeviceGetCount=Library.Fails(pynvml.NVML_ERROR_UNKNOWN))).facts()
    assert facts == NvmlFacts(error=facts.error, fix=facts.fix) and "Unknown Error" in facts.error


# --- this box ---------------------------------------------------------------------------------------------------------


def test_the_box_that_runs_the_tests(tmp_path):
    machine = read_machine(paths={"data": tmp_path, "later": tmp_path / "not" / "yet"})
    assert machine.mem_total_bytes == psutil.virtual_memory().total
    assert 0 < machine.ram_available_bytes <= machine.mem_total_bytes
    assert abs(machine.mem_available_bytes - psutil.virtual_memory().available) < 2 * GIB
    assert machine.cpu_count <= len(os.sched_getaffinity(0))
    assert machine.kernel == os.uname().release
    assert machine.shm_free_bytes <= machine.shm_total_bytes
    assert machine.memlock_bytes >= 0
    mount = machine.mounts["later"]
    assert Path(mount.mount_point).is_mount() and 0 <= mount.free_bytes < mount.total_bytes
    assert mount.mount_point == machine.mounts["data"].mount_point
    assert json.loads(json.dumps(dataclasses.asdict(machine)))["kernel"] == machine.kernel


def test_real_nvml_gives_cards_or_a_reason():
    facts = Nvml().facts()
    if Path("/dev/nvidiactl").exists():
        assert facts.gpus and all(0 < gpu.free_bytes <= gpu.total_bytes and gpu.uuid for gpu in facts.gpus), facts
    else:
        assert facts.gpus == () and "libnvidia-ml.so.1" in facts.error and facts.fix
