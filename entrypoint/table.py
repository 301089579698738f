"""Decides whether a prepared table file is whole, and makes it so: the checkpoint's table shards, one after another, in one file.

What it is made from: the `ngram_embedding.shard_K.weight` tensors of one decoder layer, K from 0, each a piece of rows; so
the file is those pieces in order and nothing else. What it leaves beside FILE:

    FILE.json           the marker, written last: shape, dtype, identity of the table, sha256 of each shard
    FILE.partial        the file while it is made, at its full size from the start
    FILE.progress.json  the shards that are on the disk for good, rewritten after each

Rule order of `prepare`
1. FILE with a marker: checked; whole and of this checkpoint, nothing is done; else refused by name. We never overwrite it.
2. FILE without a marker is finished if our progress says that all shards are in it, else refused.
3. FILE.partial is taken up where the progress says, if that is of this table; else begun again. One maker at a time.
4. Space is reserved before the first byte is written. A full disk or a quota leaves no FILE and gives the space back.
5. Copy, hash, fdatasync per shard; then the identity is read back and held against the checkpoint's; then fsync, rename,
   fsync of the folder, marker.

So at any moment, a power cut included, FILE and its marker are there together only if every byte is. What is wrong is a
Refusal with code 5. patches/flashnext/table_store.py reads what this writes and computes the same identity.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from .checkpoint import read_tensors
from .errors import Exit, Refusal
from .table_place import Prepared
from .units import format_gib

MARKER_FORMAT = 1
SAMPLES = 256
CHUNK_BYTES = 8 << 20
_SHARD = re.compile(r"(?P<layer>.*\blayers\.\d+\.)ple\.ple_embedding\.ngram_embedding\.shard_(?P<part>\d+)\.weight")


@dataclass(frozen=True)
class Piece:
    """One shard: `nbytes` from byte `start` of `file`."""

    file: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class Source:
    """The table as the checkpoint has it."""

    pieces: tuple[Piece, ...]
    rows: int
    columns: int
    dtype: str
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Progress:
    """How far it is: bytes of the file that are written, of all; those that this run wrote, and in how many seconds."""

    done_bytes: int
    total_bytes: int
    run_bytes: int
    run_s: float

    @property
    def bytes_per_s(self) -> float | None:
        return self.run_bytes / self.run_s if self.run_bytes and self.run_s > 0 else None

    @property
    def left_s(self) -> float | None:
        rate = self.bytes_per_s
        return (self.total_bytes - self.done_bytes) / rate if rate else None


def _refusal(what: str, fix: str) -> Refusal:
    return Refusal(f"table: {what}", fix, Exit.TABLE)


def read_source(folder: Path) -> Source:
    """The one table of a checkpoint. Raises Refusal: code 4 for what is wrong with its files, 5 for what is with the table."""
    _, tensors, _ = read_tensors(folder)
    found: dict[int, Any] = {}
    layers = set()
    for name in tensors:
        match = _SHARD.fullmatch(name)
        if match and not name.startswith("mtp."):
            layers.add(match["layer"])
            found[int(match["part"])] = tensors[name]
    if not found:
        raise _refusal(f"{folder} has no N-gram table", "give the folder of a checkpoint that has one")
    if len(layers) > 1:
        raise _refusal(
            f"{folder} has tables in {len(layers)} layers", "read them in the checkpoint: FLASHNEXT_TABLE=checkpoint"
        )
    config = _read_json(folder / "config.json") or {}
    told = (config.get("text_config") or config).get("split_ngram_parts")
    count = max(max(found) + 1, told if isinstance(told, int) else 0)
    missing = [n for n in range(count) if n not in found]
    if missing:
        raise _refusal(f"shard {missing[0]} of {count} is not in {folder}", "download the whole checkpoint")
    shards = [found[n] for n in range(len(found))]
    dtype, columns = shards[0].dtype, shards[0].shape[-1]
    rows = sum(s.shape[0] for s in shards)
    piece_rows = -(-rows // len(shards))
    for n, s in enumerate(shards):
        want = (max(0, min(piece_rows, rows - n * piece_rows)), columns)
        if s.dtype != dtype or tuple(s.shape) != want:
            raise _refusal(
                f"shard {n} is {s.dtype} {list(s.shape)}, not {dtype} {list(want)}", "download the checkpoint again"
            )
    pieces = tuple(Piece(folder / s.file, s.offset, s.nbytes) for s in shards)
    return Source(pieces, rows, columns, dtype, sum(p.nbytes for p in pieces) // rows)


def _identity(source: Source, read: Callable[[int], bytes]) -> str:
    """sha256 over dtype, shape and SAMPLES rows spread evenly; `read` gives the row_bytes of the table from a byte of it."""
    total = hashlib.sha256(f"{source.dtype} {source.rows} {source.columns}\n".encode())
    for n in range(SAMPLES):
        total.update(read(n * (source.rows - 1) // (SAMPLES - 1) * source.row_bytes))
    return total.hexdigest()


def identity_of_source(source: Source) -> str:
    """The identity of the table in the checkpoint. Raises Refusal (code 5)."""
    with contextlib.ExitStack() as stack:
        opened: dict[Path, int] = {}

        def read(at: int) -> bytes:
            n, within = divmod(at, source.pieces[0].nbytes)
            piece = source.pieces[n]
            if piece.file not in opened:
                opened[piece.file] = os.open(piece.file, os.O_RDONLY)
                stack.callback(os.close, opened[piece.file])
            return os.pread(opened[piece.file], source.row_bytes, piece.start + within)

        with _told(source.pieces[0].file.parent):
            return _identity(source, read)


@contextlib.contextmanager
def _told(where: Path) -> Iterator[None]:
    """OSError -> Refusal (code 5)."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            why = "the disk is full" if e.errno == errno.ENOSPC else "the disk quota is used up"
            raise _refusal(
                f"cannot write {where}: {why}", "free space there, or read the table in the checkpoint"
            ) from None
        raise _refusal(
            f"{where}: {e.strerror or e}", "make it readable and its folder writable for this user"
        ) from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Atomic and durable."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(path)
    _sync_folder(path.parent)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _shape(source: Source, identity: str) -> dict[str, Any]:
    return {
        "format": MARKER_FORMAT,
        "dtype": source.dtype,
        "rows": source.rows,
        "columns": source.columns,
        "identity": identity,
    }


