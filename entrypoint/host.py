"""Reads the operating system's side of a box from /proc, /sys and the cgroup files under any root: '/' or a fixture.

Rule order
1. RAM limits: every cgroup level from this process's own up to the mount's root, v1 and v2; the one that allows least now binds.
2. A path's disk is the mount that holds it, of equal mount points the later one, classified by file system first: memory, network,
   overlay.
3. Otherwise by the block device: by major:minor, by source where the file system has no number of its own, all devices of a btrfs;
   down through md, device-mapper and loop files to the disks. The slowest disk below says what the mount is.
Unreadable and missing are None.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from .machine import UNLIMITED, CgroupMemory, Mount, NumaNode, least

# cgroup v1 says "no limit" as the largest page multiple in an int64; anything near it is the same statement.
_CGROUP_V1_NO_LIMIT_BYTES = 2**62

# fmt: off
_NETWORK_FS = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "drvfs", "ceph", "glusterfs", "lustre", "beegfs", "afs", "gpfs",
    "fuse.sshfs", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse", "fuse.glusterfs", "fuse.ceph",
    "fuse.juicefs", "fuse.goofys", "ocfs2",
    # a folder of the host behind a virtual machine: every read is a message to it
    "virtiofs", "vboxsf", "fuse.vmhgfs-fuse", "prl_fs", "fuse.grpcfuse", "fakeowner",
})
# fmt: on
_MEMORY_FS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
# Hypervisors leave the kernel's rotational flag at its default of 1, whatever lies below.
_VIRTUAL_DISK_MARKS = ("virtual", "qemu", "vmware", "vbox", "msft", "xen", "google", "persistentdisk", "ec2")
_VIRTUAL_DISK_NAMES = re.compile(r"(vd|xvd|loop|nbd|rbd|dasd)")
_PCIE_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # GT/s as the kernel writes them
_SLOWEST_FIRST = ("network", "hdd", "unknown", "ssd", "nvme", "memory")
_CAP_IPC_LOCK = 14
_CONTAINER_MARKS = re.compile(r"/(docker|kubepods|libpod|lxc|containerd|podman|crio)[-/.]")


@dataclass(frozen=True)
class _MountLine:
    """One line of /proc/self/mountinfo (proc(5)): which tree of which file system hangs where."""

    device: str
    root: str
    mount_point: str
    fs_type: str
    source: str
    options: frozenset[str]
    super_options: frozenset[str]


def _unescape(text: str) -> str:
    """mountinfo writes blank, tab, newline and backslash as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits.group(1), 8)), text)


def parse_mountinfo(text: str) -> list[_MountLine]:
    """The lines of a mountinfo text in mount order; lines of another shape are skipped."""
    mounts = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        fields, tail = left.split(), right.split(" ")
        if not separator or len(fields) < 6 or len(tail) < 3:
            continue
        mounts.append(
            _MountLine(
                device=fields[2],
                root=_unescape(fields[3]),
                mount_point=_unescape(fields[4]),
                fs_type=tail[0],
                source=_unescape(tail[1]),
                options=frozenset(fields[5].split(",")),
                super_options=frozenset(" ".join(tail[2:]).split(",")),
            )
        )
    return mounts


def _pci_address(pci_bus_id: str | None) -> str | None:
    """The kernel's name of a PCI device by NVML's ('00000000:0B:00.0'), whose domain has eight digits."""
    found = re.fullmatch(r"[0-9a-f]*([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])", (pci_bus_id or "").lower())
    return found.group(1) if found else None


def parse_cpu_list(text: str) -> int:
    """How many CPUs a kernel list names: '0-3,8' is 5. Raises ValueError on another shape."""
    count = 0
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return count


