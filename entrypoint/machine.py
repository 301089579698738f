"""What this box is: cards, driver, RAM, limits, disks. Facts only; what to do with them is the plan's.

Read from NVML, /proc, /sys and the cgroup files, each behind an object that has a fixture twin: `Host(root)` reads
files under any root, `Nvml` and `FakeNvml` give the same `NvmlFacts`. Unknown is None and never "not supported" or a
guess.

Rule order of `read_machine`
1. NVML lists the cards in PCI order. A failure is a reason in words (`gpu_error`, `gpu_fix`), not an exception.
2. CUDA_VISIBLE_DEVICES picks and orders them as CUDA itself would (`visible_devices`). Integers are read in PCI order:
   CUDA's own default is fastest first, which differs from it on mixed cards, so whoever starts the engine has to set
   CUDA_DEVICE_ORDER=PCI_BUS_ID; `cuda_order` tells what the environment says now.
3. RAM that may be used is min(MemAvailable, what the tightest cgroup level still allows), cgroup v1 and v2 alike.
4. A path's disk is the mount that holds it, classified by file system and, for block devices, by what lies under them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

UNLIMITED = 2**63 - 1
"""A limit that is not there (`memlock_bytes`). A number, so that it compares; None stays "unknown"."""

# cgroup v1 says "no limit" as the largest page multiple in an int64; anything near it is the same statement.
_CGROUP_V1_NO_LIMIT_BYTES = 2**62


# --- facts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One card. `index` is its CUDA ordinal after CUDA_VISIBLE_DEVICES, `nvml_index` its place in PCI order.

    `total_bytes` is NVML's total, `reserved_bytes` what the driver keeps of it (CUDA's own total is the difference),
    `free_bytes` what is free now. `pcie_gen_now` drops on an idle card to save power: compare `pcie_gen_max`, which is what
    card and slot can do together; `pcie_gen_card` and `pcie_width_max` are what the card could do in a better slot.
    `processes` counts compute processes that NVML can see (inside a container often none of the host's),
    `graphics_processes` those that draw, `process_bytes` what both hold, as far as the driver tells. `display`: a monitor is
    attached or the card draws for one. `power_limit_w` is the limit now, `power_default_w` the one it was sold with.
    """

    index: int
    name: str
    uuid: str = ""
    nvml_index: int | None = None
    compute_capability: tuple[int, int] | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    pci_bus_id: str | None = None
    pcie_gen_now: int | None = None
    pcie_gen_max: int | None = None
    pcie_gen_card: int | None = None
    pcie_width_now: int | None = None
    pcie_width_max: int | None = None
    bar1_total_bytes: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    persistence: bool | None = None
    display: bool | None = None
    mig: bool | None = None
    mig_ids: tuple[str, ...] = ()
    processes: int | None = None
    graphics_processes: int | None = None
    process_bytes: int | None = None
    numa_node: int | None = None

    @property
    def used_bytes(self) -> int | None:
        """What others hold of the card now: total - the driver's reserve - free."""
        if self.total_bytes is None or self.free_bytes is None:
            return None
        return max(0, self.total_bytes - (self.reserved_bytes or 0) - self.free_bytes)

    @property
    def pcie_bytes_s(self) -> float | None:
        """Most bytes a second, one way, that this slot gives the card: the best generation of both, the lanes it has now."""
        return pcie_bytes_s(self.pcie_gen_max, self.pcie_width_now or self.pcie_width_max)


# PCI-SIG: transfers a second and lane; 8b/10b up to generation 2, 128b/130b up to 5, FLITs of 242 in 256 bytes after it.
_PCIE_LANE_BYTES_S = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}


def pcie_bytes_s(gen: int | None, width: int | None) -> float | None:
    """Bytes a second, one way, of a PCIe link before packet headers; None where either number is unknown."""
    lane = _PCIE_LANE_BYTES_S.get(gen or 0)
    return lane * width if lane and width else None


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """A node with its memory and CPUs. `free_bytes` counts page cache as used, as the kernel does."""

    node: int
    total_bytes: int | None = None
    free_bytes: int | None = None
    cpus: int | None = None


