# SPDX-License-Identifier: Apache-2.0
"""Decide whether the host can hold the K/V pool page-locked, and hold it: allocate, lock, report, free.

From the size and number of the buffers, the cap, and what the host says now (MemAvailable, cgroup v1 or v2, RLIMIT_MEMLOCK).
Rule order:
1. The cap counts what is really reserved by all stages of the engine, rounding included; above it: refused.
2. What this stage reserves must fit into MemAvailable and into the tightest cgroup, each with 1 GiB left over; else refused.
   Stages allocate at the same time, so both are looked at again before each buffer.
3. Exact: ordinary anonymous memory, rounded up to pages of 4 KiB, advised to huge pages, registered with CUDA.
4. If CUDA does not register it: PyTorch's pinned allocator, which reserves the next power of two. Rules 1 and 2 again with
   those sizes, and a warning with both figures.

A limit of locked memory (RLIMIT_MEMLOCK) is said and not refused: it binds mlock, and the driver pins pages in a way of its own.
If registering fails, the message names it first.

Freeing: unregister, then unmap, newest first. Memory that is unmapped while registered makes a later pinned allocation at the
same address fail ("resource already mapped"), so what cannot be unregistered stays mapped until the process ends. The same
order holds when an allocation fails half-way and when a pool is dropped without `release`.

The four CUDA calls are behind `Cuda`, so that tests on a CPU run everything else as it is.

Ran on one and two H200 (docs/gpu.md), never on an RTX 3090.
"""

import ctypes
import mmap
import re
import resource
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.logger import init_logger

logger = init_logger("vllm.flashnext.host_pool")

PAGE_BYTES = mmap.PAGESIZE
HUGE_BYTES = 2 << 20
SPARE_BYTES = 1 << 30
PIECE_BYTES = 1 << 30  # faulted in at once
_POPULATE_WRITE = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # Linux 5.14
_NO_LIMIT = 1 << 62  # cgroup v1 says "no limit" as the largest multiple of a page in an int64


class Refused(ValueError):
    """The pool cannot be had; the text is one line, `flashnext: why. Fix: what`."""


class NotLocked(RuntimeError):
    """CUDA did not register or unregister memory."""


def exact_bytes(nbytes: int) -> int:
    """What an exact buffer of `nbytes` reserves: whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def rounded_bytes(nbytes: int) -> int:
    """What PyTorch's pinned allocator reserves for `nbytes`: the next power of two."""
    return 1 << (nbytes - 1).bit_length()


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


# -- what the host allows


@dataclass(frozen=True)
class Room:
    """What the host allows now, in bytes. None: unknown, or no limit."""

    available_bytes: int | None
    cgroup_bytes: int | None
    memlock_bytes: int | None
    wsl: bool