def _has(content: dict[str, Any] | None, shape: dict[str, Any]) -> bool:
    return content is not None and all(content.get(key) == value for key, value in shape.items())


def why_not_whole(file: Path, source: Source, identity: str) -> str | None:
    """None if FILE is the whole table of this checkpoint, else one sentence. Reads SAMPLES rows."""
    told = _read_json(Path(f"{file}.json"))
    if told is None:
        return "it has no marker, so it was never finished"
    if not _has(told, _shape(source, identity)):
        return "its marker is of another table"
    with _told(file):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            return _why_not_these_bytes(descriptor, source, identity)
        finally:
            os.close(descriptor)


def _why_not_these_bytes(descriptor: int, source: Source, identity: str) -> str | None:
    size = os.fstat(descriptor).st_size
    if size != source.nbytes:
        return f"it has {size:,} bytes instead of {source.nbytes:,}"
    hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
    if hole < size:
        return f"it was never written at byte {hole:,}"
    if _identity(source, lambda at: os.pread(descriptor, source.row_bytes, at)) != identity:
        return "its rows are not those of this checkpoint"
    return None


def look(folder: Path, file: Path) -> Prepared:
    """What lies at FILE, for the plan: read, never changed; raises nothing. Headers and rows are read only where FILE is there."""
    partial, progress, marker = (Path(f"{file}{end}") for end in (".partial", ".progress.json", ".json"))
    try:
        if not file.exists():
            reserved = partial.stat().st_blocks * 512 if partial.exists() else 0
            return Prepared(file=str(file), reserved_bytes=reserved)
        source = read_source(folder)
        identity = identity_of_source(source)
        state = _read_json(progress) or {}
        copied = _has(state, _shape(source, identity)) and len(state.get("sha256", [])) == len(source.pieces)
        if copied and not marker.exists():  # which is all that `prepare` has to add
            return Prepared(file=str(file), reserved_bytes=file.stat().st_size)
        why = why_not_whole(file, source, identity)
        return Prepared(file=str(file), whole=why is None, trouble=why)
    except Refusal as e:
        return Prepared(file=str(file), trouble=e.message.removeprefix("table: "))
    except OSError as e:
        return Prepared(file=str(file), trouble=f"it cannot be looked at ({e.strerror})")


def teller(stream: TextIO, every_s: float = 10.0) -> Callable[[Progress], None]:
    """A `tell` for `prepare` that writes a line at most every `every_s` seconds, and one at the end."""
    last = -every_s

    def tell(progress: Progress) -> None:
        nonlocal last
        whole = progress.done_bytes == progress.total_bytes
        if not whole and progress.run_s - last < every_s:
            return
        last = progress.run_s
        rate, left = progress.bytes_per_s, progress.left_s
        stream.write(
            f"flashnext: table: {format_gib(progress.done_bytes)} of {format_gib(progress.total_bytes)}"
            + (f", {format_gib(int(rate))}/s" if rate else "")
            + (f", {left / 60:.0f} min left" if left and not whole else "")
            + "\n"
        )
        stream.flush()

    return tell