class Host:
    """The operating system as files under `root`: '/' is this box, a folder is a fixture of another.

    `capacities` maps a path to (total, free) bytes where the file system cannot be asked, as under a fixture root.
    """

    def __init__(self, root: str | Path = "/", capacities: Mapping[str, tuple[int, int]] | None = None):
        self.root = Path(root)
        self.real = self.root == Path("/")
        self.capacities = dict(capacities or {})
        self._mounts: list[_MountLine] | None = None

    def at(self, path: str | PurePosixPath) -> Path:
        """Where the box's absolute `path` lies for us."""
        return self.root / str(path).lstrip("/")

    def read(self, path: str | PurePosixPath) -> str | None:
        """Text of a file, None where it is missing or unreadable."""
        try:
            return self.at(path).read_text(encoding="utf-8", errors="replace")
        except (OSError, ValueError):
            return None

    def read_number(self, path: str | PurePosixPath) -> int | None:
        """The one integer in a file, None for anything else (`max` included)."""
        try:
            return int((self.read(path) or "").strip())
        except ValueError:
            return None

    # -- memory

    def meminfo(self) -> dict[str, int]:
        """/proc/meminfo in bytes by its own names; {} where there is none."""
        facts = {}
        for line in (self.read("/proc/meminfo") or "").splitlines():
            found = re.match(r"(\w[^:]*):\s+(\d+)( kB)?$", line.strip())
            if found:
                facts[found.group(1)] = int(found.group(2)) * (1024 if found.group(3) else 1)
        return facts

    def mountinfo(self) -> list[_MountLine]:
        if self._mounts is None:
            self._mounts = parse_mountinfo(self.read("/proc/self/mountinfo") or "")
        return self._mounts

    def cgroup_levels(self, controller: str) -> list[tuple[int, PurePosixPath, bool]]:
        """(version, folder, is it ours) for each cgroup that binds this process, from its own up to the mount's root.

        v1: the hierarchy of `controller`; v2: the unified one (its folders simply lack the controller's files where a
        hybrid box keeps it in v1). A path that the mount does not show (a private cgroup namespace, a bind mount of a
        container's own folder, `/../x`) starts at the mount point, which is then the container's own cgroup.
        """
        paths: dict[int, str] = {}
        for line in (self.read("/proc/self/cgroup") or "").splitlines():
            number, _, rest = line.partition(":")
            names, _, path = rest.partition(":")
            if number == "0" and not names:
                paths[2] = path
            elif controller in names.split(","):
                paths[1] = path
        levels = []
        for version, path in sorted(paths.items()):
            for mount in self.mountinfo():
                if version == 2 and mount.fs_type != "cgroup2":
                    continue
                if version == 1 and (mount.fs_type != "cgroup" or controller not in mount.super_options):
                    continue
                top = PurePosixPath(mount.mount_point)
                inside = (
                    path if mount.root == "/" else path.removeprefix(mount.root) if _under(path, mount.root) else "/"
                )
                folder = top / inside.lstrip("/")
                if ".." in folder.parts or not self.at(folder).is_dir():
                    folder = top
                own = folder
                while True:
                    levels.append((version, folder, folder == own))
                    if folder == top:
                        break
                    folder = folder.parent
                break
        return levels

    def cgroup_memory(self) -> CgroupMemory | None:
        """The level that allows least now; None where no level has a limit.

        v1 limits: memory.limit_in_bytes of each level, and at our own also hierarchical_memory_limit, which tells of
        ancestors that a container cannot see. v2 limits: the smaller of memory.max and memory.high (above `high` every
        allocation stalls).
        """
        found = []
        for version, folder, own in self.cgroup_levels("memory"):
            stat = _key_values(self.read(folder / "memory.stat") or "")
            if version == 1:
                limit = least(
                    self.read_number(folder / "memory.limit_in_bytes"),
                    stat.get("hierarchical_memory_limit") if own else None,
                )
                usage = self.read_number(folder / "memory.usage_in_bytes")
                cache = stat.get("total_active_file", 0) + stat.get("total_inactive_file", 0)
            else:
                limit = least(self.read_number(folder / "memory.max"), self.read_number(folder / "memory.high"))
                usage = self.read_number(folder / "memory.current")
                cache = sum(stat.get(name, 0) for name in ("active_file", "inactive_file", "slab_reclaimable"))
            if limit is None or limit >= _CGROUP_V1_NO_LIMIT_BYTES:
                continue
            used = max(0, (usage or 0) - cache)
            found.append(CgroupMemory(version=version, path=str(folder), limit_bytes=limit, used_bytes=used))
        return min(found, key=lambda level: level.available_bytes, default=None)

    def memlock_bytes(self) -> int | None:
        """Soft limit of locked memory from /proc/self/limits; UNLIMITED or None (unknown)."""
        found = re.search(r"^Max locked memory\s+(\S+)", self.read("/proc/self/limits") or "", re.MULTILINE)
        if not found:
            return None
        return UNLIMITED if found.group(1) == "unlimited" else int(found.group(1))

    def ipc_lock(self) -> bool | None:
        """Whether CAP_IPC_LOCK is effective, so that the memlock limit does not bind."""
        found = re.search(r"^CapEff:\s+([0-9a-fA-F]+)", self.read("/proc/self/status") or "", re.MULTILINE)
        return bool(int(found.group(1), 16) >> _CAP_IPC_LOCK & 1) if found else None

    # -- processor and system

    def cpu_count(self) -> int | None:
        """CPUs this process may use: its affinity list, cut by the tightest cgroup quota (rounded up, at least 1)."""
        found = re.search(r"^Cpus_allowed_list:\s+(\S+)", self.read("/proc/self/status") or "", re.MULTILINE)
        count = parse_cpu_list(found.group(1)) if found else None
        for version, folder, _ in self.cgroup_levels("cpu"):
            if version == 1:
                quota, period = (
                    self.read_number(folder / "cpu.cfs_quota_us"),
                    self.read_number(folder / "cpu.cfs_period_us"),
                )
            else:
                words = (self.read(folder / "cpu.max") or "").split()
                quota, period = (int(word) if word.isdigit() else None for word in [*words, "", ""][:2])
            if quota and period and quota > 0:
                count = least(count, max(1, math.ceil(quota / period)))
        return count

    def kernel(self) -> str | None:
        release = self.read("/proc/sys/kernel/osrelease")
        return release.strip() if release else None

    def wsl(self) -> bool:
        """Whether this is WSL: Microsoft's kernels carry its name in the release or the version text."""
        return "microsoft" in f"{self.kernel()} {self.read('/proc/version')}".lower()

    def container(self) -> bool:
        """Whether we run in a container: the runtimes' marker files, their cgroup names, or an overlay as root."""
        if self.at("/.dockerenv").exists() or self.at("/run/.containerenv").exists():
            return True
        if _CONTAINER_MARKS.search(self.read("/proc/self/cgroup") or ""):
            return True
        return any(mount.mount_point == "/" and mount.fs_type == "overlay" for mount in self.mountinfo())

    def iommu(self) -> bool | None:
        """Whether the kernel drives an IOMMU (it often blocks copies between cards); None where /sys does not tell."""
        try:
            return any(self.at("/sys/class/iommu").iterdir())
        except OSError:
            return None

    def numa_node(self, pci_bus_id: str | None) -> int | None:
        """NUMA node of a PCI device by NVML's bus id ('00000000:0B:00.0'); None where the board has but one."""
        address = _pci_address(pci_bus_id)
        node = self.read_number(f"/sys/bus/pci/devices/{address}/numa_node") if address else None
        return None if node is None or node < 0 else node

    def numa(self) -> tuple[NumaNode, ...]:
        """The nodes that have memory, by number; () where the kernel does not tell."""
        nodes = []
        for folder in self.at("/sys/devices/system/node").glob("node[0-9]*"):
            number = int(folder.name.removeprefix("node"))
            text = self.read(f"/sys/devices/system/node/{folder.name}/meminfo") or ""
            sizes = {name: int(kib) * 1024 for name, kib in re.findall(r"Node \d+ (\w+):\s+(\d+) kB", text)}
            if not sizes.get("MemTotal"):
                continue
            cpus = self.read(f"/sys/devices/system/node/{folder.name}/cpulist")
            nodes.append(
                NumaNode(
                    node=number,
                    total_bytes=sizes["MemTotal"],
                    free_bytes=sizes.get("MemFree"),
                    cpus=None if cpus is None else parse_cpu_list(cpus),
                )
            )
        return tuple(sorted(nodes, key=lambda node: node.node))

    def pcie_link(self, pci_bus_id: str | None) -> dict[str, int]:
        """The kernel's own view of a card's link under `Gpu`'s names, for what NVML does not tell; {} where neither does.

        `pcie_gen_max` and `pcie_width_max` are the card's: the kernel does not know what the slot could do.
        """
        address = _pci_address(pci_bus_id)
        if address is None:
            return {}
        folder, link = f"/sys/bus/pci/devices/{address}", {}
        for name, file in (("now", "current"), ("max", "max")):
            width = self.read_number(f"{folder}/{file}_link_width")
            speed = re.match(r"([0-9.]+) GT/s", self.read(f"{folder}/{file}_link_speed") or "")
            gen = _PCIE_GENERATION.get(float(speed.group(1))) if speed else None
            link |= {f"pcie_width_{name}": width} if width else {}
            link |= {f"pcie_gen_{name}": gen} if gen else {}
        return link

    def uvm(self) -> bool:
        return self.at("/dev/nvidia-uvm").exists()

    # -- disks

    def capacity(self, path: str) -> tuple[int | None, int | None]:
        """(total, free for us) bytes of the file system that holds `path` or its nearest existing parent."""
        for folder in (PurePosixPath(path), *PurePosixPath(path).parents):
            if str(folder) in self.capacities:
                return self.capacities[str(folder)]
            if self.real and self.at(folder).exists():
                try:
                    stat = os.statvfs(self.at(folder))
                except OSError:
                    return None, None
                return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
        return None, None

    def _holder(self, resolved: str) -> _MountLine | None:
        holder = None
        for mount in self.mountinfo():
            # Of equal mount points the later one covers the earlier.
            if _under(resolved, mount.mount_point) and (
                holder is None or len(mount.mount_point) >= len(holder.mount_point)
            ):
                holder = mount
        return holder

    def mount_of(self, path: str | Path) -> Mount | None:
        """The mount that holds `path` (which need not exist yet), None where mountinfo does not tell."""
        resolved = os.path.realpath(path) if self.real else str(path)
        holder = self._holder(resolved)
        if holder is None:
            return None
        below = self._classify(holder)
        total_bytes, free_bytes = self.capacity(resolved)
        return Mount(
            path=str(path),
            mount_point=holder.mount_point,
            fs_type=holder.fs_type,
            source=holder.source,
            kind=below.kind,
            read_only="ro" in holder.options or "ro" in holder.super_options,
            rotational=below.rotational,
            device=below.device,
            disks=below.disks,
            usb=below.usb,
            compressed=_compressed(holder),
            total_bytes=total_bytes,
            free_bytes=free_bytes,
        )

    def _classify(self, mount: _MountLine, depth: int = 0) -> _Below:
        """What a mount's file system lies on."""
        if mount.fs_type in _MEMORY_FS:
            return _Below("memory")
        if mount.fs_type in _NETWORK_FS:
            return _Below("network")
        if mount.fs_type in ("overlay", "aufs", "fuse.fuse-overlayfs"):
            return _Below("overlay")
        name = self._block_name(mount)
        if name is None:
            return _Below("unknown")
        names = self._btrfs_devices(name) if mount.fs_type == "btrfs" else [name]
        return replace(_together([self._block(each, depth) for each in names]), device=name)

    def _btrfs_devices(self, name: str) -> list[str]:
        """All devices of the btrfs that `name` is one of: mountinfo tells only the first."""
        for folder in self.at("/sys/fs/btrfs").glob("*/devices"):
            devices = sorted(entry.name for entry in folder.iterdir())
            if name in devices:
                return devices
        return [name]

    def _block_name(self, mount: _MountLine) -> str | None:
        """Kernel name of the block device under a mount.

        By major:minor; btrfs and fuseblk have none of their own and are found by their source, device-mapper names
        included.
        """
        by_number = self.at(f"/sys/dev/block/{mount.device}")
        if by_number.exists():
            return by_number.resolve().name
        name = mount.source.rpartition("/")[2]
        if not mount.source.startswith("/dev/"):
            return None
        if self.at(f"/sys/class/block/{name}").exists():
            return name
        for folder in sorted(self.at("/sys/class/block").glob("dm-*")):
            if (self.read(f"/sys/class/block/{folder.name}/dm/name") or "").strip() == name:
                return folder.name
        return None

    def _block(self, name: str, depth: int = 0) -> _Below:
        """What a block device is; a stack (md, dm, a file behind a loop device) is as slow as the slowest disk below it."""
        folder = self.at(f"/sys/class/block/{name}").resolve()
        slaves = sorted(entry.name for entry in (folder / "slaves").glob("*")) if depth < 8 else []
        if slaves:
            return _together([self._block(slave, depth + 1) for slave in slaves])
        if name.startswith("loop") and depth < 8 and (below := self._loop(name, depth)) is not None:
            return below
        if not (folder / "queue").is_dir():  # a partition: the disk is the folder around it
            folder = folder.parent
        try:
            rotational = (folder / "queue" / "rotational").read_text().strip() == "1"
        except OSError:
            rotational = None
        disk = folder.name
        is_usb = any(part.startswith("usb") for part in folder.parts)
        if disk.startswith(("zram", "ram", "pmem")):
            return _Below("memory", rotational, disk, (disk,), is_usb)
        if disk.startswith("nvme"):
            return _Below("nvme", rotational, disk, (disk,), is_usb)
        if rotational is None:
            return _Below("unknown", None, disk, (disk,), is_usb)
        if not rotational:
            return _Below("ssd", False, disk, (disk,), is_usb)
        marks = " ".join(
            (folder / "device" / part).read_text(errors="replace")
            for part in ("vendor", "model")
            if (folder / "device" / part).is_file()
        ).lower()
        virtual = _VIRTUAL_DISK_NAMES.match(disk) or any(mark in marks for mark in _VIRTUAL_DISK_MARKS)
        return _Below("unknown" if virtual else "hdd", True, disk, (disk,), is_usb)

    def _loop(self, name: str, depth: int) -> _Below | None:
        """What holds the file behind a loop device; None where the kernel names no file that can be found."""
        file = (self.read(f"/sys/class/block/{name}/loop/backing_file") or "").strip()
        holder = self._holder(file) if file.startswith("/") else None
        return None if holder is None else self._classify(holder, depth + 1)


@dataclass(frozen=True)
class _Below:
    """What lies under a file system: kind and flag as in `Mount`, the device it sits on, the disks at the bottom."""

    kind: str
    rotational: bool | None = None
    device: str | None = None
    disks: tuple[str, ...] = ()
    usb: bool | None = None


def _together(parts: list[_Below]) -> _Below:
    """Several devices as one: the slowest says what they are."""
    slowest = min(parts, key=lambda part: _SLOWEST_FIRST.index(part.kind))
    disks = tuple(dict.fromkeys(disk for part in parts for disk in part.disks))
    return replace(slowest, disks=disks, usb=any(part.usb for part in parts))


def _compressed(mount: _MountLine) -> bool | None:
    """Whether new files of this mount are compressed. Only btrfs says it in its options; elsewhere None, or False where the
    file system cannot."""
    if mount.fs_type == "btrfs":
        return any(option.startswith(("compress=", "compress-force")) for option in mount.super_options)
    return False if mount.fs_type in ("ext4", "ext3", "ext2", "xfs") else None


def _under(path: str, folder: str) -> bool:
    return folder == "/" or path == folder or path.startswith(folder.rstrip("/") + "/")


def _key_values(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
