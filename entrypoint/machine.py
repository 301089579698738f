"""What is known of a box: cards, driver, RAM, limits, disks. Facts only; reading them is detect.py's, what to do with them the
plan's. Sizes are bytes. Unknown is None and never "not supported" or a guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

UNLIMITED = 2**63 - 1
"""A limit that is not there (`memlock_bytes`). A number, so that it compares; None stays "unknown"."""


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