def prepare(folder: Path, file: Path, tell: Callable[[Progress], None] = lambda progress: None) -> bool:
    """Make FILE from the checkpoint in `folder`; False if it was whole already. Raises Refusal (codes 4 and 5).

    `tell` is called about once a second. A run that is killed, or loses power, is taken up by the next.
    """
    source = read_source(folder)
    identity = identity_of_source(source)
    shape = _shape(source, identity)
    partial, progress, marker = (Path(f"{file}{end}") for end in (".partial", ".progress.json", ".json"))
    remove = f"remove {file} and {marker.name}, or name another file in FLASHNEXT_TABLE"
    if marker.exists() and file.exists():
        why = why_not_whole(file, source, identity)
        if why:
            raise _refusal(f"{file}: {why}", remove)
        progress.unlink(missing_ok=True)
        return False
    with _told(partial):
        if not file.parent.is_dir():
            raise _refusal(f"the folder {file.parent} is not there", "make it, or name a file in another one")
        state = _read_json(progress)
        hashes = list(state.get("sha256", [])) if _has(state, shape) else []
        if file.exists():
            if len(hashes) != len(source.pieces):
                raise _refusal(f"{file}: it has no marker, so it was never finished", remove)
        else:
            hashes = _copy(source, shape, partial, progress, hashes, tell)
            partial.replace(file)
            _sync_folder(file.parent)
        descriptor = os.open(file, os.O_RDONLY)
        try:
            why = _why_not_these_bytes(descriptor, source, identity)
        finally:
            os.close(descriptor)
        if why:
            raise _refusal(f"{file} was written, and {why}", f"check the disk, then {remove}")
        _write_json(marker, shape | {"bytes": source.nbytes, "sha256": hashes})
        progress.unlink(missing_ok=True)
    return True


def _copy(
    source: Source,
    shape: dict[str, Any],
    partial: Path,
    progress: Path,
    hashes: list[str],
    tell: Callable[[Progress], None],
) -> list[str]:
    """Bring every byte of the table to `partial` for good; returns the sha256 of each shard."""
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _refusal(f"{partial} is being written by another process", "wait for it") from None
        if os.fstat(descriptor).st_size != source.nbytes:
            hashes = []
        try:
            # Also on a file of the right size: what is reserved already costs nothing.
            os.ftruncate(descriptor, source.nbytes)
            os.posix_fallocate(descriptor, 0, source.nbytes)
        except OSError:
            partial.unlink(missing_ok=True)
            progress.unlink(missing_ok=True)
            raise
        _write_json(progress, shape | {"sha256": hashes})
        done = sum(piece.nbytes for piece in source.pieces[: len(hashes)])
        begun, told, run = time.monotonic(), 0.0, 0
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(piece.nbytes for piece in source.pieces))))
        for piece in source.pieces[len(hashes) :]:
            total = hashlib.sha256()
            for data in _read(piece, buffer):
                total.update(data)
                _write_at(descriptor, data, done)
                done += len(data)
                run += len(data)
                if time.monotonic() - told >= 1:
                    told = time.monotonic()
                    tell(Progress(done, source.nbytes, run, told - begun))
            os.fdatasync(descriptor)
            # What is on the disk need not stay in memory: the machine has better use for it.
            os.posix_fadvise(descriptor, done - piece.nbytes, piece.nbytes, os.POSIX_FADV_DONTNEED)
            hashes = [*hashes, total.hexdigest()]
            _write_json(progress, shape | {"sha256": hashes})
        os.fsync(descriptor)
        tell(Progress(done, source.nbytes, run, time.monotonic() - begun))
        return hashes
    finally:
        os.close(descriptor)


def _read(piece: Piece, buffer: memoryview) -> Iterator[memoryview]:
    """The bytes of a piece in chunks that are valid until the next one."""
    descriptor = os.open(piece.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, piece.start, piece.nbytes, os.POSIX_FADV_SEQUENTIAL)
        at, end = piece.start, piece.start + piece.nbytes
        while at < end:
            got = os.preadv(descriptor, [buffer[: min(len(buffer), end - at)]], at)
            if not got:
                raise _refusal(f"{piece.file} has shrunk while it was read", "download this file again")
            yield buffer[:got]
            at += got
        os.posix_fadvise(descriptor, piece.start, piece.nbytes, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written
