# SPDX-License-Identifier: Apache-2.0
"""Measure the gather against the other ways to read random rows of one file, on the disk that is to be judged.

    python -m flashnext.table_bench FILE [--rows 8192] [--row-bytes 320] [--repeat 3] [--json]

FILE is any file of several GiB on that disk, of bytes that were written (a reserved or sparse file reads from nowhere).
Cold means that the kernel was asked to drop the file's pages (POSIX_FADV_DONTNEED) and mincore() says they are gone; no
root needed. Warm means that a plain read has just brought them. The ways take turns, each with fresh random rows, in
`repeat` rounds whose median is printed; each way's bytes are compared with a plain read's.

    gather       flashnext.table_gather, what the engine uses, all rows in one step (512 tokens of 16 rows)
    gather/16    the same in steps of one token
    mmap         one row after another through a mapping with MADV_RANDOM (numpy.take)
    mapped       the same once more, with the pages still mapped (warm only: no fault is left)
    normal       the mapping without MADV_RANDOM, for 16 tokens, because the kernel reads megabytes around each row (cold only)
    pread        one row after another, pread
    uring        the yardstick: io_uring, O_DIRECT, 128 reads in flight, rows sorted (table_yardstick; cold only)

Below the table: the bars of the gather, each with its number. A token has 16 rows.
"""

import argparse
import ctypes
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from flashnext import table_yardstick
from flashnext.table_gather import Gatherer
from flashnext.table_store import Part, Table

PAGE = mmap.PAGESIZE
TOKEN_ROWS = 16
NORMAL_ROWS = 16 * TOKEN_ROWS

Way = Callable[[np.ndarray, np.ndarray], object]


def cached_pages(mapping: mmap.mmap) -> int:
    """Pages of a mapped file in the page cache, of those that mincore() tells us about."""
    view = np.frombuffer(mapping, np.uint8)
    pages = np.zeros(-(-len(view) // PAGE), np.uint8)
    if ctypes.CDLL(None).mincore(
        ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), ctypes.c_void_p(pages.ctypes.data)
    ):
        raise OSError("mincore")
    return int((pages & 1).sum())


def _disk_bytes() -> int:
    """Bytes that this process has caused to be read from disks (proc_pid_io(5))."""
    with open("/proc/self/io") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith("read_bytes:"))