@dataclass(frozen=True, kw_only=True)
class Mount:
    """The mount that holds `path`.

    `kind` is 'nvme', 'ssd', 'hdd', 'network', 'memory', 'overlay' or 'unknown'. `rotational` is the kernel's flag as it
    stands; virtual disks set it without meaning it, which is why `kind` may be 'unknown' beside rotational=True.
    `disks` are the whole disks under the file system, through LVM, md, LUKS, btrfs and loop files; `usb`: one of them hangs
    on USB. `compressed`: the file system unpacks a whole extent for one row (btrfs; None where it is not told).
    """

    path: str
    mount_point: str
    fs_type: str
    source: str
    kind: str
    read_only: bool | None = None
    rotational: bool | None = None
    device: str | None = None
    disks: tuple[str, ...] = ()
    usb: bool | None = None
    compressed: bool | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class CgroupMemory:
    """The cgroup level that allows the least now. `available_bytes` = limit - used, at least 0.

    `used_bytes` leaves out what the kernel can take back: usage minus active_file and inactive_file (v1: the `total_`
    counters; v2 also minus slab_reclaimable). tmpfs and locked pages are not in those counters and stay counted.
    """

    version: int
    path: str
    limit_bytes: int
    used_bytes: int

    @property
    def available_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All facts of one box. Every field may be None where the box does not tell.

    `ram_available_bytes` is min(mem_available_bytes, cgroup limit - used). `cgroup_*` describe the tightest level
    (None: no limit).
    `memlock_bytes` is the soft RLIMIT_MEMLOCK, UNLIMITED where there is none; `ipc_lock` is the capability that
    overrides it.
    `uvm`: whether CUDA's device node is here; NVML works without it, CUDA does not.
    `numa` is the memory by node, () where the kernel does not tell; `Gpu.numa_node` says where a card hangs.
    `p2p[i][j]` is what the driver reports for reads and writes between gpus i and j: a claim, not a proof.
    `mounts` maps a role ('model', 'data', ...) to the mount of its path. `simulated` is the text a box was made up
    from.
    """

    gpus: tuple[Gpu, ...] = ()
    gpu_error: str | None = None
    gpu_fix: str | None = None
    driver_version: str | None = None
    driver_cuda_version: tuple[int, int] | None = None
    cuda_order: str = "FASTEST_FIRST"
    cuda_visible_devices: str | None = None
    visible_note: str | None = None
    p2p: tuple[tuple[bool | None, ...], ...] | None = None
    mem_total_bytes: int | None = None
    mem_available_bytes: int | None = None
    cgroup_version: int | None = None
    cgroup_path: str | None = None
    cgroup_limit_bytes: int | None = None
    cgroup_used_bytes: int | None = None
    ram_available_bytes: int | None = None
    swap_total_bytes: int | None = None
    memlock_bytes: int | None = None
    ipc_lock: bool | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    cpu_count: int | None = None
    numa: tuple[NumaNode, ...] = ()
    uvm: bool | None = None
    kernel: str | None = None
    wsl: bool = False
    container: bool = False
    iommu: bool | None = None
    mounts: Mapping[str, Mount] = field(default_factory=dict, hash=False)
    simulated: str | None = None

    @property
    def mixed(self) -> bool:
        """Whether the cards differ in name or memory, so that their order matters."""
        return len({(gpu.name, gpu.total_bytes) for gpu in self.gpus}) > 1


def least(*values: int | None) -> int | None:
    """The smallest known value, None where none is known."""
    known = [value for value in values if value is not None]
    return min(known) if known else None


# --- the host, from files under a root ------------------------------------------------------------------------------

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


# --- the cards, from NVML -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NvmlFacts:
    """What NVML tells: cards in PCI order (`index` = `nvml_index`), or `error` and `fix` in words."""

    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    driver_cuda_version: tuple[int, int] | None = None
    p2p: tuple[tuple[bool | None, ...], ...] | None = None
    error: str | None = None
    fix: str | None = None


# NVML return code -> (what it means here, what to do). Codes are nvml.h's nvmlReturn_t.
_NVML_WORDS: dict[int, tuple[str, str]] = {
    4: (
        "NVML may not open the card (Insufficient Permissions)",
        "give this user read and write access to /dev/nvidia*, or start the container with --gpus all",
    ),
    9: (
        "the NVIDIA kernel driver is not loaded",
        "run nvidia-smi on the host; after a driver update reboot or `modprobe nvidia`",
    ),
    12: (
        "the NVML library (libnvidia-ml.so.1) is not here: no NVIDIA driver, or a container started without its cards",
        "install the NVIDIA driver and the NVIDIA Container Toolkit, and start the container with --gpus all",
    ),
    15: (
        "a card has fallen off the bus (GPU is lost)",
        "look for Xid lines in dmesg; check power and riser, then reboot",
    ),
    16: (
        "a card needs a reset (GPU requires restart)",
        "stop what uses it and run `nvidia-smi --gpu-reset`, or reboot",
    ),
    18: (
        "driver and NVML library have different versions",
        "the driver was updated under a running kernel: reboot the host (or reload its nvidia modules)",
    ),
    999: (
        "NVML cannot start (Unknown Error): the container has lost its devices, as after `systemctl daemon-reload`",
        "restart the container; to end it for good use Docker's cgroupfs driver or name the /dev/nvidia* devices",
    ),
}


class Nvml:
    """NVML by nvidia-ml-py, imported when first asked. `library` stands in for the module in tests."""

    def __init__(self, library=None):
        self._library = library

    def facts(self) -> NvmlFacts:
        """All cards, or the reason why there are none. Never raises an NVML error."""
        lib = self._library
        if lib is None:
            try:
                import pynvml as lib
            except ImportError:
                return NvmlFacts(
                    error="the Python package nvidia-ml-py is not installed", fix="pip install nvidia-ml-py"
                )
        try:
            lib.nvmlInit()
        except lib.NVMLError as error:
            words, fix = _in_words(error)
            return NvmlFacts(error=words, fix=fix)
        try:
            return self._read(lib)
        except lib.NVMLError as error:
            words, fix = _in_words(error)
            return NvmlFacts(error=words, fix=fix)
        finally:
            _ask(lib, lib.nvmlShutdown)

    def _read(self, lib) -> NvmlFacts:
        cuda = _ask(lib, lib.nvmlSystemGetCudaDriverVersion_v2)
        gpus, handles, error, fix = [], [], None, None
        for index in range(lib.nvmlDeviceGetCount()):
            try:
                handle = lib.nvmlDeviceGetHandleByIndex(index)
            except lib.NVMLError as failure:
                words, fix = _in_words(failure)
                error = f"card {index}: {words}"
                continue
            handles.append(handle)
            gpus.append(self._card(lib, handle, index))
        return NvmlFacts(
            gpus=tuple(gpus),
            driver_version=_text(_ask(lib, lib.nvmlSystemGetDriverVersion)),
            driver_cuda_version=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
            p2p=tuple(tuple(_peer(lib, one, other) for other in handles) for one in handles),
            error=error,
            fix=fix,
        )

    def _card(self, lib, handle, index: int) -> Gpu:
        def ask(name: str, *extra):
            return _ask(lib, getattr(lib, name, None), handle, *extra)

        # The second form tells the driver's reserve apart; drivers before R510 know only the first.
        memory = ask("nvmlDeviceGetMemoryInfo", lib.nvmlMemory_v2) or ask("nvmlDeviceGetMemoryInfo")
        bar1, pci = ask("nvmlDeviceGetBAR1MemoryInfo"), ask("nvmlDeviceGetPciInfo")
        power, sold_with = ask("nvmlDeviceGetEnforcedPowerLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
        mig, capability = ask("nvmlDeviceGetMigMode"), ask("nvmlDeviceGetCudaComputeCapability")
        processes, drawing = (
            ask("nvmlDeviceGetComputeRunningProcesses"),
            ask("nvmlDeviceGetGraphicsRunningProcesses"),
        )
        # One process may do both and is then in both lists.
        holding = {
            process.pid: getattr(process, "usedGpuMemory", None) for process in [*(processes or ()), *(drawing or ())]
        }
        told = [int(held) for held in holding.values() if held is not None]
        display = [ask("nvmlDeviceGetDisplayMode"), ask("nvmlDeviceGetDisplayActive")]
        persistence = ask("nvmlDeviceGetPersistenceMode")
        mig_ids = []
        if mig and mig[0] == 1:
            for slot in range(ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
                part = ask("nvmlDeviceGetMigDeviceHandleByIndex", slot)
                if part is not None and (uuid := _ask(lib, lib.nvmlDeviceGetUUID, part)):
                    mig_ids.append(_text(uuid))
        return Gpu(
            index=index,
            nvml_index=index,
            name=_text(ask("nvmlDeviceGetName")) or "unknown card",
            uuid=_text(ask("nvmlDeviceGetUUID")) or "",
            compute_capability=tuple(capability) if capability else None,
            total_bytes=int(memory.total) if memory else None,
            free_bytes=int(memory.free) if memory else None,
            reserved_bytes=int(memory.reserved) if memory and hasattr(memory, "reserved") else None,
            pci_bus_id=_text(pci.busId) if pci else None,
            pcie_gen_now=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            pcie_gen_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            pcie_gen_card=ask("nvmlDeviceGetGpuMaxPcieLinkGeneration"),
            pcie_width_now=ask("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
            bar1_total_bytes=int(bar1.bar1Total) if bar1 else None,
            power_limit_w=None if power is None else power / 1000,
            power_default_w=None if sold_with is None else sold_with / 1000,
            persistence=None if persistence is None else persistence == 1,
            display=None if display == [None, None] else 1 in display,
            mig=None if mig is None else mig[0] == 1,
            mig_ids=tuple(mig_ids),
            processes=None if processes is None else len(processes),
            graphics_processes=None if drawing is None else len(drawing),
            process_bytes=sum(told) if told else None if holding or processes is None else 0,
        )


class FakeNvml:
    """The fixture twin of `Nvml`: the cards of a made-up box, in PCI order.

    `index` and `nvml_index` are numbered here; `p2p` and the texts are given as NVML would tell them.
    """

    def __init__(self, gpus: Iterable[Gpu] = (), **facts):
        numbered = tuple(replace(gpu, index=place, nvml_index=place) for place, gpu in enumerate(gpus))
        self._facts = NvmlFacts(gpus=numbered, **facts)

    def facts(self) -> NvmlFacts:
        return self._facts


def _ask(lib, function, *arguments):
    """The answer of one NVML call, None where this card or driver does not know it."""
    if function is None:
        return None
    try:
        return function(*arguments)
    except lib.NVMLError:
        return None


def _in_words(error) -> tuple[str, str]:
    unknown = (f"NVML says: {error}", "run nvidia-smi on the host; it has to list the cards before this can")
    return _NVML_WORDS.get(getattr(error, "value", None), unknown)


def _text(value) -> str | None:
    # Older nvidia-ml-py gives bytes, newer str.
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _peer(lib, one, other) -> bool | None:
    """Whether the driver reports peer reads and writes between two cards; None for a card and itself.

    By nvml.h: nvmlGpuP2PCapsIndex_t 0 is read and 1 write, status 0 is OK.
    """
    if one is other:
        return None
    answers = [_ask(lib, lib.nvmlDeviceGetP2PStatus, one, other, index) for index in (0, 1)]
    return None if None in answers else all(answer == 0 for answer in answers)


# --- which cards CUDA shows -----------------------------------------------------------------------------------------


def visible_devices(spec: str | None, gpus: tuple[Gpu, ...]) -> tuple[tuple[Gpu, ...], str | None]:
    """The cards that CUDA_VISIBLE_DEVICES=`spec` leaves, in its order and renumbered, and a note where it is not plain.

    `gpus` are in PCI order. As the driver reads it: unset shows all; integers, or `GPU-` ids of which a unique
    beginning is enough, in the order given; the list ends at the first entry that names no card (so '', '-1' and 'none'
    show nothing); a card named twice shows nothing at all. A `MIG-` id (alone, or `MIG-GPU-<uuid>/<gi>/<ci>`) stands
    for the card it is a part of, marked mig.
    """
    if spec is None:
        return gpus, None
    if not spec.strip():
        return (), "CUDA_VISIBLE_DEVICES is set and empty: CUDA shows no card"
    chosen: list[Gpu] = []
    note = None
    entries = [entry.strip() for entry in spec.split(",")]
    first_kind = _entry_kind(entries[0])
    for entry in entries:
        gpu, why = _entry_card(entry, gpus)
        if gpu is not None and _entry_kind(entry) != first_kind:
            gpu, why = None, "mixes numbers and ids"
        if gpu is None:
            note = f"CUDA_VISIBLE_DEVICES={spec[:200]!r}: entry {entry!r} {why}; CUDA ignores it and all after it"
            break
        chosen.append(gpu)
    # Two parts of one card are two entries; the same card by number or id twice is CUDA's error.
    if first_kind != "mig" and len({gpu.nvml_index for gpu in chosen}) < len(chosen):
        return (), f"CUDA_VISIBLE_DEVICES={spec[:200]!r} names a card twice: CUDA shows none"
    return tuple(replace(gpu, index=place) for place, gpu in enumerate(chosen)), note


def _entry_kind(entry: str) -> str:
    return "mig" if entry.startswith("MIG-") else "id" if entry.startswith("GPU-") else "number"


def _entry_card(entry: str, gpus: tuple[Gpu, ...]) -> tuple[Gpu | None, str]:
    """The card that one entry names, or why it names none."""
    kind = _entry_kind(entry)
    if kind == "number":
        # The driver reads the leading digits and stops there ('1gpu' is 1).
        digits = re.match(r"\+?(\d+)", entry)
        if not digits:
            return None, "is no card number"
        number = int(digits.group(1))
        return (gpus[number], "") if number < len(gpus) else (None, f"is beyond the {len(gpus)} cards of this box")
    if kind == "mig":
        parent = re.match(r"MIG-(GPU-[0-9a-fA-F-]+)", entry)
        matches = [gpu for gpu in gpus if (parent and gpu.uuid == parent.group(1)) or entry in gpu.mig_ids]
        matches = [replace(gpu, mig=True) for gpu in matches]
    else:
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    if len(matches) != 1:
        return None, "names no card of this box" if not matches else f"fits {len(matches)} cards"
    return matches[0], ""


# --- all together ---------------------------------------------------------------------------------------------------


def read_machine(
    host: Host | None = None,
    nvml: Nvml | FakeNvml | None = None,
    environ: Mapping[str, str] | None = None,
    paths: Mapping[str, str | Path] | None = None,
) -> Machine:
    """The facts of this box, or of the fixtures given. `paths` maps a role to a path ({'model': '/model', 'data':
    ...}).

    Nothing here raises for what a box can be; a missing fact is None.
    """
    host = host or Host()
    environ = os.environ if environ is None else environ
    cards = (nvml or Nvml()).facts()
    spec = environ.get("CUDA_VISIBLE_DEVICES")
    located = tuple(_located(host, gpu) for gpu in cards.gpus)
    gpus, note = visible_devices(spec, located)
    error, fix = cards.error, cards.fix
    if not gpus and located and error is None:
        error, fix = note, "unset CUDA_VISIBLE_DEVICES, or name cards that `nvidia-smi -L` lists, each once"
    memory, cgroup = host.meminfo(), host.cgroup_memory()
    shm_total_bytes, shm_free_bytes = host.capacity("/dev/shm")
    return Machine(
        gpus=gpus,
        gpu_error=error,
        gpu_fix=fix,
        driver_version=cards.driver_version,
        driver_cuda_version=cards.driver_cuda_version,
        cuda_order=environ.get("CUDA_DEVICE_ORDER") or "FASTEST_FIRST",
        cuda_visible_devices=spec,
        visible_note=note,
        p2p=_reorder(cards.p2p, cards.gpus, gpus),
        mem_total_bytes=memory.get("MemTotal"),
        mem_available_bytes=memory.get("MemAvailable"),
        cgroup_version=cgroup.version if cgroup else None,
        cgroup_path=cgroup.path if cgroup else None,
        cgroup_limit_bytes=cgroup.limit_bytes if cgroup else None,
        cgroup_used_bytes=cgroup.used_bytes if cgroup else None,
        ram_available_bytes=least(memory.get("MemAvailable"), cgroup.available_bytes if cgroup else None),
        swap_total_bytes=memory.get("SwapTotal"),
        memlock_bytes=host.memlock_bytes(),
        ipc_lock=host.ipc_lock(),
        shm_total_bytes=shm_total_bytes,
        shm_free_bytes=shm_free_bytes,
        cpu_count=host.cpu_count(),
        numa=host.numa(),
        uvm=host.uvm() if gpus else None,
        kernel=host.kernel(),
        wsl=host.wsl(),
        container=host.container(),
        iommu=host.iommu(),
        mounts=dict(_mounts(host, paths or {})),
    )


def _located(host: Host, gpu: Gpu) -> Gpu:
    """A card with its NUMA node, and with the kernel's word on its link where NVML gave none."""
    told = {name: value for name, value in host.pcie_link(gpu.pci_bus_id).items() if getattr(gpu, name) is None}
    return replace(gpu, numa_node=host.numa_node(gpu.pci_bus_id), **told)


def _mounts(host: Host, paths: Mapping[str, str | Path]) -> Iterator[tuple[str, Mount]]:
    for role, path in paths.items():
        mount = host.mount_of(path)
        if mount is not None:
            yield role, mount


def _reorder(p2p, listed: tuple[Gpu, ...], chosen: tuple[Gpu, ...]):
    """The rows and columns of `p2p` (in the order `listed`) for `chosen`."""
    if p2p is None:
        return None
    place = {gpu.nvml_index: row for row, gpu in enumerate(listed)}
    rows = [place[gpu.nvml_index] for gpu in chosen]
    return tuple(tuple(p2p[row][column] for column in rows) for row in rows)