def room(root: Path = Path("/")) -> Room:
    """Read it from the files below `root`; the limit of locked memory is this process's own."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Room(
        available_bytes=int(available[1]) * 1024 if available else None,
        cgroup_bytes=_cgroup_bytes(root),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        wsl="microsoft" in _text(root / "proc/version").lower(),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cgroup_bytes(root: Path) -> int | None:
    """What the tightest cgroup above this process still allows; page cache counts as free. None without a limit."""
    left = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            kind, names, cached = (
                "cgroup2",
                ("memory.max", "memory.high"),
                ("active_file", "inactive_file", "slab_reclaimable"),
            )
        elif "memory" in controllers.split(","):
            kind, names, cached = "cgroup", ("memory.limit_in_bytes",), ("total_active_file", "total_inactive_file")
        else:
            continue
        mount = _cgroup_mount(root, kind)
        if mount is None:
            continue
        folder = mount / path.strip("/")
        if ".." in path.split("/") or not folder.is_dir():
            folder = mount  # a container sees its own group at the mount point
        while True:
            stat = dict(pair.split() for pair in _text(folder / "memory.stat").splitlines() if len(pair.split()) == 2)
            limits = [int(text) for name in names if (text := _text(folder / name).strip()).isdigit()]
            if kind == "cgroup" and "hierarchical_memory_limit" in stat:
                limits.append(int(stat["hierarchical_memory_limit"]))
            used = _text(folder / ("memory.current" if kind == "cgroup2" else "memory.usage_in_bytes")).strip()
            used_bytes = max(0, (int(used) if used.isdigit() else 0) - sum(int(stat.get(name, 0)) for name in cached))
            left += [max(0, limit - used_bytes) for limit in limits if limit < _NO_LIMIT]
            if folder == mount:
                break
            folder = folder.parent
    return min(left, default=None)


def _cgroup_mount(root: Path, kind: str) -> Path | None:
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        tail = right.split(" ")
        if tail[0] == kind and (kind == "cgroup2" or "memory" in tail[-1].split(",")) and len(left.split()) > 4:
            return root / left.split()[4].lstrip("/")
    return None


def why_not(reserved: Sequence[int], engine_bytes: int, cap_bytes: int, now: Room, what: str) -> str | None:
    """None if buffers that reserve `reserved` bytes each may be allocated here, else one line for the user.

    `engine_bytes`: what all stages reserve. `what` names the buffers in the message.
    """
    need = sum(reserved)
    if engine_bytes > cap_bytes:
        return (
            f"flashnext: {what} reserves {engine_bytes} bytes of host memory in all stages, and "
            f"additional_config.flashnext.host_kv.max_bytes allows {cap_bytes}. Fix: a smaller --kv-cache-memory-bytes, or a "
            f"max_bytes of at least {engine_bytes}"
        )
    for have, name, fix in (
        (now.cgroup_bytes, "the container's memory limit (cgroup) leaves", "raise or remove that limit"),
        (now.available_bytes, "the host has MemAvailable of", "end what else uses memory"),
    ):
        if have is not None and need + SPARE_BYTES > have:
            return (
                f"flashnext: {what} needs {need} bytes of host memory on this stage and {SPARE_BYTES} to spare, and {name} "
                f"{have} bytes ({gib(have)}). Fix: {fix}, or a smaller --kv-cache-memory-bytes"
            )
    return None


def lock_hints(need: int, now: Room) -> str:
    """What most likely keeps memory from being locked, as the `Fix` of a message."""
    hints = []
    if now.memlock_bytes is not None and now.memlock_bytes < need:
        hints.append(
            f"raise RLIMIT_MEMLOCK, now {now.memlock_bytes} bytes (ulimit -l unlimited; Docker: --ulimit memlock=-1)"
        )
    if now.wsl:
        hints.append("run on Linux itself, for WSL2 lets a process lock a small part of its memory only")
    hints.append("leave additional_config.flashnext.host_kv out to keep K/V on the card")
    return ", or ".join(hints)


# -- CUDA


class Cuda:
    """The CUDA calls that the pool needs."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory and map it for the device. Raises NotLocked."""
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostRegister(address, nbytes, 3)  # portable, mapped
        if int(code) != 0:
            self._forget_error()
            raise NotLocked(f"cudaHostRegister: {runtime.cudaGetErrorString(code)} ({int(code)})")

    def unregister(self, address: int) -> None:
        """Raises NotLocked."""
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostUnregister(address)
        if int(code) != 0:
            self._forget_error()
            raise NotLocked(f"cudaHostUnregister: {runtime.cudaGetErrorString(code)} ({int(code)})")

    def pinned(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] from PyTorch's pinned allocator, zeroed. Raises RuntimeError."""
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory as a tensor of the device."""
        from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

        if not tensor.is_pinned():  # upstream would make a pinned copy and view that
            raise NotLocked("CUDA does not know the memory as page-locked")
        return get_accelerator_view_from_cpu_tensor(tensor)

    @staticmethod
    def _forget_error() -> None:
        """The next kernel launch would report the error of this call as its own."""
        from vllm.utils.system_utils import find_loaded_library

        with suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(find_loaded_library("libcudart")).cudaGetLastError()


# -- buffers


class ExactBuffer:
    """`nbytes` of anonymous memory at an address of whole huge pages, registered with CUDA."""

    way = "page-locked exactly"

    def __init__(self, nbytes: int, cuda: Cuda) -> None:
        """Raises Refused if the memory cannot be had, NotLocked if CUDA does not take it; nothing is left behind then."""
        self.nbytes, self.reserved_bytes = nbytes, exact_bytes(nbytes)
        self._cuda, self._registered = cuda, False
        # The address space is one huge page larger; only `reserved_bytes` of it are ever touched.
        self._area: mmap.mmap | None = mmap.mmap(
            -1, self.reserved_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        base = torch.frombuffer(self._area, dtype=torch.uint8).data_ptr()
        self._offset = -base % HUGE_BYTES
        self.address = base + self._offset
        try:
            self._advise()
            self._populate()
            cuda.register(self.address, self.reserved_bytes)
            self._registered = True
        except BaseException:
            self.free()
            raise

    def _advise(self) -> None:
        huge = self.reserved_bytes // HUGE_BYTES * HUGE_BYTES
        with suppress(OSError):  # a kernel without huge pages
            if huge:
                self._area.madvise(mmap.MADV_HUGEPAGE, self._offset, huge)
            # A huge page behind the last whole one would reserve more than was counted.
            self._area.madvise(mmap.MADV_NOHUGEPAGE, self._offset + huge, self.reserved_bytes - huge + PAGE_BYTES)
        # A child process must not share these pages: the first write after a fork would go to a copy of them.
        with suppress(OSError):
            self._area.madvise(mmap.MADV_DONTFORK)

    def _populate(self) -> None:
        for start in range(0, self.reserved_bytes, PIECE_BYTES):
            length = min(PIECE_BYTES, self.reserved_bytes - start)
            try:
                self._area.madvise(_POPULATE_WRITE, self._offset + start, length)
            except OSError as error:
                if error.errno == 22:  # an older kernel; registering brings the pages in
                    return
                raise Refused(
                    f"flashnext: the host gave {start} of {self.reserved_bytes} bytes of a K/V buffer and then said "
                    f"'{error.strerror}'. Fix: a smaller --kv-cache-memory-bytes, or more memory for the container"
                ) from None

    def tensor(self) -> torch.Tensor:
        """uint8 [nbytes], zeros at first."""
        assert self._area is not None
        return torch.frombuffer(self._area, dtype=torch.uint8, count=self.nbytes, offset=self._offset)

    def free(self) -> None:
        """Unregister, then unmap. A tensor that still looks here keeps the mapping until it goes."""
        if self._registered:
            try:
                self._cuda.unregister(self.address)
            except NotLocked as error:
                _kept.append(self._area)
                logger.error("K/V buffer at %#x stays mapped until this process ends: %s", self.address, error)
                return
            self._registered = False
        self._area = None  # unmapped now, or with the last tensor over it; closing it would take it from under them


_kept: list[mmap.mmap] = []  # registered for good


class RoundedBuffer:
    """`nbytes` from PyTorch's pinned allocator, which reserves the next power of two and keeps it for its own later use."""

    way = "from PyTorch's pinned allocator, rounded up to a power of two"

    def __init__(self, nbytes: int, cuda: Cuda) -> None:
        self.nbytes, self.reserved_bytes = nbytes, rounded_bytes(nbytes)
        try:
            self._memory: torch.Tensor | None = cuda.pinned(nbytes)
        except RuntimeError as error:
            raise NotLocked(str(error).splitlines()[0]) from None
        self.address = self._memory.data_ptr()

    def tensor(self) -> torch.Tensor:
        assert self._memory is not None
        return self._memory

    def free(self) -> None:
        self._memory = None


