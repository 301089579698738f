# SPDX-License-Identifier: Apache-2.0
"""Decide in which order and by which system calls the rows of one step are read, so that cold rows come in parallel.

All rows of a step at once. Rule order:
1. Rows are sorted by their place and each is read once, straight into its place in the caller's buffer; its repeats are
   copied from there.
2. A row is asked for with RWF_NOWAIT: in the page cache it is copied at once, one system call and nothing else.
3. A row that is not there is announced (POSIX_FADV_WILLNEED), which starts the read of just its one or two pages and
   returns. So all missing rows of a window are with the disk at the same time, at whatever depth its queue has.
4. After a window, the missing rows are read the ordinary way, which waits for the disk.
5. Once TRIED rows of a window were asked for and most of all so far were missing, the rest is announced unasked, since
   step 2 would be wasted on it.

Why system calls and not a mapping: an I/O error or a file that shrinks is an errno here and SIGBUS there, and the kernel
holds one row in flight per faulting thread. Why not io_uring: Docker's default seccomp profile refuses it. Why no pool
of threads: nothing is left to wait for side by side; and nothing has to be stopped at the end. The loop is compiled by
Numba, which vLLM requires, and runs without the GIL. Measured: `python -m flashnext.table_bench`;
for the 16 rows of one token as well, no shorter way in Python was faster, warm or cold.

Memory: 16 bytes for each row of a window beyond the caller's buffer, and the argsort of the step's ids.
"""

import ctypes
import errno
from typing import NamedTuple

import numpy as np

from flashnext.table_store import Table

WINDOW = 8192
"""Rows with the disk at once; at two pages each, 64 MiB of page cache at most."""
TRIED = 32
"""Rows of a window after which it can count as cold."""
_NOWAIT = 8  # RWF_NOWAIT, linux/fs.h


class Counts(NamedTuple):
    """Of one gather: rows asked for, different rows among them, and rows that were not, or not likely, in the page cache."""

    rows: int
    distinct: int
    cold: int


def _loop(table: Table, window: int):
    """The compiled loop over one table, whose places it holds as constants: arguments cost a call of few rows much.

    Seconds to compile. Takes Linux's own calls from the C library.
    """
    import numba

    # A handle of our own: argtypes belong to the function object, and ctypes shares those of a shared handle.
    libc = ctypes.CDLL(None)
    number, size, offset = ctypes.c_int, ctypes.c_ssize_t, ctypes.c_int64
    pread, preadv2, advise = libc.pread, libc.preadv2, libc.posix_fadvise
    pread.argtypes, pread.restype = [number, size, size, offset], size
    preadv2.argtypes, preadv2.restype = [number, size, number, offset, number], size
    advise.argtypes, advise.restype = [number, offset, offset, number], number
    nowait, willneed = _NOWAIT, 3  # POSIX_FADV_WILLNEED
    descriptors, starts = np.array(table.descriptors, np.int32), np.array(table.starts, np.int64)
    part_rows, row_bytes = table.part_rows, table.row_bytes

    @numba.njit(nogil=True)
    def loop(ids, order, out, vector, waiting):
        # Returns (distinct, cold, position in `ids` of a row that could not be read, or -1).
        address, at_vector = out.ctypes.data, vector.ctypes.data
        distinct, cold, begin, count = 0, 0, 0, len(order)
        while begin < count:
            end = min(count, begin + window)
            missing = read = 0
            for k in range(begin, end):
                row = ids[order[k]]
                if k > begin and row == ids[order[k - 1]]:
                    continue
                read += 1
                part = row // part_rows
                at = starts[part] + (row - part * part_rows) * row_bytes
                vector[0] = address + order[k] * row_bytes
                mostly_cold = read > TRIED and missing * 2 > read
                if mostly_cold or preadv2(descriptors[part], at_vector, 1, at, nowait) != row_bytes:
                    advise(descriptors[part], at, row_bytes, willneed)
                    waiting[missing] = k
                    missing += 1
            for n in range(missing):
                k = waiting[n]
                row = ids[order[k]]
                part = row // part_rows
                at = starts[part] + (row - part * part_rows) * row_bytes
                if pread(descriptors[part], address + order[k] * row_bytes, row_bytes, at) != row_bytes:
                    return distinct, cold, order[k]
            for k in range(begin + 1, end):
                if ids[order[k]] == ids[order[k - 1]]:
                    out[order[k]] = out[order[k - 1]]
            distinct += read
            cold += missing
            begin = end
        return distinct, cold, -1

    return loop


class Gatherer:
    """Reads rows of one `Table`. One step at a time: not for use by two threads at once."""

    def __init__(self, table: Table):
        self.table = table
        self._loop = _loop(table, WINDOW)
        self._waiting = np.empty(WINDOW, np.int64)
        self._vector = np.array([0, table.row_bytes], np.int64)  # struct iovec
        # Compile now, not in the first request.
        self.gather(np.zeros(1, np.int64), np.empty((1, table.row_bytes), np.uint8))

    def gather(self, ids: np.ndarray, out: np.ndarray) -> Counts:
        """Fill `out` (uint8 [n, row_bytes], contiguous) with the rows `ids` (int64 [n]).

        Raises IndexError for an id outside the table, and OSError with the file's name if a row cannot be read; then
        what `out` holds is not to be used.
        """
        count = len(ids)
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise TypeError(f"ids must be int64 [n], not {ids.dtype} {list(ids.shape)}")
        shape = (count, self.table.row_bytes)
        if out.dtype != np.uint8 or out.shape != shape or not (out.flags.c_contiguous and out.flags.writeable):
            raise TypeError(f"out must be contiguous uint8 {list(shape)}, not {out.dtype} {list(out.shape)}")
        if not count:
            return Counts(0, 0, 0)
        order = np.argsort(ids)
        self._check(int(ids[order[0]]), int(ids[order[-1]]))
        distinct, cold, failed = self._loop(ids, order, out, self._vector, self._waiting)
        if failed >= 0:
            raise self._failure(int(ids[failed]))
        return Counts(count, distinct, cold)

    def _check(self, low: int, high: int) -> None:
        if low < 0 or high >= self.table.rows:
            raise IndexError(f"row {low if low < 0 else high} of a table of {self.table.rows}")

    def _failure(self, row: int) -> OSError:
        """Asks again, for what the disk says; a row that can be read the second time is still one too many."""
        try:
            self.table.read_row(row)
        except OSError as error:
            return error
        return OSError(
            errno.EIO, f"row {row} of the table could be read at the second attempt only", self.table.place(row)[0]
        )
