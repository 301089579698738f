"""The page-locked pool: what it reserves, when it refuses, and in which order it locks, unlocks and unmaps.

Memory is mapped, advised, faulted in and unmapped for real; a recorder stands for the calls to CUDA, which a CPU has not.
"""

import pytest

_PROGRAM = r"""
import gc, json, sys
from pathlib import Path
import torch
from flashnext import host_pool as hp
from flashnext.host_pool import Room

MIB = 1 << 20
PLENTY = Room(available_bytes=1 << 40, cgroup_bytes=None, memlock_bytes=None, wsl=False)
base = Path(sys.argv[1])


def mapped(address):
    with open("/proc/self/maps") as maps:
        return any(int(a, 16) <= address < int(b, 16) for a, b in (line.split()[0].split("-") for line in maps))


class Recorder(hp.Cuda):
    # Registers at most `most` buffers; says whether memory was mapped when it was unregistered.
    def __init__(self, most=100, pins=True, unregisters=True):
        self.most, self.pins, self.unregisters = most, pins, unregisters
        self.held, self.log = {}, []

    def register(self, address, nbytes):
        if len(self.held) == self.most:
            self.log.append("refuses")
            raise hp.NotLocked("cudaHostRegister: out of memory (2)")
        area = torch.frombuffer((__import__("ctypes").c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
        assert address % hp.HUGE_BYTES == 0 and nbytes % hp.PAGE_BYTES == 0
        assert not area[::4096].any(), "zeros"
        self.held[address] = nbytes
        self.log.append(f"register {nbytes}")

    def unregister(self, address):
        if not self.unregisters:
            raise hp.NotLocked("cudaHostUnregister: unknown error (999)")
        self.log.append(f"unregister {self.held.pop(address)}" + ("" if mapped(address) else " WHEN UNMAPPED"))

    def pinned(self, nbytes):
        if not self.pins:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        self.log.append(f"pinned {nbytes}")
        return torch.zeros(nbytes, dtype=torch.uint8)


def allocate(count, nbytes, cuda, cap=1 << 40, engine_count=None, look=lambda: PLENTY):
    return hp.allocate(count, nbytes, engine_count=engine_count or count, cap_bytes=cap, cuda=cuda, what="K/V", look=look)


def refused(*args, **more):
    try:
        allocate(*args, **more)
    except hp.Refused as error:
        return str(error)


out = {"edges": {}}
for name, nbytes in {"below": 4 * MIB - 1, "at": 4 * MIB, "above": 4 * MIB + 1, "page": 4096, "page + 1": 4097}.items():
    exact, rounded = Recorder(), Recorder(most=0)
    pool, other = allocate(2, nbytes, exact), allocate(2, nbytes, rounded)
    out["edges"][name] = [pool.reserved_bytes, other.reserved_bytes, exact.log, rounded.log, pool.way, other.way]
    for buffer in pool.buffers + other.buffers:
        tensor = buffer.tensor()
        assert tensor.shape == (nbytes,) and tensor.data_ptr() == buffer.address and not tensor.any()
        tensor.fill_(7)
        assert bool((buffer.tensor() == 7).all()), "the same memory each time"
    del tensor, buffer
    pool.release()
    other.release()

# Release: newest first, each unregistered before it is unmapped; a second time does nothing.
cuda = Recorder()
pool = allocate(3, 3 * MIB, cuda)
addresses = [buffer.address for buffer in pool.buffers]
view = pool.buffers[0].tensor()
pool.release()
pool.release()
out["release"] = [cuda.log[3:], [mapped(a) for a in addresses], len(cuda.held)]
view[-1] = 5  # somebody still looks: mapped until that ends, and unlocked
del view
out["release"].append(mapped(addresses[0]))

# A pool that is dropped without a word.
cuda = Recorder()
pool = allocate(2, MIB, cuda)
addresses = [buffer.address for buffer in pool.buffers]
del pool
gc.collect()
out["dropped"] = [cuda.log[2:], [mapped(a) for a in addresses]]

# The third of four is not registered: all of it by the other allocator, and the first two are free before.
cuda = Recorder(most=2)
pool = allocate(4, 3 * MIB, cuda)
out["half-way"] = [cuda.log, len(cuda.held), pool.reserved_bytes, pool.way]
pool.release()
cuda = Recorder(most=2, pins=False)
out["neither"] = [refused(4, 3 * MIB, cuda), cuda.log, len(cuda.held)]

# What cannot be unregistered is never unmapped.
cuda = Recorder(unregisters=False)
pool = allocate(1, MIB, cuda)
address = pool.buffers[0].address
pool.release()
gc.collect()
out["stuck"] = mapped(address)

# The cap: what all stages reserve, rounding included, at the edge from both sides.
PAGE = 4096
out["cap"] = {
    "exact, fits": refused(4, 3 * PAGE - 5, Recorder(), cap=12 * 3 * PAGE, engine_count=12),
    "exact, one less": refused(4, 3 * PAGE - 5, Recorder(), cap=12 * 3 * PAGE - 1, engine_count=12),
    "rounded, fits": refused(4, 3 * PAGE, Recorder(most=0), cap=12 * 4 * PAGE, engine_count=12),
    "rounded, one less": refused(4, 3 * PAGE, Recorder(most=0), cap=12 * 4 * PAGE - 1, engine_count=12),
}
cuda = Recorder()
refused(4, 3 * PAGE, cuda, cap=1)
out["cap"]["calls"] = cuda.log

def says(**room):
    return lambda: Room(**({"available_bytes": 1 << 40, "cgroup_bytes": None, "memlock_bytes": None, "wsl": False} | room))

need = 4 * 8 * PAGE
spare = hp.SPARE_BYTES
out["room"] = {
    "fits": refused(4, 8 * PAGE, Recorder(), look=says(available_bytes=need + spare, cgroup_bytes=need + spare)),
    "host": refused(4, 8 * PAGE, Recorder(), look=says(available_bytes=need + spare - 1)),
    "cgroup": refused(4, 8 * PAGE, Recorder(), look=says(cgroup_bytes=need + spare - 1)),
    "unknown": refused(4, 8 * PAGE, Recorder(), look=says(available_bytes=None)),
    "memlock": refused(4, 8 * PAGE, Recorder(), look=says(memlock_bytes=1)),
    "memlock, not locked": refused(4, 8 * PAGE, Recorder(most=0, pins=False), look=says(memlock_bytes=65536)),
    "WSL": refused(4, 8 * PAGE, Recorder(most=0, pins=False), look=says(wsl=True)),
}
# Another stage takes the memory between two buffers of ours.
left = [2 * need + spare] * 3 + [spare]
cuda = Recorder()
out["meanwhile"] = [refused(4, 8 * PAGE, cuda, look=lambda: Room(left.pop(0), None, None, False)), cuda.log]

# What the kernel gives is less than it said: mapping fails as it does in a container that is full.
class Full(hp.ExactBuffer):
    def _populate(self):
        hp._POPULATE_WRITE, was = 9999, hp._POPULATE_WRITE
        try:
            super()._populate()  # EINVAL: an older kernel
        finally:
            hp._POPULATE_WRITE = was
        self._area = type("Area", (), {"madvise": lambda *a: (_ for _ in ()).throw(OSError(12, "Cannot allocate memory"))})()
        super()._populate()
real, hp.ExactBuffer = hp.ExactBuffer, Full
cuda = Recorder()
out["full"] = [refused(2, MIB, cuda), cuda.log]
hp.ExactBuffer = real

# Where it landed: of this process, and of texts.
pool = allocate(2, 33 * MIB, Recorder())
landed = pool.landed()
thp = Path("/sys/kernel/mm/transparent_hugepage/enabled")
def advice(address):
    # What the kernel was told about the mapping that holds `address`.
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            first, last = (int(x, 16) for x in line.split()[0].split("-"))
            inside = first <= address < last
        elif inside and line.startswith("VmFlags:"):
            return [flag for flag in line.split()[1:] if flag in ("hg", "nh", "dc")]
address = pool.buffers[0].address
out["advice"] = [thp.exists(), advice(address), advice(address + 32 * MIB - 1), advice(address + 32 * MIB), advice(address + 33 * MIB - 1)]
out["landed"] = [landed.huge_bytes, Path("/proc/self/numa_maps").exists(),
                 sum((landed.node_bytes or {}).values()), str(landed)]
smaps = "\n".join(
    f"{start}-{end} rw-p 00000000 00:00 0\nSize: 1 kB\nAnonHugePages:  {huge} kB\nVmFlags: rd wr"
    for start, end, huge in (("1000", "3000", 4), ("200000", "600000", 4096), ("800000", "a00000", 2048), ("a00000", "b00000", 8))
)
numa = "200000 default anon=1024 N0=512 N1=512 kernelpagesize_kB=4\n800000 bind:1 anon=512 N1=512 kernelpagesize_kB=4\na00000 default N7=9"
out["texts"] = [str(hp.landed([(0x200000, 0x600000), (0x800000, 0xA00000)], smaps, numa)), str(hp.landed([(0x200000, 0x300000)], "", ""))]

# Limits of the host as files.
def box(name, **files):
    for path, text in files.items():
        file = base / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return base / name

V2 = "30 24 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n"
V1 = "31 24 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n32 24 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
group = "sys/fs/cgroup/system.slice/docker-1.scope"
out["boxes"] = {name: [room.available_bytes, room.cgroup_bytes, room.wsl] for name, room in {
    "none": hp.room(box("none")),
    "v2": hp.room(box("v2", **{
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   1000 kB\n", "proc/version": "Linux version 6.1\n",
        "proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2, "sys/fs/cgroup/memory.max": "5000\n",
        "sys/fs/cgroup/memory.current": "3000\n", "sys/fs/cgroup/memory.stat": "anon 2\nactive_file 400\ninactive_file 600\n"})),
    "v2, parent is tighter": hp.room(box("v2p", **{
        "proc/self/cgroup": "0::/system.slice/docker-1.scope\n", "proc/self/mountinfo": V2, f"{group}/memory.max": "max\n",
        f"{group}/memory.high": "9000\n", f"{group}/memory.current": "1000\n",
        "sys/fs/cgroup/system.slice/memory.max": "4000\n", "sys/fs/cgroup/system.slice/memory.current": "1500\n"})),
    "v1": hp.room(box("v1", **{
        "proc/version": "Linux version 5.15.90.1-microsoft-standard-WSL2\n",
        "proc/self/cgroup": "5:cpu:/docker/1\n4:memory:/docker/1\n", "proc/self/mountinfo": V1,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "8000\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "6000\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 1000\nhierarchical_memory_limit 9223372036854771712\n"})),
    "v1, no limit": hp.room(box("v1n", **{
        "proc/self/cgroup": "4:memory:/\n", "proc/self/mountinfo": V1,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})),
}.items()}
here = hp.room()
with open("/proc/meminfo") as f:
    total = int(f.readline().split()[1]) * 1024
out["here"] = 0 < here.available_bytes <= total
print(json.dumps(out))
"""