# -- where the memory landed


@dataclass(frozen=True)
class Landed:
    """Bytes of the pool in huge pages and by NUMA node; None where the kernel does not say."""

    huge_bytes: int | None
    node_bytes: dict[int, int] | None

    def __str__(self) -> str:
        huge = "unknown" if self.huge_bytes is None else gib(self.huge_bytes)
        nodes = ", ".join(f"node {node} {gib(size)}" for node, size in sorted((self.node_bytes or {}).items()))
        return f"{huge} in huge pages, NUMA: {nodes or 'unknown'}"


def landed(ranges: Sequence[tuple[int, int]], smaps: str, numa_maps: str) -> Landed:
    """`ranges`: [start, end) addresses. The texts are those of /proc/self/smaps and /proc/self/numa_maps.

    The kernel may have joined a range with memory beside it; such a mapping counts whole, at most as much as was asked for.
    """
    starts, huge, inside, seen = set(), 0, False, False
    for line in smaps.splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = int(mapping[1], 16), int(mapping[2], 16)
            inside = any(start < stop and begin < end for begin, stop in ranges)
            if inside:
                starts.add(start)
        elif inside and line.startswith("AnonHugePages:"):
            seen = True
            huge += int(line.split()[1]) * 1024
    nodes: dict[int, int] = {}
    for line in numa_maps.splitlines():
        address, _, rest = line.partition(" ")
        if int(address, 16) in starts:
            page = re.search(r"kernelpagesize_kB=(\d+)", rest)
            for node, pages in re.findall(r"\bN(\d+)=(\d+)", rest):
                nodes[int(node)] = nodes.get(int(node), 0) + int(pages) * 1024 * int(page[1] if page else 4)
    asked = sum(stop - start for start, stop in ranges)
    return Landed(min(huge, asked) if seen else None, nodes or None)


