# SPDX-License-Identifier: Apache-2.0
"""Measure the gather against the other ways to read random rows of one file, on the disk that is to be judged.

    python -m flashnext.table_bench FILE [--rows 4096] [--row-bytes 320] [--repeat 3] [--json]

FILE is any file of several GiB on that disk, of bytes that were written (a reserved or sparse file reads from nowhere).
Cold means that the kernel was asked to drop the file's pages (POSIX_FADV_DONTNEED) and mincore() says they are gone; no
root needed. Every way reads the same sorted random rows in the same run, and its bytes are compared with a plain read.

    gather          flashnext.table_gather, what the engine uses
    mmap            one after another through a mapping with MADV_RANDOM (numpy.take)
    pread           one after another, pread
    uring           io_uring, O_DIRECT, 128 reads in flight: the most that this disk gives. Needs a kernel that lets us
"""

import argparse
import ctypes
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

from flashnext.table_gather import Gatherer
from flashnext.table_store import Part, Table

PAGE = mmap.PAGESIZE
_SETUP, _ENTER, _GETEVENTS, _OP_READ = 425, 426, 1, 22  # linux/io_uring.h, the same numbers on every architecture


class Uring:
    """Reads of whole pages, O_DIRECT, `depth` in flight, through the raw system calls."""

    def __init__(self, file: str, depth: int = 128):
        self._libc = ctypes.CDLL(None, use_errno=True)
        params = np.zeros(30, np.uint32)  # struct io_uring_params
        self._ring = self._libc.syscall(_SETUP, depth, ctypes.c_void_p(params.ctypes.data))
        if self._ring < 0:
            raise OSError(ctypes.get_errno(), f"io_uring_setup: {os.strerror(ctypes.get_errno())}")
        self._entries, self._depth = int(params[0]), depth
        sq_off, cq_off = params[10:20], params[20:30]
        rw = mmap.PROT_READ | mmap.PROT_WRITE

        def ring(size: int, offset: int) -> mmap.mmap:
            return mmap.mmap(self._ring, size, flags=mmap.MAP_SHARED, prot=rw, offset=offset)

        sq = np.frombuffer(ring(int(sq_off[6]) + self._entries * 4, 0), np.uint8)
        cq = np.frombuffer(ring(int(cq_off[5]) + int(params[1]) * 16, 0x8000000), np.uint8)
        sqes = np.frombuffer(ring(self._entries * 64, 0x10000000), np.uint8)
        self._sqes = sqes.view(
            np.dtype({
                "names": ["op", "fd", "off", "addr", "len", "data"],
                "formats": ["u1", "<i4", "<u8", "<u8", "<u4", "<u8"],
                "offsets": [0, 4, 8, 16, 24, 32],
                "itemsize": 64,
            })
        )  # fmt: skip

        def word(area: np.ndarray, at: int) -> np.ndarray:
            return area[at : at + 4].view(np.uint32)

        self._sq_tail, self._sq_mask = word(sq, int(sq_off[1])), int(word(sq, int(sq_off[2]))[0])
        self._sq_array = sq[int(sq_off[6]) :].view(np.uint32)[: self._entries]
        self._cq_head, self._cq_tail = word(cq, int(cq_off[0])), word(cq, int(cq_off[1]))
        self._cq_mask = int(word(cq, int(cq_off[2]))[0])
        cqes = cq[int(cq_off[5]) : int(cq_off[5]) + int(params[1]) * 16]
        self._cqes = cqes.view(np.dtype([("data", "<u8"), ("res", "<i4"), ("flags", "<u4")]))
        self._file = os.open(file, os.O_RDONLY | os.O_DIRECT)
        area = mmap.mmap(-1, depth * 2 * PAGE)
        self._pages = np.frombuffer(area, np.uint8).reshape(depth, 2 * PAGE)

    def read(self, offsets: np.ndarray, length: int, out: np.ndarray) -> None:
        """Fill out[i] with `length` bytes from offsets[i]; each read is the one or two pages around them."""
        count, done, sent = len(offsets), 0, 0
        first = offsets // PAGE * PAGE
        span = (offsets + length + PAGE - 1) // PAGE * PAGE - first
        free = list(range(self._depth))
        owner = np.zeros(self._depth, np.int64)
        while done < count:
            fresh = min(len(free), count - sent, self._entries)
            if fresh:
                slots = np.array([free.pop() for _ in range(fresh)])
                rows = np.arange(sent, sent + fresh)
                owner[slots] = rows
                tail = int(self._sq_tail[0])
                at = (tail + np.arange(fresh)) & self._sq_mask
                entry = np.zeros(fresh, self._sqes.dtype)
                entry["op"], entry["fd"], entry["data"] = _OP_READ, self._file, slots
                entry["off"], entry["len"] = first[rows], span[rows]
                entry["addr"] = self._pages.ctypes.data + slots * 2 * PAGE
                self._sqes[at] = entry
                self._sq_array[at] = at
                self._sq_tail[0] = (tail + fresh) & 0xFFFFFFFF
                sent += fresh
            # Wait for a few at a time: one system call for several, and the queue stays full enough.
            some = min(max(1, self._depth // 8), count - done)
            got = self._libc.syscall(_ENTER, self._ring, fresh, some, _GETEVENTS, None, 0)
            if got < 0:
                raise OSError(ctypes.get_errno(), "io_uring_enter")
            head, tail = int(self._cq_head[0]), int(self._cq_tail[0])
            events = self._cqes[np.arange(head, head + ((tail - head) & 0xFFFFFFFF)) & self._cq_mask]
            if (events["res"] < length).any():
                raise OSError(-int(events["res"].min()), "a read failed")
            slots = events["data"].astype(np.int64)
            rows = owner[slots]
            for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
                begin = int(offsets[row] - first[row])
                out[row] = self._pages[slot, begin : begin + length]
            self._cq_head[0] = tail
            free.extend(slots.tolist())
            done += len(slots)


def cached_pages(mapping: mmap.mmap) -> int:
    """Pages of a mapped file in the page cache, of those that mincore() tells us about."""
    view = np.frombuffer(mapping, np.uint8)
    pages = np.zeros(-(-len(view) // PAGE), np.uint8)
    if ctypes.CDLL(None).mincore(
        ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), ctypes.c_void_p(pages.ctypes.data)
    ):
        raise OSError("mincore")
    return int((pages & 1).sum())


def measure(file: str, rows: int, row_bytes: int, repeat: int) -> list[dict]:
    """One dict for each way and temperature: median seconds, rows a second, bytes from the disk per row."""
    size = os.path.getsize(file)
    total = size // row_bytes
    table = Table([Part(file, 0, total)], total, row_bytes, "F8_E4M3")
    gatherer = Gatherer(table)
    mapping = mmap.mmap(table.descriptors[0], size, prot=mmap.PROT_READ)
    mapping.madvise(mmap.MADV_RANDOM)
    flat = np.frombuffer(mapping, np.uint8)[: total * row_bytes].reshape(total, row_bytes)
    descriptor = table.descriptors[0]

    def by_pread(ids: np.ndarray, out: np.ndarray) -> None:
        for n, row in enumerate(ids.tolist()):
            os.preadv(descriptor, [out[n]], row * row_bytes)

    ways: dict[str, Callable[[np.ndarray, np.ndarray], object]] = {
        "gather": gatherer.gather,
        "mmap": lambda ids, out: np.take(flat, ids, axis=0, out=out, mode="clip"),
        "pread": by_pread,
    }
    try:
        ring = Uring(file)
        ways["uring"] = lambda ids, out: ring.read(ids * row_bytes, row_bytes, out)
    except OSError as error:
        print(f"no io_uring here: {error}")
    random = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    results = []
    for cold in (True, False):
        times: dict[str, list[float]] = {name: [] for name in ways}
        read: dict[str, list[int]] = {name: [] for name in ways}
        for _ in range(repeat):
            for name, way in ways.items():
                ids = np.sort(random.integers(0, total, rows))
                out = np.zeros((rows, row_bytes), np.uint8)
                if cold:
                    # A page that is mapped stays in the cache, so the mapping lets go of its pages first.
                    mapping.madvise(mmap.MADV_DONTNEED)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    left = cached_pages(mapping)
                    if left > size // PAGE // 100:
                        raise RuntimeError(f"{left} pages of {file} stay in the cache: not a cold run")
                else:
                    by_pread(ids, out)
                    out[:] = 0
                before = _disk_bytes()
                begin = time.perf_counter()
                way(ids, out)
                times[name].append(time.perf_counter() - begin)
                read[name].append(_disk_bytes() - before)
                check = np.zeros_like(out)
                by_pread(ids, check)
                if not np.array_equal(out, check):
                    raise AssertionError(f"{name} read other bytes")
        for name in ways:
            seconds = statistics.median(times[name])
            per_row = statistics.median(read[name]) / rows
            results.append({
                "way": name, "cold": cold, "rows": rows, "seconds": seconds, "rows_per_s": rows / seconds,
                "disk_bytes_per_row": per_row,
            })  # fmt: skip
    table.close()
    return results


def _disk_bytes() -> int:
    """Bytes that this process has caused to be read from disks (proc_pid_io(5))."""
    with open("/proc/self/io") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith("read_bytes:"))


def main() -> None:
    ask = argparse.ArgumentParser(prog="python -m flashnext.table_bench", description="Rows a second of one file.")
    ask.add_argument("file")
    ask.add_argument("--rows", type=int, default=4096)
    ask.add_argument("--row-bytes", type=int, default=320)
    ask.add_argument("--repeat", type=int, default=3)
    ask.add_argument("--json", action="store_true")
    asked = ask.parse_args()
    results = measure(asked.file, asked.rows, asked.row_bytes, asked.repeat)
    if asked.json:
        print(json.dumps(results))
        return
    print(f"{'way':8} {'':4} {'rows/s':>9} {'us/row':>8} {'KiB from disk/row':>18}")
    for one in results:
        print(
            f"{one['way']:8} {'cold' if one['cold'] else 'warm'} {one['rows_per_s']:9,.0f} "
            f"{1e6 * one['seconds'] / one['rows']:8.2f} {one['disk_bytes_per_row'] / 1024:18.2f}"
        )


if __name__ == "__main__":
    main()