MIB = 1 << 20
PAGE = 4096


@pytest.fixture(scope="module")
def seen(run_patched, tmp_path_factory):
    return run_patched(_PROGRAM, str(tmp_path_factory.mktemp("boxes"))).value


@pytest.mark.parametrize(
    ("edge", "asked", "exact", "rounded"),
    [
        ("below", 4 * MIB - 1, 4 * MIB, 4 * MIB),
        ("at", 4 * MIB, 4 * MIB, 4 * MIB),
        ("above", 4 * MIB + 1, 4 * MIB + PAGE, 8 * MIB),
        ("page", PAGE, PAGE, PAGE),
        ("page + 1", PAGE + 1, 2 * PAGE, 2 * PAGE),
    ],
)
def test_what_is_reserved_at_a_power_of_two(seen, edge, asked, exact, rounded):
    reserved, other, log, other_log, way, other_way = seen["edges"][edge]
    assert (reserved, other) == (2 * exact, 2 * rounded)
    assert log == [f"register {exact}"] * 2 + [f"unregister {exact}"] * 2
    assert other_log == ["refuses", f"pinned {asked}", f"pinned {asked}"]
    assert (way, other_way) == (
        "page-locked exactly", "from PyTorch's pinned allocator, rounded up to a power of two",
    )  # fmt: skip


