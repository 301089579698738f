"""Boxes as little trees of /proc, /sys and cgroup files, with the numbers in the test.

    box = Box(tmp_path).meminfo(total=..., available=...).cgroup2("/docker/abc", {"memory.max": "17179869184"})
    machine = read_machine(box.host(), FakeNvml(...), {})

Texts have the kernel's own shape (proc(5), cgroup-v1 and cgroup-v2 documents), cut to the lines that are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from entrypoint.host import Host

NO_LIMIT_V1 = 9223372036854771712


class Box:
    """A root folder that grows into a fixture. Every method returns the box, so that calls chain."""

    def __init__(self, root: Path):
        self.root = root
        self.mount_lines: list[str] = []
        self.cgroup_lines: list[str] = []
        self.capacities: dict[str, tuple[int, int]] = {}

    def file(self, path: str, text: str | int) -> Box:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n" if isinstance(text, int) else text)
        return self

    def folder(self, path: str) -> Box:
        (self.root / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        return self

    def link(self, path: str, target: str) -> Box:
        """A link at `path` to the box's absolute path `target` (written relative, as in /sys)."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * (len(Path(path.lstrip("/")).parts) - 1)
        place.symlink_to(up + target.lstrip("/"))
        return self

    def meminfo(self, total: int, available: int | None, swap: int = 0) -> Box:
        """/proc/meminfo; sizes in bytes, whole KiB. `available=None` is a kernel before 3.14."""
        lines = [f"MemTotal:       {total // 1024:8} kB", "MemFree:         1048576 kB"]
        if available is not None:
            lines.append(f"MemAvailable:   {available // 1024:8} kB")
        lines += ["Buffers:          123456 kB", "HugePages_Total:       0", f"SwapTotal:      {swap // 1024:8} kB"]
        return self.file("/proc/meminfo", "\n".join(lines) + "\n")

    def status(self, cpus: str = "0-31", cap_eff: str = "0000000000000000") -> Box:
        text = f"Name:\tpython\nUmask:\t0022\nCapEff:\t{cap_eff}\nCpus_allowed:\tffffffff\nCpus_allowed_list:\t{cpus}\n"
        return self.file("/proc/self/status", text)

    def memlock(self, soft: str) -> Box:
        head = "Limit                     Soft Limit           Hard Limit           Units     "
        other = "Max processes             514033               514033               processes "
        ours = f"Max locked memory         {soft:<20} {soft:<20} bytes     "
        return self.file("/proc/self/limits", f"{head}\n{other}\n{ours}\n")

    def kernel(self, release: str, version: str | None = None) -> Box:
        self.file("/proc/sys/kernel/osrelease", release + "\n")
        return self.file("/proc/version", version or f"Linux version {release} (gcc) #1 SMP\n")

    def mount(
        self,
        point: str,
        fs_type: str,
        source: str,
        *,
        device: str = "0:50",
        root: str = "/",
        options: str = "rw,relatime",
        super_options: str = "rw",
    ) -> Box:
        """One more line of /proc/self/mountinfo; blanks in paths are escaped here."""
        number = 20 + len(self.mount_lines)
        fields = [part.replace(" ", "\\040") for part in (root, point, source)]
        left = f"{number} 1 {device} {fields[0]} {fields[1]} {options} shared:{number}"
        self.mount_lines.append(f"{left} - {fs_type} {fields[2]} {super_options}")
        return self.file("/proc/self/mountinfo", "\n".join(self.mount_lines) + "\n")

    def cgroup_line(self, line: str) -> Box:
        self.cgroup_lines.append(line)
        return self.file("/proc/self/cgroup", "\n".join(self.cgroup_lines) + "\n")

    def cgroup2(
        self, path: str, *levels: Mapping[str, str | int], point: str = "/sys/fs/cgroup", root: str = "/"
    ) -> Box:
        """A unified hierarchy with this process in `path`; `levels`: the files of `path`, of its parent, ..."""
        self.mount(point, "cgroup2", "cgroup2", root=root, super_options="rw,nsdelegate,memory_recursiveprot")
        self.cgroup_line(f"0::{path}")
        return self._levels(point, path if root == "/" else "/", levels)

    def cgroup1(self, controller: str, path: str, *levels: Mapping[str, str | int], root: str = "/") -> Box:
        """A v1 hierarchy of one controller, as `cgroup2`."""
        point = f"/sys/fs/cgroup/{controller}"
        self.mount(point, "cgroup", "cgroup", root=root, super_options=f"rw,{controller}")
        self.cgroup_line(f"{5 + len(self.cgroup_lines)}:{controller}:{path}")
        return self._levels(point, path.removeprefix(root) if root != "/" else path, levels)

    def _levels(self, point: str, path: str, levels: tuple[Mapping[str, str | int], ...]) -> Box:
        folder = Path(point) / path.lstrip("/")
        self.folder(str(folder))
        for files in levels:
            for name, text in files.items():
                self.file(str(folder / name), text if isinstance(text, int) else text + "\n")
            folder = folder.parent
        return self

    def disk(
        self,
        name: str,
        number: str,
        *,
        rotational: int,
        parts: Mapping[str, str] | None = None,
        model: str = "",
        vendor: str = "",
        slaves: tuple[str, ...] = (),
        dm_name: str | None = None,
        bus: str = "host",
        backing_file: str | None = None,
    ) -> Box:
        """A block device in /sys: its device folder (on `bus`), with links from dev/block and class/block."""
        home = f"/sys/devices/pci0000:00/0000:00:01.1/{bus}/block/{name}"
        self.file(f"{home}/queue/rotational", rotational)
        if model:
            self.file(f"{home}/device/model", model + "\n")
        if vendor:
            self.file(f"{home}/device/vendor", vendor + "\n")
        if dm_name:
            self.file(f"{home}/dm/name", dm_name + "\n")
        if backing_file:
            self.file(f"{home}/loop/backing_file", backing_file + "\n")
        self.folder(f"{home}/slaves")
        for slave in slaves:
            self.file(f"{home}/slaves/{slave}", "")
        places = [(name, number, home), *((part, at, f"{home}/{part}") for part, at in (parts or {}).items())]
        for part, part_number, where in places:
            self.folder(where)
            self.link(f"/sys/dev/block/{part_number}", where)
            self.link(f"/sys/class/block/{part}", where)
        return self

    def btrfs(self, uuid: str, *devices: str) -> Box:
        """The kernel's list of the devices of one btrfs."""
        for device in devices:
            self.folder(f"/sys/fs/btrfs/{uuid}/devices/{device}")
        return self

    def numa_node(self, node: int, total: int, free: int, cpus: str) -> Box:
        """A memory node; sizes in bytes, whole KiB."""
        lines = [f"Node {node} MemTotal:       {total // 1024} kB", f"Node {node} MemFree:        {free // 1024} kB"]
        self.file(f"/sys/devices/system/node/node{node}/meminfo", "\n".join(lines) + "\n")
        return self.file(f"/sys/devices/system/node/node{node}/cpulist", cpus + "\n")

    def pci(self, address: str, **files: str | int) -> Box:
        """A PCI device's folder; `current_link_speed="8.0 GT/s PCIe"`, `numa_node=0`."""
        for name, text in files.items():
            self.file(f"/sys/bus/pci/devices/{address}/{name}", text if isinstance(text, int) else text + "\n")
        return self

    def capacity(self, path: str, total: int, free: int) -> Box:
        self.capacities[path] = (total, free)
        return self

    def host(self) -> Host:
        return Host(self.root, self.capacities)