class _Bench:
    """One file, open in every way."""

    def __init__(self, file: str, row_bytes: int):
        self.file, self.row_bytes = file, row_bytes
        self.size = os.path.getsize(file)
        self.total = self.size // row_bytes
        self.table = Table([Part(file, 0, self.total)], self.total, row_bytes, "F8_E4M3")
        self.gatherer = Gatherer(self.table)
        self.descriptor = self.table.descriptors[0]
        self.random = self._map(mmap.MADV_RANDOM)
        self.normal = self._map(mmap.MADV_NORMAL)
        self.draw = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))

    def _map(self, advice: int) -> tuple[mmap.mmap, np.ndarray]:
        # Read-ahead of a mapping goes by its open file, and the table's own was told POSIX_FADV_RANDOM.
        descriptor = os.open(self.file, os.O_RDONLY)
        mapping = mmap.mmap(descriptor, self.size, prot=mmap.PROT_READ)
        os.close(descriptor)
        mapping.madvise(advice)
        view = np.frombuffer(mapping, np.uint8)[: self.total * self.row_bytes]
        return mapping, view.reshape(self.total, self.row_bytes)

    def by_pread(self, ids: np.ndarray, out: np.ndarray) -> None:
        for n, row in enumerate(ids.tolist()):
            os.preadv(self.descriptor, [out[n]], row * self.row_bytes)

    def by_token(self, ids: np.ndarray, out: np.ndarray) -> None:
        for n in range(0, len(ids), TOKEN_ROWS):
            self.gatherer.gather(ids[n : n + TOKEN_ROWS], out[n : n + TOKEN_ROWS])

    def by_mapping(self, view: np.ndarray) -> Way:
        return lambda ids, out: np.take(view, ids, axis=0, out=out, mode="clip")

    def let_go(self) -> None:
        """Unmap the pages, not the file: the next touch of each is a fault again."""
        for mapping, _ in (self.random, self.normal):
            mapping.madvise(mmap.MADV_DONTNEED)

    def drop(self) -> None:
        """Out of the page cache, or RuntimeError. A page that is mapped would stay."""
        self.let_go()
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        left = cached_pages(self.random[0])
        if left > self.size // PAGE // 100:
            raise RuntimeError(f"{left} pages of {self.file} stay in the cache: not a cold run")

    def rows_of(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self.draw.integers(0, self.total, count)
        return ids, np.zeros((count, self.row_bytes), np.uint8)

    def timed(self, way: Way, ids: np.ndarray, out: np.ndarray) -> tuple[float, int]:
        """(seconds, bytes from the disk)"""
        before, begin = _disk_bytes(), time.perf_counter()
        way(ids, out)
        return time.perf_counter() - begin, _disk_bytes() - before

    def yardstick(self, program: Path, ids: np.ndarray, out: np.ndarray) -> tuple[float, int]:
        reading = table_yardstick.read(program, self.file, np.sort(ids) * self.row_bytes, self.row_bytes)
        out[np.argsort(ids, kind="stable")] = reading.rows
        return reading.seconds, reading.disk_bytes

    def check(self, name: str, ids: np.ndarray, out: np.ndarray) -> None:
        want = np.zeros_like(out)
        self.by_pread(ids, want)
        if not np.array_equal(out, want):
            raise AssertionError(f"{name} read other bytes")


def measure(file: str, rows: int, row_bytes: int, repeat: int, program: Path | None = None) -> list[dict]:
    """One dict for each way and temperature: median seconds, rows a second, bytes from the disk per row.

    `program`: the compiled yardstick; without it there is no such way.
    """
    bench = _Bench(file, row_bytes)
    seen: dict[tuple[str, bool], list[tuple[int, float, int]]] = {}

    def note(name: str, cold: bool, count: int, took: tuple[float, int]) -> None:
        seen.setdefault((name, cold), []).append((count, *took))

    ways: dict[str, Way] = {
        "gather": bench.gatherer.gather,
        "gather/16": bench.by_token,
        "mmap": bench.by_mapping(bench.random[1]),
        "normal": bench.by_mapping(bench.normal[1]),
        "pread": bench.by_pread,
    }
    for _ in range(repeat):
        for name, way in ways.items():
            bench.drop()
            ids, out = bench.rows_of(min(rows, NORMAL_ROWS) if name == "normal" else rows)
            note(name, True, len(ids), bench.timed(way, ids, out))
            bench.check(name, ids, out)
        if program is not None:
            bench.drop()
            ids, out = bench.rows_of(rows)
            note("uring", True, rows, bench.yardstick(program, ids, out))
            bench.check("uring", ids, out)
    for _ in range(repeat):
        for name, way in ways.items():
            if name == "normal":
                continue
            bench.let_go()
            ids, out = bench.rows_of(rows)
            bench.by_pread(ids, out)
            out[:] = 0
            note(name, False, rows, bench.timed(way, ids, out))
            bench.check(name, ids, out)
            if name == "mmap":
                note("mapped", False, rows, bench.timed(way, ids, out))
    results = []
    for (name, cold), runs in seen.items():
        count = runs[0][0]
        seconds = statistics.median(run[1] for run in runs)
        results.append({
            "way": name, "cold": cold, "rows": count, "seconds": seconds, "rows_per_s": count / seconds,
            "disk_bytes_per_row": statistics.median(run[2] for run in runs) / count,
        })  # fmt: skip
    bench.table.close()
    return results


def bars(results: list[dict]) -> list[tuple[str, float, bool | None]]:
    """(what, number, whether the bar is met; None where there is none) of what was measured."""
    rate = {(one["way"], one["cold"]): one["rows_per_s"] for one in results}

    def ratio(a: tuple[str, bool], b: tuple[str, bool]) -> float:
        return rate[a] / rate[b]

    serial, warm = ("mmap", True), ("mmap", False)
    found: list[tuple[str, float, bool | None]] = []
    if ("uring", True) in rate:
        share = ratio(("gather", True), ("uring", True))
        found.append(("cold: gather / yardstick, at least 0.70", share, share >= 0.7))
        found.append(("cold: gather/16 / yardstick", ratio(("gather/16", True), ("uring", True)), None))
    times = ratio(("gather", True), serial)
    found.append(("cold: gather / serial mmap, at least 3", times, times >= 3))
    found.append(("cold: gather/16 / serial mmap", ratio(("gather/16", True), serial), None))
    for name in ("gather", "gather/16"):
        times = ratio((name, False), warm)
        found.append((f"warm: {name} / serial mmap, at least 1", times, times >= 1))
        found.append(
            (f"warm: {name} / serial mmap with its pages mapped", ratio((name, False), ("mapped", False)), None)
        )
    return found


def main() -> None:
    ask = argparse.ArgumentParser(prog="python -m flashnext.table_bench", description="Rows a second of one file.")
    ask.add_argument("file")
    ask.add_argument("--rows", type=int, default=8192)
    ask.add_argument("--row-bytes", type=int, default=320)
    ask.add_argument("--repeat", type=int, default=3)
    ask.add_argument("--json", action="store_true")
    asked = ask.parse_args()
    why_not = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            program = table_yardstick.build(Path(folder))
            table_yardstick.read(program, asked.file, np.zeros(1, np.int64), asked.row_bytes)
        except table_yardstick.Unavailable as error:
            program, why_not = None, str(error)
        results = measure(asked.file, asked.rows, asked.row_bytes, asked.repeat, program)
    if asked.json:
        print(json.dumps({"ways": results, "bars": bars(results), "no_yardstick": why_not}))
        return
    print(f"{'way':10} {'':4} {'rows/s':>10} {'us/token':>9} {'KiB from disk/token':>20}")
    for one in results:
        print(
            f"{one['way']:10} {'cold' if one['cold'] else 'warm'} {one['rows_per_s']:10,.0f} "
            f"{1e6 * TOKEN_ROWS / one['rows_per_s']:9.1f} {one['disk_bytes_per_row'] * TOKEN_ROWS / 1024:20.1f}"
        )
    if why_not:
        print(f"{'uring':10} cold {why_not}")
    for what, number, met in bars(results):
        print(f"{what}: {number:.2f}" + ("" if met is None else ", met" if met else ", NOT met"))


if __name__ == "__main__":
    main()