def test_unregistered_before_unmapped(seen):
    log, mapped, held, after = seen["release"]
    assert log == [f"unregister {3 * MIB}"] * 3
    assert (mapped, held, after) == ([True, False, False], 0, False)
    assert seen["dropped"] == [[f"unregister {MIB}"] * 2, [False, False]]
    assert seen["stuck"] is True


def test_failure_half_way_leaves_nothing(seen):
    log, held, reserved, _ = seen["half-way"]
    assert log == [f"register {3 * MIB}"] * 2 + ["refuses"] + [f"unregister {3 * MIB}"] * 2 + [f"pinned {3 * MIB}"] * 4
    assert (held, reserved) == (0, 16 * MIB)
    said, log, held = seen["neither"]
    assert log[-2:] == [f"unregister {3 * MIB}"] * 2 and held == 0
    assert said == (
        "flashnext: K/V cannot be page-locked: cudaHostRegister: out of memory (2); CUDA error: out of memory. "
        "Fix: leave additional_config.flashnext.host_kv out to keep K/V on the card"
    )


def test_cap_counts_what_all_stages_reserve(seen):
    cap = seen["cap"]
    assert cap["exact, fits"] is None and cap["rounded, fits"] is None
    assert cap["exact, one less"] == (
        "flashnext: K/V reserves 147456 bytes of host memory in all stages, and additional_config.flashnext.host_kv.max_bytes "
        "allows 147455. Fix: a smaller --kv-cache-memory-bytes, or a max_bytes of at least 147456"
    )
    assert "reserves 196608 bytes" in cap["rounded, one less"] and "allows 196607" in cap["rounded, one less"]
    assert "page-locked exactly (cudaHostRegister: out of memory (2))" in cap["rounded, one less"]
    assert cap["calls"] == []


