"""Measures how many rows of the table this box's disk gives at random: short, bounded, reading only.

Rule order
1. What is read: the bytes given as pieces (the table in the checkpoint, or the prepared file), 4,096 at a time at random places;
   a row of 320 B costs at least one page.
2. Past the page cache with O_DIRECT, so that a warm cache does not speak for the disk. Where the file system does not know it, the
   cache is asked to let go of each place first (POSIX_FADV_DONTNEED) and the result says `direct=False`: an upper bound.
3. A file with a hole among these bytes was never written there, and a hole costs no read: it is named in the place of a rate.
4. Twice: one read after another, then `DEPTH` side by side, as the 16 rows of one token are asked for together. Each part ends after
   `reads` reads or half of `limit_s`.
5. A disk that does not answer (a hung NFS mount holds its reader in the kernel for ever) is given up on after `patience_s`; the
   reader is a daemon thread and dies with the process.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096
ROWS_PER_TOKEN = 16
DEPTH = 16
READS = 512
LIMIT_S = 0.8
PATIENCE_S = 20.0  # a disk that slept takes ten seconds to spin up
LEAST_BYTES = 64 << 20
"""Below this the places lie so close together that the disk's own cache answers."""


@dataclass(frozen=True)
class Piece:
    """`nbytes` from byte `start` of `file`."""

    file: Path
    start: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Reads a second, one after another and `DEPTH` side by side; None where `trouble` says why in words.

    `longest_s` is the slowest single read. `direct`: past the page cache.
    """

    rows_s: float | None = None
    rows_deep_s: float | None = None
    longest_s: float | None = None
    reads: int = 0
    took_s: float = 0.0
    direct: bool = True
    trouble: str | None = None

    @property
    def tokens_s(self) -> float | None:
        """Tokens a second that the disk alone allows when no row is in RAM yet."""
        return None if self.rows_deep_s is None else self.rows_deep_s / ROWS_PER_TOKEN


class _Hole(Exception):
    """A piece has bytes that were never written."""


def _hole(descriptor: int, start: int, end: int) -> int | None:
    """The first byte of [start, end) that the file system has no data for; None where it has all, or does not tell."""
    if end <= start or not hasattr(os, "SEEK_HOLE"):
        return None
    try:
        hole = os.lseek(descriptor, start, os.SEEK_HOLE)
    except OSError:
        return None
    return hole if hole < end else None


class _Reader:
    """The pieces as files that are open for reading; `at(n)` reads the n-th page of all of them."""

    def __init__(self, pieces: Sequence[Piece]):
        self.direct = True
        self._files: dict[Path, int] = {}
        self._pages: list[tuple[int, int, int]] = []  # (first page number, file descriptor, offset of that page)
        self.pages = 0
        try:
            for piece in pieces:
                if piece.file not in self._files:
                    self._files[piece.file] = os.open(piece.file, os.O_RDONLY | os.O_CLOEXEC)
                start = -(-piece.start // PAGE) * PAGE
                end = min(piece.start + piece.nbytes, os.fstat(self._files[piece.file]).st_size) // PAGE * PAGE
                hole = _hole(self._files[piece.file], start, end)
                if hole is not None:
                    raise _Hole(f"{piece.file.name} has a hole at byte {hole:,}: what belongs there was never written")
                if end > start:
                    self._pages.append((self.pages, self._files[piece.file], start))
                    self.pages += (end - start) // PAGE
            self._go_direct()
        except BaseException:
            self.close()
            raise

    def _go_direct(self) -> None:
        import fcntl

        try:
            for descriptor in self._files.values():
                fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
            if self.pages:
                self.read(0)
        except (OSError, AttributeError) as e:
            if isinstance(e, OSError) and e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.direct = False
            for descriptor in self._files.values():
                fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)

    def read(self, page: int) -> float:
        """Seconds that the read of one page took. Raises OSError."""
        low, high = 0, len(self._pages)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._pages[middle][0] <= page else (low, middle)
        first, descriptor, start = self._pages[low]
        offset = start + (page - first) * PAGE
        if not self.direct and hasattr(os, "posix_fadvise"):  # macOS has neither
            os.posix_fadvise(descriptor, offset, PAGE, os.POSIX_FADV_DONTNEED)
        begun = time.perf_counter()
        got = os.preadv(descriptor, [_buffer()], offset)
        took = time.perf_counter() - begun
        if got != PAGE:
            raise OSError(errno.EIO, f"{got} of {PAGE} bytes came back")
        return took

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}


_local = threading.local()


def _buffer() -> mmap.mmap:
    """A page of this thread: O_DIRECT wants memory that begins on one."""
    if not hasattr(_local, "page"):
        _local.page = mmap.mmap(-1, PAGE)
    return _local.page


def _rate(
    reader: _Reader, pages: Sequence[int], limit_s: float, pool: ThreadPoolExecutor | None
) -> tuple[float, list[float]]:
    """(reads a second, seconds of each read) of `pages`, as far as `limit_s` reaches."""
    took: list[float] = []
    begun = time.perf_counter()
    end = begun + limit_s

    def some(mine: Sequence[int]) -> None:
        for page in mine:
            took.append(reader.read(page))
            if time.perf_counter() > end:
                return

    if pool is None:
        some(pages)
    else:
        for done in [pool.submit(some, pages[n::DEPTH]) for n in range(DEPTH)]:
            done.result()
    return len(took) / (time.perf_counter() - begun), took


def probe(
    pieces: Sequence[Piece],
    *,
    reads: int = READS,
    limit_s: float = LIMIT_S,
    patience_s: float = PATIENCE_S,
    seed: int | None = None,
) -> Probe:
    """Read `pieces` at random and say how fast they came. Never raises for what a disk does; never writes."""
    total = sum(piece.nbytes for piece in pieces)
    if total < LEAST_BYTES:
        return Probe(trouble=f"{total / 1e6:,.1f} MB are too little to tell a disk's speed")
    result: list[Probe] = []
    worker = threading.Thread(
        target=lambda: result.append(_probe(pieces, reads, limit_s, seed)), name="disk probe", daemon=True
    )
    worker.start()
    worker.join(patience_s)
    return result[0] if result else Probe(took_s=patience_s, trouble=f"no answer within {patience_s:g} s")


def _probe(pieces: Sequence[Piece], reads: int, limit_s: float, seed: int | None) -> Probe:
    begun = time.perf_counter()
    try:
        reader = _Reader(pieces)
    except OSError as e:
        return Probe(trouble=f"cannot be read: {e.strerror}")
    except _Hole as e:
        return Probe(trouble=str(e))
    try:
        # Each place once: a second read of it could come from the disk's own cache.
        places = random.Random(seed).sample(range(reader.pages), min(2 * reads, reader.pages))
        half = len(places) // 2
        one, took = _rate(reader, places[:half], limit_s / 2, None)
        with ThreadPoolExecutor(DEPTH) as pool:
            deep, took_deep = _rate(reader, places[half:], limit_s / 2, pool)
        return Probe(
            rows_s=one,
            rows_deep_s=deep,
            longest_s=max(took + took_deep),
            reads=len(took) + len(took_deep),
            took_s=time.perf_counter() - begun,
            direct=reader.direct,
        )
    except OSError as e:
        return Probe(took_s=time.perf_counter() - begun, trouble=f"cannot be read: {e.strerror}")
    finally:
        reader.close()