# -- the pool


@dataclass
class HostPool:
    """Page-locked buffers of equal size. Made by `allocate`; addresses do not change until `release`."""

    buffers: list[ExactBuffer | RoundedBuffer]
    seconds: float = 0.0
    _finalizer: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._finalizer = weakref.finalize(self, _free_all, self.buffers)
        self._finalizer.atexit = False  # the driver unlocks what a dead process leaves

    @property
    def reserved_bytes(self) -> int:
        return sum(buffer.reserved_bytes for buffer in self.buffers)

    @property
    def way(self) -> str:
        return self.buffers[0].way

    def landed(self, root: Path = Path("/")) -> Landed:
        ranges = [(buffer.address, buffer.address + buffer.nbytes) for buffer in self.buffers]
        return landed(ranges, _text(root / "proc/self/smaps"), _text(root / "proc/self/numa_maps"))

    def release(self) -> None:
        """Nothing on the device may still use the memory. Twice is as good as once."""
        self._finalizer()


def _free_all(buffers: list[ExactBuffer | RoundedBuffer]) -> None:
    while buffers:
        buffers.pop().free()


def allocate(
    count: int,
    nbytes: int,
    *,
    engine_count: int,
    cap_bytes: int,
    cuda: Cuda,
    what: str,
    look: Callable[[], Room] = room,
) -> HostPool:
    """`count` page-locked buffers of `nbytes` each, for an engine whose stages have `engine_count` of them in all.

    Raises Refused; what was allocated before is free again then.
    """
    begin = time.monotonic()
    now = look()
    _refuse_if(why_not([exact_bytes(nbytes)] * count, exact_bytes(nbytes) * engine_count, cap_bytes, now, what))
    if now.memlock_bytes is not None and now.memlock_bytes < count * nbytes:
        logger.warning(
            "RLIMIT_MEMLOCK is %d bytes and %s locks %d on this stage; CUDA mostly goes by its own rules, so this is tried",
            now.memlock_bytes,
            what,
            count * nbytes,
        )
    try:
        buffers = _fill(ExactBuffer, count, nbytes, cuda, look, what)
    except NotLocked as error:
        first = str(error)
    else:
        return HostPool(buffers, time.monotonic() - begin)

    rounded = rounded_bytes(nbytes)
    if why := why_not(
        [rounded] * count, rounded * engine_count, cap_bytes, look(), f"{what}, rounded up to powers of two,"
    ):
        raise Refused(
            f"flashnext: {what} cannot be page-locked exactly ({first}), and in PyTorch's pinned allocator it does not fit: "
            f"{why.removeprefix('flashnext: ').replace('. Fix: ', '; ')}. Fix: {lock_hints(count * nbytes, now)}"
        )
    logger.warning(
        "%s cannot be page-locked exactly (%s). PyTorch's pinned allocator takes %d bytes a buffer in place of %d: %s",
        what,
        first,
        rounded,
        exact_bytes(nbytes),
        lock_hints(count * nbytes, now),
    )
    try:
        buffers = _fill(RoundedBuffer, count, nbytes, cuda, look, what)
    except NotLocked as error:
        raise Refused(
            f"flashnext: {what} cannot be page-locked: {first}; {error}. Fix: {lock_hints(count * nbytes, now)}"
        ) from None
    return HostPool(buffers, time.monotonic() - begin)


def _fill(
    kind: type, count: int, nbytes: int, cuda: Cuda, look: Callable[[], Room], what: str
) -> list[ExactBuffer | RoundedBuffer]:
    buffers: list[ExactBuffer | RoundedBuffer] = []
    reserve = exact_bytes(nbytes) if kind is ExactBuffer else rounded_bytes(nbytes)
    try:
        for done in range(count):
            # Other stages take from the same host meanwhile; the cap has been checked and is none of this.
            _refuse_if(why_not([reserve], 0, 0, look(), f"{what}, buffer {done + 1} of {count},"))
            buffers.append(kind(nbytes, cuda))
    except BaseException:
        _free_all(buffers)
        raise
    return buffers


def _refuse_if(why: str | None) -> None:
    if why is not None:
        raise Refused(why)