def test_room_is_looked_at_before_memory_is_taken(seen):
    room = seen["room"]
    assert room["fits"] is room["unknown"] is room["memlock"] is None
    need = f"needs {4 * 8 * PAGE} bytes of host memory on this stage and {1 << 30} to spare, and "
    have = f"{4 * 8 * PAGE + (1 << 30) - 1} bytes"
    assert f"{need}the host has MemAvailable of {have} (1.00 GiB). Fix: end what else uses memory" in room["host"]
    assert f"{need}the container's memory limit (cgroup) leaves {have}" in room["cgroup"]
    said, log = seen["meanwhile"]
    assert "buffer 3 of 4, needs 32768 bytes" in said
    assert log == ["register 32768"] * 2 + ["unregister 32768"] * 2


def test_hints_name_the_likely_cause(seen):
    room = seen["room"]
    assert (
        "Fix: raise RLIMIT_MEMLOCK, now 65536 bytes (ulimit -l unlimited; Docker: --ulimit memlock=-1), or leave"
        in (room["memlock, not locked"])
    )
    assert (
        "Fix: run on Linux itself, for WSL2 lets a process lock a small part of its memory only, or leave"
        in room["WSL"]
    )


def test_memory_that_the_kernel_does_not_give(seen):
    said, log = seen["full"]
    assert "gave 0 of 1048576 bytes of a K/V buffer and then said 'Cannot allocate memory'. Fix: " in said
    assert log == []


def test_where_it_landed(seen):
    huge, has_numa, on_nodes, text = seen["landed"]
    # Two buffers of 33 MiB: huge pages (hg) for 32 of them, none (nh) for the rest, and no child has any of it (dc).
    has_huge, *advice = seen["advice"]
    assert advice == ([["dc", "hg"]] * 2 + [["dc", "nh"]] * 2 if has_huge else [["dc"]] * 4)
    assert huge is None or huge <= 64 * MIB, "how many there were to be had is the box's business"
    if has_numa:
        assert on_nodes >= 66 * MIB
    assert "in huge pages, NUMA: " in text
    assert seen["texts"] == [
        "0.01 GiB in huge pages, NUMA: node 0 0.00 GiB, node 1 0.00 GiB", "unknown in huge pages, NUMA: unknown",
    ]  # fmt: skip


def test_limits_of_the_host(seen):
    assert seen["boxes"] == {
        "none": [None, None, False],
        "v2": [1_024_000, 5_000 - (3_000 - 1_000), False],
        "v2, parent is tighter": [None, 2_500, False],
        "v1": [None, 8_000 - (6_000 - 1_000), True],
        "v1, no limit": [None, None, False],
    }
    assert seen["here"]
